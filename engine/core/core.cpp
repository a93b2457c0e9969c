// The start of an endpoint, its peers and its exchanges, and the statistics of its links.
#include "core/core.hpp"

#include <algorithm>
#include <stdexcept>

#include "peers/peer.hpp"

namespace storm {

std::size_t Core::chunk_bytes_for(std::size_t datagram_bytes, bool sealed) {
    const std::size_t overhead = header_bytes + (sealed ? tag_bytes : 0);
    return datagram_bytes > overhead ? (datagram_bytes - overhead) / 16 * 16 : 0;
}

Core::Core(CoreConfig config, Nanos now)
    : config_(std::move(config)),
      chunk_bytes_(chunk_bytes_for(config_.datagram_bytes, config_.secrets.sealed)),
      seal_(config_.secrets, config_.rank, config_.world),
      blocks_(chunk_bytes_, 64 << 20),
      coding_memory_(blocks_, config_.pool_bytes / 2, config_.world),
      pool_(config_.pool_bytes, config_.world > 1 ? config_.world - 1U : 1U),
      credit_(config_.receive_buffer, config_.world),
      bottleneck_(config_.world, now, config_.paths),
      sequences_(config_.lane != 0),
      failure_causes_(config_.rank, config_.silence),
      peers_(config_.world, credit_),
      due_at_(peers_, config_.silence),
      doorbells_(config_.world) {
    if (config_.world == 0 || config_.rank >= config_.world)
        throw std::invalid_argument("rank must be below world, got rank " + std::to_string(config_.rank) + " of " +
                                    std::to_string(config_.world));
    if (config_.datagram_bytes < 128 || config_.datagram_bytes > max_datagram_bytes) {
        throw std::invalid_argument("datagram_bytes must lie in [128, 65507], got " +
                                    std::to_string(config_.datagram_bytes));
    }
    if (config_.paths == 0 || config_.paths > most_paths || config_.world * std::size_t{config_.paths} > 0xffff)
        throw std::invalid_argument("paths must lie in [1, 4], and world times paths below 65536");
    if (!config_.peer_paths.empty() && config_.peer_paths.size() != config_.world)
        throw std::invalid_argument("peer_paths must have one entry per rank");
    // A report with one word must fit.
    if (config_.least_path_bytes < header_bytes + tag_bytes + Report::fixed_bytes + 8)
        throw std::invalid_argument("least_path_bytes must be at least 88");
    if (config_.rate_mode == RateMode::fixed) {
        if (!(config_.bytes_per_s > 0)) throw std::invalid_argument("rate must be above 0 bytes per second");
        // The burst makes up for late wakeups: two milliseconds at the rate, or two datagrams if that is more. After a
        // pause it is a tenth of a millisecond: all ranks start at the same time, and switches queue little more.
        const double least = 2.0 * static_cast<double>(config_.datagram_bytes);
        Pacer pacer(config_.bytes_per_s, std::max(config_.bytes_per_s * 0.002, least), now);
        pacer.set_rest(std::max(config_.bytes_per_s * 0.0001, least));
        shared_pacers_.assign(config_.paths, pacer);
    }
    for (const std::uint16_t rank : config_.vacant) {
        if (rank >= config_.world || rank == config_.rank)
            throw std::invalid_argument("a vacant rank must be another rank of the world");
        credit_.remove_peer(rank);
    }
    pool_.set_peers(std::max<std::size_t>(credit_.peers(), 1));
    coding_memory_.set_peers(credit_.peers());
    for (std::uint16_t rank = 0; rank < config_.world; ++rank) {
        const std::size_t paths = config_.peer_paths.empty() ? config_.paths : config_.peer_paths[rank];
        if (rank != config_.rank) peers_.put(make_peer(rank, paths, now));
    }
    for (const std::uint16_t rank : config_.vacant) {
        peers_[rank].vacant = true;
        peers_[rank].leave({rank, Status::peer_left});
    }
}

Core::~Core() = default;

// Only paths that both ranks have are used.
std::unique_ptr<Peer> Core::make_peer(std::uint16_t rank, std::size_t paths, Nanos now) const {
    return std::make_unique<Peer>(rank, credit_.idle_bytes(), make_rate(now), make_path(), chunk_bytes_, now,
                                  std::clamp<std::size_t>(paths, 1, config_.paths), config_.silence);
}

PathMtu Core::make_path() const {
    const std::size_t overhead = header_bytes + seal_.overhead_bytes();
    return {std::max(config_.least_path_bytes, PieceLayout::least_datagram(chunk_bytes_, overhead)),
            config_.datagram_bytes};
}

RateControl Core::make_rate(Nanos now) const {
    return {config_.rate_mode, config_.datagram_bytes, now, std::max<std::size_t>(credit_.peers(), 1),
            config_.yield_delay};
}

std::uint64_t Core::post(const ExchangeSpec& spec, Nanos now) {
    validate(spec, config_.rank, config_.world);
    if (spec.view != 0 && config_.lane == 0) (void)views(now);
    sequences_.post(spec.channel, spec.seq);
    Exchange& exchange = exchanges_.add(std::make_unique<Exchange>(spec, chunk_bytes_, blocks_, now));
    begin_sends(exchange);
    if (bottleneck_.due(now)) share_bottleneck(now);
    for (const Incoming& message : exchange.receives) {
        if (credit_.open(message.peer)) peers_.credit_shrank();
        Peer& peer = peers_[message.peer];
        if (peer.silent()) peer.queue_control({.kind = Kind::ping});
    }
    take_pooled(exchange, now);
    begin_receives(exchange, now);
    drop_non_members(exchange);
    exchange.timers.set_all([&](Timers::Owner timer) { return due_at_(exchange, timer); });
    exchanges_.timers_changed(exchange);
    const std::uint64_t id = exchange.id;
    settle(exchange, now);
    return id;
}

void Core::begin_sends(Exchange& exchange) {
    // Each rank starts with the rank after it, so that only one rank at a time sends to any receiver (no incast).
    if (!peers_.any_queued()) next_rank_ = config_.rank + 1U;
    for (Outgoing& message : exchange.sends) {
        message.ref = slots_.add(message);
        Peer& peer = peers_[message.peer];
        if (peer.silent()) peer.queue_control({.kind = Kind::ping});  // its answer ends its silence
        const bool lossy = exchange.lossy(message.second_stage);
        if (exchange.waits_across_views()) {
            peers_.queue(message);
        } else if (peer.left() && !lossy) {
            exchange.fail(Status::peer_left, peer.rank, message.layout.bytes, peer.leave_cause());
        } else if (peer.left() || (peer.silent() && lossy)) {
            message.release();
        } else {
            peers_.queue(message);
        }
    }
}

// Delivers pooled chunks and controls, which arrived before the exchange was posted here.
void Core::take_pooled(Exchange& exchange, Nanos now) {
    for (Pool::Entry& entry : pool_.take(exchange.channel, exchange.seq)) {
        Peer& peer = peers_[entry.header.source];
        if (entry.header.kind == Kind::end) {
            on_end(exchange, peer, entry.header.has(flag_second_stage), now);
        } else if (entry.header.kind == Kind::ready) {
            on_control(exchange, peer, entry.header, now);
        } else if (entry.header.kind == Kind::failed) {
            // The pool only keeps `failed` headers with a valid failure cause.
            on_peer_failed(exchange, peer, *parse_failure_cause(entry.header, config_.world));
        } else {
            deliver(exchange, peer, entry.header, {entry.payload.get(), entry.bytes}, now, Carrier::datagram);
        }
    }
    counters_.pool_bytes = pool_.bytes();
    for (const std::uint16_t rank : same_host_peers_) peers_[rank].shared_memory->stalled = false;
}

void Core::begin_receives(Exchange& exchange, Nanos now) {
    for (Incoming& message : exchange.receives) {
        if (message.closed) continue;
        Peer& peer = peers_[message.peer];
        const bool lossy = exchange.lossy(message.second_stage), waits_across_views = exchange.waits_across_views();
        if (peer.left() && !lossy && !waits_across_views) {
            exchange.fail(Status::peer_left, peer.rank, message.missing_bytes(), peer.leave_cause());
        } else if (!waits_across_views && (peer.left() || (peer.silent() && lossy))) {
            close(exchange, message, false);
        } else {
            message.ready_every =
                std::min(std::max(8 * peer.links.probe_timeout(), 100 * millisecond), longest_ready_interval());
            message.ready_at = now + message.ready_every;
            if (message.layout.bytes > config_.eager_bytes || peer.pool_was_full) {
                peer.queue_control({.kind = Kind::ready, .channel = exchange.channel, .seq = exchange.seq});
            }
        }
    }
}

void Core::cancel(std::uint64_t id, Nanos now) {
    if (Exchange* exchange = exchanges_.find(id)) finish(*exchange, Status::closed, now);
}

void Core::fail(std::uint64_t id, Status status, std::uint16_t peer, FailureCause failure_cause, Nanos now) {
    Exchange* exchange = exchanges_.find(id);
    if (exchange == nullptr) return;
    exchange->fail(status, peer, 0, failure_cause);
    settle(*exchange, now);
}

void Core::leave() {
    for (std::uint16_t rank = 0; rank < config_.world; ++rank) {
        if (rank != config_.rank)
            peers_[rank].queue_control({.kind = Kind::bye, .failure_cause = failure_causes_.last()});
    }
}

bool Core::goodbye_acknowledged() const {
    // No acknowledgement is awaited from a peer that others report as silent, unless something has arrived from it
    // since; nor from a peer that is not in the latest view.
    for (std::uint16_t rank = 0; rank < config_.world; ++rank) {
        const Peer* peer = peers_.find(rank);
        if (peer == nullptr || peer->left() || peer->goodbye_acked || peer->silent()) continue;
        if (view_ && !view_->has(member(rank))) continue;
        if (!failure_causes_.silenced(rank, peer->last_received())) return false;
    }
    return true;
}

void Core::readmit(std::uint16_t rank, std::uint32_t incarnation, const std::optional<LinkKeys>& keys, Nanos now,
                   std::size_t paths) {
    if (rank >= config_.world || rank == config_.rank)
        throw std::invalid_argument("a peer must be another rank of the world");
    // Packet numbers start from scratch, and none may be used twice between the same two processes.
    if (incarnation <= seal_.incarnation(rank)) {
        throw std::invalid_argument("incarnation " + std::to_string(incarnation) + " of rank " + std::to_string(rank) +
                                    " is not newer than " + std::to_string(seal_.incarnation(rank)));
    }
    seal_.readmit(rank, incarnation, keys);
    pool_.forget(rank);
    counters_.pool_bytes = pool_.bytes();
    exchanges_.each([&](Exchange& exchange) {
        if (exchange.waits_across_views()) {
            drop_peer(exchange, rank);
        } else {
            abort_with_peer(exchange, peers_[rank], Status::peer_silent, {rank, Status::peer_silent});
        }
        settle(exchange, now);
    });
    // Messages queued for the old process are dropped: the new process must not receive them.
    peers_[rank].queue.clear();
    std::erase(same_host_peers_, rank);
    doorbells_.clear(rank);
    if (broadcast_buffer_) broadcast_buffer_->forget(rank);
    std::erase(config_.vacant, rank);
    credit_.add_peer(rank);
    count_peers();
    peers_.put(make_peer(rank, paths == 0 ? config_.paths : paths, now));
    if (!views_) return;
    views_->readmitted(member(rank), now);
    on_views_changed(now);
}

// Peers joined or left: divides the memory for what they send again.
void Core::count_peers() {
    pool_.set_peers(std::max<std::size_t>(credit_.peers(), 1));
    coding_memory_.set_peers(credit_.peers());
    peers_.credit_shrank();
}

Nanos Core::round_trip(std::uint16_t peer) const {
    const Peer* known = peers_.find(peer);
    return known == nullptr ? 0 : known->links.round_trip();
}

double Core::loss_from(std::uint16_t peer) const {
    const Peer* known = peers_.find(peer);
    if (known == nullptr) return 0.0;
    double arrived = 0, sent = 0;
    for (const Link& link : known->links) {
        arrived += static_cast<double>(link.in.arrived());
        sent += static_cast<double>(link.in.largest());
    }
    return sent > 0 ? 1.0 - arrived / sent : 0.0;
}

double Core::rate_to(std::uint16_t peer) const {
    const Peer* known = peers_.find(peer);
    return known == nullptr ? 0.0 : known->links.bytes_per_s();
}

std::optional<PathMetrics> Core::path_metrics(std::uint16_t peer, std::size_t path) const {
    const Peer* known = peers_.find(peer);
    return known == nullptr || path >= known->links.size() ? std::nullopt : known->links[path].rate.metrics();
}

void Core::recall(std::uint16_t peer, const PathMetrics& metrics, std::size_t path) {
    if (peers_.find(peer) != nullptr && path < peers_[peer].links.size()) peers_[peer].links[path].rate.recall(metrics);
}

std::size_t Core::path_bytes(std::uint16_t peer) const {
    const Peer* known = peers_.find(peer);
    std::size_t least = config_.datagram_bytes;
    if (known == nullptr) return least;
    for (const Link& link : known->links) least = std::min(least, link.path.bytes());
    return least;
}

std::vector<PathHealth> Core::paths_to(std::uint16_t peer) const {
    const Peer* known = peers_.find(peer);
    return known == nullptr ? std::vector<PathHealth>{} : known->links.health();
}

}  // namespace storm
