// The shared-memory transport between endpoints on one machine: records in rings, broadcast buffers and doorbells.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "core/core.hpp"
#include "peers/peer.hpp"

namespace storm {
namespace {

// Round robin: how many records of one peer are read, or written, before the next peer's.
constexpr std::size_t records_per_turn = 4;
// The largest record, unless one chunk is larger: a fraction of the ring, so that both sides can work at the same time.
constexpr std::size_t most_run_bytes = 64 << 10;
std::size_t run_bytes(const RingWriter& ring) { return std::min(most_run_bytes, ring.capacity() / 4); }
// The smallest run that goes into the broadcast buffer. Smaller ones are copied into each ring, which costs no more.
constexpr std::size_t least_shelved_bytes = 8 << 10;
// How many shares of the pool a peer may use through shared memory: a peer on the same machine is trusted more.
constexpr std::size_t pool_shares = 16;
// How long a contribution to a sum in rank order may wait in the ring for those before it. Taking it early costs a
// copy. Leaving it there for ever could cause a deadlock: those before it may depend on what is behind it in the ring.
constexpr Nanos longest_deferral = millisecond / 2;

}  // namespace

std::optional<Record> Record::parse(std::span<const std::byte> from) {
    Record record;
    if (from.size() < head_bytes) return std::nullopt;
    // A copy, so that its writer cannot change what has been checked.
    std::memcpy(&record, from.data(), sizeof record);
    const bool fits = record.in_broadcast_buffer == 0
                          ? size(record.bytes) <= from.size()
                          : record.kind == Kind::data && record.bytes <= most_run_bytes &&
                                std::size_t{record.position} + record.bytes <= BroadcastMemory::capacity;
    const bool sound = (record.kind == Kind::data || record.kind == Kind::end) && fits;
    return sound ? std::optional(record) : std::nullopt;
}

void Core::connect(std::uint16_t rank, std::uint32_t incarnation, std::unique_ptr<SharedMemoryChannel> shared_memory,
                   Nanos now) {
    if (rank >= config_.world || rank == config_.rank || incarnation != seal_.incarnation(rank) ||
        peers_.look(rank).vacant)
        throw std::invalid_argument("rank " + std::to_string(rank) + " is not the process to share memory with");
    Peer& peer = peers_[rank];
    drain(peer, now);  // the earlier channel, if there was one
    if (peer.shared_memory && peer.shared_memory->broken()) {
        drop_broken_peer(peer, now);
        throw std::invalid_argument("rank " + std::to_string(rank) + " has written nonsense into shared memory");
    }
    // A peer that reads a new ring has drained the old one before, as we have.
    if (broadcast_buffer_ && peer.shared_memory) broadcast_buffer_->renew(rank);
    shared_memory->in.set_shut(shared_memory_paused_);
    peer.shared_memory = std::move(shared_memory);
    const auto position = std::lower_bound(same_host_peers_.begin(), same_host_peers_.end(), rank);
    if (position == same_host_peers_.end() || *position != rank) same_host_peers_.insert(position, rank);
}

void Core::disconnect() {
    for (const std::uint16_t rank : same_host_peers_) {
        peers_[rank].shared_memory.reset();
        doorbells_.clear(rank);
    }
    same_host_peers_.clear();
    broadcast_buffer_.reset();
}

void Core::pause_shared_memory(bool shut) {
    shared_memory_paused_ = shut;
    for (const std::uint16_t rank : same_host_peers_) peers_[rank].shared_memory->in.set_shut(shut);
}

bool Core::uses_shared_memory(std::uint16_t rank) const {
    const Peer& peer = peers_.look(rank);
    return peer.shared_memory && !peer.shared_memory->out.shut();
}

bool Core::pass(Nanos now) {
    bool any = false, broken = false;
    defer_until_ = never;
    // In rising order of ranks, the order of most sums.
    for (const std::uint16_t rank : same_host_peers_) {
        const bool taken = take_records(rank, records_per_turn, now), put = put_records(rank, now);
        any = any || taken || put;
        const SharedMemoryChannel& shared_memory = *peers_.look(rank).shared_memory;
        broken = broken || shared_memory.broken();
        defer_until_ = std::min(defer_until_, shared_memory.defer_until);
    }
    if (!broken) return any;
    const auto found = std::find_if(same_host_peers_.begin(), same_host_peers_.end(),
                                    [&](std::uint16_t rank) { return peers_.look(rank).shared_memory->broken(); });
    drop_broken_peer(peers_[*found], now);
    return true;  // there may be another
}

// Drops a peer that has written nonsense into shared memory, as if both sides had left; all others go on. Its unread
// records are lost, so exchanges under way with it cannot succeed.
void Core::drop_broken_peer(Peer& peer, Nanos now) {
    ++counters_.malformed;
    const FailureCause failure_cause{peer.rank, Status::memory_broken};
    std::erase(same_host_peers_, peer.rank);
    doorbells_.clear(peer.rank);
    if (broadcast_buffer_) broadcast_buffer_->forget(peer.rank);
    peer.shared_memory.reset();
    peer.goodbye_repeats = Peer::most_goodbye_repeats;
    peer.queue_control({.kind = Kind::bye, .failure_cause = failure_cause});
    on_peer_left(peer, Status::memory_broken, failure_cause, now);
}

bool Core::may_sleep() {
    return std::all_of(same_host_peers_.begin(), same_host_peers_.end(), [&](std::uint16_t rank) {
        SharedMemoryChannel& shared_memory = *peers_.attempt(rank).shared_memory;
        return shared_memory.in.may_sleep() || shared_memory.stalled || shared_memory.defer_until != never;
    });
}

bool Core::take_records(std::uint16_t rank, std::size_t most, Nanos now) {
    SharedMemoryChannel& shared_memory = *peers_.attempt(rank).shared_memory;
    std::span<const std::byte> front = shared_memory.in.front();
    if (front.empty()) shared_memory.defer_until = never;
    if (front.empty() || (shared_memory.stalled && !draining_)) return false;
    Peer& peer = peers_[rank];
    std::size_t taken = 0;
    for (; taken < most && !front.empty(); ++taken) {
        const std::optional<Record> record = Record::parse(front);
        if (!record) {
            shared_memory.in.set_broken();
            break;
        }
        const Taken how = take_record(peer, *record, shared_memory.payload(*record, front), now);
        shared_memory.stalled = how == Taken::no_space;
        if (how != Taken::yes) break;
        if (shared_memory.in.pop(record->size())) doorbells_.set(rank);
        front = shared_memory.in.front();
    }
    if (taken == 0) return false;
    peer.on_received(now);
    if (views_) views_->on_received(rank, now);
    return true;
}

// Whether a contribution need not wait for those before it: only sums in rank order require that.
bool Core::is_in_order(Exchange& exchange, const Header& header) {
    const Incoming* message = exchange.incoming(header.source, header.has(flag_second_stage));
    return message == nullptr || message->reduction == nullptr || message->closed ||
           header.chunk >= message->layout.chunks || !message->reduction->early(message->contributor, header.chunk);
}

bool Core::awaits(std::uint16_t rank) const {
    const auto& active = exchanges_.active();
    return std::any_of(active.begin(), active.end(), [&](const auto& each) { return each.second->waits_for(rank); });
}

// Takes all records of a peer, before a datagram of it is processed that may have overtaken them.
void Core::drain(Peer& peer, Nanos now) {
    if (!peer.shared_memory || draining_) return;
    draining_ = true;
    while (take_records(peer.rank, records_per_turn, now)) {
    }
    draining_ = false;
}

// Takes one record. A record that is not taken stays in the ring.
Core::Taken Core::take_record(Peer& peer, const Record& record, std::span<const std::byte> payload, Nanos now) {
    Header header = record.header(peer.rank);
    Exchange* exchange = exchanges_.find(header.channel, header.seq);
    if (exchange == nullptr && sequences_.posted(header.channel, header.seq)) {
        ++counters_.late;
        answer_for_ended(peer, header);
        return Taken::yes;
    }
    // If we wait for this peer, what we need may be behind this record, so the pool keeps the record in any case. The
    // peer sends no more than the eager bytes of a message that is not posted here.
    if (exchange == nullptr && !draining_ && pool_.exceeds_share(peer.rank, pool_shares) && !awaits(peer.rank))
        return Taken::no_space;
    if (exchange != nullptr && record.kind == Kind::end) {
        take_end(peer, header, now);
        return Taken::yes;
    }
    Nanos& defer_until = peer.shared_memory->defer_until;
    if (exchange == nullptr || is_in_order(*exchange, header)) {
        defer_until = never;
    } else if (!draining_) {
        // Once one was taken early, so are those that follow, until one is in order again.
        if (defer_until == never) defer_until = now + longest_deferral;
        if (now < defer_until) return Taken::out_of_order;
    }
    counters_.shared_bytes_received += payload.size();
    do {
        const std::span<const std::byte> chunk = payload.first(std::min(payload.size(), chunk_bytes_));
        payload = payload.subspan(chunk.size());
        if (exchange != nullptr) {
            deliver(*exchange, peer, header, chunk, now, Carrier::memory);
        } else {
            pool_.force_keep(header, chunk);
            ++counters_.pooled;
        }
        ++header.chunk;
    } while (!payload.empty());
    if (exchange != nullptr) {
        settle(*exchange, now);
        return Taken::yes;
    }
    counters_.pool_bytes = pool_.bytes();
    counters_.pool_peak_bytes = std::max(counters_.pool_peak_bytes, counters_.pool_bytes);
    return Taken::yes;
}

bool Core::put_records(std::uint16_t rank, Nanos now) {
    if (!peers_.queued().test(rank) || peers_.idle(rank)) return false;
    Peer& peer = peers_.attempt(rank);
    RingWriter& out = peer.shared_memory->out;
    if (!uses_shared_memory(rank)) return false;
    // A run of chunks, and possibly the end of its message.
    const std::size_t needed = Record::size(std::max(run_bytes(out), chunk_bytes_)) + Record::size(0);
    bool any = false;
    for (std::size_t i = 0; i < records_per_turn; ++i) {
        Outgoing* message = peer.queue.next(config_.eager_bytes);
        std::byte* space = message == nullptr ? nullptr : out.space(needed);
        if (space == nullptr) break;
        peers_.mark(rank);
        any = true;
        if (message->encoding) stop_coding(peer, *message, now);
        if (out.publish(put_run(*message, out, space))) doorbells_.set(rank);
        Exchange& exchange = *message->exchange;
        message->release_if_done();
        if (message->released) settle(exchange, now);
    }
    return any;
}

// Puts a run of chunks that goes to several peers into the broadcast buffer; null if it must be copied into the ring.
BroadcastBuffer::Item* Core::put_in_broadcast_buffer(const Outgoing& message, const Record& record, std::uint32_t end) {
    if (!broadcast_buffer_ || !message.checksums || record.bytes < least_shelved_bytes || same_host_peers_.size() < 2)
        return nullptr;
    return broadcast_buffer_->put(message, record.chunk, end, record.bytes,
                                  [&](std::uint16_t rank) { return peers_.attempt(rank).shared_memory->out.read(); });
}

// Writes the next run of chunks of a message into a ring that has space for it; returns the bytes that it takes there.
std::size_t Core::put_run(Outgoing& message, const RingWriter& ring, std::byte* space) {
    message.extra_copies.clear();  // shared memory loses nothing
    while (!message.repairs.empty() && message.acked_chunks.test(message.repairs.front())) message.repairs.pop_front();
    const bool repair = !message.repairs.empty();
    while (!repair && message.sendable() && message.next_is_missing()) message.skip_missing();
    Record record{.message_bytes = static_cast<std::uint32_t>(message.announced),
                  .channel = message.exchange->channel,
                  .seq = message.exchange->seq,
                  .kind = Kind::data,
                  .flags = stage_flag(message.second_stage)};
    bool any = false;
    std::size_t used = 0;
    BroadcastBuffer::Item* item = nullptr;
    const auto arrives = [&](std::uint32_t chunk) {
        any = true;
        if (message.acked_chunks.set(chunk)) ++message.acked;
        record.bytes += message.layout.size(chunk);
    };
    if (repair) {
        record.chunk = message.repairs.front();
        message.repairs.pop_front();
        ++message.repaired;
        ++counters_.repaired;
        arrives(record.chunk);
    } else if (message.sendable()) {
        record.chunk = message.chunk_at(message.cursor);
        std::uint32_t next = record.chunk;
        if (broadcast_buffer_ && message.checksums) item = broadcast_buffer_->find(message, next);
        do {
            arrives(next++);
            ++message.cursor;
        } while (message.sendable() && message.chunk_at(message.cursor) == next && !message.next_is_missing() &&
                 (item == nullptr || next < item->end()) &&
                 record.bytes + message.layout.size(next) <= run_bytes(ring));
        message.eager_bytes += record.bytes;
        if (item != nullptr) {
            counters_.shelved_bytes_sent += record.bytes;
        } else {
            item = put_in_broadcast_buffer(message, record, next);
        }
    }
    if (any) {
        if (item != nullptr) {
            record.in_broadcast_buffer = 1;
            record.position = item->position(record.chunk);
        } else if (record.bytes > 0) {
            std::memcpy(space + Record::head_bytes, message.payload(record.chunk).data(), record.bytes);
        }
        record.write(space);
        counters_.shared_bytes_sent += record.bytes;
        used = record.size();
        if (item != nullptr) item->add_reader(message.peer, ring.written() + used);
    }
    // The receiver need not wait for chunks that we do not have. Those in flight by datagram may still arrive.
    const bool settled = message.acked + message.unrepaired >= message.layout.chunks;
    if (message.first_pass_over() && message.repairs.empty() && message.acked < message.layout.chunks &&
        (settled || !message.lossless())) {
        record.kind = Kind::end;
        if (settled) record.flags |= flag_repair;
        record.bytes = 0;
        record.in_broadcast_buffer = 0;
        record.write(space + used);
        used += Record::size(0);
    }
    return used;
}

}  // namespace storm
