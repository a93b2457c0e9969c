// Forward error correction: which messages get parity and how much, retransmission where parity does not suffice, and
// decoding of received parity.
#include <algorithm>
#include <cmath>
#include <functional>

#include "coding/coding_model.hpp"
#include "core/core.hpp"
#include "exchange/batch.hpp"
#include "exchange/exchange.hpp"
#include "peers/peer.hpp"

namespace storm {
namespace {

// Below this loss rate, parity costs more than all retransmissions.
constexpr double least_loss = 0.002;

// Whether results of the second stage overwrite the message, as in an in-place all-reduce. A result arrives only after
// its owner has received the chunk that it overwrites, or does without it. From then on, retransmissions of that chunk
// are refused as duplicates, so they may read the overwritten data. Parity may not, as it covers other chunks too.
bool results_overwrite(const Outgoing& message) {
    const std::byte* end = message.data + message.layout.bytes;
    const std::less<> before;
    return std::any_of(message.exchange->receives.begin(), message.exchange->receives.end(), [&](const Incoming& each) {
        return each.into != nullptr && before(each.into, end) && before(message.data, each.into + each.layout.bytes);
    });
}

// Chunks that are still to be sent to the peer after this stretch of a message. A contribution to a sum is followed by
// the sum's result. About half of the result hides what is lost now: results also wait for contributions of other
// ranks, and their parity waits for the last of them.
std::size_t chunks_after(const Outgoing& message, std::uint32_t stretch_chunks) {
    std::size_t after = message.layout.chunks - std::min(message.cursor + stretch_chunks, message.layout.chunks);
    if (message.second_stage) return after;
    for (const Outgoing& each : message.exchange->sends) {
        if (each.second_stage && each.peer == message.peer) after += (each.layout.chunks - each.cursor) / 2;
    }
    return after;
}

// Messages of the same stage on all ranks, if each sends as many as we do. All ranks wait for the last of them.
double messages_in_stage(const Outgoing& message) {
    const auto ours = static_cast<double>(
        std::count_if(message.exchange->sends.begin(), message.exchange->sends.end(),
                      [&](const Outgoing& each) { return each.second_stage == message.second_stage; }));
    return ours * (ours + 1.0);
}

}  // namespace

// Whether a message may get parity at all. `plan_parity` decides how much each of its stretches gets, if any.
bool Core::wants_parity(const Peer& peer, const Outgoing& message) const {
    const double redundancy = message.exchange->stage(message.second_stage).redundancy;
    if (redundancy == 0.0 || message.layout.bytes == 0 || message.first_pass_over()) return false;
    return redundancy > 0.0 || (!message.never_repaired() && peer.links.loss() > least_loss);
}

std::unique_ptr<Encoding> Core::begin_coding(const Outgoing& message) {
    // Chunks of a second stage are sent as they become final, so the cursor does not say which ones were sent.
    const bool began = message.source != nullptr && message.cursor > 0;
    return std::make_unique<Encoding>(message.layout, began ? message.layout.chunks : message.cursor,
                                      message.lossless(), results_overwrite(message));
}

// Before the first chunk of a stretch is sent in the first pass: decides how much parity the stretch gets.
void Core::plan_parity(Peer& peer, Outgoing& message, std::uint32_t chunk) {
    Encoding& encoding = *message.encoding;
    if (!encoding.undecided(chunk)) return;
    const CodeShape& shape = encoding.shape();
    const std::uint32_t stretch = shape.stretch_of(message.layout.ordinal(chunk));
    const double redundancy = message.exchange->stage(message.second_stage).redundancy;
    std::size_t parity = 0;
    if (peer.links.splits_chunks(chunk_bytes_, seal_.overhead_bytes())) {
        // No parity on paths with fragmentation: pieces are matched by chunk number, which parity does not have.
    } else if (redundancy > 0.0) {
        // The epsilon undoes rounding just above a whole number. The block size bounds the result: see `decide`.
        parity = static_cast<std::size_t>(std::ceil(redundancy * shape.block_size(stretch, 0) - 1e-9));
    } else {
        const double rate = shared_pacers_.empty() ? peer.links.bytes_per_s()
                                                   : static_cast<double>(shared_pacers_.size()) * config_.bytes_per_s;
        const double bytes = static_cast<double>(shape.parity_bytes + header_bytes + seal_.overhead_bytes());
        parity = parity_that_pays({.loss = peer.links.loss(),
                                   .burst = peer.links.burst(),
                                   .round_trip_s = static_cast<double>(peer.links.round_trip()) * 1e-9,
                                   .chunk_s = rate > 0.0 ? bytes / rate : 0.0},
                                  {.chunks = shape.size(stretch),
                                   .blocks = shape.blocks(stretch),
                                   .after = chunks_after(message, shape.size(stretch)),
                                   .messages = messages_in_stage(message)});
    }
    encoding.decide(chunk, parity);
}

void Core::add_parity(Batch& batch, Peer& peer, Link& link, Outgoing& message, Nanos now) {
    const Encoding::Ready parity = message.encoding->take([&](std::uint32_t chunk) { return message.payload(chunk); });
    auto flags = static_cast<std::uint8_t>(stage_flag(message.second_stage) | flag_parity);
    const bool is_last = message.first_pass_over() && message.parity_due() == 0;
    if (is_last) flags |= flag_last;
    const Flight flight{
        .bytes = static_cast<std::uint32_t>(parity.payload.size() + header_bytes + seal_.overhead_bytes()),
        .kind = Kind::data,
        .flags = flags,
        .message = message.ref,
        .chunk = parity.name};
    const Header header{.kind = Kind::data,
                        .flags = flags,
                        .source = source(link),
                        .cookie = seal_.visible_cookie(),
                        .channel = message.exchange->channel,
                        .seq = message.exchange->seq,
                        .chunk = parity.name,
                        .message_bytes = static_cast<std::uint32_t>(message.announced)};
    counters_.parity_bytes += flight.bytes;
    add_datagram(batch, link, flight, header, parity.payload, now);
    if (is_last && !message.lossless()) peer.queue_control(message.end());
}

// A coded message lost a datagram: retransmits what its block needs beyond its parity, if anything.
void Core::repair_coded(Peer& peer, Outgoing& message, const Flight& flight, Nanos now) {
    const bool parity = (flight.flags & flag_parity) != 0;
    if (!parity && message.acked_chunks.test(flight.chunk)) return;
    const std::vector<std::uint32_t> again =
        parity ? message.encoding->on_parity_lost(flight.chunk) : message.encoding->on_lost(flight.chunk);
    count_blocks(message);
    if (!parity && again.empty()) ++message.repaired;  // by parity, as far as we know
    for (const std::uint32_t chunk : again) {
        if (message.wanted) retransmit(peer, message, chunk, now, (flight.flags & flag_repair) != 0);
    }
    repair_before_parity(peer, message, now);
}

// Nothing else is to be sent, and parity waits for chunks that are not final yet: retransmits known losses meanwhile.
void Core::repair_before_parity(Peer& peer, Outgoing& message, Nanos now) {
    if (!message.wanted || !message.encoding || message.first_pass_over() || message.waiting() > 0) return;
    if (!peer.queue.only_repairs()) return;
    for (const std::uint32_t chunk : message.encoding->take_lost_before_parity()) retransmit(peer, message, chunk, now);
}

// Goes on without parity: retransmits the chunks that parity was expected to recover.
void Core::stop_coding(Peer& peer, Outgoing& message, Nanos now) {
    for (const std::uint32_t chunk : message.encoding->stop()) {
        if (message.wanted && !message.acked_chunks.test(chunk)) retransmit(peer, message, chunk, now);
    }
}

void Core::count_blocks(Outgoing& message) {
    const Encoding::BlockCounts news = message.encoding->take_block_counts();
    counters_.blocks_saved += news.saved;
    counters_.blocks_topped_up += news.topped_up;
}

void Core::keep_coded(Incoming& message, const Header& header, std::span<const std::byte> payload) {
    if (message.closed || message.settled.test(header.chunk) || message.layout.bytes == 0) return;
    if (!message.decoding) {
        const std::byte* placed = message.reduction == nullptr ? message.into : nullptr;
        message.decoding = std::make_unique<Decoding>(message.layout, placed, message.peer, coding_memory_);
    }
    message.decoding->keep(header.chunk, payload);
}

bool Core::take_parity(Exchange& exchange, Peer& peer, Incoming& message, const Header& header,
                       std::span<const std::byte> payload, Nanos now) {
    if (message.closed) {
        ++counters_.late;
        return true;
    }
    if (message.layout.bytes == 0) {
        ++counters_.unexpected;
        return true;
    }
    if (!message.decoding) {
        const std::byte* placed = message.reduction == nullptr ? message.into : nullptr;
        message.decoding = std::make_unique<Decoding>(message.layout, placed, message.peer, coding_memory_);
    }
    switch (message.decoding->take_parity(header.chunk, payload, message.arrived, message.settled)) {
        case Decoding::Taken::malformed: ++counters_.unexpected; return true;
        case Decoding::Taken::no_space: return false;
        case Decoding::Taken::yes: break;
    }
    restore(message, header);
    on_progress(exchange, peer, message, header, now, Carrier::datagram);
    return true;
}

// A chunk or parity of a coded message arrived: decodes what is missing of its block, if that is possible now.
void Core::restore(Incoming& message, const Header& header) {
    const auto restored = [&](std::uint32_t chunk, std::span<const std::byte> payload) {
        if (!message.accept(chunk, payload)) return;
        ++message.recovered;
        ++counters_.recovered;
    };
    if (header.has(flag_parity)) {
        message.decoding->restore_block_named(header.chunk, message.arrived, restored);
        return;
    }
    message.decoding->restore_block_of(header.chunk, message.arrived, restored);
    if (message.allowed < message.layout.chunks) return;
    // Nothing is retransmitted, so nothing more arrives of the stretch before the last.
    const std::uint32_t stretch = message.decoding->shape().stretch_of(message.layout.ordinal(header.chunk));
    if (stretch >= 2) message.decoding->forget_before(stretch - 1);
}

}  // namespace storm
