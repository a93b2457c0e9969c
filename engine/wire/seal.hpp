// Authentication and encryption of datagrams: CRC32C against accidents, AES-GCM against attackers.
//
// Without a job key the check is a CRC32C over header (check field zero) and payload, seeded by half of the job's
// cookie; the other half stands in the header. An off-path attacker must guess both halves: 64 bits. Between processes
// of one machine, headers are checked but data is not: it is copied from memory to memory, and the kernel does not
// check it either.
// With a job key the payload is encrypted by AES-128-GCM, the header is authenticated, and a 16-byte tag follows. Each
// direction of each link has a key of its own, to which both ends have added a random number. So a process never reuses
// a key, and accepts only what was sealed for it, even if it was misinformed about its peer.
// Either way the check covers the incarnations of both ends: a process accepts no datagram that was sent to, or by, an
// earlier process of the same rank.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "math/crc32c.hpp"
#include "wire/wire.hpp"

namespace storm {

using Key = std::array<std::byte, 16>;

// AES-128-GCM through libcrypto, opened at run time. Each thread needs an object of its own.
class Aead {
public:
    static constexpr std::array library_names{"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"};
    // Empty result when libcrypto cannot be opened; `why` then says what was tried and what to install.
    // Tests pass other names to simulate a machine without it.
    static std::unique_ptr<Aead> open(std::string& why, std::span<const char* const> names = library_names);
    ~Aead();

    // Encrypts `plain` into `out` (plain.size() + tag_bytes), which may be the same memory; `nonce` must never repeat
    // under one key. Keys are cached by content: only a change of key costs its expansion.
    bool encrypt(const Key& key, std::span<const std::byte, 12> nonce, std::span<const std::byte> associated,
                 std::span<const std::byte> plain, std::span<std::byte> out);
    // Decrypts `sealed` (ciphertext and tag) into `out`, which may be the same memory; false if it was not made with
    // this key, and then `out` holds nothing that may be used.
    bool decrypt(const Key& key, std::span<const std::byte, 12> nonce, std::span<const std::byte> associated,
                 std::span<const std::byte> sealed, std::span<std::byte> out);

    struct Library;

private:
    explicit Aead(const Library& library);
    struct Contexts;
    std::unique_ptr<Contexts> contexts_;
};

struct LinkKeys {
    Key sealing{};  // seals what this endpoint sends to the peer
    Key opening{};  // opens what the peer sends to it
};

// The secrets of a job as one endpoint holds them.
struct Secrets {
    std::uint64_t cookie{};
    bool checks_data{true};  // false: chunks cannot be corrupted in transit
    bool sealed{};
    std::vector<LinkKeys> links;  // by rank; empty when not sealed
    // By rank, our own included: how many earlier processes of that rank there were. Empty if every process is the
    // first.
    std::vector<std::uint32_t> incarnations{};
};

// Seals outgoing datagrams and opens incoming ones of one endpoint.
class Seal {
public:
    // `world`: ranks; a source beyond them is a rank on another path (Core::source). 0 if there is one path.
    // Throws std::runtime_error, saying what to install, when a key is given and libcrypto is missing.
    Seal(Secrets secrets, std::uint16_t rank, std::uint16_t world = 0);
    ~Seal();

    [[nodiscard]] bool encrypts() const { return secrets_.sealed; }
    [[nodiscard]] std::uint32_t visible_cookie() const { return static_cast<std::uint32_t>(secrets_.cookie); }
    // Bytes that sealing adds to a datagram behind its payload.
    [[nodiscard]] std::size_t overhead_bytes() const { return encrypts() ? tag_bytes : 0; }

    // Unencrypted: the payload's part of the check. It depends on the payload alone, so a chunk that is sent to many
    // peers is read once.
    [[nodiscard]] std::uint32_t payload_check(std::span<const std::byte> payload) const {
        return crc32c(payload, static_cast<std::uint32_t>(secrets_.cookie >> 32));
    }
    // The check of a chunk of data. Where data cannot be corrupted, only its length is checked.
    [[nodiscard]] std::uint32_t data_check(std::span<const std::byte> payload) const {
        if (secrets_.checks_data) return payload_check(payload);
        const auto length = static_cast<std::uint32_t>(payload.size());
        return payload_check(std::as_bytes(std::span(&length, 1)));
    }
    // Unencrypted: fills the check of the header that `header` holds in wire form and clears flag_sealed.
    void protect(std::span<std::byte, header_bytes> header, std::uint16_t peer, std::uint32_t payload_check) const;
    // Encrypted: writes ciphertext and tag to `out` (payload.size() + tag_bytes), zeroes the header's check and sets
    // flag_sealed. `number` is the full packet number. Throws std::logic_error without a key, std::runtime_error when
    // libcrypto refuses.
    void encrypt(std::span<std::byte, header_bytes> header, std::span<const std::byte> payload, std::uint16_t peer,
                 std::uint64_t number, std::span<std::byte> out);
    // The payload of a datagram whose check or tag is right, decrypted in place; empty result otherwise.
    // `header` is what parse_header made of it, `number` its widened packet number. Never throws.
    [[nodiscard]] std::optional<std::span<std::byte>> open(const Header& header, std::uint64_t number,
                                                           std::span<std::byte> datagram);

    [[nodiscard]] std::uint32_t incarnation(std::uint16_t rank) const {
        return rank < secrets_.incarnations.size() ? secrets_.incarnations[rank] : 0;
    }
    // A new process has replaced a peer. `keys` are those of the link to it; empty if nothing is sealed.
    void readmit(std::uint16_t peer, std::uint32_t incarnation, const std::optional<LinkKeys>& keys);

private:
    [[nodiscard]] std::uint16_t rank_of(std::uint16_t source) const {
        return world_ == 0 ? source : static_cast<std::uint16_t>(source % world_);
    }
    // The value of the header's check field while the check is computed. It mixes both incarnations with the target,
    // which the header does not hold.
    [[nodiscard]] std::uint32_t mark(std::uint16_t source, std::uint16_t target) const {
        const std::uint32_t to = incarnation(target), from = incarnation(source);
        return (to << 16 | (from & 0xffffU)) ^
               ((to >> 16) * 0x9e37'79b1U + (from >> 16) * 0x85eb'ca77U + target * 0xc2b2'ae35U);
    }

    Secrets secrets_;
    std::uint16_t rank_, world_;
    std::unique_ptr<Aead> aead_;
};

}  // namespace storm
