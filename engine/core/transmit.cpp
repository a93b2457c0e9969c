// Transmission: what an endpoint sends, to which peer, over which path and when. Controls and reports come first, then
// data as credit (flow control), congestion control and pacing allow.
#include <algorithm>
#include <array>

#include "core/core.hpp"
#include "exchange/batch.hpp"
#include "peers/peer.hpp"

namespace storm {

bool Core::transmit(Batch& batch, Nanos now) {
    // Fills the batch with data for the first rank in [first, end) that may send some.
    const auto fill_any = [&](std::size_t first, std::size_t end) {
        for (std::size_t at = peers_.may_send_data().next(first); at < end && !shut();
             at = peers_.may_send_data().next(at + 1)) {
            const auto rank = static_cast<std::uint16_t>(at);
            if (peers_.idle(rank) || uses_shared_memory(rank)) continue;
            deferred_until_ = never;
            const bool filled = fill_data(batch, peers_.attempt(rank), now);
            // With several paths, time alone may change which of them is tried, so such a peer is not deferred.
            if (!filled && !shut() && !peers_.look(rank).links.several()) peers_.defer_sending(rank, deferred_until_);
            if (filled || retry_transmit_) peers_.mark(rank);
            if (!filled) {
                paced_until_ = std::min(paced_until_, deferred_until_);
                continue;
            }
            next_rank_ = at + 1;
            return true;
        }
        return false;
    };
    const auto fill_any_control = [&](std::size_t first, std::size_t end) {
        for (std::size_t at = peers_.awake().next(first); at < end; at = peers_.awake().next(at + 1)) {
            const auto rank = static_cast<std::uint16_t>(at);
            if (!peers_.may_send_control(rank, now)) continue;
            if (fill_control(batch, peers_[rank], now) || fill_probe(batch, peers_[rank], now)) return true;
        }
        return false;
    };
    do {
        retry_transmit_ = false;
        peers_.wake(now);
        if (fill_any_control(config_.rank, config_.world) || fill_any_control(0, config_.rank)) return true;
        paced_until_ = peers_.deferred_until();
        rate_limited_paths_ = 0;
        if (fill_any(next_rank_, config_.world) || fill_any(0, next_rank_)) return true;
    } while (retry_transmit_);
#ifdef STORM_CHECK_TIMERS
    check_quiet(now);
#endif
    return false;
}

void Core::transmitted(const Batch& batch, Nanos now) {
    if (batch.too_large()) peers_[batch.peer()].links[batch.path()].path.on_refused(batch.segment_bytes(), now);
    if (!batch.pinned()) return;
    Outgoing* message = slots_.find(*batch.pinned());
    if (message == nullptr || --message->pins > 0) return;
    Exchange& exchange = *message->exchange;
    if (exchange.running()) {
        message->release_if_done();
        settle(exchange, now);
        return;
    }
    // The exchange ended while this batch still pointed into its buffers.
    slots_.remove(message->ref);
    if (!exchange.pinned()) exchanges_.unpinned(exchange);
}

bool Core::fill_control(Batch& batch, Peer& peer, Nanos now) {
    for (Link& link : peer.links) {
        if (socket_full_[link.index]) continue;
        if (fill_report(batch, peer, link, now)) return true;
        if (!link.asks || peer.left()) continue;
        link.asks = false;
        Flight flight{.kind = Kind::ping};
        send_control(batch, peer, link, {.kind = Kind::ping, .chunk = link.out.probes()}, flight, {}, 0, now);
        return true;
    }
    for (const std::uint8_t path : peer.links.order(now)) {
        if (!socket_full_[path]) return fill_messages(batch, peer, peer.links[path], now);
    }
    return false;
}

bool Core::fill_report(Batch& batch, Peer& peer, Link& link, Nanos now) {
    const std::uint64_t credit = credit_.bytes(peer.rank);
    if (link.in.report_at(credit, link.report_delay()) > now) return false;
    const unsigned urgent = link.in.urgent();
    std::array<std::byte, Report::fixed_bytes + 8 * Report::max_words> body;
    const std::size_t bytes = write_report(link.in.make_report(credit, overflow_, now), body);
    ++counters_.reports;
    // Reports are not acknowledged.
    send_control(batch, peer, link, {.kind = Kind::report}, {.kind = Kind::report, .settled = true},
                 std::span(body).first(bytes), urgent, now);
    return true;
}

// Controls and view messages, which may go over any path.
bool Core::fill_messages(Batch& batch, Peer& peer, Link& link, Nanos now) {
    Header header{};
    Flight flight{};
    std::array<std::byte, Report::fixed_bytes + 8 * Report::max_words> body;
    std::span<const std::byte> body_bytes;
    std::vector<std::byte> view_message;
    if (!peer.controls.empty()) {
        const Control what = peer.controls.pop();
        header.kind = what.kind;
        header.flags = flight.flags = what.flags;
        header.channel = flight.channel = what.channel;
        header.seq = flight.seq = what.seq;
        flight.failure_cause = what.failure_cause;
        // Each unanswered probe asks for more copies of the report, as these may be lost in a burst too.
        if (what.kind == Kind::ping) header.chunk = link.out.probes();
        if (what.kind == Kind::bye || what.kind == Kind::failed) write_failure_cause(what.failure_cause, header);
        if (what.kind == Kind::bye) body_bytes = std::span(body).first(write_last_reports(peer, body, now));
        flight.settled = peer.silent();  // no answer is awaited from a silent peer
    } else if (!peer.view_messages.empty()) {
        header.kind = Kind::note;
        view_message = std::move(peer.view_messages.front());
        peer.view_messages.pop_front();
        body_bytes = view_message;
        flight.settled = true;  // view messages are not acknowledged
    } else {
        return false;
    }
    flight.kind = header.kind;
    send_control(batch, peer, link, header, flight, body_bytes, 0, now);
    return true;
}

// The reports of all paths, in a goodbye: together they are no larger than one full report.
std::size_t Core::write_last_reports(Peer& peer, std::span<std::byte> body, Nanos now) {
    std::size_t most = Report::max_words;
    for (const Link& link : peer.links) most = std::min(most, link.in.most_words());
    const std::size_t count = peer.links.size(), fixed = (count - 1) * Report::fixed_bytes / 8;
    const std::size_t words = std::max<std::size_t>((most - std::min(most, fixed)) / count, 1);
    std::size_t bytes = 0;
    for (Link& link : peer.links) {
        // If the path carries very little, only the reports of the first paths are sent.
        if (link.index > 0 && bytes + Report::fixed_bytes + 8 * words > Report::fixed_bytes + 8 * most) break;
        const Report report = link.in.make_report(credit_.bytes(peer.rank), overflow_, now, true, words);
        bytes += write_report(report, body.subspan(bytes));
    }
    return bytes;
}

void Core::send_control(Batch& batch, Peer& peer, Link& link, Header header, Flight flight,
                        std::span<const std::byte> body_bytes, unsigned urgent, Nanos now) {
    header.source = source(link);
    header.cookie = seal_.visible_cookie();
    flight.bytes = static_cast<std::uint32_t>(header_bytes + body_bytes.size());
    batch.begin(peer.rank, Batch::max_bytes, link.index);
    const LinkState state{.loss = link.out.loss(), .lossy = link.out.lossy(), .probes = link.out.probes()};
    for (unsigned copy = copies_of(header.kind, urgent, state); copy > 0; --copy) {
        // Only the last copy is tracked, so that the link counts the control once.
        Flight each = flight;
        each.settled = flight.settled || copy > 1;
        add_datagram(batch, link, each, header, body_bytes, now);
    }
}

// Path MTU discovery: a ping of a size that the path may or may not carry. Its acknowledgement shows that it does.
bool Core::fill_probe(Batch& batch, Peer& peer, Nanos now) {
    if (!peer.explores_path()) return false;
    for (Link& link : peer.links) {
        if (link.down || socket_full_[link.index]) continue;
        const std::size_t bytes = link.path.take_probe(!peer.queue.empty(), link.out.probe_timeout(), now);
        if (bytes == 0) continue;
        ++counters_.path_probes;
        const std::vector<std::byte> filling(bytes - header_bytes - seal_.overhead_bytes());
        batch.begin(peer.rank, bytes, link.index);
        add_datagram(batch, link, {.bytes = static_cast<std::uint32_t>(bytes), .kind = Kind::ping},
                     {.kind = Kind::ping, .source = source(link), .cookie = seal_.visible_cookie()}, filling, now);
        return true;
    }
    return false;
}

Link* Core::choose(Peer& peer, const Outgoing& message, std::size_t& chunks, Nanos now) {
    const Links::Order order = peer.links.order(now);
    for (const std::uint8_t path : order) {
        Link& link = peer.links[path];
        if (socket_full_[path]) continue;
        // Little is left: a path that takes longer, or does not answer, would only delay the end.
        if (path != order.paths[0] && peer.queue.size() == 1 &&
            peer.links.better_without(link, order, message.waiting() * message.layout.chunk_bytes, now))
            break;
        chunks = admit(link, message, now);
        if (chunks > 0) return &link;
    }
    return nullptr;
}

// Requests a report at once on each path with much loss, to learn what the peer lacks.
void Core::request_loss_reports(Peer& peer) {
    for (Link& link : peer.links) {
        if (link.down || !link.out.lossy()) continue;
        if (!peer.links.several()) {
            peer.queue_control({.kind = Kind::ping});
        } else if (link.out.in_flight_bytes() > 0) {
            link.asks = true;
        }
    }
}

// How many chunks of the message credit and congestion control allow now. They then count as sent.
std::size_t Core::admit(Link& link, const Outgoing& message, Nanos now) {
    const std::size_t chunk = std::min<std::size_t>(chunk_bytes_, message.layout.bytes);
    const PieceLayout layout = link.layout(chunk, seal_.overhead_bytes());
    const std::size_t overhead =
        header_bytes + seal_.overhead_bytes() + (layout.count > 1 ? PiecePrefix::wire_bytes : 0);
    const std::size_t segment = chunk + layout.count * overhead;
    if (!link.out.window_open(segment)) return 0;
    Pacer* const shared = shared_pacers_.empty() ? nullptr : &shared_pacers_[link.index];
    // A batch is a burst: at a fixed rate, at most a millisecond's worth.
    const std::size_t paced =
        shared != nullptr ? static_cast<std::size_t>(config_.bytes_per_s * 0.001) : link.rate.batch_bytes();
    const std::size_t limit =
        std::min({std::size_t{Batch::max_bytes}, paced, std::max<std::size_t>(link.out.window_bytes(), segment)});
    // The pieces of one chunk are a batch of their own, as the last of them may be shorter.
    const std::size_t most = layout.count > 1 ? 1 : Batch::max_segments;
    const std::size_t segments = std::clamp<std::size_t>(std::min(limit / segment, message.waiting()), 1, most);
    const std::size_t bytes = segments * segment;
    const bool admitted = shared != nullptr
                              ? shared->try_send(bytes, now)
                              : link.rate.try_send(bytes, link.out.in_flight_bytes(), now, link.out.ack_overdue(now));
    if (admitted) return segments;
    if (shared != nullptr) rate_limited_paths_ |= 1U << link.index;
    const Nanos paced_at = shared != nullptr ? shared->next_send_at(now) : link.rate.next_send_at(now);
    deferred_until_ = std::min(deferred_until_, paced_at == never ? link.out.ack_overdue_at() : paced_at);
    return 0;
}

bool Core::fill_data(Batch& batch, Peer& peer, Nanos now) {
    Outgoing* message = peer.queue.next(config_.eager_bytes);
    std::size_t chunks = 0;
    Link* const chosen = message == nullptr ? nullptr : choose(peer, *message, chunks, now);
    if (chosen == nullptr) return false;
    Link& link = *chosen;

    if (!message->encoding && wants_parity(peer, *message)) message->encoding = begin_coding(*message);
    const bool copies =
        seal_.encrypts() || message->encoding || link.layout(chunk_bytes_, seal_.overhead_bytes()).count > 1;
    batch.begin(peer.rank, copies ? Batch::max_bytes + max_datagram_bytes : 0, link.index);
    while (batch.segments() < chunks && message->sendable()) {
        const bool is_extra_copy = message->only_extra_copies();
        const bool repair = is_extra_copy || !message->repairs.empty();
        if (!repair && message->parity_due() > 0) {
            if (!batch.takes(message->encoding->shape().parity_bytes + header_bytes + seal_.overhead_bytes())) break;
            add_parity(batch, peer, link, *message, now);
            continue;
        }
        std::deque<std::uint32_t>& again = is_extra_copy ? message->extra_copies : message->repairs;
        const std::uint32_t chunk = repair ? again.front() : message->chunk_at(message->cursor);
        if (repair && message->acked_chunks.test(chunk)) {
            again.pop_front();
            continue;
        }
        if (!repair && message->next_is_missing()) {
            if (message->encoding) {
                for (const std::uint32_t each : message->encoding->on_skipped(chunk))
                    retransmit(peer, *message, each, now);
            }
            message->skip_missing();
            if (message->first_pass_over()) peer.queue_control(message->end());
            continue;
        }
        if (!batch.takes(message->layout.size(chunk) + header_bytes + seal_.overhead_bytes())) break;
        std::uint8_t flags = stage_flag(message->second_stage);
        if (message->encoding) {
            if (!repair) plan_parity(peer, *message, chunk);
            if (message->encoding->coded(chunk)) flags |= flag_coded;
            message->encoding->on_sent(chunk, message->payload(chunk));
        }
        if (repair) {
            again.pop_front();
            flags |= flag_repair;
            if (!is_extra_copy) ++message->repaired;  // a measure of loss, so extra copies do not count
            ++counters_.repaired;
        } else {
            ++message->cursor;
        }
        // Nothing is left to send: an exact message requests a report, a lossy one announces its end.
        const bool is_last =
            message->first_pass_over() && message->parity_due() == 0 && (message->lossless() ? again.empty() : !repair);
        if (is_last) flags |= flag_last;
        add_chunk(batch, link, *message, chunk, flags, now);
        if (is_last && !message->lossless()) peer.queue_control(message->end());
        if (batch.ended()) break;
    }
    if (batch.segments() == 0) {
        retry_transmit_ = true;
        message->release_if_done();
        settle(*message->exchange, now);
        return false;
    }
    if (!message->sendable() && peer.queue.size() == 1) {
        for (Link& each : peer.links) each.out.on_app_limited();
        // Tail loss: nothing follows that would show which of the last datagrams are lost. Requests reports now instead
        // of waiting for the probe.
        if (message->lossless() && message->first_pass_over()) request_loss_reports(peer);
    }
    repair_before_parity(peer, *message, now);
    ++message->pins;
    batch.pin(message->ref);
    return true;
}

void Core::add_chunk(Batch& batch, Link& link, Outgoing& message, std::uint32_t chunk, std::uint8_t flags, Nanos now) {
    const std::uint32_t size = message.layout.size(chunk);
    Flight flight{.bytes = static_cast<std::uint32_t>(size + header_bytes + seal_.overhead_bytes()),
                  .kind = Kind::data,
                  .flags = flags,
                  .message = message.ref,
                  .chunk = chunk};
    if ((flags & flag_repair) == 0) message.eager_bytes += size;
    Header header{.kind = Kind::data,
                  .flags = flags,
                  .source = source(link),
                  .cookie = seal_.visible_cookie(),
                  .channel = message.exchange->channel,
                  .seq = message.exchange->seq,
                  .chunk = chunk,
                  .message_bytes = static_cast<std::uint32_t>(message.announced)};
    const std::span<const std::byte> payload = message.payload(chunk);
    const PieceLayout layout = link.layout(size, seal_.overhead_bytes());
    if (layout.count == 1) {
        add_datagram(batch, link, flight, header, payload, now, message.checksums.get());
        return;
    }
    header.flags |= flag_piece;
    const std::size_t overhead = header_bytes + seal_.overhead_bytes() + PiecePrefix::wire_bytes;
    std::vector<std::byte> body(PiecePrefix::wire_bytes + layout.bytes);
    for (std::size_t piece = 0; piece < layout.count; ++piece) {
        write_piece({.index = static_cast<std::uint16_t>(piece),
                     .count = static_cast<std::uint16_t>(layout.count),
                     .chunk_bytes = size},
                    std::span(body).first<PiecePrefix::wire_bytes>());
        const std::span<const std::byte> part = payload.subspan(layout.begin(piece), layout.size(piece));
        std::copy(part.begin(), part.end(), body.begin() + PiecePrefix::wire_bytes);
        flight.bytes = static_cast<std::uint32_t>(part.size() + overhead);
        flight.more = piece + 1 < layout.count;
        ++counters_.pieces;
        add_datagram(batch, link, flight, header, {body.data(), PiecePrefix::wire_bytes + part.size()}, now);
    }
}

void Core::add_datagram(Batch& batch, Link& link, const Flight& flight, const Header& header,
                        std::span<const std::byte> payload, Nanos now, ChunkChecksums* checksums) {
    const std::uint64_t number = link.out.depart(flight, now);
    const std::size_t bytes = batch.add(seal_, number, header, payload, checksums);
    counters_.bytes_sent += bytes;
    link.bytes_sent += bytes;
    peaks_.sent(bytes, now);
    ++counters_.datagrams_sent;
}

// All links of a path share the endpoint's bottleneck: each gets a share in proportion to what it still has to carry.
void Core::share_bottleneck(Nanos now) {
    bottleneck_.begin(now);
    for (const auto& [key, exchange] : exchanges_.active()) {
        for (const Outgoing& message : exchange->sends) {
            if (!message.wanted || uses_shared_memory(message.peer)) continue;
            const std::uint64_t chunks = message.layout.chunks - message.cursor + message.repairs.size();
            const Nanos deadline = exchange->stage(message.second_stage).deadline;
            bottleneck_.add(message.peer, chunks * message.layout.chunk_bytes,
                            deadline == never ? never : deadline - exchange->outcome.started);
        }
    }
    bottleneck_.share([&](std::uint16_t peer, double share, std::size_t busy, Nanos deadline) {
        for (Link& link : peers_[peer].links) link.rate.set_share(share, busy, deadline);
    });
}

}  // namespace storm
