#include "math/galois.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header starts some intrinsics with a deliberately undefined value, and then warns of it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace storm {
namespace {

constexpr std::uint8_t slow_product(unsigned a, unsigned b) {
    unsigned sum = 0;
    for (unsigned bit = 0; bit < 8; ++bit) {
        if ((b >> bit & 1) != 0) sum ^= a << bit;
    }
    for (unsigned bit = 14; bit >= 8; --bit) {
        if ((sum >> bit & 1) != 0) sum ^= 0x11dU << (bit - 8);
    }
    return static_cast<std::uint8_t>(sum);
}

// Powers of 2, which generates the field, and logarithms: log[0] is not used.
struct Logarithms {
    std::array<std::uint8_t, 510> power{};  // twice, so that a sum of two logarithms needs no remainder
    std::array<std::uint8_t, 256> log{};
};
constexpr Logarithms logarithms = [] {
    Logarithms made;
    std::uint8_t power = 1;
    for (unsigned i = 0; i < 255; ++i) {
        made.power[i] = made.power[i + 255] = power;
        made.log[power] = static_cast<std::uint8_t>(i);
        power = slow_product(power, 2);
    }
    return made;
}();

// For each factor, its products with the 16 values of a byte's low half and with those of its high half. The product
// with a whole byte is the sum of one entry of each.
struct Nibbles {
    alignas(32) std::array<std::array<std::uint8_t, 32>, 256> of{};
};
constexpr Nibbles nibbles = [] {
    Nibbles made;
    for (unsigned factor = 0; factor < 256; ++factor) {
        for (unsigned half = 0; half < 16; ++half) {
            made.of[factor][half] = slow_product(factor, half);
            made.of[factor][16 + half] = slow_product(factor, half << 4);
        }
    }
    return made;
}();

using Sources = const std::byte* const*;
using Outs = std::byte* const*;

// Outs are rows of factors. `count_of` calls the kernel for as many outs as there are, so that each has registers of
// its own.
template <template <std::size_t> class Kernel, std::size_t... sizes>
void by_count(std::index_sequence<sizes...>, Sources sources, std::size_t count, Outs outs, std::size_t out_count,
              const std::uint8_t* factors, std::size_t bytes, bool fresh) {
    (void)((out_count == sizes + 1 && (Kernel<sizes + 1>::run(sources, count, outs, factors, bytes, fresh), true)) ||
           ...);
}

template <template <std::size_t> class Kernel, std::size_t most>
void run_kernel(Sources sources, std::size_t count, Outs outs, std::size_t out_count, const std::uint8_t* factors,
                std::size_t bytes, bool fresh) {
    by_count<Kernel>(std::make_index_sequence<most>{}, sources, count, outs, out_count, factors, bytes, fresh);
}

void plain(Sources sources, std::size_t count, Outs outs, std::size_t, const std::uint8_t* factors, std::size_t bytes,
           bool fresh) {
    auto* out = reinterpret_cast<std::uint8_t*>(outs[0]);
    if (fresh) std::memset(out, 0, bytes);
    for (std::size_t s = 0; s < count; ++s) {
        const auto* source = reinterpret_cast<const std::uint8_t*>(sources[s]);
        const auto& table = nibbles.of[factors[s]];
        for (std::size_t i = 0; i < bytes; ++i) {
            const std::uint8_t value = source[i];
            out[i] = static_cast<std::uint8_t>(out[i] ^ table[value & 15] ^ table[16 + (value >> 4)]);
        }
    }
}

#if defined(__x86_64__)

// A product by a constant is linear in the bits: an 8x8 matrix, of which the instruction takes the rows from the last.
constexpr std::array<std::uint64_t, 256> matrices = [] {
    std::array<std::uint64_t, 256> made{};
    for (unsigned factor = 0; factor < 256; ++factor) {
        for (unsigned column = 0; column < 8; ++column) {
            const unsigned image = slow_product(factor, 1U << column);
            for (unsigned row = 0; row < 8; ++row) {
                made[factor] |= std::uint64_t{image >> row & 1} << (8 * (7 - row) + column);
            }
        }
    }
    return made;
}();

#define STORM_GFNI_512 __attribute__((target("gfni,avx512f,avx512bw")))
#define STORM_GFNI_256 __attribute__((target("gfni,avx2")))
#define STORM_AVX_512 __attribute__((target("avx512f,avx512bw")))
#define STORM_AVX_256 __attribute__((target("avx2")))

template <std::size_t outs_here>
struct Gfni512 {
    STORM_GFNI_512 static void run(Sources sources, std::size_t count, Outs outs, const std::uint8_t* factors,
                                   std::size_t bytes, bool fresh) {
        for (std::size_t at = 0; at < bytes; at += 64) {
            __m512i sums[outs_here];
            for (std::size_t o = 0; o < outs_here; ++o) {
                sums[o] = fresh ? _mm512_setzero_si512() : _mm512_loadu_si512(outs[o] + at);
            }
            for (std::size_t s = 0; s < count; ++s) {
                const __m512i value = _mm512_loadu_si512(sources[s] + at);
                for (std::size_t o = 0; o < outs_here; ++o) {
                    const auto matrix = _mm512_set1_epi64(static_cast<long long>(matrices[factors[o * count + s]]));
                    sums[o] = _mm512_xor_si512(sums[o], _mm512_gf2p8affine_epi64_epi8(value, matrix, 0));
                }
            }
            for (std::size_t o = 0; o < outs_here; ++o) _mm512_storeu_si512(outs[o] + at, sums[o]);
        }
    }
};

template <std::size_t outs_here>
struct Gfni256 {
    STORM_GFNI_256 static void run(Sources sources, std::size_t count, Outs outs, const std::uint8_t* factors,
                                   std::size_t bytes, bool fresh) {
        for (std::size_t at = 0; at < bytes; at += 32) {
            __m256i sums[outs_here];
            for (std::size_t o = 0; o < outs_here; ++o) {
                sums[o] =
                    fresh ? _mm256_setzero_si256() : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(outs[o] + at));
            }
            for (std::size_t s = 0; s < count; ++s) {
                const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sources[s] + at));
                for (std::size_t o = 0; o < outs_here; ++o) {
                    const auto matrix = _mm256_set1_epi64x(static_cast<long long>(matrices[factors[o * count + s]]));
                    sums[o] = _mm256_xor_si256(sums[o], _mm256_gf2p8affine_epi64_epi8(value, matrix, 0));
                }
            }
            for (std::size_t o = 0; o < outs_here; ++o) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(outs[o] + at), sums[o]);
            }
        }
    }
};

template <std::size_t outs_here>
struct Avx512 {
    STORM_AVX_512 static void run(Sources sources, std::size_t count, Outs outs, const std::uint8_t* factors,
                                  std::size_t bytes, bool fresh) {
        const __m512i low_half = _mm512_set1_epi8(15);
        for (std::size_t at = 0; at < bytes; at += 64) {
            __m512i sums[outs_here];
            for (std::size_t o = 0; o < outs_here; ++o) {
                sums[o] = fresh ? _mm512_setzero_si512() : _mm512_loadu_si512(outs[o] + at);
            }
            for (std::size_t s = 0; s < count; ++s) {
                const __m512i value = _mm512_loadu_si512(sources[s] + at);
                const __m512i low = _mm512_and_si512(value, low_half);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi64(value, 4), low_half);
                for (std::size_t o = 0; o < outs_here; ++o) {
                    const auto* table = reinterpret_cast<const __m128i*>(nibbles.of[factors[o * count + s]].data());
                    const __m512i of_low = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(table)), low);
                    const __m512i of_high =
                        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(table + 1)), high);
                    sums[o] = _mm512_ternarylogic_epi64(sums[o], of_low, of_high, 0x96);  // exclusive or of all
                }
            }
            for (std::size_t o = 0; o < outs_here; ++o) _mm512_storeu_si512(outs[o] + at, sums[o]);
        }
    }
};

template <std::size_t outs_here>
struct Avx256 {
    STORM_AVX_256 static void run(Sources sources, std::size_t count, Outs outs, const std::uint8_t* factors,
                                  std::size_t bytes, bool fresh) {
        const __m256i low_half = _mm256_set1_epi8(15);
        for (std::size_t at = 0; at < bytes; at += 32) {
            __m256i sums[outs_here];
            for (std::size_t o = 0; o < outs_here; ++o) {
                sums[o] =
                    fresh ? _mm256_setzero_si256() : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(outs[o] + at));
            }
            for (std::size_t s = 0; s < count; ++s) {
                const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sources[s] + at));
                const __m256i low = _mm256_and_si256(value, low_half);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi64(value, 4), low_half);
                for (std::size_t o = 0; o < outs_here; ++o) {
                    const auto* table = reinterpret_cast<const __m128i*>(nibbles.of[factors[o * count + s]].data());
                    const __m256i of_low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(table)), low);
                    const __m256i of_high =
                        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(table + 1)), high);
                    sums[o] = _mm256_xor_si256(sums[o], _mm256_xor_si256(of_low, of_high));
                }
            }
            for (std::size_t o = 0; o < outs_here; ++o) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(outs[o] + at), sums[o]);
            }
        }
    }
};

#elif defined(__aarch64__)

template <std::size_t outs_here>
struct Neon {
    static void run(Sources sources, std::size_t count, Outs outs, const std::uint8_t* factors, std::size_t bytes,
                    bool fresh) {
        const uint8x16_t low_half = vdupq_n_u8(15);
        for (std::size_t at = 0; at < bytes; at += 32) {
            uint8x16_t first[outs_here], second[outs_here];
            for (std::size_t o = 0; o < outs_here; ++o) {
                const auto* out = reinterpret_cast<const std::uint8_t*>(outs[o] + at);
                first[o] = fresh ? vdupq_n_u8(0) : vld1q_u8(out);
                second[o] = fresh ? vdupq_n_u8(0) : vld1q_u8(out + 16);
            }
            for (std::size_t s = 0; s < count; ++s) {
                const auto* source = reinterpret_cast<const std::uint8_t*>(sources[s] + at);
                const uint8x16_t a = vld1q_u8(source), b = vld1q_u8(source + 16);
                const uint8x16_t a_low = vandq_u8(a, low_half), a_high = vshrq_n_u8(a, 4);
                const uint8x16_t b_low = vandq_u8(b, low_half), b_high = vshrq_n_u8(b, 4);
                for (std::size_t o = 0; o < outs_here; ++o) {
                    const std::uint8_t* table = nibbles.of[factors[o * count + s]].data();
                    const uint8x16_t low = vld1q_u8(table), high = vld1q_u8(table + 16);
                    first[o] = veorq_u8(first[o], veorq_u8(vqtbl1q_u8(low, a_low), vqtbl1q_u8(high, a_high)));
                    second[o] = veorq_u8(second[o], veorq_u8(vqtbl1q_u8(low, b_low), vqtbl1q_u8(high, b_high)));
                }
            }
            for (std::size_t o = 0; o < outs_here; ++o) {
                auto* out = reinterpret_cast<std::uint8_t*>(outs[o] + at);
                vst1q_u8(out, first[o]);
                vst1q_u8(out + 16, second[o]);
            }
        }
    }
};

#endif

struct Versions {
    std::array<GaloisVersion, 5> list{};
    std::size_t count = 0;

    Versions() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool wide = __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0;
        const bool narrow = __builtin_cpu_supports("avx2") != 0, fields = __builtin_cpu_supports("gfni") != 0;
        if (fields && wide) list[count++] = {"gfni-avx512", 64, 8, run_kernel<Gfni512, 8>};
        if (wide) list[count++] = {"avx512", 64, 8, run_kernel<Avx512, 8>};
        if (fields && narrow) list[count++] = {"gfni-avx2", 32, 8, run_kernel<Gfni256, 8>};
        if (narrow) list[count++] = {"avx2", 32, 8, run_kernel<Avx256, 8>};
#elif defined(__aarch64__)
        list[count++] = {"neon", 32, 4, run_kernel<Neon, 4>};
#endif
        list[count++] = {"plain", 1, 1, plain};
    }
};

// Sources are read once for each group of outs. So many bytes of all of them stay in the nearest cache between groups.
constexpr std::size_t near_bytes = 24 << 10;

}  // namespace

std::uint8_t galois_product(std::uint8_t a, std::uint8_t b) {
    if (a == 0 || b == 0) return 0;
    return logarithms.power[std::size_t{logarithms.log[a]} + logarithms.log[b]];
}

std::uint8_t galois_inverse(std::uint8_t a) {
    return a == 0 ? std::uint8_t{0} : logarithms.power[255 - std::size_t{logarithms.log[a]}];
}

std::span<const GaloisVersion> galois_versions() {
    static const Versions found;
    return std::span(found.list).first(found.count);
}

void galois_sums(const GaloisVersion& version, std::span<const std::byte* const> sources,
                 std::span<std::byte* const> outs, std::span<const std::uint8_t> factors, std::size_t bytes,
                 bool fresh) {
    const std::size_t count = sources.size(), column = version.column;
    if (outs.empty() || bytes == 0) return;
    const std::size_t whole = bytes - bytes % column;
    std::size_t strip = near_bytes / std::max<std::size_t>(count, 1);
    strip = std::max(column, strip - strip % column);
    std::array<const std::byte*, max_galois_sources> from;
    std::array<std::byte*, 8> to;
    const auto groups = [&](auto&& run) {
        for (std::size_t first = 0; first < outs.size(); first += version.outs_at_once) {
            run(first, std::min(version.outs_at_once, outs.size() - first));
        }
    };
    for (std::size_t begin = 0; begin < whole; begin += strip) {
        const std::size_t here = std::min(strip, whole - begin);
        for (std::size_t s = 0; s < count; ++s) from[s] = sources[s] + begin;
        groups([&](std::size_t first, std::size_t several) {
            for (std::size_t o = 0; o < several; ++o) to[o] = outs[first + o] + begin;
            version.run(from.data(), count, to.data(), several, factors.data() + first * count, here, fresh);
        });
    }
    const std::size_t rest = bytes - whole;
    if (rest == 0) return;
    // The rest, which does not fill a column, is copied to buffers of one column each.
    constexpr std::size_t widest = 64;
    alignas(64) std::array<std::byte, max_galois_sources * widest> padded;
    alignas(64) std::array<std::byte, 8 * widest> result;
    for (std::size_t s = 0; s < count; ++s) {
        std::memcpy(padded.data() + s * column, sources[s] + whole, rest);
        std::memset(padded.data() + s * column + rest, 0, column - rest);
        from[s] = padded.data() + s * column;
    }
    groups([&](std::size_t first, std::size_t several) {
        for (std::size_t o = 0; o < several; ++o) {
            to[o] = result.data() + o * column;
            if (!fresh) std::memcpy(to[o], outs[first + o] + whole, rest);
        }
        version.run(from.data(), count, to.data(), several, factors.data() + first * count, column, fresh);
        for (std::size_t o = 0; o < several; ++o) std::memcpy(outs[first + o] + whole, to[o], rest);
    });
}

void galois_sums(std::span<const std::byte* const> sources, std::span<std::byte* const> outs,
                 std::span<const std::uint8_t> factors, std::size_t bytes, bool fresh) {
    galois_sums(galois_versions().front(), sources, outs, factors, bytes, fresh);
}

}  // namespace storm
