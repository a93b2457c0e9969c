#include "math/grid.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace storm {
namespace {

struct Grid {
    float low, step;
};

struct Shape {
    std::size_t bits, block_elements;

    [[nodiscard]] constexpr std::size_t code_bytes(std::size_t elements) const { return (elements * bits + 7) / 8; }
    [[nodiscard]] constexpr std::size_t block_bytes() const { return sizeof(Grid) + code_bytes(block_elements); }
    [[nodiscard]] constexpr float steps() const { return static_cast<float>((1U << bits) - 1); }
};
constexpr Shape eight_bits{.bits = 8, .block_elements = 1024}, four_bits{.bits = 4, .block_elements = 128};

const Shape& shape_of(Dtype dtype) {
    if (!has_grids(dtype)) throw std::invalid_argument("only int8 and int4 come in blocks with grids");
    return dtype == Dtype::int8 ? eight_bits : four_bits;
}

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

// The caller makes sure that the result is finite and near [0, last]; rounding may leave the range by a little.
template <int last>
STORM_INLINE std::uint8_t code_of(float value, float low, float inverse) {
    const int code = static_cast<int>((value - low) * inverse + 0.5F);
    return static_cast<std::uint8_t>(code < 0 ? 0 : code > last ? last : code);
}

template <std::size_t bits>
STORM_INLINE void encode(const float* from, std::size_t n, float scale, float low, float inverse, std::byte* codes) {
    auto* out = reinterpret_cast<std::uint8_t*>(codes);
    if constexpr (bits == 8) {
        for (std::size_t i = 0; i < n; ++i) out[i] = code_of<255>(scale * from[i], low, inverse);
    } else {
        const std::size_t half = (n + 1) / 2;
        for (std::size_t i = 0; i < n / 2; ++i) {
            const unsigned first = code_of<15>(scale * from[i], low, inverse);
            const unsigned second = code_of<15>(scale * from[half + i], low, inverse);
            out[i] = static_cast<std::uint8_t>(first | second << 4);
        }
        if (n % 2 == 1) out[half - 1] = code_of<15>(scale * from[half - 1], low, inverse);
    }
}

template <std::size_t bits, bool onto>
STORM_INLINE void decode(const std::byte* codes, std::size_t n, Grid grid, float* sum) {
    const auto* in = reinterpret_cast<const std::uint8_t*>(codes);
    const auto put = [&](std::size_t i, int code) __attribute__((always_inline)) {
        const float value = grid.low + grid.step * static_cast<float>(code);
        sum[i] = onto ? sum[i] + value : value;
    };
    if constexpr (bits == 8) {
        for (std::size_t i = 0; i < n; ++i) put(i, in[i]);
    } else {
        // Two loops over the same bytes: each writes one row of memory, which compilers turn into vectors.
        const std::size_t half = (n + 1) / 2;
        for (std::size_t i = 0; i < half; ++i) put(i, in[i] & 15);
        for (std::size_t i = 0; i < n / 2; ++i) put(half + i, in[i] >> 4);
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
    template <std::size_t bits>                                                                                       \
    struct Set {                                                                                                      \
        TARGET static Range range(const float* from, std::size_t n, float scale) { return range_of(from, n, scale); } \
        TARGET static void to(const float* from, std::size_t n, float scale, float low, float inverse,                \
                              std::byte* codes) {                                                                     \
            encode<bits>(from, n, scale, low, inverse, codes);                                                        \
        }                                                                                                             \
        TARGET static void widen(const std::byte* codes, std::size_t n, Grid grid, float* sum) {                      \
            decode<bits, false>(codes, n, grid, sum);                                                                 \
        }                                                                                                             \
        TARGET static void add(const std::byte* codes, std::size_t n, Grid grid, float* sum) {                        \
            decode<bits, true>(codes, n, grid, sum);                                                                  \
        }                                                                                                             \
        static constexpr Loops loops{range, to, widen, add};                                                          \
    };

STORM_LOOPS(Baseline, )
#if defined(__x86_64__)
STORM_LOOPS(Wide, __attribute__((target("avx2"))))
#endif

const Loops& loops(const Shape& shape) {
#if defined(__x86_64__)
    if (std::strcmp(instruction_set(), "baseline") != 0) return shape.bits == 8 ? Wide<8>::loops : Wide<4>::loops;
#endif
    return shape.bits == 8 ? Baseline<8>::loops : Baseline<4>::loops;
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
void each_block(const Shape& shape, std::size_t elements, const Each& each) {
    const std::size_t block = shape.block_elements;
    for (std::size_t first = 0, at = 0; first < elements; first += block, at += shape.block_bytes()) {
        each(first, std::min(block, elements - first), at);
    }
}

void decode_blocks(const Shape& shape, const std::byte* from, std::size_t elements, decltype(Loops::widen) decode,
                   float* sum) {
    each_block(shape, elements, [&](std::size_t first, std::size_t n, std::size_t at) {
        Grid grid;
        std::memcpy(&grid, from + at, sizeof grid);
        decode(from + at + sizeof grid, n, grid, sum + first);
    });
}

std::size_t elements_per_chunk(Dtype dtype, std::size_t chunk_bytes) {
    const std::size_t each = grid_elements(dtype, chunk_bytes);
    if (each == 0) throw std::invalid_argument("a chunk is too small for a grid and a code");
    return each;
}

}  // namespace

std::size_t grid_elements(Dtype dtype, std::size_t chunk_bytes) {
    const Shape& shape = shape_of(dtype);
    const std::size_t rest = chunk_bytes % shape.block_bytes();
    return chunk_bytes / shape.block_bytes() * shape.block_elements +
           (rest > sizeof(Grid) ? (rest - sizeof(Grid)) * 8 / shape.bits : 0);
}

std::size_t grid_bytes(Dtype dtype, std::size_t elements, std::size_t chunk_bytes) {
    const Shape& shape = shape_of(dtype);
    const std::size_t each = elements_per_chunk(dtype, chunk_bytes);
    const std::size_t rest = elements % each;
    const std::size_t blocks = (rest + shape.block_elements - 1) / shape.block_elements;
    return elements / each * chunk_bytes + shape.code_bytes(rest) + blocks * sizeof(Grid);
}

void grid_encode(Dtype dtype, const float* from, std::size_t elements, float scale, std::uint64_t seed,
                 std::byte* out) {
    const Shape& shape = shape_of(dtype);
    const Loops& by = loops(shape);
    each_block(shape, elements, [&](std::size_t first, std::size_t n, std::size_t at) {
        Range range = by.range_of(from + first, n, scale);
        Grid grid{range.least, range.most / shape.steps() - range.least / shape.steps()};
        // A step so small that it has no finite inverse: treat the block as constant.
        const bool flat = !(grid.step >= std::numeric_limits<float>::min());
        if (!range.finite) {
            grid.low = grid.step = std::numeric_limits<float>::quiet_NaN();
        } else if (flat) {
            grid.step = 0.0F;
        } else {
            // From half a step below the least value to half a step above it: every value has a point within half a
            // step whatever the offset, and no code is spent on values that do not occur.
            grid.low += (0.5F - random_part(seed + first)) * grid.step;
            // If values are so large that their difference is not finite, treat the block like one with an infinity.
            range.finite = std::isfinite(range.most - grid.low) && std::isfinite(grid.low + shape.steps() * grid.step);
            if (!range.finite) grid.low = grid.step = std::numeric_limits<float>::quiet_NaN();
        }
        std::memcpy(out + at, &grid, sizeof grid);
        std::byte* codes = out + at + sizeof grid;
        if (flat || !range.finite) {
            std::memset(codes, 0, shape.code_bytes(n));
        } else {
            by.encode(from + first, n, scale, grid.low, 1.0F / grid.step, codes);
        }
    });
}

void grid_widen(Dtype dtype, const std::byte* a, std::size_t elements, float* sum) {
    const Shape& shape = shape_of(dtype);
    decode_blocks(shape, a, elements, loops(shape).widen, sum);
}

void grid_add(Dtype dtype, const std::byte* a, std::size_t elements, float* sum) {
    const Shape& shape = shape_of(dtype);
    decode_blocks(shape, a, elements, loops(shape).add, sum);
}

void grid_encode_message(Dtype dtype, const float* from, std::size_t elements, std::size_t chunk_bytes,
                         std::uint64_t seed, std::byte* out) {
    const std::size_t each = elements_per_chunk(dtype, chunk_bytes), block_bytes = shape_of(dtype).block_bytes();
    for (std::size_t first = 0; first < elements; first += each, out += chunk_bytes) {
        grid_encode(dtype, from + first, std::min(each, elements - first), 1.0F, mix(seed) + first, out);
        // Bytes left over at the end are sent too, so clear them: they must not leak old memory.
        if (elements - first > each && chunk_bytes % block_bytes <= sizeof(Grid))
            std::memset(out + chunk_bytes / block_bytes * block_bytes, 0, chunk_bytes % block_bytes);
    }
}

void grid_decode_message(Dtype dtype, const std::byte* from, std::size_t elements, std::size_t chunk_bytes,
                         float* out) {
    const std::size_t each = elements_per_chunk(dtype, chunk_bytes);
    for (std::size_t first = 0; first < elements; first += each, from += chunk_bytes) {
        grid_widen(dtype, from, std::min(each, elements - first), out + first);
    }
}

}  // namespace storm
