// Completion of exchanges: timers, timeouts, probes, silent and blocked peers, and how an exchange ends or fails.
#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/core.hpp"
#include "peers/peer.hpp"

namespace storm {

// Closes a message; with `notify_sender`, its sender is notified that it may stop.
void Core::close(Exchange& exchange, Incoming& message, bool notify_sender) {
    if (message.closed) return;
    message.close();
    credit_.close(message.peer);
    if (!notify_sender) return;
    peers_[message.peer].queue_control({.kind = Kind::done,
                                        .flags = stage_flag(message.second_stage),
                                        .channel = exchange.channel,
                                        .seq = exchange.seq});
}

void Core::close_stage(Exchange& exchange, bool second_stage) {
    for (Incoming& message : exchange.receives) {
        if (message.second_stage == second_stage) close(exchange, message, true);
    }
    for (Outgoing& message : exchange.sends) {
        if (message.second_stage != second_stage || message.released) continue;
        // A receiver with a later deadline would otherwise wait in vain for the rest.
        Control end = message.end();
        end.flags = static_cast<std::uint8_t>(end.flags | flag_repair);
        if (message.wanted && message.delivered() < message.layout.chunks) peers_[message.peer].queue_control(end);
        message.release();
    }
}

// The peer takes no further part in the exchange: that counts as loss in lossy stages, and as an error in exact ones.
void Core::abort_with_peer(Exchange& exchange, Peer& peer, Status status, FailureCause failure_cause) {
    for (Outgoing& message : exchange.sends) {
        if (message.peer != peer.rank || message.released) continue;
        if (!exchange.lossy(message.second_stage) && message.delivered() < message.layout.chunks) {
            exchange.fail(status, peer.rank, message.unacked_bytes(), failure_cause);
        } else {
            message.release();
        }
    }
    for (Incoming& message : exchange.receives) {
        if (message.peer != peer.rank || message.closed) continue;
        if (exchange.lossy(message.second_stage)) {
            close(exchange, message, false);
        } else {
            exchange.fail(status, peer.rank, message.missing_bytes(), failure_cause);
        }
    }
}

void Core::settle(Exchange& exchange, Nanos now) {
    if (exchange.take_new_final_chunks()) {
        for (Outgoing& message : exchange.sends) {
            if (message.second_stage) peers_.queue(message);
        }
    }
    if (!exchange.running()) {
        finish(exchange, exchange.outcome.status, now);
    } else if (exchange.finished()) {
        finish(exchange, Status::ok, now);
    }
}

// The exchange has timed out: names the likeliest cause among the peers that have not completed their part. A peer that
// did not answer several `ready` comes first; then one whose first-stage contribution is missing, as the second stage
// waits for the first.
void Core::fail_timed_out(Exchange& exchange, Nanos now) {
    const Nanos asked_since = 3 * longest_ready_interval(), pinged_since = config_.silence / 2;
    int strongest = 0;
    std::uint16_t whom = 0;
    std::uint64_t missing_bytes = 0;
    const auto suspect = [&](std::uint16_t peer, int weight, Nanos since, std::uint64_t bytes) {
        if (peers_.look(peer).last_received() + since < now) weight += 4;
        if (weight <= strongest) return;
        strongest = weight;
        whom = peer;
        missing_bytes = bytes;
    };
    for (const Incoming& message : exchange.receives) {
        if (message.closed) continue;
        suspect(message.peer, message.second_stage ? 2 : 3, asked_since, message.missing_bytes());
    }
    for (const Outgoing& message : exchange.sends) {
        if (!message.released) suspect(message.peer, 1, pinged_since, message.unacked_bytes());
    }
    if (strongest > 0) exchange.fail(Status::timed_out, whom, missing_bytes);
}

void Core::finish(Exchange& exchange, Status status, Nanos now) {
    for (Incoming& message : exchange.receives) close(exchange, message, status == Status::ok);
    if (status == Status::closed) {
        exchange.outcome.failure_cause =
            failure_causes_.last() ? failure_causes_.last() : FailureCause{config_.rank, status};
    }
    exchange.conclude(status, now);
    if (status == Status::ok) {
        const std::uint16_t culprit = failure_causes_.last().culprit;
        const bool took_part = culprit != config_.rank && exchange.involves(culprit);
        failure_causes_.on_success(exchange.outcome.started,
                                   took_part ? std::optional(peers_.look(culprit).last_received()) : std::nullopt);
    } else {
        failure_causes_.on_failed(exchange_key(exchange.channel, exchange.seq), status, exchange.outcome.failure_cause,
                                  now);
        const Control notice{.kind = Kind::failed,
                             .channel = exchange.channel,
                             .seq = exchange.seq,
                             .failure_cause = exchange.outcome.failure_cause};
        for (const Outgoing& message : exchange.sends) peers_[message.peer].queue_control(notice);
        for (const Incoming& message : exchange.receives) peers_[message.peer].queue_control(notice);
    }
    for (Outgoing& message : exchange.sends) {
        message.wanted = false;
        peers_[message.peer].queue.remove(message);
        // A pinned message keeps its slot until the last batch that points into it has been sent.
        if (message.pins == 0) slots_.remove(message.ref);
    }
    exchanges_.end(exchange);
}

void Core::tick(Nanos now) {
    for (const std::uint16_t rank : peers_.take_due(now)) {
        for (Link& link : peers_[rank].links) tick_link(peers_[rank], link, now);
        peers_[rank].probe_if_due(now);
    }
    if (now >= views_timer()) {
        views_->tick(now);
        on_views_changed(now);
    }
    refresh_timers();
    for (const std::uint64_t id : exchanges_.take_due(now, due_at_)) {
        if (Exchange* exchange = exchanges_.find(id)) tick_exchange(*exchange, now);
    }
    std::sort(newly_silent_.begin(), newly_silent_.end());
    for (const std::uint16_t rank : std::exchange(newly_silent_, {})) {
        Peer& peer = peers_[rank];
        for (Link& link : peer.links)
            link.out.mark_all_lost([&](const Flight& flight) { on_lost(peer, link, flight, now); });
    }
    if (blocked_.empty()) return;
    if (config_.lane != 0) {
        blocked_.clear();  // lane 0 learns of them through `unreachable_peers`
        return;
    }
    for (const std::uint16_t rank : std::exchange(blocked_, {})) views_->blocked(rank, now);
    on_views_changed(now);
}

void Core::tick_link(Peer& peer, Link& link, Nanos now) {
    link.out.expire(now, [&](const Flight& flight) { on_lost(peer, link, flight, now); });
    if (link.path.tick(now)) {
        // The path MTU changed: the rate found so far belonged to another path, or to none.
        ++counters_.path_changes;
        link.rate = make_rate(now);
        link.fit_reports(link.path.bytes());
    }
    // In an outage of minutes, all packet numbers would be in flight: counts what they carried as lost in any case.
    if (link.out.out_of_numbers() && link.out.probes() > 0) {
        link.out.forget_all([&](const Flight& flight) { repair(peer, flight, now); });
    }
    if (now >= link.probe_at()) probe(peer, link, now);
}

// Nothing in flight on a path was acknowledged in time, or the path is down: sends a probe.
void Core::probe(Peer& peer, Link& link, Nanos now) {
    if (link.down && peer.left()) return;
    if (!link.down && link.unanswered(now) && peer.links.survives(link)) {
        // Another path answers, so this one is down: sends what is in flight on it over the others.
        ++counters_.path_outages;
        link.mark_down(now);
        link.out.forget_all([&](const Flight& flight) { repair(peer, flight, now); });
    }
    ++counters_.probes;
    if (link.down) {
        link.on_probe_sent(now);
        return;
    }
    link.out.probed(now);
    if (peer.left()) {
        // A peer that has left or was dropped need only acknowledge our goodbye: sends that instead of a ping.
        peer.queue_control({.kind = Kind::bye, .failure_cause = peer.leave_cause()});
    } else if (!peer.links.several()) {
        peer.queue_control({.kind = Kind::ping});
    } else {
        // Pings over the other paths show whether the path does not answer, or the peer.
        for (Link& each : peer.links) each.asks = each.asks || !each.down;
    }
    if (link.out.lossy() && !peer.left()) repeat_unanswered(peer, link, now);
}

// Retransmits what was not acknowledged in time on a link with much loss: it is probably lost, and the receiver waits
// for it. Sent together with the probe, it arrives a round trip earlier than after the probe's answer.
void Core::repeat_unanswered(Peer& peer, Link& link, Nanos now) {
    std::vector<Flight> unanswered;
    link.out.each_unanswered([&](const Flight& flight) {
        if (flight.kind == Kind::data) {
            // Skips what is queued for retransmission already, what may be missing, and what may be decoded.
            const Outgoing* message = slots_.find(flight.message);
            if (message == nullptr || !message->lossless() || message->encoding || !message->repairs.empty()) return;
        }
        unanswered.push_back(flight);
    });
    for (const Flight& flight : unanswered) repair(peer, flight, now);
}

void Core::tick_exchange(Exchange& exchange, Nanos now) {
    for (const bool second_stage : {false, true}) {
        if (now >= exchange.stage(second_stage).deadline) close_stage(exchange, second_stage);
    }
    const auto true_time = [&](Timers::Owner timer) { return due_at_(exchange, timer); };
    const std::vector<Timers::Owner> due = exchange.timers.take_due(now, true_time);
    // In the order of their numbers, receives first: the first error counts.
    for (const Timers::Owner timer : due) {
        if (Incoming* message = exchange.received_by(timer)) tick_receive(exchange, *message, now);
        if (Outgoing* message = exchange.sent_by(timer)) tick_send(exchange, *message, now);
    }
    if (now >= exchange.timeout_at) fail_timed_out(exchange, now);
    for (const Timers::Owner timer : due) exchange.timers.set(timer, true_time(timer));
    exchanges_.timers_changed(exchange);
    settle(exchange, now);
}

// What is in flight to a silent peer counts as lost, but only after all exchanges have seen that it is silent.
void Core::mark_silent(Peer& peer) {
    peer.fall_silent();
    if (std::find(newly_silent_.begin(), newly_silent_.end(), peer.rank) == newly_silent_.end())
        newly_silent_.push_back(peer.rank);
}

void Core::tick_receive(Exchange& exchange, Incoming& message, Nanos now) {
    if (message.closed) return;
    Peer& peer = peers_[message.peer];
    if (now >= message.close_at) {
        close(exchange, message, true);
    } else if (!exchange.waits_across_views() && now >= peer.silent_at(exchange.outcome.started, config_.silence)) {
        mark_silent(peer);
        if (exchange.lossy(message.second_stage)) {
            close(exchange, message, false);
        } else {
            exchange.fail(Status::peer_silent, peer.rank, message.missing_bytes());
        }
    } else if (now >= message.ready_at) {
        message.ready_every = std::min(2 * message.ready_every, longest_ready_interval());
        message.ready_at = now + message.ready_every;
        ++counters_.asks;
        // From the report, the sender learns at once what is missing.
        peer.links.report_now();
        peer.queue_control({.kind = Kind::ready, .channel = exchange.channel, .seq = exchange.seq});
    }
}

void Core::tick_send(Exchange& exchange, Outgoing& message, Nanos now) {
    if (!message.wanted) return;
    Peer& peer = peers_[message.peer];
    const Nanos started = exchange.outcome.started;
    const bool silent = !exchange.waits_across_views() && now >= peer.silent_at(started, config_.silence);
    if (exchange.waits_across_views() && !message.parked &&
        now >= peer.blocked_at(std::max(started, message.blocked_from), config_.silence)) {
        message.blocked_from = now;
        if (now < peer.last_received() + config_.silence) blocked_.push_back(peer.rank);
    } else if (silent || (!message.parked && now >= peer.blocked_at(started, config_.silence))) {
        if (silent) mark_silent(peer);
        if (exchange.lossy(message.second_stage)) {
            message.release();
        } else {
            exchange.fail(silent ? Status::peer_silent : Status::path_blocked, peer.rank, message.unacked_bytes());
        }
    } else if (now >= peer.ping_at(started, config_.silence)) {
        peer.ping(now, config_.silence);
    }
}

// Updates the timers of all marked peers, and of the exchanges whose path became blocked: that makes a timer earlier.
// All other timers of exchanges only move later by themselves.
void Core::refresh_timers() {
    peers_.refresh([&](std::uint16_t rank) {
        if (!peers_.look(rank).may_be_blocked(config_.silence)) return;
        for (const auto& [key, exchange] : exchanges_.active()) {
            for (const Outgoing& message : exchange->sends) {
                if (message.peer != rank) continue;
                exchanges_.set_earlier(*exchange, exchange->timer_of(message), due_at_.of(*exchange, message));
            }
        }
    });
}

Nanos Core::next_timer() {
    refresh_timers();
    const Nanos at =
        std::min({paced_until_, defer_until_, peers_.next(), exchanges_.next_timer(due_at_), views_timer()});
#ifdef STORM_CHECK_TIMERS
    if (at != scanned_timer()) throw std::logic_error("the next timer is not the one that a scan finds");
#endif
    return at;
}

#ifdef STORM_CHECK_TIMERS
Nanos Core::scanned_timer() const {
    Nanos at = std::min({paced_until_, defer_until_, views_timer()});
    for (std::uint16_t rank = 0; rank < config_.world; ++rank) {
        if (rank == config_.rank) continue;
        for (const PeerTimer each : peer_timers) at = std::min(at, peers_.timer(rank, each));
    }
    for (const auto& [key, exchange] : exchanges_.active()) {
        at = std::min(at, exchange->timeout_at);
        for (const Incoming& message : exchange->receives) at = std::min(at, due_at_.of(*exchange, message));
        for (const Outgoing& message : exchange->sends) at = std::min(at, due_at_.of(*exchange, message));
    }
    return at;
}

void Core::check_quiet(Nanos now) const {
    for (std::uint16_t rank = 0; rank < config_.world; ++rank) {
        if (rank == config_.rank) continue;
        const Peer& peer = peers_.look(rank);
        if (std::find(socket_full_.begin(), socket_full_.end(), true) == socket_full_.end() &&
            (peer.has_pending_control() || peers_.timer(rank, PeerTimer::report) <= now))
            throw std::logic_error("a peer was passed over that has a control datagram to send");
        if (!peer.queue.empty() && !peers_.queued().test(rank))
            throw std::logic_error("a peer was passed over whose queue holds messages");
    }
}
#endif

}  // namespace storm
