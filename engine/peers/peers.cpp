#include "peers/peers.hpp"

#include <algorithm>

#include "exchange/message.hpp"
#include "peers/credit.hpp"

namespace storm {

Peers::Peers(std::size_t world, const Credit& credit)
    : credit_(credit),
      all_(world),
      may_have_control_(world),
      queued_(world),
      awake_(world),
      may_send_data_(world),
      control_asleep_(world),
      deferred_(world),
      stale_(world),
      needs_tick_(world),
      timers_(world * peer_timers.size()) {}

void Peers::put(std::unique_ptr<Peer> peer) {
    const std::uint16_t rank = peer->rank;
    all_[rank] = std::move(peer);
    mark(rank);
}

bool Peers::may_send_control(std::uint16_t rank, Nanos now) {
    if (look(rank).has_pending_control()) return true;
    const Nanos at = std::min(timer(rank, PeerTimer::report), timer(rank, PeerTimer::path));
    if (at <= now) return true;
    if (at == never) may_have_control_.clear(rank);
    awake_.clear(rank);
    control_asleep_.set(rank, at);
    return false;
}

void Peers::wake(Nanos now) {
    for (const Timers::Owner rank :
         control_asleep_.take_due(now, [&](Timers::Owner each) { return control_asleep_.at(each); }))
        awake_.set(rank);
    for (const Timers::Owner rank : deferred_.take_due(now, [&](Timers::Owner each) { return deferred_.at(each); }))
        may_send_data_.set(rank);
}

void Peers::defer_sending(std::uint16_t rank, Nanos until) {
    may_send_data_.clear(rank);
    deferred_.set(rank, until);
}

void Peers::queue(Outgoing& message) {
    Peer& peer = (*this)[message.peer];
    if (peer.left()) return;  // an exchange that waits across views stays open, but no process would receive this
    peer.queue.push(message);
    queued_.set(message.peer);
}

bool Peers::any_queued() {
    for (std::size_t rank = queued_.next(0); rank < all_.size(); rank = queued_.next(rank + 1)) {
        if (!idle(static_cast<std::uint16_t>(rank))) return true;
    }
    return false;
}

bool Peers::idle(std::uint16_t rank) {
    if (!look(rank).queue.empty()) return false;
    queued_.clear(rank);
    defer_sending(rank, never);
    return true;
}

std::vector<std::uint16_t> Peers::take_due(Nanos now) {
    for (const Timers::Owner owner : timers_.take_due(now, [&](Timers::Owner each) { return timer_of(each); })) {
        const auto rank = static_cast<std::uint16_t>(owner / peer_timers.size());
        stale_.set(rank);  // `take_due` has set its entry to `never`
        needs_tick_.set(rank);
    }
    std::vector<std::uint16_t> due;
    for (std::size_t rank = needs_tick_.next(0); rank < all_.size(); rank = needs_tick_.next(rank + 1)) {
        needs_tick_.clear(rank);
        if (all_[rank]->due(now)) due.push_back(static_cast<std::uint16_t>(rank));
    }
    return due;
}

Nanos Peers::next() {
    return timers_.next([&](Timers::Owner owner) { return timer_of(owner); });
}

Nanos Peers::timer(std::uint16_t rank, PeerTimer which) const {
    const Peer& peer = look(rank);
    switch (which) {
        case PeerTimer::loss: return peer.loss_timer();
        case PeerTimer::probe: return peer.probe_timer();
        case PeerTimer::path: return peer.path_timer();
        case PeerTimer::report: return peer.report_timer(credit_.bytes(rank));
        case PeerTimer::unreachable: return peer.unreachable_timer();
    }
    return never;
}

void Peers::update(std::uint16_t rank) {
    for (const PeerTimer each : peer_timers) {
        const auto owner = static_cast<Timers::Owner>(rank * peer_timers.size() + static_cast<std::size_t>(each));
        timers_.set(owner, timer(rank, each));
    }
}

}  // namespace storm
