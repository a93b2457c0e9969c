// One message of an exchange, at its sender and at its receiver: which chunks were sent, acknowledged, lost,
// retransmitted or received.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/bitmap.hpp"
#include "base/clock.hpp"
#include "coding/chunk_layout.hpp"
#include "coding/coding.hpp"
#include "math/reduction.hpp"
#include "wire/controls.hpp"
#include "wire/slots.hpp"

namespace storm {

class Exchange;

// Checksums of chunks that go to several peers, so that each is computed once.
struct ChunkChecksums {
    Bitmap known;
    std::vector<std::uint32_t> values;

    explicit ChunkChecksums(std::uint32_t chunks) : known(chunks), values(chunks) {}
};

// Tail loss: how many copies to send of each lost chunk at the end of a message, for the least expected time. Each copy
// costs its transmission time, `chunk_s`; a chunk of which all copies are lost costs another round trip, `trip_s`.
[[nodiscard]] unsigned tail_loss_copies(double chunks, double loss, double chunk_s, double trip_s);

// A message to a peer.
struct Outgoing {
    Exchange* exchange{};
    std::uint16_t peer{};
    bool second_stage{};
    const std::byte* data{};
    ChunkLayout layout;
    std::uint64_t announced{};  // bytes of the whole message, of which this may be a lane's part: both sides must agree
    std::uint32_t allowed{};    // chunks that may be missing in the end
    std::uint32_t
        reserved{};  // part of `allowed` kept for chunks that never reached us, so that we cannot forward them
    const Reduction* source{};                  // second stage: only its final chunks can be sent
    std::shared_ptr<ChunkChecksums> checksums;  // shared with other messages of the same data; null if there are none
    SlotRef ref;                                // how flights and batches refer to it

    std::uint32_t cursor{};  // chunks of the first pass (first transmissions) that were sent or skipped
    std::uint32_t acked{}, unrepaired{}, repaired{};
    std::uint64_t eager_bytes{};  // bytes sent in the first pass so far
    Bitmap acked_chunks;
    std::deque<std::uint32_t> repairs;       // chunks to retransmit
    std::deque<std::uint32_t> extra_copies;  // further copies of repairs, sent when there is nothing else to send
    unsigned pins{};                         // batches that still point into `data`
    Nanos
        blocked_from{};  // since when losses count, if the exchange waits across views and its path was blocked before
    bool ready{};        // the receiver has posted: no eager limit
    bool parked{};       // the receiver's pool was full: hold until it is ready
    bool queued{};       // is in its peer's queue; only SendQueue writes it
    bool wanted{true};   // false once nothing more need be sent
    bool released{};     // the caller may use its buffer again
    std::unique_ptr<Encoding> encoding;  // its parity; null until parity is first considered

    explicit Outgoing(const ChunkLayout& c) : layout(c), acked_chunks(c.chunks) {}
    [[nodiscard]] bool first_pass_over() const { return cursor == layout.chunks; }
    // Chunks that could be sent now.
    [[nodiscard]] std::size_t waiting() const {
        return repairs.size() + extra_copies.size() +
               (source != nullptr ? source->final_chunks().size() : layout.chunks) - cursor + parity_due();
    }
    [[nodiscard]] bool only_extra_copies() const { return !extra_copies.empty() && waiting() == extra_copies.size(); }
    [[nodiscard]] bool sendable() const { return wanted && !parked && waiting() > 0; }
    [[nodiscard]] std::size_t parity_due() const { return encoding ? encoding->due() : 0; }
    // Chunks that the receiver has, or can decode, as far as we know.
    [[nodiscard]] std::uint32_t delivered() const { return acked + (encoding ? encoding->presumed() : 0); }
    // Chunk number `ordinal` of the first pass, in the order of sending.
    [[nodiscard]] std::uint32_t chunk_at(std::uint32_t ordinal) const {
        return source != nullptr ? source->final_chunks()[ordinal] : layout.at(ordinal);
    }
    [[nodiscard]] std::span<const std::byte> payload(std::uint32_t chunk) const {
        return {data + std::size_t{chunk} * layout.chunk_bytes, layout.size(chunk)};
    }
    [[nodiscard]] bool lossless() const { return allowed == 0; }
    [[nodiscard]] bool never_repaired() const { return allowed == layout.chunks; }
    [[nodiscard]] std::uint64_t unacked_bytes() const {
        return layout.bytes - std::min<std::uint64_t>(std::uint64_t{acked} * layout.chunk_bytes, layout.bytes);
    }
    // Whether the next chunk of the first pass never reached us, so that we cannot forward it.
    [[nodiscard]] bool next_is_missing() const { return source != nullptr && source->counts()[chunk_at(cursor)] == 0; }
    void skip_missing();
    // The end of a lossy message, in a datagram of its own: it must arrive even if the last chunk is lost.
    [[nodiscard]] Control end() const;
    // Sends nothing more, and releases the caller's buffer as soon as no batch points into it.
    void release();
    // Releases the message if every chunk is acknowledged or left unrepaired.
    void release_if_done();
};

// A message from a peer.
struct Incoming {
    std::uint16_t peer{};
    bool second_stage{};
    ChunkLayout layout;
    std::uint64_t announced{};  // bytes of the whole message, as in Outgoing
    std::uint32_t allowed{};
    std::byte* into{};
    Reduction* reduction{};
    std::uint32_t contributor{};

    Bitmap arrived, settled;
    std::uint32_t arrived_count{};
    std::uint64_t arrived_bytes{};
    std::uint32_t settled_upto{};  // in a message that is never retransmitted: all ordinals below this are settled
    bool ended{};                  // the sender's first pass is over
    bool closed{};                 // no further chunk is accepted
    Nanos close_at{never};         // when to close: after a grace period for chunks that the end overtook (reordering)
    Nanos ready_at{never};         // when to send the next `ready` to the sender
    Nanos ready_every{};
    std::uint32_t recovered{};           // chunks decoded from parity
    std::unique_ptr<Decoding> decoding;  // null until parity arrives, or a chunk flagged as coded

    explicit Incoming(const ChunkLayout& c) : layout(c), arrived(c.chunks), settled(c.chunks) {}
    [[nodiscard]] std::uint32_t missing() const { return layout.chunks - arrived_count; }
    [[nodiscard]] std::uint64_t missing_bytes() const { return layout.bytes - arrived_bytes; }
    // Accepts a chunk of the right size; false if it is late or a duplicate.
    bool accept(std::uint32_t chunk, std::span<const std::byte> payload);
    // Accepts no further chunk; the reduction goes on without those that are missing.
    void close();

private:
    void mark_missing(std::uint32_t chunk);
};

}  // namespace storm
