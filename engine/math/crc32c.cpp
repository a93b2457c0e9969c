#include "math/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define STORM_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#if defined(__clang__)
#define STORM_CRC_TARGET __attribute__((target("crc")))
#else
#define STORM_CRC_TARGET __attribute__((target("+crc")))
#endif
#endif

namespace storm {
namespace {

using Bytes = std::span<const std::byte>;

template <class T>
T load(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Polynomials modulo Castagnoli's, bit-reflected: bit 31 is x^0.
constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? 0x82f63b78U : 0U); }

constexpr std::uint32_t power_of_x(unsigned exponent) {
    std::uint32_t power = 0x80000000U;
    while (exponent-- > 0) power = times_x(power);
    return power;
}

using Table = std::array<std::uint32_t, 256>;

// tables[k][b] is the CRC state that byte b leaves behind after k further zero bytes.
constexpr auto slices = [] {
    std::array<Table, 8> tables{};
    for (std::uint32_t b = 0; b < 256; ++b) {
        std::uint32_t state = b;
        for (int bit = 0; bit < 8; ++bit) state = times_x(state);
        tables[0][b] = state;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::size_t b = 0; b < 256; ++b)
            tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xff];
    return tables;
}();

#if defined(STORM_CRC_TARGET)

#if defined(__x86_64__)
using State = std::uint64_t;  // the type that the instruction uses: no conversion between steps
STORM_CRC_TARGET inline State step(State state, std::uint64_t word) { return _mm_crc32_u64(state, word); }
STORM_CRC_TARGET inline State step(State state, std::uint8_t byte) {
    return _mm_crc32_u8(static_cast<std::uint32_t>(state), byte);
}
#else
using State = std::uint32_t;
STORM_CRC_TARGET inline State step(State state, std::uint64_t word) { return __crc32cd(state, word); }
STORM_CRC_TARGET inline State step(State state, std::uint8_t byte) { return __crc32cb(state, byte); }
#endif

// Advances a state over `bytes` zero bytes: one table for each byte of the state.
template <unsigned bytes>
constexpr auto shifts = [] {
    std::array<Table, 4> tables{};
    std::array<std::uint32_t, 32> image{};  // of each bit of the state, highest bit first
    image[0] = power_of_x(8 * bytes);
    for (std::size_t i = 1; i < 32; ++i) image[i] = times_x(image[i - 1]);
    for (std::size_t k = 0; k < 4; ++k)
        for (std::size_t b = 0; b < 256; ++b)
            for (std::size_t bit = 0; bit < 8; ++bit)
                if ((b >> bit & 1) != 0) tables[k][b] ^= image[31 - 8 * k - bit];
    return tables;
}();

template <unsigned bytes>
inline std::uint32_t shift(State state) {
    const auto& tables = shifts<bytes>;
    return tables[0][state & 0xff] ^ tables[1][state >> 8 & 0xff] ^ tables[2][state >> 16 & 0xff] ^
           tables[3][state >> 24 & 0xff];
}

// The instruction takes three cycles but one may start in each: three streams, joined at the end, keep it busy.
template <unsigned stream>
STORM_CRC_TARGET inline State three_streams(State state, const std::byte*& at, std::size_t& left) {
    for (; left >= 3 * stream; left -= 3 * stream, at += 3 * stream) {
        State second = 0, third = 0;
        for (std::size_t i = 0; i < stream; i += 8) {
            state = step(state, load<std::uint64_t>(at + i));
            second = step(second, load<std::uint64_t>(at + stream + i));
            third = step(third, load<std::uint64_t>(at + 2 * stream + i));
        }
        state = shift<stream>(shift<stream>(state) ^ second) ^ third;
    }
    return state;
}

STORM_CRC_TARGET inline State one_stream(State state, const std::byte* at, std::size_t left) {
    for (; left >= 8; left -= 8, at += 8) state = step(state, load<std::uint64_t>(at));
    for (; left > 0; --left, ++at) state = step(state, load<std::uint8_t>(at));
    return state;
}

STORM_CRC_TARGET std::uint32_t by_instruction(Bytes bytes, std::uint32_t seed) {
    const std::byte* at = bytes.data();
    std::size_t left = bytes.size();
    // 3 x 480 is the payload of a datagram on Ethernet, 3 x 4096 a fifth of a 60 KB one.
    State state = three_streams<4096>(~seed, at, left);
    state = three_streams<480>(state, at, left);
    state = three_streams<64>(state, at, left);
    return ~static_cast<std::uint32_t>(one_stream(state, at, left));
}

#endif  // STORM_CRC_TARGET

#if defined(__x86_64__)

#define STORM_FOLD_TARGET __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))

// Factors that move a 16-byte lane `bits` further on, one for each half. A product of reflected
// operands comes out one bit low and the factors sit 32 bits low, hence the odd exponents.
struct Factors {
    long long first, second;
};
constexpr Factors factors(unsigned bits) { return {power_of_x(bits + 31), power_of_x(bits - 33)}; }

template <unsigned bits>
STORM_FOLD_TARGET inline __m512i every_lane() {
    constexpr Factors f = factors(bits);
    return _mm512_set_epi64(f.second, f.first, f.second, f.first, f.second, f.first, f.second, f.first);
}

STORM_FOLD_TARGET inline __m512i fold(__m512i lanes, __m512i by, __m512i onto) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, by, 0x00),
                                     _mm512_clmulepi64_epi128(lanes, by, 0x11), onto,
                                     0x96);  // exclusive or of all three
}

// Intel's folding: 256 bytes at a time are multiplied onto the 256 that follow; what is left at the end is 16 bytes
// with the same remainder as the whole, and the instruction finishes them.
STORM_FOLD_TARGET std::uint32_t by_folding(Bytes bytes, std::uint32_t seed) {
    const std::byte* at = bytes.data();
    std::size_t left = bytes.size();
    if (left < 256) return by_instruction(bytes, seed);
    const auto line = [&](std::size_t i) STORM_FOLD_TARGET { return _mm512_loadu_si512(at + 64 * i); };
    __m512i a = _mm512_xor_si512(line(0), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~seed))));
    __m512i b = line(1), c = line(2), d = line(3);
    const __m512i by_256 = every_lane<2048>(), by_64 = every_lane<512>();
    for (left -= 256, at += 256; left >= 256; left -= 256, at += 256) {
        // The sender's tensor is read here first; hints bring it in a little faster than the hardware guesses.
        for (int k = 0; k < 4; ++k) _mm_prefetch(reinterpret_cast<const char*>(at) + 1024 + 64 * k, _MM_HINT_T0);
        a = fold(a, by_256, line(0));
        b = fold(b, by_256, line(1));
        c = fold(c, by_256, line(2));
        d = fold(d, by_256, line(3));
    }
    a = fold(fold(fold(a, by_64, b), by_64, c), by_64, d);
    for (; left >= 64; left -= 64, at += 64) a = fold(a, by_64, line(0));

    constexpr Factors by_48 = factors(384), by_32 = factors(256), by_16 = factors(128);
    const __m512i onto_last =
        _mm512_set_epi64(0, 0, by_16.second, by_16.first, by_32.second, by_32.first, by_48.second, by_48.first);
    a = fold(a, onto_last, _mm512_maskz_mov_epi64(0xc0, a));
    State state = step(0, static_cast<std::uint64_t>(a[0] ^ a[2] ^ a[4] ^ a[6]));
    state = step(state, static_cast<std::uint64_t>(a[1] ^ a[3] ^ a[5] ^ a[7]));
    return ~static_cast<std::uint32_t>(one_stream(state, at, left));
}

#endif  // __x86_64__

struct Versions {
    std::array<Crc32cVersion, 3> list{};
    std::size_t count = 0;

    Versions() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool instruction = __builtin_cpu_supports("sse4.2") != 0;
        if (instruction && __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("avx512f") != 0 &&
            __builtin_cpu_supports("vpclmulqdq") != 0)
            list[count++] = {"folding", by_folding};
        if (instruction) list[count++] = {"instruction", by_instruction};
#elif defined(__aarch64__)
        if ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0) list[count++] = {"instruction", by_instruction};
#endif
        list[count++] = {"portable", crc32c_portable};
    }
};

}  // namespace

std::uint32_t crc32c_portable(Bytes bytes, std::uint32_t seed) {
    std::uint32_t state = ~seed;
    const std::byte* at = bytes.data();
    std::size_t left = bytes.size();
    for (; left >= 8; left -= 8, at += 8) {
        const std::uint64_t word = load<std::uint64_t>(at) ^ state;
        state = 0;
        for (std::size_t k = 0; k < 8; ++k) state ^= slices[7 - k][word >> (8 * k) & 0xff];
    }
    for (; left > 0; --left, ++at) state = state >> 8 ^ slices[0][(state ^ load<std::uint8_t>(at)) & 0xff];
    return ~state;
}

std::span<const Crc32cVersion> crc32c_versions() {
    static const Versions found;
    return std::span(found.list).first(found.count);
}

std::uint32_t crc32c(Bytes bytes, std::uint32_t seed) {
    static const auto fastest = crc32c_versions().front().run;
    return fastest(bytes, seed);
}

}  // namespace storm
