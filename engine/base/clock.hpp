// Time: a monotonic count of nanoseconds, passed as an argument throughout the engine's core. A driver reads it from
// the kernel; a simulation makes it up.
#pragma once

#include <cstdint>
#include <limits>

namespace storm {

using Nanos = std::int64_t;

inline constexpr Nanos microsecond = 1'000;
inline constexpr Nanos millisecond = 1'000'000;
inline constexpr Nanos second = 1'000'000'000;
inline constexpr Nanos never = std::numeric_limits<Nanos>::max();

constexpr double seconds(Nanos t) { return static_cast<double>(t) / static_cast<double>(second); }

}  // namespace storm
