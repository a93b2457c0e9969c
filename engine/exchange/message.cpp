#include "exchange/message.hpp"

#include <cmath>
#include <limits>

#include "exchange/exchange.hpp"
#include "math/kernels.hpp"

namespace storm {
namespace {

// In a message that is never retransmitted, a chunk this far behind the newest one counts as lost.
constexpr std::uint32_t reorder_margin = 32;
// Messages above this size do not stay in a core's own cache until they are used.
constexpr std::uint64_t large_bytes = 2 << 20;

std::uint32_t mix(std::uint32_t channel, std::uint32_t seq) {
    std::uint64_t x = (std::uint64_t{channel} << 32 | seq) + 0x9e37'79b9'7f4a'7c15ULL;
    x = (x ^ x >> 30) * 0xbf58'476d'1ce4'e5b9ULL;
    x = (x ^ x >> 27) * 0x94d0'49bb'1331'11ebULL;
    return static_cast<std::uint32_t>(x >> 32);
}

}  // namespace

ChunkLayout::ChunkLayout(std::uint64_t message_bytes, std::size_t bytes_per_chunk, std::uint32_t channel,
                         std::uint32_t seq)
    : bytes(message_bytes), chunk_bytes(static_cast<std::uint32_t>(bytes_per_chunk)) {
    chunks = bytes == 0 ? 1 : static_cast<std::uint32_t>((bytes + chunk_bytes - 1) / chunk_bytes);
    start = mix(channel, seq) % chunks;
}

Control Outgoing::end() const {
    return {.kind = Kind::end, .flags = stage_flag(second_stage), .channel = exchange->channel, .seq = exchange->seq};
}

void Outgoing::skip_missing() {
    ++cursor;
    ++unrepaired;
    if (reserved > 0) --reserved;
}

unsigned tail_loss_copies(double chunks, double loss, double chunk_s, double trip_s) {
    constexpr unsigned most = 6;
    unsigned best = 1;
    double least_s = std::numeric_limits<double>::infinity();
    for (unsigned copies = 1; copies <= most; ++copies) {
        const double again = std::min(chunks * std::pow(loss, copies), 1.0);
        const double takes_s = copies * chunks * chunk_s + again * trip_s;
        if (takes_s < least_s) {
            least_s = takes_s;
            best = copies;
        }
    }
    return best;
}

void Outgoing::release() {
    wanted = false;
    repairs.clear();
    extra_copies.clear();
    if (pins == 0) released = true;
}

void Outgoing::release_if_done() {
    if (released || pins > 0) return;
    // A chunk that was left unrepaired and then acknowledged counts twice. That does no harm once all were sent.
    // A chunk that the receiver can only decode is not settled until the receiver reports it.
    const bool settled_all = (never_repaired() || acked + unrepaired >= layout.chunks) && parity_due() == 0;
    if (!wanted || (first_pass_over() && settled_all)) release();
}

bool Incoming::accept(std::uint32_t chunk, std::span<const std::byte> payload) {
    if (closed || !settled.set(chunk)) return false;
    arrived.set(chunk);
    ++arrived_count;
    arrived_bytes += payload.size();
    if (reduction != nullptr) {
        reduction->contribute(contributor, chunk, payload);
    } else if (!payload.empty()) {
        copy_streaming(into + std::size_t{chunk} * layout.chunk_bytes, payload.data(), payload.size(),
                       layout.bytes >= large_bytes);
    }
    if (reduction != nullptr && allowed == layout.chunks) {
        // Chunks are sent once, in a known order, so those well behind this one are lost.
        std::uint32_t ordinal = layout.ordinal(chunk);
        if (decoding && ordinal >= reorder_margin) {
            // Parity follows its stretch: missing chunks of earlier stretches are lost, others may still be decoded.
            const std::uint32_t stretch = decoding->shape().stretch_of(ordinal - reorder_margin);
            ordinal = decoding->shape().begin(stretch) + reorder_margin;
        }
        while (settled_upto + reorder_margin < ordinal) mark_missing(layout.at(settled_upto++));
    }
    if (arrived_count == layout.chunks) closed = true;
    return true;
}

void Incoming::mark_missing(std::uint32_t chunk) {
    if (settled.set(chunk) && reduction != nullptr) reduction->mark_missing(contributor, chunk);
}

void Incoming::close() {
    if (closed) return;
    closed = true;
    decoding.reset();
    for (std::uint32_t chunk = 0; chunk < layout.chunks; ++chunk) mark_missing(chunk);
}

}  // namespace storm
