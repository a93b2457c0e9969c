// What the fuzz targets of whole cores share: the input as a program, and conditions that abort when they are violated.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

namespace storm::fuzz {

inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "violated: %s\n", what);
    std::abort();
}
#define REQUIRE(condition) require((condition), #condition)

// The rest of the input, as numbers. An exhausted input is all zeros.
struct Program {
    std::span<const std::uint8_t> rest;
    std::uint8_t byte() {
        if (rest.empty()) return 0;
        const std::uint8_t first = rest.front();
        rest = rest.subspan(1);
        return first;
    }
    std::uint32_t word() { return byte() | byte() << 8U | byte() << 16U | static_cast<std::uint32_t>(byte()) << 24U; }
};

}  // namespace storm::fuzz
