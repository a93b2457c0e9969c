#include "exchange/exchange.hpp"

#include <algorithm>

namespace storm {

Exchange::Exchange(const ExchangeSpec& spec, std::size_t chunk_bytes, BlockPool& blocks, Nanos now)
    : channel(spec.channel), seq(spec.seq), timeout_at(spec.timeout_at), view(spec.view), stages_(spec.stages) {
    outcome.started = now;
    if (spec.reduction) {
        const auto contributors =
            std::count_if(spec.receives.begin(), spec.receives.end(), [](const ReceiveSpec& r) { return r.reduce; });
        reduction =
            std::make_unique<Reduction>(*spec.reduction, static_cast<std::uint32_t>(contributors), chunk_bytes, blocks);
    }
    sends.reserve(spec.sends.size());
    for (const SendSpec& send : spec.sends) {
        Outgoing& message = sends.emplace_back(ChunkLayout(send.bytes, chunk_bytes, channel, seq));
        message.exchange = this;
        message.peer = send.peer;
        message.second_stage = send.second_stage;
        message.data = send.data;
        message.announced = send.whole == 0 ? send.bytes : send.whole;
        message.allowed = message.layout.allowed(stage(send.second_stage).budget);
        if (send.second_stage && reduction) {
            message.source = reduction.get();
            if (spec.reduction->mode == Reduce::copy)
                message.reserved = std::min(message.allowed, message.layout.allowed(stage(false).budget));
        }
        for (Outgoing& other : sends) {
            if (&other == &message || other.data != message.data || other.layout.bytes != message.layout.bytes)
                continue;
            if (!other.checksums) other.checksums = std::make_shared<ChunkChecksums>(message.layout.chunks);
            message.checksums = other.checksums;
            break;
        }
    }
    receives.reserve(spec.receives.size());
    std::uint32_t contributor = 0;
    for (const ReceiveSpec& receive : spec.receives) {
        Incoming& message = receives.emplace_back(ChunkLayout(receive.bytes, chunk_bytes, channel, seq));
        message.peer = receive.peer;
        message.second_stage = receive.second_stage;
        message.allowed = message.layout.allowed(stage(receive.second_stage).budget);
        message.into = receive.into;
        message.announced = receive.whole == 0 ? receive.bytes : receive.whole;
        if (receive.reduce) {
            message.reduction = reduction.get();
            message.contributor = contributor++;
        }
        const std::size_t at = 2 * std::size_t{receive.peer} + (receive.second_stage ? 1 : 0);
        if (index_.size() <= at) index_.resize(at + 1);
        index_[at] = static_cast<std::uint32_t>(receives.size());
    }
    timers.resize(1 + receives.size() + sends.size());
}

Incoming* Exchange::received_by(Timers::Owner timer) {
    return timer >= 1 && timer - 1 < receives.size() ? &receives[timer - 1] : nullptr;
}

Outgoing* Exchange::sent_by(Timers::Owner timer) {
    return timer > receives.size() ? &sends[timer - 1 - receives.size()] : nullptr;
}

Incoming* Exchange::incoming(std::uint16_t peer, bool second_stage) {
    const std::size_t at = 2 * std::size_t{peer} + (second_stage ? 1 : 0);
    return at < index_.size() && index_[at] != 0 ? &receives[index_[at] - 1] : nullptr;
}

bool Exchange::waits_for(std::uint16_t peer) const {
    return std::any_of(receives.begin(), receives.end(),
                       [&](const Incoming& m) { return m.peer == peer && !m.closed; });
}

bool Exchange::involves(std::uint16_t peer) const {
    const auto of_peer = [&](const auto& message) { return message.peer == peer; };
    return std::any_of(sends.begin(), sends.end(), of_peer) || std::any_of(receives.begin(), receives.end(), of_peer);
}

bool Exchange::finished() const {
    return std::all_of(receives.begin(), receives.end(), [](const Incoming& m) { return m.closed; }) &&
           std::all_of(sends.begin(), sends.end(), [](const Outgoing& m) { return m.released; });
}

void Exchange::fail(Status status, std::uint16_t peer, std::uint64_t missing_bytes, FailureCause failure_cause) {
    if (!running()) return;
    outcome.status = status;
    outcome.peer = peer;
    outcome.missing_bytes = missing_bytes;
    outcome.failure_cause = failure_cause ? failure_cause : FailureCause{peer, status};
}

bool Exchange::pinned() const {
    return std::any_of(sends.begin(), sends.end(), [](const Outgoing& m) { return m.pins > 0; });
}

void Exchange::conclude(Status status, Nanos now) {
    outcome.status = status;
    outcome.ended = now;
    for (const Outgoing& message : sends) outcome.repaired += message.repaired;
    outcome.arrivals.reserve(receives.size());
    for (const Incoming& message : receives) {
        outcome.arrivals.push_back({.peer = message.peer,
                                    .second_stage = message.second_stage,
                                    .chunks = message.layout.chunks,
                                    .arrived = message.arrived_count,
                                    .recovered = message.recovered,
                                    .bytes = message.layout.bytes,
                                    .missing_bytes = message.missing_bytes(),
                                    .mask = message.arrived.words()});
    }
    if (reduction) outcome.counts = reduction->counts();
}

bool Exchange::take_new_final_chunks() {
    if (!reduction || reduction->final_chunks().size() == announced_final_) return false;
    announced_final_ = reduction->final_chunks().size();
    return true;
}

}  // namespace storm
