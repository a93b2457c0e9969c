#include "grid.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "kernels.hpp"

namespace storm {
namespace {

constexpr std::size_t block_elements = 1024;
struct Grid {
    float low, step;
};
constexpr std::size_t block_bytes = sizeof(Grid) + block_elements;
// One step fewer than there are codes, as the random offset may push the largest value up by one.
constexpr float steps = 254.0F;

#define STORM_INLINE __attribute__((always_inline)) inline

struct Range {
    float least, most;
    bool finite;
};

// Works in lanes with their own extremes: compilers do not reorder float comparisons by themselves.
constexpr std::size_t lanes = 16;

STORM_INLINE Range range_of(const float* from, std::size_t n, float scale) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    std::array<float, lanes> least, most;
    std::array<std::uint32_t, lanes> exponents{};  // the largest
    least.fill(infinity);
    most.fill(-infinity);
    const auto look = [&](std::size_t i, std::size_t lane) __attribute__((always_inline)) {
        const float value = scale * from[i];
        const std::uint32_t exponent = std::bit_cast<std::uint32_t>(value) & 0x7f800000U;
        least[lane] = value < least[lane] ? value : least[lane];
        most[lane] = value > most[lane] ? value : most[lane];
        exponents[lane] = exponent > exponents[lane] ? exponent : exponents[lane];
    };
    std::size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (std::size_t lane = 0; lane < lanes; ++lane) look(i + lane, lane);
    }
    for (; i < n; ++i) look(i, 0);
    Range range{infinity, -infinity, true};
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        range.least = std::min(range.least, least[lane]);
        range.most = std::max(range.most, most[lane]);
        range.finite &= exponents[lane] != 0x7f800000U;  // that of infinities and NaNs
    }
    return range;
}

STORM_INLINE void encode(const float* from, std::size_t n, float scale, float low, float inverse, std::byte* codes) {
    auto* out = reinterpret_cast<std::uint8_t*>(codes);
    for (std::size_t i = 0; i < n; ++i) {
        // The caller makes sure that this is finite and near [0, 255]; rounding may leave the range by a little.
        const int code = static_cast<int>((scale * from[i] - low) * inverse + 0.5F);
        out[i] = static_cast<std::uint8_t>(code < 0 ? 0 : code > 255 ? 255 : code);
    }
}

template <bool onto>
STORM_INLINE void decode(const std::byte* codes, std::size_t n, Grid grid, float* sum) {
    for (std::size_t i = 0; i < n; ++i) {
        const float value = grid.low + grid.step * static_cast<float>(static_cast<int>(codes[i]));
        sum[i] = onto ? sum[i] + value : value;
    }
}

// The loops above, for each instruction set by its name in kernels.cpp. All give the same bits.
struct Loops {
    Range (*range_of)(const float* from, std::size_t n, float scale);
    void (*encode)(const float* from, std::size_t n, float scale, float low, float inverse, std::byte* codes);
    void (*widen)(const std::byte* codes, std::size_t n, Grid grid, float* sum);
    void (*add)(const std::byte* codes, std::size_t n, Grid grid, float* sum);
};

#define STORM_LOOPS(Set, TARGET)                                                                                      \
    struct Set {                                                                                                      \
        TARGET static Range range(const float* from, std::size_t n, float scale) { return range_of(from, n, scale); } \
        TARGET static void to(const float* from, std::size_t n, float scale, float low, float inverse,                \
                              std::byte* codes) {                                                                     \
            encode(from, n, scale, low, inverse, codes);                                                              \
        }                                                                                                             \
        TARGET static void widen(const std::byte* codes, std::size_t n, Grid grid, float* sum) {                      \
            decode<false>(codes, n, grid, sum);                                                                       \
        }                                                                                                             \
        TARGET static void add(const std::byte* codes, std::size_t n, Grid grid, float* sum) {                        \
            decode<true>(codes, n, grid, sum);                                                                        \
        }                                                                                                             \
        static constexpr Loops loops{range, to, widen, add};                                                          \
    };

STORM_LOOPS(Baseline, )
#if defined(__x86_64__)
STORM_LOOPS(Wide, __attribute__((target("avx2"))))
#endif

const Loops& loops() {
#if defined(__x86_64__)
    if (std::strcmp(instruction_set(), "baseline") != 0) return Wide::loops;
#endif
    return Baseline::loops;
}

std::uint64_t mix(std::uint64_t x) {
    x += 0x9e37'79b9'7f4a'7c15ULL;
    x = (x ^ x >> 30) * 0xbf58'476d'1ce4'e5b9ULL;
    x = (x ^ x >> 27) * 0x94d0'49bb'1331'11ebULL;
    return x ^ x >> 31;
}

// A random number in [0, 1).
float random_part(std::uint64_t seed) { return static_cast<float>(mix(seed) >> 40) * 0x1p-24F; }

template <class Each>
void each_block(std::size_t elements, const Each& each) {
    for (std::size_t first = 0, at = 0; first < elements; first += block_elements, at += block_bytes) {
        each(first, std::min(block_elements, elements - first), at);
    }
}

void decode_blocks(const std::byte* from, std::size_t elements, decltype(Loops::widen) decode, float* sum) {
    each_block(elements, [&](std::size_t first, std::size_t n, std::size_t at) {
        Grid grid;
        std::memcpy(&grid, from + at, sizeof grid);
        decode(from + at + sizeof grid, n, grid, sum + first);
    });
}

std::size_t elements_per_chunk(std::size_t chunk_bytes) {
    const std::size_t each = int8_elements(chunk_bytes);
    if (each == 0) throw std::invalid_argument("a chunk is too small for int8");
    return each;
}

}  // namespace

std::size_t int8_elements(std::size_t chunk_bytes) {
    const std::size_t rest = chunk_bytes % block_bytes;
    return chunk_bytes / block_bytes * block_elements + (rest > sizeof(Grid) ? rest - sizeof(Grid) : 0);
}

std::size_t int8_bytes(std::size_t elements, std::size_t chunk_bytes) {
    const std::size_t each = elements_per_chunk(chunk_bytes);
    const std::size_t rest = elements % each;
    const std::size_t blocks = (rest + block_elements - 1) / block_elements;
    return elements / each * chunk_bytes + rest + blocks * sizeof(Grid);
}

void int8_encode(const float* from, std::size_t elements, float scale, std::uint64_t seed, std::byte* out) {
    const Loops& by = loops();
    each_block(elements, [&](std::size_t first, std::size_t n, std::size_t at) {
        Range range = by.range_of(from + first, n, scale);
        Grid grid{range.least, range.most / steps - range.least / steps};
        // A step so small that it has no finite inverse: treat the block as constant.
        const bool flat = !(grid.step >= std::numeric_limits<float>::min());
        if (!range.finite) {
            grid.low = grid.step = std::numeric_limits<float>::quiet_NaN();
        } else if (flat) {
            grid.step = 0.0F;
        } else {
            grid.low -= random_part(seed + first) * grid.step;
            // If values are so large that their difference is not finite, treat the block like one with an infinity.
            range.finite = std::isfinite(range.most - grid.low) && std::isfinite(grid.low + 255.0F * grid.step);
            if (!range.finite) grid.low = grid.step = std::numeric_limits<float>::quiet_NaN();
        }
        std::memcpy(out + at, &grid, sizeof grid);
        std::byte* codes = out + at + sizeof grid;
        if (flat || !range.finite) {
            std::memset(codes, 0, n);
        } else {
            by.encode(from + first, n, scale, grid.low, 1.0F / grid.step, codes);
        }
    });
}

void int8_widen(const std::byte* a, std::size_t elements, float* sum) {
    decode_blocks(a, elements, loops().widen, sum);
}

void int8_add(const std::byte* a, std::size_t elements, float* sum) { decode_blocks(a, elements, loops().add, sum); }

void int8_encode_message(const float* from, std::size_t elements, std::size_t chunk_bytes, std::uint64_t seed,
                         std::byte* out) {
    const std::size_t each = elements_per_chunk(chunk_bytes);
    for (std::size_t first = 0; first < elements; first += each, out += chunk_bytes) {
        int8_encode(from + first, std::min(each, elements - first), 1.0F, mix(seed) + first, out);
        // Bytes left over at the end are sent too, so clear them: they must not leak old memory.
        if (elements - first > each && chunk_bytes % block_bytes <= sizeof(Grid))
            std::memset(out + chunk_bytes / block_bytes * block_bytes, 0, chunk_bytes % block_bytes);
    }
}

void int8_decode_message(const std::byte* from, std::size_t elements, std::size_t chunk_bytes, float* out) {
    const std::size_t each = elements_per_chunk(chunk_bytes);
    for (std::size_t first = 0; first < elements; first += each, from += chunk_bytes) {
        int8_widen(from, std::min(each, elements - first), out + first);
    }
}

}  // namespace storm
