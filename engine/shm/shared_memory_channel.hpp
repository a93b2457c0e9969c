// Shared-memory channel between two endpoints of one machine: a ring each way.
//
// It carries only data, and the end of a message of which something is missing. Heartbeats, and what a peer must
// receive even if data is stuck, travel by datagram. Nothing is lost or reordered here, so a chunk counts as
// acknowledged once it is in the ring; there are no reports, no retransmission and no rate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "base/clock.hpp"
#include "shm/broadcast_buffer.hpp"
#include "shm/ring.hpp"
#include "wire/wire.hpp"

namespace storm {

// Header of a record, which holds a run of consecutive chunks of one message.
struct Record {
    // Payloads begin and end on cache lines.
    static constexpr std::size_t head_bytes = 64;

    std::uint32_t bytes{};  // of the payload
    std::uint32_t chunk{};  // the first
    std::uint32_t message_bytes{};
    std::uint32_t channel{}, seq{};
    Kind kind{};
    std::uint8_t flags{};
    std::uint8_t in_broadcast_buffer{};  // 1: the payload is in the writer's broadcast buffer, not behind this
    std::uint32_t position{};            // where in the broadcast buffer

    // What a record takes in the ring.
    [[nodiscard]] static constexpr std::size_t size(std::size_t payload_bytes) {
        return head_bytes + (payload_bytes + 63) / 64 * 64;
    }
    [[nodiscard]] std::size_t size() const { return size(in_broadcast_buffer != 0 ? 0 : bytes); }
    // The first record of what was read, which is untrusted.
    [[nodiscard]] static std::optional<Record> parse(std::span<const std::byte> from);
    void write(std::byte* to) const { std::memcpy(to, this, sizeof *this); }
    [[nodiscard]] Header header(std::uint16_t source) const {
        return {.kind = kind,
                .flags = flags,
                .source = source,
                .channel = channel,
                .seq = seq,
                .chunk = chunk,
                .message_bytes = message_bytes};
    }
};
static_assert(sizeof(Record) <= Record::head_bytes);

struct SharedMemoryChannel {
    RingWriter out;
    RingReader in;
    std::unique_ptr<BroadcastMemory> peer_broadcast_memory;
    bool stalled{};            // the pool has no space for the next record
    Nanos defer_until{never};  // when the next term of a sum is taken although it is out of order

    SharedMemoryChannel(std::unique_ptr<RingMemory> to_it, std::unique_ptr<RingMemory> from_it,
                        std::unique_ptr<BroadcastMemory> broadcast_buffer)
        : out(std::move(to_it)), in(std::move(from_it)), peer_broadcast_memory(std::move(broadcast_buffer)) {}

    // The payload of the first record of what was read.
    [[nodiscard]] std::span<const std::byte> payload(const Record& record, std::span<const std::byte> front) const {
        if (record.in_broadcast_buffer != 0) return {peer_broadcast_memory->bytes() + record.position, record.bytes};
        return front.subspan(Record::head_bytes, record.bytes);
    }

    // True if the peer has written invalid data, by mistake or not.
    [[nodiscard]] bool broken() const { return out.broken() || in.broken(); }
};

}  // namespace storm
