#include "seal.hpp"

#include <dlfcn.h>

#include <climits>
#include <cstring>
#include <stdexcept>
#include <utility>

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

// ---- CRC32C ----

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
using State = std::uint64_t;  // as the instruction wants it: no conversion between steps
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

// What a 16-byte lane is multiplied by to stand `bits` further on; one factor for each half. A product of reflected
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
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, by, 0x00), _mm512_clmulepi64_epi128(lanes, by, 0x11), onto,
                                     0x96);  // exclusive or of all three
}

// Intel's folding: 256 bytes in flight are multiplied onto the 256 that follow; what is left at the end is 16 bytes with
// the same remainder as the whole, and the instruction finishes them.
STORM_FOLD_TARGET std::uint32_t by_folding(Bytes bytes, std::uint32_t seed) {
    const std::byte* at = bytes.data();
    std::size_t left = bytes.size();
    if (left < 256) return by_instruction(bytes, seed);
    const auto line = [&](std::size_t i) STORM_FOLD_TARGET { return _mm512_loadu_si512(at + 64 * i); };
    __m512i a = _mm512_xor_si512(line(0), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~seed))));
    __m512i b = line(1), c = line(2), d = line(3);
    const __m512i by_256 = every_lane<2048>(), by_64 = every_lane<512>();
    for (left -= 256, at += 256; left >= 256; left -= 256, at += 256) {
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

// ---- AES-128-GCM ----

// The few functions of libcrypto that are used, as its headers of 1.1 and 3 both declare them. The library is never closed:
// its own exit handlers, and Python's ssl module, may still need it.
struct Aead::Library {
    void* (*context_new)();
    void (*context_free)(void*);
    int (*context_control)(void*, int, int, void*);
    const void* (*aes_128_gcm)();
    int (*init)(void*, const void* cipher, void* engine, const void* key, const void* nonce, int encrypting);
    int (*update)(void*, void* out, int* out_bytes, const void* in, int in_bytes);
    int (*finish)(void*, void* out, int* out_bytes);
    void (*clear_errors)();

    bool find_in(void* handle) {
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
            return function != nullptr;
        };
        return find(context_new, "EVP_CIPHER_CTX_new") && find(context_free, "EVP_CIPHER_CTX_free") &&
               find(context_control, "EVP_CIPHER_CTX_ctrl") && find(aes_128_gcm, "EVP_aes_128_gcm") &&
               find(init, "EVP_CipherInit_ex") && find(update, "EVP_CipherUpdate") && find(finish, "EVP_CipherFinal_ex") &&
               find(clear_errors, "ERR_clear_error");
    }
};

namespace {

constexpr int control_get_tag = 0x10, control_set_tag = 0x11;  // EVP_CTRL_AEAD_GET_TAG and _SET_TAG

bool fits_int(Bytes bytes) { return bytes.size() <= INT_MAX; }

}  // namespace

struct Aead::Contexts {
    struct Context {
        void* handle = nullptr;
        bool keyed = false;
        Key key{};
    };

    Library library;
    Context sealing;
    // One for each peer, as long as they are fewer than this: datagrams of many peers come interleaved.
    std::array<Context, 256> opening;

    explicit Contexts(const Library& opened) : library(opened) {}
    Contexts(const Contexts&) = delete;
    Contexts& operator=(const Contexts&) = delete;
    ~Contexts() {
        forget(sealing);
        for (Context& context : opening) forget(context);
    }

    void forget(Context& context) const {
        library.context_free(context.handle);
        explicit_bzero(&context.key, sizeof context.key);
    }

    // The slot follows from where the key lies, which is no secret, and never decides whether the key is right.
    Context& slot(const Key& key) {
        return opening[reinterpret_cast<std::uintptr_t>(key.data()) / sizeof(Key) % opening.size()];
    }

    // A context that expects data under this key and nonce, or null.
    void* start(Context& context, const Key& key, std::span<const std::byte, 12> nonce, bool encrypting) const {
        if (context.handle == nullptr) {
            context.handle = library.context_new();
            if (context.handle == nullptr) return nullptr;
        }
        if (!context.keyed || context.key != key) {
            // Naming the cipher makes OpenSSL 3 search for it, so that is done once. The nonce has GCM's default 12 bytes.
            const void* cipher = context.keyed ? nullptr : library.aes_128_gcm();
            context.keyed = library.init(context.handle, cipher, nullptr, key.data(), nullptr, encrypting) == 1;
            context.key = key;
            if (!context.keyed) return nullptr;
        }
        return library.init(context.handle, nullptr, nullptr, nullptr, nonce.data(), -1) == 1 ? context.handle : nullptr;
    }

    // `out` null marks `in` as associated data. Empty input is skipped: an empty span may have a null pointer.
    bool feed(void* context, Bytes in, std::byte* out) const {
        int written = 0;
        return in.empty() || (library.update(context, out, &written, in.data(), static_cast<int>(in.size())) == 1 &&
                              written == static_cast<int>(in.size()));
    }

    bool control(void* context, int command, std::byte* tag) const {
        return library.context_control(context, command, static_cast<int>(tag_bytes), tag) == 1;
    }

    bool finish(void* context) const {
        std::array<std::byte, 16> rest;  // GCM has none, but libcrypto wants a place for it
        int written = 0;
        return library.finish(context, rest.data(), &written) == 1;
    }

    // Leaves no error behind for another user of libcrypto on this thread.
    bool succeeded(bool result) const {
        if (!result) library.clear_errors();
        return result;
    }
};

std::unique_ptr<Aead> Aead::open(std::string& why, std::span<const char* const> names) {
    why = "AES-GCM needs OpenSSL's libcrypto, which could not be opened (";
    for (const char* name : names) {
        Library library{};
        void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (handle != nullptr && library.find_in(handle)) {
            why.clear();
            return std::unique_ptr<Aead>(new Aead(library));
        }
        const char* error = dlerror();
        why.append(error != nullptr ? error : name).append("; ");
        if (handle != nullptr) dlclose(handle);
    }
    why += "none left to try): install it, for example by `apt-get install libssl3`, or run without a job key";
    return nullptr;
}

Aead::Aead(const Library& library) : contexts_(std::make_unique<Contexts>(library)) {}
Aead::~Aead() = default;

bool Aead::encrypt(const Key& key, std::span<const std::byte, 12> nonce, Bytes associated, Bytes plain,
                   std::span<std::byte> out) {
    if (!fits_int(associated) || !fits_int(plain) || out.size() < plain.size() + tag_bytes) return false;
    const Contexts& with = *contexts_;
    void* context = with.start(contexts_->sealing, key, nonce, true);
    return with.succeeded(context != nullptr && with.feed(context, associated, nullptr) &&
                          with.feed(context, plain, out.data()) && with.finish(context) &&
                          with.control(context, control_get_tag, out.data() + plain.size()));
}

bool Aead::decrypt(const Key& key, std::span<const std::byte, 12> nonce, Bytes associated, Bytes sealed,
                   std::span<std::byte> out) {
    if (sealed.size() < tag_bytes) return false;
    const Bytes cipher = sealed.first(sealed.size() - tag_bytes);
    if (!fits_int(associated) || !fits_int(cipher) || out.size() < cipher.size()) return false;
    std::array<std::byte, tag_bytes> tag;  // a copy: libcrypto takes it as mutable
    std::memcpy(tag.data(), sealed.data() + cipher.size(), tag_bytes);
    const Contexts& with = *contexts_;
    void* context = with.start(contexts_->slot(key), key, nonce, false);
    return with.succeeded(context != nullptr && with.feed(context, associated, nullptr) &&
                          with.feed(context, cipher, out.data()) && with.control(context, control_set_tag, tag.data()) &&
                          with.finish(context));
}

// ---- datagrams ----

namespace {

constexpr std::size_t flags_offset = 1;

void write_check(std::span<std::byte, header_bytes> header, std::uint32_t check) {
    std::memcpy(header.data() + check_offset, &check, sizeof check);
}

std::array<std::byte, 12> make_nonce(std::uint16_t target, std::uint16_t source, std::uint64_t number) {
    std::array<std::byte, 12> nonce;
    std::memcpy(nonce.data(), &target, 2);
    std::memcpy(nonce.data() + 2, &source, 2);
    std::memcpy(nonce.data() + 4, &number, 8);
    return nonce;
}

void wipe(Key& key) { explicit_bzero(key.data(), key.size()); }

}  // namespace

Seal::Seal(Secrets secrets, std::uint16_t rank) : secrets_(std::move(secrets)), rank_(rank) {
    wipe(secrets.own);  // moving an array copies it
    if (!secrets_.sealed) return;
    std::string why;
    aead_ = Aead::open(why);
    if (aead_ == nullptr) throw std::runtime_error("rank " + std::to_string(rank) + ": datagrams cannot be encrypted: " + why);
}

Seal::~Seal() {
    wipe(secrets_.own);
    for (Key& key : secrets_.peers) wipe(key);
}

void Seal::protect(std::span<std::byte, header_bytes> header, std::uint32_t payload_check) const {
    header[flags_offset] &= ~std::byte{flag_sealed};
    write_check(header, 0);
    write_check(header, crc32c(header, payload_check));
}

void Seal::encrypt(std::span<std::byte, header_bytes> header, Bytes payload, std::uint16_t peer, std::uint64_t number,
                   std::span<std::byte> out) {
    if (aead_ == nullptr) throw std::logic_error("Seal::encrypt needs a job key; without one use Seal::protect");
    header[flags_offset] |= std::byte{flag_sealed};
    write_check(header, 0);
    if (!aead_->encrypt(secrets_.own, make_nonce(peer, rank_, number), header, payload, out))
        throw std::runtime_error("rank " + std::to_string(rank_) + ": libcrypto did not encrypt " +
                                 std::to_string(payload.size()) + " bytes for peer " + std::to_string(peer) + " into " +
                                 std::to_string(out.size()));
}

std::optional<std::span<std::byte>> Seal::open(const Header& header, std::uint64_t number, std::span<std::byte> datagram) {
    if (datagram.size() < header_bytes + overhead_bytes() || datagram.size() > max_datagram_bytes) return std::nullopt;
    if (header.cookie != visible_cookie() || header.number != static_cast<std::uint32_t>(number)) return std::nullopt;
    if (((header.flags & flag_sealed) != 0) != encrypts()) return std::nullopt;
    const auto written = datagram.first<header_bytes>();
    const auto body = datagram.subspan(header_bytes);
    if (!encrypts()) {
        std::array<std::byte, header_bytes> unchecked;
        std::memcpy(unchecked.data(), written.data(), header_bytes);
        write_check(unchecked, 0);
        const auto check = crc32c(unchecked, payload_check(body));
        return check == header.check ? std::optional(body) : std::nullopt;
    }
    if (header.source >= secrets_.peers.size()) return std::nullopt;
    // The header as it came is the associated data: a check that is not zero fails like any other change.
    const auto plain = body.first(body.size() - tag_bytes);
    const bool genuine =
        aead_->decrypt(secrets_.peers[header.source], make_nonce(rank_, header.source, number), written, body, plain);
    return genuine ? std::optional(plain) : std::nullopt;
}

}  // namespace storm
