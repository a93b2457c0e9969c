// Time is an argument everywhere in the engine's core: a monotonic count of nanoseconds that a driver reads from the
// kernel and a simulation makes up.
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
