#include "exchange.hpp"

#include <algorithm>

namespace storm {
namespace {

// How far behind the newest chunk another may arrive before a message that is never repaired stops waiting for it.
constexpr std::uint32_t reorder_margin = 32;
// Larger messages do not stay in a core's own cache until they are used.
constexpr std::uint64_t large_bytes = 2 << 20;

std::uint32_t mix(std::uint32_t channel, std::uint32_t seq) {
    std::uint64_t x = (std::uint64_t{channel} << 32 | seq) + 0x9e37'79b9'7f4a'7c15ULL;
    x = (x ^ x >> 30) * 0xbf58'476d'1ce4'e5b9ULL;
    x = (x ^ x >> 27) * 0x94d0'49bb'1331'11ebULL;
    return static_cast<std::uint32_t>(x >> 32);
}

}  // namespace

Cut::Cut(std::uint64_t message_bytes, std::size_t bytes_per_chunk, std::uint32_t channel, std::uint32_t seq)
    : bytes(message_bytes), chunk_bytes(static_cast<std::uint32_t>(bytes_per_chunk)) {
    chunks = bytes == 0 ? 1 : static_cast<std::uint32_t>((bytes + chunk_bytes - 1) / chunk_bytes);
    start = mix(channel, seq) % chunks;
}

bool Incoming::accept(std::uint32_t chunk, std::span<const std::byte> payload) {
    if (closed || !settled.set(chunk)) return false;
    arrived.set(chunk);
    ++arrived_count;
    arrived_bytes += payload.size();
    if (reduction != nullptr) {
        reduction->contribute(contributor, chunk, payload);
    } else if (!payload.empty()) {
        place(into + std::size_t{chunk} * cut.chunk_bytes, payload.data(), payload.size(), cut.bytes >= large_bytes);
    }
    if (reduction != nullptr && allowed == cut.chunks) {
        // Never repaired and sent in a known order: what lies well behind this chunk is lost.
        const std::uint32_t ordinal = cut.ordinal(chunk);
        while (settled_upto + reorder_margin < ordinal) give_up(cut.at(settled_upto++));
    }
    if (arrived_count == cut.chunks) closed = true;
    return true;
}

void Incoming::give_up(std::uint32_t chunk) {
    if (settled.set(chunk) && reduction != nullptr) reduction->give_up(contributor, chunk);
}

void Incoming::close() {
    if (closed) return;
    closed = true;
    for (std::uint32_t chunk = 0; chunk < cut.chunks; ++chunk) give_up(chunk);
}

Exchange::Exchange(const ExchangeSpec& spec, std::size_t chunk_bytes, Blocks& blocks, Nanos now)
    : channel(spec.channel), seq(spec.seq), timeout_at(spec.timeout_at), stages_(spec.stages) {
    outcome.started = now;
    if (spec.reduction) {
        const auto contributors =
            std::count_if(spec.receives.begin(), spec.receives.end(), [](const ReceiveSpec& r) { return r.reduce; });
        reduction =
            std::make_unique<Reduction>(*spec.reduction, static_cast<std::uint32_t>(contributors), chunk_bytes, blocks);
    }
    sends.reserve(spec.sends.size());
    for (const SendSpec& send : spec.sends) {
        Outgoing& message = sends.emplace_back(Cut(send.bytes, chunk_bytes, channel, seq));
        message.exchange = this;
        message.peer = send.peer;
        message.second_stage = send.second_stage;
        message.data = send.data;
        message.allowed = message.cut.allowed(stage(send.second_stage).budget);
        if (send.second_stage && reduction) {
            message.source = reduction.get();
            if (spec.reduction->mode == Reduce::copy)
                message.reserved = std::min(message.allowed, message.cut.allowed(stage(false).budget));
        }
        for (Outgoing& other : sends) {
            if (&other == &message || other.data != message.data || other.cut.bytes != message.cut.bytes) continue;
            if (!other.checks) other.checks = std::make_shared<Checks>(message.cut.chunks);
            message.checks = other.checks;
            break;
        }
    }
    receives.reserve(spec.receives.size());
    std::uint32_t contributor = 0;
    for (const ReceiveSpec& receive : spec.receives) {
        Incoming& message = receives.emplace_back(Cut(receive.bytes, chunk_bytes, channel, seq));
        message.peer = receive.peer;
        message.second_stage = receive.second_stage;
        message.allowed = message.cut.allowed(stage(receive.second_stage).budget);
        message.into = receive.into;
        if (receive.reduce) {
            message.reduction = reduction.get();
            message.contributor = contributor++;
        }
        const std::size_t at = 2 * std::size_t{receive.peer} + (receive.second_stage ? 1 : 0);
        if (index_.size() <= at) index_.resize(at + 1);
        index_[at] = static_cast<std::uint32_t>(receives.size());
    }
}

Incoming* Exchange::incoming(std::uint16_t peer, bool second_stage) {
    const std::size_t at = 2 * std::size_t{peer} + (second_stage ? 1 : 0);
    return at < index_.size() && index_[at] != 0 ? &receives[index_[at] - 1] : nullptr;
}

bool Exchange::waits_for(std::uint16_t peer) const {
    return std::any_of(receives.begin(), receives.end(),
                       [&](const Incoming& m) { return m.peer == peer && !m.closed; });
}

bool Exchange::with(std::uint16_t peer) const {
    const auto of_peer = [&](const auto& message) { return message.peer == peer; };
    return std::any_of(sends.begin(), sends.end(), of_peer) || std::any_of(receives.begin(), receives.end(), of_peer);
}

bool Exchange::finished() const {
    return std::all_of(receives.begin(), receives.end(), [](const Incoming& m) { return m.closed; }) &&
           std::all_of(sends.begin(), sends.end(), [](const Outgoing& m) { return m.released; });
}

void Exchange::conclude(Status status, Nanos now) {
    outcome.status = status;
    outcome.ended = now;
    for (const Outgoing& message : sends) outcome.repaired += message.repaired;
    outcome.arrivals.reserve(receives.size());
    for (const Incoming& message : receives) {
        outcome.arrivals.push_back({.peer = message.peer,
                                    .second_stage = message.second_stage,
                                    .chunks = message.cut.chunks,
                                    .arrived = message.arrived_count,
                                    .bytes = message.cut.bytes,
                                    .missing_bytes = message.cut.bytes - message.arrived_bytes,
                                    .mask = message.arrived.words()});
    }
    if (reduction) outcome.counts = reduction->counts();
}

bool Exchange::take_news() {
    if (!reduction || reduction->final_chunks().size() == announced_) return false;
    announced_ = reduction->final_chunks().size();
    return true;
}

}  // namespace storm
