#include "wire/seal.hpp"

#include <dlfcn.h>

#include <climits>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace storm {
namespace {

using Bytes = std::span<const std::byte>;

}  // namespace

// The functions of libcrypto that we use, as the headers of versions 1.1 and 3 declare them. The library is never
// closed: its own exit handlers, and Python's ssl module, may still need it.
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
               find(init, "EVP_CipherInit_ex") && find(update, "EVP_CipherUpdate") &&
               find(finish, "EVP_CipherFinal_ex") && find(clear_errors, "ERR_clear_error");
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
    // One context per peer, up to this many: datagrams to and from many peers are interleaved.
    using PerPeer = std::array<Context, 256>;
    PerPeer sealing, opening;

    explicit Contexts(const Library& opened) : library(opened) {}
    Contexts(const Contexts&) = delete;
    Contexts& operator=(const Contexts&) = delete;
    ~Contexts() {
        for (Context& context : sealing) forget(context);
        for (Context& context : opening) forget(context);
    }

    void forget(Context& context) const {
        library.context_free(context.handle);
        explicit_bzero(&context.key, sizeof context.key);
    }

    // The key's address, which is no secret, chooses the slot. It never decides whether the key matches.
    static Context& slot(PerPeer& contexts, const Key& key) {
        return contexts[reinterpret_cast<std::uintptr_t>(key.data()) / sizeof(LinkKeys) % contexts.size()];
    }

    // A context that expects data under this key and nonce, or null.
    void* start(Context& context, const Key& key, std::span<const std::byte, 12> nonce, bool encrypting) const {
        if (context.handle == nullptr) {
            context.handle = library.context_new();
            if (context.handle == nullptr) return nullptr;
        }
        if (!context.keyed || context.key != key) {
            // Naming the cipher makes OpenSSL 3 search for it, so that is done once. The nonce has GCM's default 12
            // bytes.
            const void* cipher = context.keyed ? nullptr : library.aes_128_gcm();
            context.keyed = library.init(context.handle, cipher, nullptr, key.data(), nullptr, encrypting) == 1;
            context.key = key;
            if (!context.keyed) return nullptr;
        }
        return library.init(context.handle, nullptr, nullptr, nullptr, nonce.data(), -1) == 1 ? context.handle
                                                                                              : nullptr;
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
        std::array<std::byte, 16> rest;  // GCM leaves no rest, but libcrypto requires a buffer for it
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
    void* context = with.start(Contexts::slot(contexts_->sealing, key), key, nonce, true);
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
    void* context = with.start(Contexts::slot(contexts_->opening, key), key, nonce, false);
    return with.succeeded(context != nullptr && with.feed(context, associated, nullptr) &&
                          with.feed(context, cipher, out.data()) &&
                          with.control(context, control_set_tag, tag.data()) && with.finish(context));
}

// ---- datagrams ----

namespace {

constexpr std::size_t flags_offset = 1, source_offset = 2;

void write_check(std::span<std::byte, header_bytes> header, std::uint32_t check) {
    std::memcpy(header.data() + check_offset, &check, sizeof check);
}

// Every link between two processes has its own keys. The source identifies the path, as each path has its own packet
// numbers. The key implies the target and its incarnation; the nonce holds the target and the incarnation's lower half
// as well, so that not even equal keys would repeat a nonce. 48 bits of packet numbers last for years.
std::array<std::byte, 12> make_nonce(std::uint16_t target, std::uint16_t source, std::uint64_t number,
                                     std::uint32_t target_incarnation) {
    std::array<std::byte, 12> nonce;
    std::memcpy(nonce.data(), &target, 2);
    std::memcpy(nonce.data() + 2, &source, 2);
    std::memcpy(nonce.data() + 4, &number, 6);
    std::memcpy(nonce.data() + 10, &target_incarnation, 2);
    return nonce;
}

std::uint16_t source_in(std::span<const std::byte, header_bytes> header) {
    std::uint16_t source = 0;
    std::memcpy(&source, header.data() + source_offset, sizeof source);
    return source;
}

}  // namespace

Seal::Seal(Secrets secrets, std::uint16_t rank, std::uint16_t world)
    : secrets_(std::move(secrets)), rank_(rank), world_(world) {
    if (!secrets_.sealed) return;
    std::string why;
    aead_ = Aead::open(why);
    if (aead_ == nullptr)
        throw std::runtime_error("rank " + std::to_string(rank) + ": datagrams cannot be encrypted: " + why);
}

Seal::~Seal() {
    for (LinkKeys& keys : secrets_.links) explicit_bzero(&keys, sizeof keys);
}

void Seal::readmit(std::uint16_t peer, std::uint32_t incarnation, const std::optional<LinkKeys>& keys) {
    if (keys.has_value() != encrypts())
        throw std::invalid_argument(
            "readmitting a peer needs link keys if datagrams are sealed, and takes none otherwise");
    if (secrets_.incarnations.size() <= peer) secrets_.incarnations.resize(std::size_t{peer} + 1);
    secrets_.incarnations[peer] = incarnation;
    if (keys) secrets_.links.at(peer) = *keys;
}

void Seal::protect(std::span<std::byte, header_bytes> header, std::uint16_t peer, std::uint32_t payload_check) const {
    header[flags_offset] &= ~std::byte{flag_sealed};
    write_check(header, mark(rank_, peer));
    write_check(header, crc32c(header, payload_check));
}

void Seal::encrypt(std::span<std::byte, header_bytes> header, Bytes payload, std::uint16_t peer, std::uint64_t number,
                   std::span<std::byte> out) {
    if (aead_ == nullptr) throw std::logic_error("Seal::encrypt needs a job key; without one use Seal::protect");
    const Key& key = secrets_.links.at(peer).sealing;
    header[flags_offset] |= std::byte{flag_sealed};
    write_check(header, 0);
    if (!aead_->encrypt(key, make_nonce(peer, source_in(header), number, incarnation(peer)), header, payload, out))
        throw std::runtime_error("rank " + std::to_string(rank_) + ": libcrypto did not encrypt " +
                                 std::to_string(payload.size()) + " bytes for peer " + std::to_string(peer) + " into " +
                                 std::to_string(out.size()));
}

std::optional<std::span<std::byte>> Seal::open(const Header& header, std::uint64_t number,
                                               std::span<std::byte> datagram) {
    if (datagram.size() < header_bytes + overhead_bytes() || datagram.size() > max_datagram_bytes) return std::nullopt;
    if (header.cookie != visible_cookie() || header.number != static_cast<std::uint32_t>(number)) return std::nullopt;
    if (((header.flags & flag_sealed) != 0) != encrypts()) return std::nullopt;
    const auto written = datagram.first<header_bytes>();
    const auto body = datagram.subspan(header_bytes);
    if (!encrypts()) {
        std::array<std::byte, header_bytes> unchecked;
        std::memcpy(unchecked.data(), written.data(), header_bytes);
        write_check(unchecked, mark(rank_of(header.source), rank_));
        const auto check = crc32c(unchecked, header.kind == Kind::data ? data_check(body) : payload_check(body));
        return check == header.check ? std::optional(body) : std::nullopt;
    }
    const std::uint16_t sender = rank_of(header.source);
    if (sender >= secrets_.links.size()) return std::nullopt;
    // The header as received is the associated data: a check that is not zero fails like any other change.
    const auto plain = body.first(body.size() - tag_bytes);
    const bool genuine =
        aead_->decrypt(secrets_.links[sender].opening, make_nonce(rank_, header.source, number, incarnation(rank_)),
                       written, body, plain);
    return genuine ? std::optional(plain) : std::nullopt;
}

}  // namespace storm
