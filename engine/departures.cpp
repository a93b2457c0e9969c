// What a core sends, to whom and when; and what became of it.
#include <algorithm>

#include "core.hpp"
#include "peer.hpp"

namespace storm {

bool Core::transmit(Batch& batch, Nanos now) {
    batch.segments = batch.bytes = batch.parts = 0;
    batch.too_large = false;
    batch.sealed.clear();
    batch.pinned.reset();
    do {
        again_ = false;
        for (auto& peer : peers_) {
            if (peer && (fill_control(batch, *peer, now) || fill_probe(batch, *peer, now))) return true;
        }
        paced_until_ = never;
        for (std::size_t k = 0; k < peers_.size(); ++k) {
            const std::size_t index = (turn_ + k) % peers_.size();
            if (!peers_[index] || peers_[index]->queue.empty() || !fill_data(batch, *peers_[index], now)) continue;
            turn_ = index + 1;
            return true;
        }
    } while (again_);
    return false;
}

void Core::transmitted(const Batch& batch, Nanos now) {
    if (batch.too_large) peers_[batch.peer]->path.on_refused(batch.segment_bytes, now);
    if (!batch.pinned) return;
    const auto [slot, generation] = *batch.pinned;
    Outgoing* message = message_of(slot, generation);
    if (message == nullptr || --message->pins > 0) return;
    Exchange& exchange = *message->exchange;
    if (exchange.outcome.status == Status::running) {
        release_if_done(*message);
        finish_if_done(exchange, now);
        return;
    }
    // The exchange ended with this batch still pointing into its buffers.
    ++slots_[slot].generation;
    free_slots_.push_back(slot);
    for (const Outgoing& other : exchange.sends) {
        if (other.pins > 0) return;
    }
    const auto found =
        std::find_if(leaving_.begin(), leaving_.end(), [&](const auto& e) { return e.get() == &exchange; });
    finished_.push_back({.id = exchange.id, .outcome = std::move(exchange.outcome)});
    leaving_.erase(found);
}

bool Core::fill_control(Batch& batch, Peer& peer, Nanos now) {
    Header header{.source = config_.rank, .cookie = seal_.visible_cookie()};
    Flight flight{};
    std::array<std::byte, Report::fixed_bytes + 8 * Report::max_words> body;
    std::size_t body_bytes = 0;
    const bool urgent = peer.in.urgent();
    if (peer.in.report_at(credit_bytes(&peer), peer.report_delay()) <= now) {
        header.kind = Kind::report;
        body_bytes = write_report(peer.in.make_report(credit_bytes(&peer), overflow_, now), body);
        flight.settled = true;  // reports are not reported
        ++counters_.reports;
    } else if (!peer.controls.empty()) {
        const Control what = peer.controls.front();
        peer.controls.pop_front();
        header.kind = what.kind;
        header.flags = flight.flags = what.flags;
        header.channel = flight.channel = what.channel;
        header.seq = flight.seq = what.seq;
        flight.blame = what.blame;
        if (what.kind == Kind::bye || what.kind == Kind::failed) write_blame(what.blame, header);
        if (what.kind == Kind::bye)
            body_bytes = write_report(peer.in.make_report(credit_bytes(&peer), overflow_, now, true), body);
        flight.settled = peer.silent;  // nobody waits for an answer of the silent
    } else {
        return false;
    }
    batch.peer = peer.rank;
    flight.kind = header.kind;
    flight.bytes = static_cast<std::uint32_t>(header_bytes + body_bytes);
    batch.segment_bytes = header_bytes + body_bytes + seal_.overhead_bytes();
    // The body is copied: it must outlive this call.
    batch.sealed.reserve(Batch::max_bytes);
    const unsigned copies = copies_of(header.kind, peer, urgent);
    for (unsigned copy = copies; copy > 0; --copy) {
        Flight each = flight;
        each.settled = flight.settled || copy > 1;
        seal_segment(batch, peer, peer.out.depart(each, now), header, {body.data(), body_bytes}, nullptr);
    }
    return true;
}

// A ping as large as what the path may or may not carry.
bool Core::fill_probe(Batch& batch, Peer& peer, Nanos now) {
    if (!probes_path(peer)) return false;
    const std::size_t bytes = peer.path.take_probe(!peer.queue.empty(), peer.out.patience(), now);
    if (bytes == 0) return false;
    ++counters_.path_probes;
    batch.peer = peer.rank;
    batch.segment_bytes = bytes;
    const std::vector<std::byte> filling(bytes - header_bytes - seal_.overhead_bytes());
    batch.sealed.reserve(filling.size() + seal_.overhead_bytes());
    const Flight flight{.bytes = static_cast<std::uint32_t>(bytes), .kind = Kind::ping};
    seal_segment(batch, peer, peer.out.depart(flight, now),
                 {.kind = Kind::ping, .source = config_.rank, .cookie = seal_.visible_cookie()}, filling, nullptr);
    return true;
}

bool Core::probes_path(const Peer& peer) { return !peer.left && !peer.silent; }

PieceCut Core::cut_for(const Peer& peer, std::size_t chunk_bytes) const {
    const std::size_t overhead = header_bytes + seal_.overhead_bytes();
    if (chunk_bytes + overhead <= peer.path.bytes()) return {chunk_bytes, 1};
    return PieceCut::within(chunk_bytes, peer.path.bytes(), overhead);
}

// Some copies, of which the last is watched, of what somebody waits for: the end of a lossy message; a probe that was not
// answered and so meets a bad time; and where much is lost, an urgent report and the question for one.
unsigned Core::copies_of(Kind kind, const Peer& peer, bool urgent) {
    const unsigned lossy = peer.out.lossy() ? 1 : 0;
    if (kind == Kind::end) return 3;
    if (kind == Kind::ping) return 1 + lossy + std::min(peer.out.probes(), 3U);
    return kind == Kind::report && urgent ? 1 + lossy : 1;
}

// The oldest message to the peer that has something to send and may send it; forgets those that have nothing.
Outgoing* Core::next_message(Peer& peer) {
    for (std::size_t i = 0; i < peer.queue.size();) {
        Outgoing* candidate = peer.queue[i];
        if (!candidate->sendable() && !candidate->parked) {
            candidate->queued = false;
            peer.queue.erase(peer.queue.begin() + static_cast<std::ptrdiff_t>(i));
            continue;
        }
        const bool within_eager =
            candidate->ready || !candidate->repairs.empty() || candidate->eager_bytes < config_.eager_bytes;
        if (candidate->sendable() && within_eager) return candidate;
        ++i;
    }
    return nullptr;
}

// How many chunks of the message credit and rate let go now; they are then counted as sent.
std::size_t Core::admit(Peer& peer, const Outgoing& message, Nanos now) {
    const std::size_t chunk = std::min<std::size_t>(chunk_bytes_, message.cut.bytes);
    const PieceCut cut = cut_for(peer, chunk);
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
    const bool admitted = shared_pacer_ ? shared_pacer_->try_send(bytes, now)
                                        : peer.rate.try_send(bytes, peer.out.in_flight_bytes(), now);
    if (admitted) return segments;
    paced_until_ =
        std::min(paced_until_, shared_pacer_ ? shared_pacer_->next_send_at(now) : peer.rate.next_send_at(now));
    return 0;
}

bool Core::fill_data(Batch& batch, Peer& peer, Nanos now) {
    Outgoing* message = next_message(peer);
    const std::size_t chunks = message == nullptr ? 0 : admit(peer, *message, now);
    if (chunks == 0) return false;

    batch.peer = peer.rank;
    batch.segment_bytes = 0;
    if (seal_.encrypts()) batch.sealed.reserve(Batch::max_bytes + max_datagram_bytes);
    while (batch.segments < chunks && message->sendable()) {
        const bool repair = !message->repairs.empty();
        const std::uint32_t chunk = repair ? message->repairs.front() : message->chunk_at(message->cursor);
        if (repair && message->acked_chunks.test(chunk)) {
            message->repairs.pop_front();
            continue;
        }
        if (!repair && message->source != nullptr && message->source->counts()[chunk] == 0) {
            // We were to pass this chunk on and never got it: for our receivers it is lost.
            ++message->cursor;
            ++message->given_up;
            if (message->reserved > 0) --message->reserved;
            if (message->first_pass_over()) end_message(peer, *message);
            continue;
        }
        // Segments of one batch are equal, but for a shorter last one.
        const std::size_t size = message->cut.size(chunk) + header_bytes + seal_.overhead_bytes();
        if (batch.segments > 0 && size > batch.segment_bytes) break;
        if (batch.segments == 0) batch.segment_bytes = size;
        std::uint8_t flags = message->second_stage ? flag_second_stage : std::uint8_t{0};
        if (repair) {
            message->repairs.pop_front();
            flags |= flag_repair;
            ++message->repaired;
            ++counters_.repaired;
        } else {
            ++message->cursor;
        }
        // Nothing is left: an exact message then wants to hear what is missing, a lossy one says that this is its end.
        const bool is_last = message->first_pass_over() && (message->lossless() ? message->repairs.empty() : !repair);
        if (is_last) flags |= flag_last;
        add_chunk(batch, peer, *message, chunk, flags, now);
        if (is_last && !message->lossless()) end_message(peer, *message);
        if (size < batch.segment_bytes) break;
    }
    if (batch.segments == 0) {
        again_ = true;
        Exchange& exchange = *message->exchange;
        release_if_done(*message);
        finish_if_done(exchange, now);
        return false;
    }
    if (!message->sendable() && peer.queue.size() == 1) {
        peer.out.on_app_limited();
        // Nothing follows that would show what is lost of the last datagrams: ask, and do not wait for the probe's timer.
        if (message->lossless() && message->first_pass_over() && peer.out.lossy()) control(peer, {.kind = Kind::ping});
    }
    ++message->pins;
    batch.pinned = {message->slot, message->generation};
    return true;
}

// The end of a lossy message must be heard even if its last datagram is lost.
void Core::end_message(Peer& peer, const Outgoing& message) {
    const std::uint8_t stage = message.second_stage ? flag_second_stage : std::uint8_t{0};
    control(peer,
            {.kind = Kind::end, .flags = stage, .channel = message.exchange->channel, .seq = message.exchange->seq});
}

void Core::add_chunk(Batch& batch, Peer& peer, Outgoing& message, std::uint32_t chunk, std::uint8_t flags, Nanos now) {
    const std::uint32_t size = message.cut.size(chunk);
    const Flight flight{.bytes = static_cast<std::uint32_t>(size + header_bytes + seal_.overhead_bytes()),
                        .kind = Kind::data,
                        .flags = flags,
                        .slot = message.slot,
                        .generation = message.generation,
                        .chunk = chunk};
    if ((flags & flag_repair) == 0) message.eager_bytes += size;
    const Header header{.kind = Kind::data,
                        .flags = flags,
                        .source = config_.rank,
                        .cookie = seal_.visible_cookie(),
                        .channel = message.exchange->channel,
                        .seq = message.exchange->seq,
                        .chunk = chunk,
                        .message_bytes = static_cast<std::uint32_t>(message.cut.bytes)};
    const std::span<const std::byte> payload(message.data + std::size_t{chunk} * message.cut.chunk_bytes, size);
    const PieceCut cut = cut_for(peer, size);
    if (cut.count > 1) {
        add_pieces(batch, peer, flight, header, payload, cut, now);
    } else {
        seal_segment(batch, peer, peer.out.depart(flight, now), header, payload, message.checks.get());
    }
}

void Core::add_pieces(Batch& batch, Peer& peer, const Flight& flight, Header header, std::span<const std::byte> payload,
                      const PieceCut& cut, Nanos now) {
    header.flags |= flag_piece;
    const std::size_t overhead = header_bytes + seal_.overhead_bytes() + PiecePrefix::wire_bytes;
    batch.sealed.reserve(payload.size() + cut.count * overhead);
    batch.segment_bytes = cut.bytes + overhead;
    std::vector<std::byte> body(PiecePrefix::wire_bytes + cut.bytes);
    for (std::size_t piece = 0; piece < cut.count; ++piece) {
        write_piece({.index = static_cast<std::uint16_t>(piece),
                     .count = static_cast<std::uint16_t>(cut.count),
                     .chunk_bytes = static_cast<std::uint32_t>(payload.size())},
                    std::span(body).first<PiecePrefix::wire_bytes>());
        const std::span<const std::byte> part = payload.subspan(cut.begin(piece), cut.size(piece));
        std::copy(part.begin(), part.end(), body.begin() + PiecePrefix::wire_bytes);
        Flight each = flight;
        each.bytes = static_cast<std::uint32_t>(part.size() + overhead);
        each.more = piece + 1 < cut.count;
        ++counters_.pieces;
        seal_segment(batch, peer, peer.out.depart(each, now), header,
                     {body.data(), PiecePrefix::wire_bytes + part.size()}, nullptr);
    }
}

void Core::seal_segment(Batch& batch, Peer& peer, std::uint64_t number, Header header,
                        std::span<const std::byte> payload, Checks* checks) {
    header.number = static_cast<std::uint32_t>(number);
    if (seal_.encrypts()) header.flags |= flag_sealed;
    const std::span<std::byte, header_bytes> wire_header(batch.headers[batch.segments]);
    write_header(header, wire_header);
    std::size_t bytes = header_bytes;
    batch.iov[batch.parts++] = {.iov_base = wire_header.data(), .iov_len = header_bytes};
    const bool piece = (header.flags & flag_piece) != 0;
    if (seal_.encrypts() || header.kind != Kind::data || piece) {
        const std::size_t at = batch.sealed.size();
        batch.sealed.resize(at + payload.size() + seal_.overhead_bytes());
        const std::span<std::byte> out(batch.sealed.data() + at, payload.size() + seal_.overhead_bytes());
        if (seal_.encrypts()) {
            seal_.encrypt(wire_header, payload, peer.rank, number, out);
        } else {
            seal_.protect(wire_header, peer.rank, piece ? seal_.data_check(payload) : seal_.payload_check(payload));
            std::copy(payload.begin(), payload.end(), out.begin());
        }
        if (!out.empty()) batch.iov[batch.parts++] = {.iov_base = out.data(), .iov_len = out.size()};
        bytes += out.size();
    } else {
        std::uint32_t check = 0;
        if (checks == nullptr) {
            check = seal_.data_check(payload);
        } else {
            if (checks->known.set(header.chunk)) checks->values[header.chunk] = seal_.data_check(payload);
            check = checks->values[header.chunk];
        }
        seal_.protect(wire_header, peer.rank, check);
        if (!payload.empty()) {
            batch.iov[batch.parts++] = {.iov_base = const_cast<std::byte*>(payload.data()), .iov_len = payload.size()};
        }
        bytes += payload.size();
    }
    ++batch.segments;
    batch.bytes += bytes;
    ++counters_.datagrams_sent;
    counters_.bytes_sent += bytes;
}

void Core::control(Peer& peer, Control what) {
    if (peer.left && what.kind != Kind::done) return;
    // Every control is sent again or asked for again if it matters, so a bound may drop some.
    constexpr std::size_t most_controls = 1024;
    if (peer.controls.size() >= most_controls) return;
    if (std::find(peer.controls.begin(), peer.controls.end(), what) == peer.controls.end())
        peer.controls.push_back(what);
}

void Core::enqueue(Outgoing& message) {
    if (message.queued || message.released || !message.wanted) return;
    message.queued = true;
    // Older exchanges first: a repair must not wait behind all that was posted since.
    auto& queue = peers_[message.peer]->queue;
    const auto younger = [](const Outgoing* one, const Outgoing* other) {
        return one->exchange->id < other->exchange->id;
    };
    queue.insert(std::upper_bound(queue.begin(), queue.end(), &message, younger), &message);
}

// All links of an endpoint share its line, so each gets as much of it as it still has to carry.
void Core::share_line(Nanos now) {
    share_at_ = now + millisecond;
    for (const auto& peer : peers_) {
        if (!peer) continue;
        peer->backlog = 0;
        peer->deadline = never;
    }
    for (const auto& [key, exchange] : active_) {
        for (const Outgoing& message : exchange->sends) {
            if (!message.wanted) continue;
            const std::uint64_t chunks = message.cut.chunks - message.cursor + message.repairs.size();
            Peer& peer = *peers_[message.peer];
            peer.backlog += chunks * message.cut.chunk_bytes;
            const Nanos deadline = exchange->stage(message.second_stage).deadline;
            if (deadline != never) peer.deadline = std::min(peer.deadline, deadline - exchange->outcome.started);
        }
    }
    std::uint64_t total = 0;
    std::size_t busy = 0;
    for (const auto& peer : peers_) {
        if (!peer || peer->backlog == 0) continue;
        total += peer->backlog;
        ++busy;
    }
    for (const auto& peer : peers_) {
        if (peer && peer->backlog > 0)
            peer->rate.set_share(static_cast<double>(peer->backlog) / static_cast<double>(total), busy, peer->deadline);
    }
}

Outgoing* Core::message_of(std::uint32_t slot, std::uint32_t generation) {
    if (slot >= slots_.size() || slots_[slot].generation != generation) return nullptr;
    return slots_[slot].message;
}

void Core::on_acked(Peer& peer, const Flight& flight, Nanos now) {
    if (flight.kind == Kind::bye) peer.told = true;
    if (flight.kind == Kind::data || flight.kind == Kind::ping) peer.path.on_acked(flight.bytes, flight.stamp.sent_at);
    if (flight.kind == Kind::data) {
        peer.data_lost_since = never;
        Outgoing* message = message_of(flight.slot, flight.generation);
        if (message == nullptr || message->released || !message->acked_chunks.set(flight.chunk)) return;
        ++message->acked;
        release_if_done(*message);
        if (message->released) finish_if_done(*message->exchange, now);
    }
}

bool Core::only_repairs(const Peer& peer) {
    return std::none_of(peer.queue.begin(), peer.queue.end(),
                        [](const Outgoing* message) { return message->sendable() && !message->first_pass_over(); });
}

void Core::on_lost(Peer& peer, const Flight& flight, Nanos now) {
    if (flight.kind == Kind::bye) peer.in.set_most_words(Peer::report_words(peer.path.least()));  // it may be too large
    if (flight.more) return;  // the last piece stands for its chunk, which is lost once
    if (flight.kind == Kind::data || flight.kind == Kind::ping)
        peer.path.on_lost(flight.bytes, flight.stamp.sent_at, now);
    if (flight.kind == Kind::data) {
        peer.data_lost_since = std::min(peer.data_lost_since, now);
        peer.data_lost_at = now;
        Outgoing* message = message_of(flight.slot, flight.generation);
        if (message == nullptr || !message->wanted || message->acked_chunks.test(flight.chunk)) return;
        if (message->given_up + message->reserved < message->allowed) {
            ++message->given_up;
            release_if_done(*message);
            if (message->released) finish_if_done(*message->exchange, now);
        } else {
            message->repairs.push_back(flight.chunk);
            // At the end of a message every further loss costs a round trip, and the line is free: send it twice.
            if (message->first_pass_over() && peer.out.lossy() && only_repairs(peer)) {
                message->repairs.push_back(flight.chunk);
            }
            enqueue(*message);
        }
    } else if (flight.kind == Kind::ready) {
        Exchange* exchange = find(flight.channel, flight.seq);
        if (exchange != nullptr && exchange->waits_for(peer.rank)) {
            control(peer, {.kind = flight.kind, .channel = flight.channel, .seq = flight.seq});
        }
    } else if (flight.kind == Kind::end || flight.kind == Kind::done || flight.kind == Kind::bye ||
               flight.kind == Kind::failed) {
        control(peer, {.kind = flight.kind,
                       .flags = flight.flags,
                       .channel = flight.channel,
                       .seq = flight.seq,
                       .blame = flight.blame});
    }
}

void Core::release_if_done(Outgoing& message) {
    if (message.released || message.pins > 0) return;
    // A chunk that was given up and then acknowledged after all counts twice; that does no harm once all were sent.
    const bool settled = message.never_repaired() || message.acked + message.given_up >= message.cut.chunks;
    if (!message.wanted || (message.first_pass_over() && settled)) release(message);
}

void Core::release(Outgoing& message) {
    message.wanted = false;
    message.repairs.clear();
    if (message.pins == 0) message.released = true;
}

}  // namespace storm
