// What an endpoint sends, to whom and when.
#include <algorithm>
#include <array>

#include "batch.hpp"
#include "core.hpp"
#include "peer.hpp"

namespace storm {

bool Core::transmit(Batch& batch, Nanos now) {
    // From `first` on, the ranks below `end` whose queues hold messages.
    const auto fill_any = [&](std::size_t first, std::size_t end) {
        for (std::size_t at = peers_.queued().next(first); at < end; at = peers_.queued().next(at + 1)) {
            const auto rank = static_cast<std::uint16_t>(at);
            if (peers_.idle(rank) || passes(rank)) continue;
            const bool filled = fill_data(batch, peers_.attempt(rank), now);
            if (filled || again_) peers_.mark(rank);
            if (!filled) continue;
            turn_ = at + 1;
            return true;
        }
        return false;
    };
    do {
        again_ = false;
        for (std::size_t at = peers_.talkative().next(0); at < config_.world; at = peers_.talkative().next(at + 1)) {
            const auto rank = static_cast<std::uint16_t>(at);
            if (!peers_.speaks(rank, now)) continue;
            if (fill_control(batch, peers_[rank], now) || fill_probe(batch, peers_[rank], now)) return true;
        }
        paced_until_ = never;
        if (fill_any(turn_, config_.world) || fill_any(0, turn_)) return true;
    } while (again_);
#ifdef STORM_CHECK_TIMERS
    check_quiet(now);
#endif
    return false;
}

void Core::transmitted(const Batch& batch, Nanos now) {
    if (batch.too_large()) peers_[batch.peer()].path.on_refused(batch.segment_bytes(), now);
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
    Header header{.source = config_.rank, .cookie = seal_.visible_cookie()};
    Flight flight{};
    const std::uint64_t credit = credit_.bytes(peer.rank);
    std::array<std::byte, Report::fixed_bytes + 8 * Report::max_words> body;
    std::size_t body_bytes = 0;
    std::vector<std::byte> note;
    const unsigned urgent = peer.in.urgent();
    if (peer.in.report_at(credit, peer.report_delay()) <= now) {
        header.kind = Kind::report;
        body_bytes = write_report(peer.in.make_report(credit, overflow_, now), body);
        flight.settled = true;  // reports are not reported
        ++counters_.reports;
    } else if (!peer.controls.empty()) {
        const Control what = peer.controls.pop();
        header.kind = what.kind;
        header.flags = flight.flags = what.flags;
        header.channel = flight.channel = what.channel;
        header.seq = flight.seq = what.seq;
        flight.blame = what.blame;
        // Who gets no answer asks for several: they, too, may be lost in a burst.
        if (what.kind == Kind::ping) header.chunk = peer.out.probes();
        if (what.kind == Kind::bye || what.kind == Kind::failed) write_blame(what.blame, header);
        if (what.kind == Kind::bye) {
            body_bytes = write_report(peer.in.make_report(credit, overflow_, now, true), body);
        }
        flight.settled = peer.silent();  // nobody waits for the answer of a silent peer
    } else if (!peer.notes.empty()) {
        header.kind = Kind::note;
        note = std::move(peer.notes.front());
        peer.notes.pop_front();
        flight.settled = true;  // nor are notes
    } else {
        return false;
    }
    flight.kind = header.kind;
    const std::span<const std::byte> says = header.kind == Kind::note
                                                ? std::span<const std::byte>(note)
                                                : std::span<const std::byte>(body.data(), body_bytes);
    flight.bytes = static_cast<std::uint32_t>(header_bytes + says.size());
    batch.begin(peer.rank, Batch::max_bytes);
    const LinkState link{.loss = peer.out.loss(), .lossy = peer.out.lossy(), .probes = peer.out.probes()};
    for (unsigned copy = copies_of(header.kind, urgent, link); copy > 0; --copy) {
        // Only the last copy is watched: the link counts the control once.
        Flight each = flight;
        each.settled = flight.settled || copy > 1;
        add_datagram(batch, peer, each, header, says, now);
    }
    return true;
}

// A ping of a size that the path may or may not carry: whether it arrives tells.
bool Core::fill_probe(Batch& batch, Peer& peer, Nanos now) {
    if (!peer.explores_path()) return false;
    const std::size_t bytes = peer.path.take_probe(!peer.queue.empty(), peer.out.patience(), now);
    if (bytes == 0) return false;
    ++counters_.path_probes;
    const std::vector<std::byte> filling(bytes - header_bytes - seal_.overhead_bytes());
    batch.begin(peer.rank, bytes);
    add_datagram(batch, peer, {.bytes = static_cast<std::uint32_t>(bytes), .kind = Kind::ping},
                 {.kind = Kind::ping, .source = config_.rank, .cookie = seal_.visible_cookie()}, filling, now);
    return true;
}

// How many chunks of the message credit and rate let go now; they are then counted as sent.
std::size_t Core::admit(Peer& peer, const Outgoing& message, Nanos now) {
    const std::size_t chunk = std::min<std::size_t>(chunk_bytes_, message.cut.bytes);
    const PieceCut cut = peer.cut(chunk, seal_.overhead_bytes());
    const std::size_t overhead = header_bytes + seal_.overhead_bytes() + (cut.count > 1 ? PiecePrefix::wire_bytes : 0);
    const std::size_t segment = chunk + cut.count * overhead;
    if (!peer.out.window_open(segment)) return 0;
    // A batch is a burst: paced by a fixed rate, it lasts a millisecond.
    const std::size_t paced =
        shared_pacer_ ? static_cast<std::size_t>(config_.bytes_per_s * 0.001) : peer.rate.batch_bytes();
    const std::size_t limit =
        std::min({std::size_t{Batch::max_bytes}, paced, std::max<std::size_t>(peer.out.window_bytes(), segment)});
    // The pieces of a chunk are a batch by themselves, as the last of them may be shorter.
    const std::size_t most = cut.count > 1 ? 1 : Batch::max_segments;
    const std::size_t segments = std::clamp<std::size_t>(std::min(limit / segment, message.waiting()), 1, most);
    const std::size_t bytes = segments * segment;
    const bool admitted = shared_pacer_
                              ? shared_pacer_->try_send(bytes, now)
                              : peer.rate.try_send(bytes, peer.out.in_flight_bytes(), now, peer.out.dark(now));
    if (admitted) return segments;
    const Nanos paced_at = shared_pacer_ ? shared_pacer_->next_send_at(now) : peer.rate.next_send_at(now);
    paced_until_ = std::min(paced_until_, paced_at == never ? peer.out.dark_at() : paced_at);
    return 0;
}

bool Core::fill_data(Batch& batch, Peer& peer, Nanos now) {
    Outgoing* message = peer.queue.next(config_.eager_bytes);
    const std::size_t chunks = message == nullptr ? 0 : admit(peer, *message, now);
    if (chunks == 0) return false;

    if (!message->encoding && wants_parity(peer, *message)) message->encoding = begin_coding(*message);
    const bool copies =
        seal_.encrypts() || message->encoding || peer.cut(chunk_bytes_, seal_.overhead_bytes()).count > 1;
    batch.begin(peer.rank, copies ? Batch::max_bytes + max_datagram_bytes : 0);
    while (batch.segments() < chunks && message->sendable()) {
        const bool echo = message->only_echoes();
        const bool repair = echo || !message->repairs.empty();
        if (!repair && message->parity_due() > 0) {
            if (!batch.takes(message->encoding->shape().parity_bytes + header_bytes + seal_.overhead_bytes())) break;
            add_parity(batch, peer, *message, now);
            continue;
        }
        std::deque<std::uint32_t>& again = echo ? message->echoes : message->repairs;
        const std::uint32_t chunk = repair ? again.front() : message->chunk_at(message->cursor);
        if (repair && message->acked_chunks.test(chunk)) {
            again.pop_front();
            continue;
        }
        if (!repair && message->next_is_missing()) {
            if (message->encoding) {
                for (const std::uint32_t each : message->encoding->on_skipped(chunk))
                    send_again(peer, *message, each, now);
            }
            message->skip_missing();
            if (message->first_pass_over()) peer.say(message->end());
            continue;
        }
        if (!batch.takes(message->cut.size(chunk) + header_bytes + seal_.overhead_bytes())) break;
        std::uint8_t flags = stage_flag(message->second_stage);
        if (message->encoding) {
            if (!repair) plan_parity(peer, *message, chunk);
            if (message->encoding->coded(chunk)) flags |= flag_coded;
            message->encoding->on_sent(chunk, message->payload(chunk));
        }
        if (repair) {
            again.pop_front();
            flags |= flag_repair;
            if (!echo) ++message->repaired;  // a measure of loss, of which copies say nothing
            ++counters_.repaired;
        } else {
            ++message->cursor;
        }
        // Nothing is left to send: an exact message asks what is missing, a lossy one says that this is its end.
        const bool is_last =
            message->first_pass_over() && message->parity_due() == 0 && (message->lossless() ? again.empty() : !repair);
        if (is_last) flags |= flag_last;
        add_chunk(batch, peer, *message, chunk, flags, now);
        if (is_last && !message->lossless()) peer.say(message->end());
        if (batch.ended()) break;
    }
    if (batch.segments() == 0) {
        again_ = true;
        message->release_if_done();
        settle(*message->exchange, now);
        return false;
    }
    if (!message->sendable() && peer.queue.size() == 1) {
        peer.out.on_app_limited();
        // Nothing follows that would show which of the last datagrams are lost: ask now, without waiting for the probe.
        if (message->lossless() && message->first_pass_over() && peer.out.lossy()) peer.say({.kind = Kind::ping});
    }
    repair_before_parity(peer, *message, now);
    ++message->pins;
    batch.pin(message->ref);
    return true;
}

void Core::add_chunk(Batch& batch, Peer& peer, Outgoing& message, std::uint32_t chunk, std::uint8_t flags, Nanos now) {
    const std::uint32_t size = message.cut.size(chunk);
    Flight flight{.bytes = static_cast<std::uint32_t>(size + header_bytes + seal_.overhead_bytes()),
                  .kind = Kind::data,
                  .flags = flags,
                  .message = message.ref,
                  .chunk = chunk};
    if ((flags & flag_repair) == 0) message.eager_bytes += size;
    Header header{.kind = Kind::data,
                  .flags = flags,
                  .source = config_.rank,
                  .cookie = seal_.visible_cookie(),
                  .channel = message.exchange->channel,
                  .seq = message.exchange->seq,
                  .chunk = chunk,
                  .message_bytes = static_cast<std::uint32_t>(message.announced)};
    const std::span<const std::byte> payload = message.payload(chunk);
    const PieceCut cut = peer.cut(size, seal_.overhead_bytes());
    if (cut.count == 1) {
        add_datagram(batch, peer, flight, header, payload, now, message.checks.get());
        return;
    }
    header.flags |= flag_piece;
    const std::size_t overhead = header_bytes + seal_.overhead_bytes() + PiecePrefix::wire_bytes;
    std::vector<std::byte> body(PiecePrefix::wire_bytes + cut.bytes);
    for (std::size_t piece = 0; piece < cut.count; ++piece) {
        write_piece({.index = static_cast<std::uint16_t>(piece),
                     .count = static_cast<std::uint16_t>(cut.count),
                     .chunk_bytes = size},
                    std::span(body).first<PiecePrefix::wire_bytes>());
        const std::span<const std::byte> part = payload.subspan(cut.begin(piece), cut.size(piece));
        std::copy(part.begin(), part.end(), body.begin() + PiecePrefix::wire_bytes);
        flight.bytes = static_cast<std::uint32_t>(part.size() + overhead);
        flight.more = piece + 1 < cut.count;
        ++counters_.pieces;
        add_datagram(batch, peer, flight, header, {body.data(), PiecePrefix::wire_bytes + part.size()}, now);
    }
}

void Core::add_datagram(Batch& batch, Peer& peer, const Flight& flight, const Header& header,
                        std::span<const std::byte> payload, Nanos now, Checks* checks) {
    const std::uint64_t number = peer.out.depart(flight, now);
    const std::size_t bytes = batch.add(seal_, number, header, payload, checks);
    counters_.bytes_sent += bytes;
    peaks_.sent(bytes, now);
    ++counters_.datagrams_sent;
}

// All links share the endpoint's line, so each gets as much of it as it still has to carry.
void Core::share_line(Nanos now) {
    line_.begin(now);
    for (const auto& [key, exchange] : exchanges_.active()) {
        for (const Outgoing& message : exchange->sends) {
            if (!message.wanted || passes(message.peer)) continue;
            const std::uint64_t chunks = message.cut.chunks - message.cursor + message.repairs.size();
            const Nanos deadline = exchange->stage(message.second_stage).deadline;
            line_.add(message.peer, chunks * message.cut.chunk_bytes,
                      deadline == never ? never : deadline - exchange->outcome.started);
        }
    }
    line_.share([&](std::uint16_t peer, double share, std::size_t busy, Nanos deadline) {
        peers_[peer].rate.set_share(share, busy, deadline);
    });
}

}  // namespace storm
