// What a core does with a datagram that came in.
#include <algorithm>

#include "core.hpp"
#include "peer.hpp"

namespace storm {

void Core::receive(std::span<std::byte> datagram, Nanos now) {
    ++counters_.datagrams_received;
    counters_.bytes_received += datagram.size();
    const std::optional<Header> header = parse_header(datagram);
    if (!header) {
        ++counters_.malformed;
        return;
    }
    if (header->cookie != seal_.visible_cookie() || header->source >= config_.world || header->source == config_.rank) {
        ++counters_.foreign;
        return;
    }
    Peer& peer = *peers_[header->source];
    const std::uint64_t number = widen_number(header->number, peer.in.largest() + 1);
    if (peer.in.seen(number) || peer.pieces.holds(number)) {
        ++counters_.duplicates;
        return;
    }
    const auto payload = seal_.open(*header, number, datagram);
    if (!payload) {
        ++counters_.corrupt;
        return;
    }
    ++counters_.authenticated;
    peer.last_heard = now;
    peer.silent = false;
    peer.out.heard();
    bool taken = true;
    switch (header->kind) {
        case Kind::data:
            if ((header->flags & flag_piece) != 0) {
                take_piece(peer, *header, number, *payload, now);
                return;
            }
            if ((header->flags & flag_last) != 0) peer.in.report_now();
            taken = take_data(peer, *header, *payload, now);
            break;
        case Kind::report: take_report(peer, *payload, now); break;
        case Kind::end:
            if (Exchange* exchange = find(header->channel, header->seq)) {
                if ((header->flags & flag_repair) != 0) {
                    forgo(*exchange, peer, (header->flags & flag_second_stage) != 0);
                } else {
                    take_end(*exchange, peer, (header->flags & flag_second_stage) != 0, now);
                }
                open_gates(*exchange);
                finish_if_done(*exchange, now);
            } else if (!is_over(header->channel, header->seq)) {
                taken = pool_chunk(peer, *header, {});
            }
            break;
        case Kind::ready:
        case Kind::wait:
        case Kind::done: take_control(peer, *header, now); break;
        case Kind::ping: peer.in.report_now(); break;
        case Kind::bye: take_bye(peer, *header, *payload, now); break;
        case Kind::failed: take_failed(peer, *header, now); break;
    }
    // What was not taken is reported as lost, and so comes again.
    if (taken) peer.in.arrive(number, datagram.size(), header->kind != Kind::report, now);
}

// A piece is reported when its chunk is complete, with all others of that chunk.
void Core::take_piece(Peer& peer, Header header, std::uint64_t number, std::span<const std::byte> payload, Nanos now) {
    switch (peer.pieces.take(header, number, payload)) {
        case Pieces::Taken::malformed:
            ++counters_.malformed;
            peer.in.arrive(number, payload.size(), true, now);  // lest it comes again
            return;
        case Pieces::Taken::kept: return;
        case Pieces::Taken::complete: break;
    }
    if ((header.flags & flag_last) != 0) peer.in.report_now();
    header.flags = static_cast<std::uint8_t>(header.flags & ~flag_piece);
    const std::span<const std::byte> whole = peer.pieces.whole();
    if (!take_data(peer, header, whole, now)) return;
    const std::span<const std::uint64_t> numbers = peer.pieces.numbers();
    for (const std::uint64_t each : numbers) {
        if (!peer.in.seen(each)) peer.in.arrive(each, whole.size() / numbers.size(), true, now);
    }
}

bool Core::take_data(Peer& peer, const Header& header, std::span<const std::byte> payload, Nanos now) {
    if (Exchange* exchange = find(header.channel, header.seq)) {
        deliver(*exchange, peer, header, payload, now);
        open_gates(*exchange);
        finish_if_done(*exchange, now);
        return true;
    }
    if (!is_over(header.channel, header.seq)) return pool_chunk(peer, header, payload);
    ++counters_.late;
    answer_for_ended(peer, header);
    return true;
}

bool Core::pool_chunk(Peer& peer, const Header& header, std::span<const std::byte> payload) {
    // A chunk longer than ours can never fit any message of this job.
    if (payload.size() > chunk_bytes_) {
        ++counters_.unexpected;
        return true;
    }
    if (!pool_.keep(header, payload)) {
        ++counters_.pool_refused;
        peer.refused = true;
        const auto stage = static_cast<std::uint8_t>(header.flags & flag_second_stage);
        control(peer, {.kind = Kind::wait, .flags = stage, .channel = header.channel, .seq = header.seq});
        return false;
    }
    ++counters_.pooled;
    counters_.pool_bytes = pool_.bytes();
    counters_.pool_peak_bytes = std::max(counters_.pool_peak_bytes, counters_.pool_bytes);
    return true;
}

void Core::deliver(Exchange& exchange, Peer& peer, const Header& header, std::span<const std::byte> payload,
                   Nanos now) {
    const bool second_stage = (header.flags & flag_second_stage) != 0;
    Incoming* message = exchange.incoming(peer.rank, second_stage);
    if (message == nullptr) {
        ++counters_.unexpected;
        return;
    }
    if (header.message_bytes != message->cut.bytes) {
        exchange.outcome.expected_bytes = message->cut.bytes;
        exchange.outcome.announced_bytes = header.message_bytes;
        fail(exchange, Status::size_mismatch, peer.rank, message->cut.bytes - message->arrived_bytes);
        return;
    }
    if (header.chunk >= message->cut.chunks || payload.size() != message->cut.size(header.chunk)) {
        ++counters_.unexpected;
        return;
    }
    const bool was_closed = message->closed;
    if (!message->accept(header.chunk, payload)) {
        ++(was_closed || !message->arrived.test(header.chunk) ? counters_.late : counters_.duplicates);
        // A sender that was thought silent may wait to be told to go on.
        if (was_closed && message->missing() > 0) {
            const std::uint8_t stage = second_stage ? flag_second_stage : std::uint8_t{0};
            control(peer, {.kind = Kind::done, .flags = stage, .channel = header.channel, .seq = header.seq});
        }
        return;
    }
    message->ask_at = now + message->ask_every;
    if (message->closed) {
        stop_waiting(peer);
        // The sender waits for exactly this news.
        peer.in.report_now();
    } else if ((header.flags & flag_last) != 0 || message->ended) {
        take_end(exchange, peer, second_stage, now);
    }
}

void Core::take_end(Exchange& exchange, Peer& peer, bool second_stage, Nanos now) {
    Incoming* message = exchange.incoming(peer.rank, second_stage);
    if (message == nullptr || message->closed || message->allowed == 0) return;
    message->ended = true;
    if (message->missing() > message->allowed || message->close_at != never) return;
    // Chunks that were overtaken by the end get a moment more.
    message->close_at = now + std::clamp<Nanos>(peer.out.smooth_rtt() / 4, 20 * microsecond, 5 * millisecond);
}

// Nothing more will come of a message, whatever its budget says.
void Core::forgo(Exchange& exchange, Peer& peer, bool second_stage) {
    Incoming* message = exchange.incoming(peer.rank, second_stage);
    if (message != nullptr && exchange.lossy(second_stage)) close(exchange, *message, false);
}

void Core::forgo_message(Peer& peer, const Header& header, std::uint8_t stage) {
    const auto flags = static_cast<std::uint8_t>(flag_repair | stage);
    control(peer, {.kind = Kind::end, .flags = flags, .channel = header.channel, .seq = header.seq});
}

void Core::take_report(Peer& peer, std::span<const std::byte> body, Nanos now) {
    const std::optional<Report> report = parse_report(body);
    if (!report) {
        ++counters_.malformed;
        return;
    }
    peer.out.settle(
        *report, now, [&](const Flight& flight) { on_acked(peer, flight, now); },
        [&](const Flight& flight) { on_lost(peer, flight, now); });
    Delivery delivery = peer.out.last_delivery();
    if (delivery.delivered_bytes > 0 || delivery.lost_bytes > 0) {
        delivery.line_bytes_per_s = line_.on_report(delivery.delivered_bytes, now);
        if (now >= share_at_) share_line(now);
        peer.rate.on_delivery(delivery);
    }
}

void Core::take_control(Peer& peer, const Header& header, Nanos now) {
    Exchange* exchange = find(header.channel, header.seq);
    if (exchange == nullptr) {
        if (header.kind != Kind::ready) return;
        // A receiver that is ahead of us (if there is no room to remember it, it will ask again), or that asks in vain.
        if (!is_over(header.channel, header.seq)) {
            (void)pool_.keep(header, {});
        } else if (blame_for(header)) {
            answer_for_ended(peer, header);
        } else {
            // It ended well for us, so whatever is missing there was allowed to be.
            for (const std::uint8_t stage : {std::uint8_t{0}, flag_second_stage}) forgo_message(peer, header, stage);
        }
        return;
    }
    obey(*exchange, peer, header);
    finish_if_done(*exchange, now);
}

void Core::obey(Exchange& exchange, Peer& peer, const Header& header) {
    const bool second_stage = (header.flags & flag_second_stage) != 0;
    for (Outgoing& message : exchange.sends) {
        if (message.peer != peer.rank) continue;
        if (header.kind == Kind::ready) {
            message.ready = true;
            // Chunks that found no room there counted as lost here, but they had arrived.
            if (message.parked) peer.data_lost_since = never;
            message.parked = false;
            enqueue(message);
            // It asks for what we have given up: say so, lest it waits for ever.
            if (!message.wanted && message.acked < message.cut.chunks) {
                forgo_message(peer, header, message.second_stage ? flag_second_stage : std::uint8_t{0});
            }
        } else if (message.second_stage == second_stage && header.kind == Kind::wait) {
            message.parked = !message.ready;
        } else if (message.second_stage == second_stage && header.kind == Kind::done) {
            release(message);
        }
    }
}

void Core::take_bye(Peer& peer, const Header& header, std::span<const std::byte> body, Nanos now) {
    const std::optional<Blame> blame = parse_blame(header, config_.world);
    if (!blame) {
        ++counters_.malformed;
        return;
    }
    // The last report tells apart what it received before it left and what it never will.
    take_report(peer, body, now);
    peer.left = true;
    peer.left_for = *blame;
    peer.in.report_now();
    peer.out.abandon([](const Flight&) {});
    std::vector<std::uint64_t> concerned;
    for (const auto& [key, exchange] : active_) concerned.push_back(key);
    for (const std::uint64_t key : concerned) {
        Exchange& exchange = *active_.at(key);
        abandon_peer(exchange, peer, Status::peer_left, *blame);
        open_gates(exchange);
        finish_if_done(exchange, now);
    }
}

void Core::take_failed(Peer& peer, const Header& header, Nanos now) {
    const std::optional<Blame> blame = parse_blame(header, config_.world);
    if (!blame) {
        ++counters_.malformed;
        return;
    }
    if (Exchange* exchange = find(header.channel, header.seq)) {
        abandon_peer(*exchange, peer, Status::peer_failed, *blame);
        open_gates(*exchange);
        finish_if_done(*exchange, now);
    } else if (!is_over(header.channel, header.seq)) {
        (void)pool_.keep(header, {});
    }
}

// The peer takes no further part in the exchange: that is loss where loss is allowed, and an error elsewhere.
void Core::abandon_peer(Exchange& exchange, Peer& peer, Status status, Blame blame) {
    for (Outgoing& message : exchange.sends) {
        if (message.peer != peer.rank || message.released) continue;
        if (!exchange.lossy(message.second_stage) && message.acked < message.cut.chunks) {
            fail(exchange, status, peer.rank, message.unacked_bytes(), blame);
        } else {
            release(message);
        }
    }
    for (Incoming& message : exchange.receives) {
        if (message.peer != peer.rank || message.closed) continue;
        if (exchange.lossy(message.second_stage)) {
            close(exchange, message, false);
        } else {
            fail(exchange, status, peer.rank, message.cut.bytes - message.arrived_bytes, blame);
        }
    }
}

Blame Core::blame_for(const Header& header) const {
    const std::uint64_t key = exchange_key(header.channel, header.seq);
    const auto found =
        std::find_if(failed_.begin(), failed_.end(), [&](const auto& each) { return each.first == key; });
    return found == failed_.end() ? Blame{} : found->second;
}

void Core::answer_for_ended(Peer& peer, const Header& header) {
    if (const Blame blame = blame_for(header)) {
        control(peer, {.kind = Kind::failed, .channel = header.channel, .seq = header.seq, .blame = blame});
    } else {
        const auto stage = static_cast<std::uint8_t>(header.flags & flag_second_stage);
        control(peer, {.kind = Kind::done, .flags = stage, .channel = header.channel, .seq = header.seq});
    }
}

}  // namespace storm
