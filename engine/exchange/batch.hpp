// Datagrams for one peer, sent with one system call (UDP segmentation offload): equal segments, the last may be
// shorter.
//
// Unsealed data is not copied (zero copy): the batch points into the caller's buffer and pins the message. The pin
// keeps the buffer until `Core::transmitted` is called with the batch. Everything else is copied into the batch.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "wire/slots.hpp"
#include "wire/wire.hpp"

namespace storm {

class Seal;
struct ChunkChecksums;

class Batch {
public:
    static constexpr std::size_t max_segments = 64;
    static constexpr std::size_t max_bytes = 65'000;

    Batch() = default;
    Batch(const Batch&) = delete;  // it holds pointers into itself
    Batch& operator=(const Batch&) = delete;

    // Empties the batch and prepares it for `peer` over `path`, with space for `copied_bytes` of copied data.
    void begin(std::uint16_t peer, std::size_t copied_bytes, std::uint8_t path = 0);
    // Whether a datagram of this size may follow those in the batch.
    [[nodiscard]] bool takes(std::size_t bytes) const {
        return segments_ == 0 || (!ended() && bytes <= segment_bytes_);
    }
    // Whether the batch holds a datagram shorter than the others, so that none may follow.
    [[nodiscard]] bool ended() const { return bytes_ < segments_ * segment_bytes_; }
    // Adds a datagram under its packet number, sealed or with a checksum, and returns its size on the wire. `checksums`
    // caches the checksums of the chunks, for data that goes to several peers.
    std::size_t add(Seal& seal, std::uint64_t number, Header header, std::span<const std::byte> payload,
                    ChunkChecksums* checksums = nullptr);
    // The batch points into this message's buffer.
    void pin(SlotRef message) { pinned_ = message; }
    // The interface refused datagrams of this size (EMSGSIZE), so they are lost.
    void mark_too_large() { too_large_ = true; }

    [[nodiscard]] std::uint16_t peer() const { return peer_; }
    [[nodiscard]] std::uint8_t path() const { return path_; }
    [[nodiscard]] std::size_t segments() const { return segments_; }
    [[nodiscard]] std::size_t segment_bytes() const { return segment_bytes_; }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    [[nodiscard]] bool too_large() const { return too_large_; }
    [[nodiscard]] const std::optional<SlotRef>& pinned() const { return pinned_; }
    // The bytes of all segments, in order, for sendmsg. Every segment has the same number of parts.
    [[nodiscard]] std::span<iovec> parts() { return {iov_.data(), parts_}; }
    [[nodiscard]] std::span<const iovec> parts() const { return {iov_.data(), parts_}; }

private:
    void add_part(const void* data, std::size_t bytes);

    std::uint16_t peer_{};
    std::uint8_t path_{};
    std::size_t segments_{}, bytes_{}, segment_bytes_{}, parts_{};
    bool too_large_{};
    std::array<iovec, 2 * max_segments> iov_{};
    std::array<std::array<std::byte, header_bytes>, max_segments> headers_{};
    std::vector<std::byte> copied_;  // ciphertext, control bodies, pieces, parity; never grows: parts point into it
    std::optional<SlotRef> pinned_;
};

}  // namespace storm
