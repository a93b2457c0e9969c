// Received datagrams: authentication, delivery of chunks, acknowledgement (reports), loss and retransmission, goodbyes.
#include <algorithm>

#include "core/core.hpp"
#include "peers/peer.hpp"

namespace storm {
namespace {

// How many copies of a report a ping may ask for.
constexpr std::uint32_t most_answers = 4;

std::uint8_t stage_of(const Header& header) { return static_cast<std::uint8_t>(header.flags & flag_second_stage); }

// Notifies a receiver that nothing more of a message will be sent.
Control nothing_more(const Header& header, bool second_stage) {
    return {.kind = Kind::end,
            .flags = static_cast<std::uint8_t>(flag_repair | stage_flag(second_stage)),
            .channel = header.channel,
            .seq = header.seq};
}

}  // namespace

void Core::receive(std::span<std::byte> datagram, Nanos now, Nanos arrived_at) {
    heard_.reset();
    ++counters_.datagrams_received;
    counters_.bytes_received += datagram.size();
    std::optional<Header> header = parse_header(datagram);
    if (!header) {
        ++counters_.malformed;
        return;
    }
    const auto rank = static_cast<std::uint16_t>(header->source % config_.world);
    const std::size_t path = header->source / config_.world;
    if (header->cookie != seal_.visible_cookie() || rank == config_.rank) {
        ++counters_.foreign;
        return;
    }
    const Peer& sender = peers_.look(rank);
    if (sender.vacant || path >= sender.links.size()) {
        ++counters_.foreign;
        return;
    }
    const Link& from = sender.links[path];
    const std::uint64_t number = widen_number(header->number, from.in.largest() + 1);
    if (from.in.seen(number) || from.pieces.holds(number)) {
        ++counters_.duplicates;
        return;
    }
    const auto payload = seal_.open(*header, number, datagram);
    if (!payload) {
        ++counters_.corrupt;
        return;
    }
    ++counters_.authenticated;
    peaks_.received(datagram.size(), now);
    heard_ = {.rank = rank, .path = static_cast<std::uint8_t>(path), .newest = number > from.in.largest()};
    header->source = rank;  // nothing below depends on the path
    Peer& peer = peers_[rank];
    Link& link = peer.links[path];
    link.bytes_received += datagram.size();
    // Data lost before an outage must not make the path count as blocked after it.
    if (now - peer.last_received() > config_.silence / 2) peer.forget_losses();
    peer.on_received(now, link);
    if (views_) views_->on_received(peer.rank, now);
    bool taken = true;
    switch (header->kind) {
        case Kind::data:
            if (header->has(flag_piece)) {
                take_piece(peer, link, *header, number, *payload, now, arrived_at);
                return;
            }
            if (header->has(flag_last)) peer.links.report_unreported();
            taken = take_data(peer, *header, *payload, now);
            break;
        case Kind::report: take_report(peer, link, *payload, now); break;
        case Kind::end:
            if (header->has(flag_repair)) drain(peer, now);
            taken = take_end(peer, *header, now);
            break;
        case Kind::ready:
        case Kind::wait:
        case Kind::done: take_control(peer, *header, now); break;
        case Kind::ping: link.in.report_now(std::clamp(header->chunk, 1U, most_answers)); break;
        case Kind::bye: take_bye(peer, *header, *payload, now); break;
        case Kind::failed:
            drain(peer, now);
            take_failed(peer, *header, now);
            break;
        case Kind::note: take_view_message(peer, *payload, now); break;
    }
    // A datagram that was not taken is not acknowledged, so its sender counts it as lost and sends it again.
    const bool elicits = header->kind != Kind::report && header->kind != Kind::note;
    if (taken) link.in.arrive(number, datagram.size(), elicits, now, arrived_at);
}

// Reassembles a fragmented chunk. Its pieces are acknowledged together, once the chunk is complete.
void Core::take_piece(Peer& peer, Link& link, Header header, std::uint64_t number, std::span<const std::byte> payload,
                      Nanos now, Nanos arrived_at) {
    switch (link.pieces.take(header, number, payload)) {
        case Pieces::Taken::malformed:
            ++counters_.malformed;
            link.in.arrive(number, payload.size(), true, now);  // acknowledged, or it would be sent again
            return;
        case Pieces::Taken::kept: return;
        case Pieces::Taken::complete: break;
    }
    if (header.has(flag_last)) peer.links.report_unreported();
    header.flags = static_cast<std::uint8_t>(header.flags & ~flag_piece);
    const std::span<const std::byte> whole = link.pieces.whole();
    if (!take_data(peer, header, whole, now)) return;
    const std::span<const std::uint64_t> numbers = link.pieces.numbers();
    for (const std::uint64_t each : numbers) {
        if (!link.in.seen(each)) link.in.arrive(each, whole.size() / numbers.size(), true, now, arrived_at);
    }
}

bool Core::take_data(Peer& peer, const Header& header, std::span<const std::byte> payload, Nanos now) {
    if (Exchange* exchange = exchanges_.find(header.channel, header.seq)) {
        const bool taken = deliver(*exchange, peer, header, payload, now, Carrier::datagram);
        settle(*exchange, now);
        return taken;
    }
    if (!sequences_.posted(header.channel, header.seq)) return pool_chunk(peer, header, payload);
    ++counters_.late;
    answer_for_ended(peer, header);
    return true;
}

bool Core::pool_chunk(Peer& peer, const Header& header, std::span<const std::byte> payload) {
    // A chunk longer than `chunk_bytes_` cannot belong to any message of this job.
    if (payload.size() > chunk_bytes_) {
        ++counters_.unexpected;
        return true;
    }
    if (!pool_.keep(header, payload)) {
        ++counters_.pool_refused;
        peer.pool_was_full = true;
        peer.queue_control(
            {.kind = Kind::wait, .flags = stage_of(header), .channel = header.channel, .seq = header.seq});
        return false;
    }
    ++counters_.pooled;
    counters_.pool_bytes = pool_.bytes();
    counters_.pool_peak_bytes = std::max(counters_.pool_peak_bytes, counters_.pool_bytes);
    return true;
}

bool Core::deliver(Exchange& exchange, Peer& peer, const Header& header, std::span<const std::byte> payload, Nanos now,
                   Carrier carrier) {
    mark_posted(exchange, peer);
    const bool second_stage = header.has(flag_second_stage);
    Incoming* message = exchange.incoming(peer.rank, second_stage);
    if (message == nullptr) {
        ++counters_.unexpected;
        return true;
    }
    if (header.message_bytes != message->announced) {
        exchange.outcome.expected_bytes = message->announced;
        exchange.outcome.announced_bytes = header.message_bytes;
        exchange.fail(Status::size_mismatch, peer.rank, message->missing_bytes());
        return true;
    }
    if (header.has(flag_parity)) return take_parity(exchange, peer, *message, header, payload, now);
    if (header.chunk >= message->layout.chunks || payload.size() != message->layout.size(header.chunk)) {
        ++counters_.unexpected;
        return true;
    }
    if (header.has(flag_coded)) keep_coded(*message, header, payload);
    const bool was_closed = message->closed;
    if (!message->accept(header.chunk, payload)) {
        ++(was_closed || !message->arrived.test(header.chunk) ? counters_.late : counters_.duplicates);
        // The sender may have been silent when its message was closed, and so not have been notified.
        if (was_closed && message->missing() > 0) {
            peer.queue_control(
                {.kind = Kind::done, .flags = stage_of(header), .channel = header.channel, .seq = header.seq});
        }
        return true;
    }
    if (message->decoding) restore(*message, header);
    on_progress(exchange, peer, *message, header, now, carrier);
    return true;
}

// A chunk of an open message arrived: the message may be complete, or its end may be due.
void Core::on_progress(Exchange& exchange, Peer& peer, Incoming& message, const Header& header, Nanos now,
                       Carrier carrier) {
    message.ready_at = now + message.ready_every;
    if (message.closed) {
        credit_.close(peer.rank);
        const bool coded = message.decoding != nullptr;
        message.decoding.reset();
        // Acknowledges at once: the sender waits for that.
        if (carrier == Carrier::datagram) peer.links.report_unreported();
        // No report covers decoded chunks; and if reports were lost, the sender may presume that chunks were.
        if (coded)
            peer.queue_control(
                {.kind = Kind::done, .flags = stage_of(header), .channel = header.channel, .seq = header.seq});
    } else if (header.has(flag_last) || message.ended) {
        on_end(exchange, peer, message.second_stage, now);
    }
}

bool Core::take_end(Peer& peer, const Header& header, Nanos now) {
    Exchange* exchange = exchanges_.find(header.channel, header.seq);
    if (exchange == nullptr) return sequences_.posted(header.channel, header.seq) || pool_chunk(peer, header, {});
    const bool second_stage = header.has(flag_second_stage);
    if (!header.has(flag_repair)) {
        on_end(*exchange, peer, second_stage, now);
    } else if (Incoming* message = exchange->incoming(peer.rank, second_stage)) {
        // Nothing more of this message will be sent, whatever its budget is. An exact message ends so only where a peer
        // was dropped: others cannot forward what that peer had.
        if (exchange->lossy(second_stage) || exchange->dropped) close(*exchange, *message, false);
    }
    settle(*exchange, now);
    return true;
}

// The sender's first pass is over: a lossy message that is within its budget is closed soon.
void Core::on_end(Exchange& exchange, Peer& peer, bool second_stage, Nanos now) {
    Incoming* message = exchange.incoming(peer.rank, second_stage);
    if (message == nullptr || message->closed || message->allowed == 0) return;
    message->ended = true;
    if (message->missing() > message->allowed || message->close_at != never) return;
    // Reordering: chunks that the end overtook get a grace period, plus the difference in delay between the paths.
    message->close_at =
        now + peer.links.spread() + std::clamp<Nanos>(peer.links.round_trip() / 4, 20 * microsecond, 5 * millisecond);
    exchanges_.set_earlier(exchange, exchange.timer_of(*message), message->close_at);
}

void Core::take_report(Peer& peer, Link& link, std::span<const std::byte> body, Nanos now) {
    const std::optional<Report> report = parse_report(body);
    if (!report) {
        ++counters_.malformed;
        return;
    }
    link.out.settle(
        *report, now, [&](const Flight& flight) { on_acked(peer, link, flight, now); },
        [&](const Flight& flight) { on_lost(peer, link, flight, now); });
    Delivery delivery = link.out.last_delivery();
    if (delivery.delivered_bytes > 0 || delivery.lost_bytes > 0) {
        delivery.bottleneck_bytes_per_s = bottleneck_.on_report(delivery.delivered_bytes, now, link.index);
        peaks_.delivered(delivery.delivered_bytes, now);
        if (bottleneck_.due(now)) share_bottleneck(now);
        link.rate.on_delivery(delivery);
    }
}

void Core::take_control(Peer& peer, const Header& header, Nanos now) {
    if (Exchange* exchange = exchanges_.find(header.channel, header.seq)) {
        on_control(*exchange, peer, header, now);
        settle(*exchange, now);
        return;
    }
    if (header.kind != Kind::ready) return;
    if (!sequences_.posted(header.channel, header.seq)) {
        // The receiver is ahead of us. If the pool is full, it will send `ready` again.
        (void)pool_.keep(header, {});
    } else if (failure_causes_.of(exchange_key(header.channel, header.seq))) {
        answer_for_ended(peer, header);
    } else {
        // The exchange succeeded here, so the budget allows for whatever is missing there.
        for (const bool second_stage : {false, true}) peer.queue_control(nothing_more(header, second_stage));
    }
}

void Core::on_control(Exchange& exchange, Peer& peer, const Header& header, Nanos now) {
    const bool second_stage = header.has(flag_second_stage);
    if (header.kind != Kind::wait)
        mark_posted(exchange, peer);  // `wait` means that its pool is full and it has not posted
    for (Outgoing& message : exchange.sends) {
        if (message.peer != peer.rank) continue;
        if (header.kind == Kind::ready) {
            message.ready = true;
            // Chunks that its pool refused counted as lost here, but they had arrived.
            if (message.parked) peer.on_data_arrived();
            message.parked = false;
            peers_.queue(message);
            // It still waits for chunks that we presumed decoded.
            if (message.encoding && message.encoding->relied_upon()) stop_coding(peer, message, now);
            // It waits for chunks that we will not retransmit: notify it, or it would wait for ever.
            if (!message.wanted && message.acked < message.layout.chunks) {
                peer.queue_control(nothing_more(header, message.second_stage));
            }
        } else if (message.second_stage == second_stage && header.kind == Kind::wait) {
            message.parked = !message.ready;
        } else if (message.second_stage == second_stage && header.kind == Kind::done) {
            message.release();
        }
    }
}

void Core::take_bye(Peer& peer, const Header& header, std::span<const std::byte> body, Nanos now) {
    const std::optional<FailureCause> failure_cause = parse_failure_cause(header, config_.world);
    if (!failure_cause) {
        ++counters_.malformed;
        return;
    }
    drain(peer, now);
    // Its last reports, one per path, acknowledge what it received before it left. All else in flight to it is lost.
    for (Link& link : peer.links) {
        if (link.index > 0 && body.empty()) break;
        const bool last = link.index + 1U == peer.links.size();
        const std::span<const std::byte> own = last ? body : body.first(std::min(report_bytes(body), body.size()));
        take_report(peer, link, own, now);
        body = body.subspan(own.size());
    }
    peer.links.report_now();
    if (broadcast_buffer_) broadcast_buffer_->forget(peer.rank);
    on_peer_left(peer, Status::peer_left, *failure_cause, now);
}

// The peer has left, or we have dropped it. Only a new process of its rank can rejoin.
void Core::on_peer_left(Peer& peer, Status status, FailureCause failure_cause, Nanos now) {
    peer.leave(failure_cause);
    for (Link& link : peer.links) link.out.mark_all_lost([](const Flight&) {});
    peer.queue.clear();
    credit_.remove_peer(peer.rank);
    count_peers();
    exchanges_.each([&](Exchange& exchange) {
        if (exchange.waits_across_views()) return;
        abort_with_peer(exchange, peer, status, failure_cause);
        settle(exchange, now);
    });
    if (!views_) return;
    views_->on_goodbye(peer.rank, now);
    on_views_changed(now);
}

void Core::take_failed(Peer& peer, const Header& header, Nanos now) {
    const std::optional<FailureCause> failure_cause = parse_failure_cause(header, config_.world);
    if (!failure_cause) {
        ++counters_.malformed;
        return;
    }
    if (Exchange* exchange = exchanges_.find(header.channel, header.seq)) {
        on_peer_failed(*exchange, peer, *failure_cause);
        settle(*exchange, now);
    } else if (!sequences_.posted(header.channel, header.seq)) {
        (void)pool_.keep(header, {});
    }
}

// A peer reports that the exchange failed there. An exchange that waits across views goes on without that peer if the
// failure cause is a lost rank (silent, left, broken memory) or the peer's own caller, as when the view changes.
void Core::on_peer_failed(Exchange& exchange, Peer& peer, FailureCause failure_cause) {
    const bool passes = failure_cause.cause == Status::closed || failure_cause.cause == Status::peer_silent ||
                        failure_cause.cause == Status::peer_left || failure_cause.cause == Status::memory_broken;
    if (exchange.waits_across_views() && peer.rank < Ranks::bits) exchange.aborted_by.add(peer.rank);
    if (!exchange.waits_across_views() || !passes) abort_with_peer(exchange, peer, Status::peer_failed, failure_cause);
}

// Answers a peer that still sends for an exchange that has ended here, or sends `ready` for it.
void Core::answer_for_ended(Peer& peer, const Header& header) {
    if (const FailureCause failure_cause = failure_causes_.of(exchange_key(header.channel, header.seq))) {
        peer.queue_control(
            {.kind = Kind::failed, .channel = header.channel, .seq = header.seq, .failure_cause = failure_cause});
    } else {
        peer.queue_control(
            {.kind = Kind::done, .flags = stage_of(header), .channel = header.channel, .seq = header.seq});
    }
}

void Core::on_acked(Peer& peer, Link& link, const Flight& flight, Nanos now) {
    link.replies.add(flight.stamp.sent_at, flight.challenge);
    link.on_answer(now);
    if (flight.kind == Kind::bye) peer.goodbye_acked = true;
    if (flight.kind == Kind::data || flight.kind == Kind::ping) link.path.on_acked(flight.bytes, flight.stamp.sent_at);
    if (flight.kind == Kind::data) {
        peer.on_data_arrived();
        Outgoing* message = slots_.find(flight.message);
        if (message == nullptr || message->released) return;
        if ((flight.flags & flag_parity) != 0) {
            message->encoding->on_parity_acked(flight.chunk);
            count_blocks(*message);
            return;
        }
        if (!message->acked_chunks.set(flight.chunk)) return;
        ++message->acked;
        if (message->encoding) message->encoding->on_acked(flight.chunk);
        message->release_if_done();
        if (message->released) settle(*message->exchange, now);
    }
}

void Core::on_lost(Peer& peer, Link& link, const Flight& flight, Nanos now) {
    // The reports in a goodbye may have been too large for the path.
    if (flight.kind == Kind::bye) link.fit_reports(link.path.least());
    if (flight.more) return;  // the last piece stands for its chunk, so that the chunk is counted as lost once
    if (flight.kind == Kind::data || flight.kind == Kind::ping)
        link.path.on_lost(flight.bytes, flight.stamp.sent_at, now);
    if (flight.kind == Kind::data) peer.on_data_lost(now);
    repair(peer, flight, now);
}

// A chunk is lost: skips it if the budget allows, otherwise queues a retransmission.
// `is_retransmission`: the lost datagram was itself a retransmission.
void Core::retransmit(Peer& peer, Outgoing& message, std::uint32_t chunk, Nanos now, bool is_retransmission) {
    if (!message.repairs.empty() && message.repairs.back() == chunk)
        return;  // only the first loss of several copies counts
    if (message.unrepaired + message.reserved < message.allowed) {
        ++message.unrepaired;
        message.release_if_done();
        if (message.released) settle(*message.exchange, now);
        return;
    }
    message.repairs.push_back(chunk);
    if (message.first_pass_over() && peer.links.lossy()) {
        const double chunk_s = message.layout.chunk_bytes / peer.links.bytes_per_s();
        const double trip_s = seconds(peer.links.round_trip());
        const auto copies = [&](double chunks) { return tail_loss_copies(chunks, peer.links.loss(), chunk_s, trip_s); };
        if (peer.queue.only_repairs()) {
            // Tail loss: every further loss costs a round trip, and nothing else is to be sent, so sends extra copies.
            const auto chunks = static_cast<double>(message.repairs.size());
            message.extra_copies.insert(message.extra_copies.end(), copies(chunks) - 1, chunk);
        } else if (is_retransmission && copies(1.0) > 1) {
            // Its retransmission was lost too, and what follows the message hides no third loss: sends it twice.
            message.repairs.push_back(chunk);
        }
    }
    peers_.queue(message);
}

// Retransmits what a lost datagram carried, as far as it is still wanted.
void Core::repair(Peer& peer, const Flight& flight, Nanos now) {
    if (flight.more) return;
    if (flight.kind == Kind::data) {
        Outgoing* message = slots_.find(flight.message);
        if (message == nullptr || !message->wanted) return;
        if (message->encoding) {
            repair_coded(peer, *message, flight, now);
        } else if (!message->acked_chunks.test(flight.chunk)) {
            retransmit(peer, *message, flight.chunk, now, (flight.flags & flag_repair) != 0);
        }
    } else if (flight.kind == Kind::ready) {
        Exchange* exchange = exchanges_.find(flight.channel, flight.seq);
        if (exchange != nullptr && exchange->waits_for(peer.rank)) {
            peer.queue_control({.kind = flight.kind, .channel = flight.channel, .seq = flight.seq});
        }
    } else if (flight.kind == Kind::end || flight.kind == Kind::done || flight.kind == Kind::bye ||
               flight.kind == Kind::failed) {
        peer.queue_control({.kind = flight.kind,
                            .flags = flight.flags,
                            .channel = flight.channel,
                            .seq = flight.seq,
                            .failure_cause = flight.failure_cause});
    }
}

}  // namespace storm
