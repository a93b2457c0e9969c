#include "math/kernels.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "math/grid.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

// Every loop is written once, forced inline into one function for each instruction set, and vectorised there. A table
// chooses the set, not ifuncs (target_clones): those run before a sanitizer has started, and crash.
//
// Results are the same bits for every set, and whether or not the compiler contracts a * b + c into one rounding (GCC
// does by default): no product here is ever followed by a sum. Keep it so.
#if defined(__FAST_MATH__)
#error "-ffast-math changes the order of sums and forgets NaN: ranks would disagree"
#endif
#define STORM_INLINE __attribute__((always_inline)) inline

// The output may be the memory of an input, at the same index: no iteration touches the elements of another.
#if defined(__clang__)
#define STORM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define STORM_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace storm {
namespace {

// ---- elements: how one lies in memory (Word), reads as a float, and is rounded from one to nearest, ties to even ----

STORM_INLINE std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
STORM_INLINE float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

struct Float32 {
    using Word = float;
    using Bits = std::uint32_t;
    static constexpr Bits infinity = 0x7f800000U;
    STORM_INLINE static float widen(Word word) { return word; }
    STORM_INLINE static Word round(float value) { return value; }
};

struct Bfloat16 {
    using Word = std::uint16_t;
    using Bits = std::uint16_t;
    static constexpr Bits infinity = 0x7f80U;
    STORM_INLINE static float widen(Word word) { return float_of(std::uint32_t{word} << 16); }
    STORM_INLINE static Word round(float value) {
        const std::uint32_t bits = bits_of(value);
        const std::uint32_t nearest = (bits + 0x7fffU + (bits >> 16 & 1U)) >> 16;
        // A NaN keeps its upper bits and becomes quiet, so that it cannot turn into infinity.
        return static_cast<Word>(value != value ? bits >> 16 | 0x40U : nearest);
    }
};

#if defined(__aarch64__)
struct Float16 {
    using Word = __fp16;  // IEEE half precision; the instructions that convert it are part of every ARMv8
    using Bits = std::uint16_t;
    static constexpr Bits infinity = 0x7c00U;
    STORM_INLINE static float widen(Word word) { return static_cast<float>(word); }
    STORM_INLINE static Word round(float value) { return static_cast<Word>(value); }
};
#else
// Selects by masks. For a ?: GCC moves one side's float arithmetic into a branch, which prevents vectorisation.
STORM_INLINE std::uint32_t choose(bool first, std::uint32_t a, std::uint32_t b) {
    const std::uint32_t mask = 0U - std::uint32_t{first};
    return (a & mask) | (b & ~mask);
}

// Converts by integer operations, as GCC 12 does not vectorise _Float16. Same bits as F16C, NaNs included.
struct Float16 {
    using Word = std::uint16_t;
    using Bits = std::uint16_t;
    static constexpr Bits infinity = 0x7c00U;
    STORM_INLINE static float widen(Word word) {
        const std::uint32_t sign = (word & 0x8000U) << 16, rest = (word & 0x7fffU) << 13;
        const std::uint32_t normal = rest + (112U << 23);
        const std::uint32_t special = (rest + (224U << 23)) | std::uint32_t{rest > 31U << 23}
                                                                  << 22;  // a NaN becomes quiet
        // Subnormal: read it as 2^-14 + value, which float32 holds exactly, and take 2^-14 away.
        const std::uint32_t subnormal = bits_of(float_of(rest + (113U << 23)) - float_of(113U << 23));
        return float_of(sign | choose(rest < 1U << 23, subnormal, choose(rest < 31U << 23, normal, special)));
    }
    STORM_INLINE static Word round(float value) {
        const std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000U, rest = bits & 0x7fffffffU;
        const std::uint32_t normal =
            (rest - (112U << 23) + 0xfffU + (rest >> 13 & 1U)) >> 13;  // may carry into infinity
        // Subnormal: adding 0.5, whose last bit is worth 2^-24, makes the processor round at the right place.
        const std::uint32_t subnormal = bits_of(float_of(rest) + 0.5F) - bits_of(0.5F);
        const std::uint32_t special = choose(rest > 0x7f800000U, 0x7e00U | (rest >> 13 & 0x3ffU), 0x7c00U);
        return static_cast<Word>(sign |
                                 choose(rest < 113U << 23, subnormal, choose(rest < 143U << 23, normal, special)));
    }
};
#endif

// Loads and stores go through memcpy, as payloads start at any address.
template <class Element>
STORM_INLINE float read(const std::byte* from, std::size_t i) {
    typename Element::Word word;
    std::memcpy(&word, from + i * sizeof word, sizeof word);
    return Element::widen(word);
}

template <class Element>
STORM_INLINE void write(std::byte* to, std::size_t i, float value) {
    const typename Element::Word word = Element::round(value);
    std::memcpy(to + i * sizeof word, &word, sizeof word);
}

STORM_INLINE std::byte* raw(float* values) { return reinterpret_cast<std::byte*>(values); }
STORM_INLINE const std::byte* raw(const float* values) { return reinterpret_cast<const std::byte*>(values); }

// ---- passes: one sweep over some elements ----

// out[i] = round((in[0][i] + in[1][i] + ...) / divisor), summed from the left; all inputs but the first are Rest. Where
// the caller writes 1.0F, the compiler leaves the division out.
template <std::size_t count, class First, class Rest, class Out>
STORM_INLINE void sum_of(const std::byte* const* inputs, std::size_t elements, float divisor, std::byte* out) {
    std::array<const std::byte*, count> in;
    for (std::size_t k = 0; k < count; ++k) in[k] = inputs[k];
    STORM_INDEPENDENT
    for (std::size_t i = 0; i < elements; ++i) {
        float sum = read<First>(in[0], i);
        for (std::size_t k = 1; k < count; ++k) sum += read<Rest>(in[k], i);
        write<Out>(out, i, sum / divisor);
    }
}

// Whether all elements are finite: those that are not have all bits of infinity's exponent.
template <class Element>
STORM_INLINE bool all_finite(const std::byte* from, std::size_t elements) {
    using Bits = typename Element::Bits;
    Bits found = 0;
    for (std::size_t i = 0; i < elements; ++i) {
        Bits bits;
        std::memcpy(&bits, from + i * sizeof bits, sizeof bits);
        found = static_cast<Bits>(found | static_cast<Bits>((bits & Element::infinity) == Element::infinity));
    }
    return found == 0;
}

constexpr std::size_t group_inputs = 4;

STORM_INLINE void sum_floats(const std::byte* const* in, std::size_t count, std::size_t n, float divisor,
                             std::byte* out) {
    if (count == 1) return sum_of<1, Float32, Float32, Float32>(in, n, divisor, out);
    if (count == 2) return sum_of<2, Float32, Float32, Float32>(in, n, divisor, out);
    if (count == 3) return sum_of<3, Float32, Float32, Float32>(in, n, divisor, out);
    sum_of<4, Float32, Float32, Float32>(in, n, divisor, out);
}

struct Passes {
    void (*widen)(const std::byte* a, std::size_t elements, float* sum);
    void (*add_first)(const std::byte* a, const std::byte* b, std::size_t elements, float* sum);
    void (*add)(const std::byte* a, std::size_t elements, float* sum);
    void (*divide_into)(const float* sum, float divisor, std::size_t elements, std::byte* out);
    bool (*finite)(const std::byte* a, std::size_t elements);
};

struct Kernels {
    const char* name;
    // One to group_inputs inputs of float32.
    void (*sum_group)(const std::byte* const* inputs, std::size_t count, std::size_t elements, float divisor,
                      std::byte* out);
    Passes float32, bfloat16, float16;
};

// A macro, because a template cannot take a target attribute as argument.
#define STORM_INSTRUCTION_SET(Set, TARGET)                                                                        \
    struct Set {                                                                                                  \
        TARGET static void sum_group(const std::byte* const* in, std::size_t count, std::size_t n, float divisor, \
                                     std::byte* out) {                                                            \
            if (divisor == 1.0F) return sum_floats(in, count, n, 1.0F, out);                                      \
            sum_floats(in, count, n, divisor, out);                                                               \
        }                                                                                                         \
        template <class Wire>                                                                                     \
        TARGET static void widen(const std::byte* a, std::size_t n, float* sum) {                                 \
            sum_of<1, Wire, Wire, Float32>(&a, n, 1.0F, raw(sum));                                                \
        }                                                                                                         \
        template <class Wire>                                                                                     \
        TARGET static void add_first(const std::byte* a, const std::byte* b, std::size_t n, float* sum) {         \
            const std::byte* const in[] = {a, b};                                                                 \
            sum_of<2, Wire, Wire, Float32>(in, n, 1.0F, raw(sum));                                                \
        }                                                                                                         \
        template <class Wire>                                                                                     \
        TARGET static void add(const std::byte* a, std::size_t n, float* sum) {                                   \
            const std::byte* const in[] = {raw(sum), a};                                                          \
            sum_of<2, Float32, Wire, Float32>(in, n, 1.0F, raw(sum));                                             \
        }                                                                                                         \
        template <class Wire>                                                                                     \
        TARGET static void divide_into(const float* sum, float divisor, std::size_t n, std::byte* out) {          \
            const std::byte* const in = raw(sum);                                                                 \
            if (divisor == 1.0F) return sum_of<1, Float32, Float32, Wire>(&in, n, 1.0F, out);                     \
            sum_of<1, Float32, Float32, Wire>(&in, n, divisor, out);                                              \
        }                                                                                                         \
        template <class Wire>                                                                                     \
        TARGET static bool finite(const std::byte* a, std::size_t n) {                                            \
            return all_finite<Wire>(a, n);                                                                        \
        }                                                                                                         \
        template <class Wire>                                                                                     \
        static constexpr Passes passes{widen<Wire>, add_first<Wire>, add<Wire>, divide_into<Wire>, finite<Wire>}; \
    };

STORM_INSTRUCTION_SET(Baseline, )

#if defined(__x86_64__)
#if defined(__clang__)
#define STORM_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define STORM_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
STORM_INSTRUCTION_SET(Avx2, __attribute__((target("avx2"))))
STORM_INSTRUCTION_SET(Avx512, STORM_AVX512)

// float16 by the instructions that GCC 12 does not find by itself: eight at a time, and the rest as above.
#define STORM_F16C __attribute__((target("avx2,f16c")))
struct F16c {
    STORM_F16C static __m256 read8(const std::byte* from, std::size_t i) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from + 2 * i)));
    }
    STORM_F16C static void widen(const std::byte* a, std::size_t n, float* sum) {
        std::size_t i = 0;
        for (; i + 8 <= n; i += 8) _mm256_storeu_ps(sum + i, read8(a, i));
        Baseline::widen<Float16>(a + 2 * i, n - i, sum + i);
    }
    STORM_F16C static void add_first(const std::byte* a, const std::byte* b, std::size_t n, float* sum) {
        std::size_t i = 0;
        for (; i + 8 <= n; i += 8) _mm256_storeu_ps(sum + i, _mm256_add_ps(read8(a, i), read8(b, i)));
        Baseline::add_first<Float16>(a + 2 * i, b + 2 * i, n - i, sum + i);
    }
    STORM_F16C static void add(const std::byte* a, std::size_t n, float* sum) {
        std::size_t i = 0;
        for (; i + 8 <= n; i += 8) _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), read8(a, i)));
        Baseline::add<Float16>(a + 2 * i, n - i, sum + i);
    }
    STORM_F16C static void divide_into(const float* sum, float divisor, std::size_t n, std::byte* out) {
        std::size_t i = 0;
        for (; i + 8 <= n; i += 8) {
            const __m256 quotient = _mm256_div_ps(_mm256_loadu_ps(sum + i), _mm256_set1_ps(divisor));
            _mm_storeu_si128(reinterpret_cast<__m128i_u*>(out + 2 * i),
                             _mm256_cvtps_ph(quotient, _MM_FROUND_TO_NEAREST_INT));
        }
        Baseline::divide_into<Float16>(sum + i, divisor, n - i, out + 2 * i);
    }
    static constexpr Passes passes{widen, add_first, add, divide_into, Avx2::finite<Float16>};
};
#endif

template <class Set>
constexpr Kernels kernels_of(const char* name, const Passes& half = Set::template passes<Float16>) {
    return {name, Set::sum_group, Set::template passes<Float32>, Set::template passes<Bfloat16>, half};
}

struct Available {
    std::array<Kernels, 3> sets{};
    std::array<const char*, 3> names{};
    std::size_t count = 0;
    std::atomic<const Kernels*> chosen = &sets[0];

    Available() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        unsigned a = 0, b = 0, c = 0, d = 0;  // clang's __builtin_cpu_supports does not know F16C
        const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
        const bool avx2 = f16c && __builtin_cpu_supports("avx2") != 0;
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                            __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
        if (avx512) sets[count++] = kernels_of<Avx512>("avx512", F16c::passes);
        if (avx2) sets[count++] = kernels_of<Avx2>("avx2", F16c::passes);
#endif
        sets[count++] = kernels_of<Baseline>("baseline");
        for (std::size_t i = 0; i < count; ++i) names[i] = sets[i].name;
    }
};

Available& available() {
    static Available found;
    return found;
}

const Kernels& kernels() { return *available().chosen.load(std::memory_order_relaxed); }

const Passes& passes(const Kernels& set, Dtype dtype) {
    if (dtype == Dtype::float32) return set.float32;
    if (dtype == Dtype::bfloat16) return set.bfloat16;
    if (dtype == Dtype::float16) return set.float16;
    throw std::invalid_argument("dtype " + std::to_string(static_cast<int>(dtype)) +
                                " has no arithmetic: it can be copied but not summed");
}

// Partial sums are kept in blocks of this many elements, which stay in the nearest cache.
constexpr std::size_t block_elements = 512;
using Scratch = std::array<float, block_elements>;
using Inputs = std::span<const std::byte* const>;

// ((in[0] + in[1]) + in[2]) + in[3], then three more onto that, and so on.
void sum_float32(const Kernels& set, Inputs inputs, std::size_t elements, float divisor, std::byte* out) {
    Scratch partial;
    const std::size_t block = inputs.size() <= group_inputs ? elements : block_elements;
    for (std::size_t begin = 0; begin < elements; begin += block) {
        const std::size_t n = std::min(block, elements - begin), offset = begin * sizeof(float);
        std::array<const std::byte*, group_inputs> group{inputs[0] + offset};
        for (std::size_t used = 1;;) {
            std::size_t count = 1;
            while (count < group_inputs && used < inputs.size()) group[count++] = inputs[used++] + offset;
            if (used == inputs.size()) {
                set.sum_group(group.data(), count, n, divisor, out + offset);
                break;
            }
            set.sum_group(group.data(), count, n, 1.0F, raw(partial.data()));
            group[0] = raw(partial.data());
        }
    }
}

void sum_halves(const Passes& wire, Inputs inputs, std::size_t elements, float divisor, const Passes& to,
                std::size_t out_bytes, std::byte* out) {
    Scratch partial;
    const std::size_t blocks = (elements + block_elements - 1) / block_elements;
    for (std::size_t b = 0; b < blocks; ++b) {
        // Output wider than the inputs it may lie on: from the last block down, so that nothing unread is overwritten.
        const std::size_t begin = (out_bytes > 2 ? blocks - 1 - b : b) * block_elements, offset = 2 * begin;
        const std::size_t n = std::min(block_elements, elements - begin);
        if (inputs.size() == 1) {
            wire.widen(inputs[0] + offset, n, partial.data());
        } else {
            wire.add_first(inputs[0] + offset, inputs[1] + offset, n, partial.data());
            for (const std::byte* input : inputs.subspan(2)) wire.add(input + offset, n, partial.data());
        }
        to.divide_into(partial.data(), divisor, n, out + begin * out_bytes);
    }
}

}  // namespace

std::size_t element_bytes(Dtype dtype) {
    switch (dtype) {
        case Dtype::bytes: return 1;
        case Dtype::bfloat16:
        case Dtype::float16: return 2;
        case Dtype::float32: return 4;
        case Dtype::int8:
        case Dtype::int4: throw std::invalid_argument("elements of blocks with grids have no bytes of their own");
    }
    throw std::invalid_argument("dtype " + std::to_string(static_cast<int>(dtype)) + " does not exist");
}

std::size_t elements_in(Dtype dtype, std::size_t chunk_bytes) {
    return has_grids(dtype) ? grid_elements(dtype, chunk_bytes) : chunk_bytes / element_bytes(dtype);
}

void sum_in_order(Dtype wire, Inputs inputs, std::size_t elements, float divisor, Dtype out_dtype, std::byte* out) {
    const Kernels& set = kernels();
    const Passes &from = passes(set, wire), &to = passes(set, out_dtype);
    const std::size_t out_bytes = element_bytes(out_dtype);
    if (out_dtype != wire && out_dtype != Dtype::float32)
        throw std::invalid_argument("a sum is written in the dtype of its inputs or as float32");
    if (elements == 0) return;  // the pointers may be null then
    if (inputs.empty()) {
        std::fill_n(out, elements * out_bytes, std::byte{});
    } else if (wire != Dtype::float32) {
        sum_halves(from, inputs, elements, divisor, to, out_bytes, out);
    } else if (inputs.size() == 1 && divisor == 1.0F) {
        std::memmove(out, inputs[0], elements * out_bytes);
    } else {
        sum_float32(set, inputs, elements, divisor, out);
    }
}

void widen(Dtype wire, const std::byte* a, std::size_t elements, float* sum) {
    if (has_grids(wire)) return grid_widen(wire, a, elements, sum);
    passes(kernels(), wire).widen(a, elements, sum);
}

void add_first(Dtype wire, const std::byte* a, const std::byte* b, std::size_t elements, float* sum) {
    if (has_grids(wire)) {
        grid_widen(wire, a, elements, sum);
        return grid_add(wire, b, elements, sum);
    }
    passes(kernels(), wire).add_first(a, b, elements, sum);
}

void add(Dtype wire, const std::byte* a, std::size_t elements, float* sum) {
    if (has_grids(wire)) return grid_add(wire, a, elements, sum);
    passes(kernels(), wire).add(a, elements, sum);
}

void divide_into(const float* sum, float divisor, std::size_t elements, Dtype out_dtype, std::byte* out) {
    const Passes& to = passes(kernels(), out_dtype);
    if (out_dtype != Dtype::float32 || divisor != 1.0F) {
        to.divide_into(sum, divisor, elements, out);
    } else if (elements > 0) {
        std::memmove(out, sum, elements * sizeof(float));
    }
}

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes, bool large) {
#if defined(__x86_64__)
    constexpr std::size_t line = 64;
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % line;
    if (large && bytes >= head + line) {
        std::memcpy(to, from, head);
        to += head, from += head, bytes -= head;
        for (; bytes >= line; to += line, from += line, bytes -= line) {
            const auto* in = reinterpret_cast<const __m128i_u*>(from);
            auto* out = reinterpret_cast<__m128i*>(to);
            for (int k = 0; k < 4; ++k) _mm_stream_si128(out + k, _mm_loadu_si128(in + k));
        }
        _mm_sfence();  // other threads must see the data before the flag that announces it
    }
#else
    (void)large;
#endif
    if (bytes > 0) std::memcpy(to, from, bytes);
}

bool copy_finite(Dtype dtype, const std::byte* from, std::size_t elements, std::byte* to) {
    const Passes& pass = passes(kernels(), dtype);
    const std::size_t bytes = elements * element_bytes(dtype);
    // Block by block: what is looked at is in the nearest cache when it is copied.
    constexpr std::size_t block_bytes = 16 << 10;
    bool finite = true;
    for (std::size_t begin = 0; begin < bytes; begin += block_bytes) {
        const std::size_t n = std::min(block_bytes, bytes - begin);
        finite = pass.finite(from + begin, n / element_bytes(dtype)) && finite;
        if (to != from) std::memcpy(to + begin, from + begin, n);
    }
    return finite;
}

std::span<const char* const> instruction_sets() { return std::span(available().names).first(available().count); }

void use_instruction_set(std::size_t index) {
    Available& known = available();
    if (index >= known.count) throw std::out_of_range("this machine has no instruction set " + std::to_string(index));
    known.chosen.store(&known.sets[index], std::memory_order_relaxed);
}

const char* instruction_set() { return kernels().name; }

}  // namespace storm
