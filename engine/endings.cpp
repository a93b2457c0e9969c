// Timers, and how exchanges come to their end.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "core.hpp"
#include "peer.hpp"

namespace storm {
namespace {

// For so many exchanges that ended badly, peers that still ask are told.
constexpr std::size_t most_failed = 1024;

}  // namespace

void Core::close(Exchange& exchange, Incoming& message, bool tell) {
    if (message.closed) return;
    message.close();
    Peer& peer = *peers_[message.peer];
    stop_waiting(peer);
    if (tell) {
        const std::uint8_t flags = message.second_stage ? flag_second_stage : std::uint8_t{0};
        control(peer, {.kind = Kind::done, .flags = flags, .channel = exchange.channel, .seq = exchange.seq});
    }
}

void Core::stop_waiting(Peer& peer) {
    if (--peer.open_receives == 0) --waited_for_;
}

void Core::close_stage(Exchange& exchange, bool second_stage) {
    for (Incoming& message : exchange.receives) {
        if (message.second_stage == second_stage) close(exchange, message, true);
    }
    for (Outgoing& message : exchange.sends) {
        if (message.second_stage == second_stage) release(message);
    }
}

void Core::open_gates(Exchange& exchange) {
    if (!exchange.take_news()) return;
    for (Outgoing& message : exchange.sends) {
        if (message.second_stage) enqueue(message);
    }
}

void Core::finish_if_done(Exchange& exchange, Nanos now) {
    if (exchange.outcome.status != Status::running) {
        finish(exchange, exchange.outcome.status, now);
    } else if (exchange.finished()) {
        finish(exchange, Status::ok, now);
    }
}

void Core::fail(Exchange& exchange, Status status, std::uint16_t peer, std::uint64_t missing_bytes, Blame blame) {
    if (exchange.outcome.status != Status::running) return;
    exchange.outcome.status = status;
    exchange.outcome.peer = peer;
    exchange.outcome.missing_bytes = missing_bytes;
    exchange.outcome.blame = blame ? blame : Blame{peer, status};
}

// Time is up. Named is who is most likely to hold up all others: of those that something is missing of, a peer that has
// missed several questions, else one whose contribution is missing, as what comes second may wait for a third.
void Core::fail_late(Exchange& exchange, Nanos now) {
    const Nanos asked_since = 3 * std::min(longest_ask, config_.silence / 16), pinged_since = config_.silence / 2;
    int strongest = 0;
    std::uint16_t whom = 0;
    std::uint64_t missing_bytes = 0;
    const auto suspect = [&](std::uint16_t peer, int weight, Nanos since, std::uint64_t bytes) {
        if (peers_[peer]->last_heard + since < now) weight += 4;
        if (weight <= strongest) return;
        strongest = weight;
        whom = peer;
        missing_bytes = bytes;
    };
    for (const Incoming& message : exchange.receives) {
        if (message.closed) continue;
        suspect(message.peer, message.second_stage ? 2 : 3, asked_since, message.cut.bytes - message.arrived_bytes);
    }
    for (const Outgoing& message : exchange.sends) {
        if (!message.released) suspect(message.peer, 1, pinged_since, message.unacked_bytes());
    }
    if (strongest > 0) fail(exchange, Status::timed_out, whom, missing_bytes);
}

// An exchange that ended: what peers that ask for it later are told, and what our goodbye will say.
void Core::remember(const Exchange& exchange) {
    const Outcome& outcome = exchange.outcome;
    if (outcome.status != Status::ok) {
        failed_.emplace_back(exchange_key(exchange.channel, exchange.seq), outcome.blame);
        if (failed_.size() > most_failed) failed_.pop_front();
        if (outcome.status == Status::closed) return;
        // The first of a cascade counts; one much later is another story.
        if (!lost_ || outcome.ended > lost_at_ + 2 * config_.silence) {
            lost_ = outcome.blame;
            lost_at_ = outcome.ended;
        }
    } else if (lost_ && healed_by(exchange)) {
        lost_ = {};
    }
}

// Whether an exchange that ended well says that the last error is over: it began after that, and the culprit was heard of since,
// or is ourselves, or the others have long gone on without it.
bool Core::healed_by(const Exchange& exchange) const {
    const Nanos started = exchange.outcome.started;
    if (started < lost_at_) return false;
    if (lost_.culprit == config_.rank || started > lost_at_ + 2 * config_.silence) return true;
    return exchange.with(lost_.culprit) && peers_[lost_.culprit]->last_heard > lost_at_;
}

void Core::finish(Exchange& exchange, Status status, Nanos now) {
    for (Incoming& message : exchange.receives) close(exchange, message, status == Status::ok);
    if (status == Status::closed) exchange.outcome.blame = lost_ ? lost_ : Blame{config_.rank, status};
    exchange.conclude(status, now);
    remember(exchange);
    if (status != Status::ok) {
        const Control notice{
            .kind = Kind::failed, .channel = exchange.channel, .seq = exchange.seq, .blame = exchange.outcome.blame};
        for (const Outgoing& message : exchange.sends) control(*peers_[message.peer], notice);
        for (const Incoming& message : exchange.receives) control(*peers_[message.peer], notice);
    }
    bool pinned = false;
    for (Outgoing& message : exchange.sends) {
        message.wanted = false;
        if (message.queued) std::erase(peers_[message.peer]->queue, &message);
        pinned |= message.pins > 0;
        // A pinned message keeps its slot until the last batch that points into it has left.
        if (message.pins == 0) {
            ++slots_[message.slot].generation;
            free_slots_.push_back(message.slot);
        }
    }
    const auto found = active_.find(exchange_key(exchange.channel, exchange.seq));
    std::unique_ptr<Exchange> owned = std::move(found->second);
    active_.erase(found);
    key_of_.erase(owned->id);
    if (pinned) {
        leaving_.push_back(std::move(owned));
    } else {
        finished_.push_back({.id = owned->id, .outcome = std::move(owned->outcome)});
    }
}

void Core::readmit(std::uint16_t rank, std::uint16_t incarnation, const std::optional<Key>& key, Nanos now) {
    if (rank >= config_.world || rank == config_.rank)
        throw std::invalid_argument("a peer must be another rank of the world");
    // Numbers begin anew, and none may be used twice between the same two processes.
    if (incarnation <= seal_.incarnation(rank)) {
        throw std::invalid_argument("incarnation " + std::to_string(incarnation) + " of rank " + std::to_string(rank) +
                                    " is not newer than " + std::to_string(seal_.incarnation(rank)));
    }
    seal_.readmit(rank, incarnation, key);
    pool_.forget(rank);
    counters_.pool_bytes = pool_.bytes();
    Peer& old = *peers_[rank];
    std::vector<std::uint64_t> concerned;
    for (const auto& [id, exchange] : active_) concerned.push_back(id);
    for (const std::uint64_t id : concerned) {
        Exchange& exchange = *active_.at(id);
        abandon_peer(exchange, old, Status::peer_silent, {rank, Status::peer_silent});
        open_gates(exchange);
        finish_if_done(exchange, now);
    }
    // What is left in its queue is no longer wanted, and was not said to the new one.
    for (Outgoing* message : old.queue) message->queued = false;
    peers_[rank] = make_peer(rank, now);
}

void Core::tick(Nanos now) {
    for (auto& peer : peers_) {
        if (peer) tick_peer(*peer, now);
    }
    // Ticking may end exchanges, so walk a copy of the keys.
    std::vector<std::uint64_t> due;
    for (const auto& [key, exchange] : active_) {
        if (exchange_timer(*exchange) <= now) due.push_back(key);
    }
    for (const std::uint64_t key : due) {
        const auto found = active_.find(key);
        if (found != active_.end()) tick_exchange(*found->second, now);
    }
    for (auto& peer : peers_) {
        if (!peer || !peer->forsaken) continue;
        peer->forsaken = false;
        peer->out.abandon([&](const Flight& flight) { on_lost(*peer, flight, now); });
    }
}

void Core::tick_peer(Peer& peer, Nanos now) {
    peer.out.expire(now, [&](const Flight& flight) { on_lost(peer, flight, now); });
    if (peer.path.tick(now)) follow_path(peer, now);
    if (now < peer.out.probe_at()) return;
    peer.out.probed(now);
    ++counters_.probes;
    control(peer, {.kind = Kind::ping});
}

// The path carries another size than before: what was learned of its rate is of another path, or of none.
void Core::follow_path(Peer& peer, Nanos now) {
    ++counters_.path_changes;
    peer.rate = make_rate(now);
    peer.in.set_most_words(Peer::report_words(peer.path.bytes()));
}

void Core::tick_exchange(Exchange& exchange, Nanos now) {
    for (const bool second_stage : {false, true}) {
        if (now >= exchange.stage(second_stage).deadline) close_stage(exchange, second_stage);
    }
    tick_receives(exchange, now);
    tick_sends(exchange, now);
    if (now >= exchange.timeout_at) fail_late(exchange, now);
    open_gates(exchange);
    finish_if_done(exchange, now);
}

void Core::tick_receives(Exchange& exchange, Nanos now) {
    for (Incoming& message : exchange.receives) {
        if (message.closed) continue;
        Peer& peer = *peers_[message.peer];
        if (now >= message.close_at) {
            close(exchange, message, true);
        } else if (now >= silent_at(exchange, peer)) {
            peer.silent = peer.forsaken = true;
            if (exchange.lossy(message.second_stage)) {
                close(exchange, message, false);
            } else {
                fail(exchange, Status::peer_silent, peer.rank, message.cut.bytes - message.arrived_bytes);
            }
        } else if (now >= message.ask_at) {
            message.ask_every = std::min(2 * message.ask_every, std::min(longest_ask, config_.silence / 16));
            message.ask_at = now + message.ask_every;
            ++counters_.asks;
            // With the report, the sender learns at once what is missing.
            peer.in.report_now();
            control(peer, {.kind = Kind::ready, .channel = exchange.channel, .seq = exchange.seq});
        }
    }
}

void Core::tick_sends(Exchange& exchange, Nanos now) {
    for (Outgoing& message : exchange.sends) {
        if (!message.wanted) continue;
        Peer& peer = *peers_[message.peer];
        if (now >= silent_at(exchange, peer)) {
            peer.silent = peer.forsaken = true;
            if (!exchange.lossy(message.second_stage)) {
                fail(exchange, Status::peer_silent, peer.rank, message.unacked_bytes());
            } else {
                release(message);
            }
        } else if (now >= blocked_at(message, peer)) {
            if (!exchange.lossy(message.second_stage)) {
                fail(exchange, Status::path_blocked, peer.rank, message.unacked_bytes());
            } else {
                release(message);
            }
        } else if (now >= wake_at(exchange, peer)) {
            // Nothing may be in flight while a receiver is late: only a ping tells that it lives.
            peer.ping_at = now + config_.silence / 4;
            control(peer, {.kind = Kind::ping});
        }
    }
}

Nanos Core::silent_at(const Exchange& exchange, const Peer& peer) const {
    return std::max(peer.last_heard, exchange.outcome.started) + config_.silence;
}

// When a peer that answers, but that no data reaches, is given up: losses, and not merely the time since one, must span
// the silence, as there may have been nothing to send.
Nanos Core::blocked_at(const Outgoing& message, const Peer& peer) const {
    if (peer.data_lost_since == never || message.parked) return never;
    const Nanos at = std::max(peer.data_lost_since, message.exchange->outcome.started) + config_.silence;
    return peer.data_lost_at >= at ? at : never;
}

Nanos Core::wake_at(const Exchange& exchange, const Peer& peer) const {
    return std::max(std::max(peer.last_heard, exchange.outcome.started) + config_.silence / 4, peer.ping_at);
}

Nanos Core::exchange_timer(const Exchange& exchange) const {
    Nanos at = exchange.timeout_at;
    for (const Incoming& message : exchange.receives) {
        if (message.closed) continue;
        at = std::min({at, exchange.stage(message.second_stage).deadline, message.close_at, message.ask_at,
                       silent_at(exchange, *peers_[message.peer])});
    }
    for (const Outgoing& message : exchange.sends) {
        // What is not wanted any more only waits for its last batch to leave.
        if (!message.wanted) continue;
        const Peer& peer = *peers_[message.peer];
        at = std::min({at, exchange.stage(message.second_stage).deadline, silent_at(exchange, peer),
                       wake_at(exchange, peer), blocked_at(message, peer)});
    }
    return at;
}

Nanos Core::next_timer() const {
    Nanos at = paced_until_;
    for (const auto& peer : peers_) {
        if (!peer) continue;
        at = std::min({at, peer->out.loss_at(), peer->out.probe_at(),
                       probes_path(*peer) ? peer->path.timer(!peer->queue.empty()) : never,
                       peer->in.report_at(credit_bytes(peer.get()), peer->report_delay())});
    }
    for (const auto& [key, exchange] : active_) at = std::min(at, exchange_timer(*exchange));
    return at;
}

}  // namespace storm
