#include "peers/peers.hpp"

#include <algorithm>

#include "exchange/message.hpp"
#include "peers/credit.hpp"

namespace storm {

Peers::Peers(std::size_t world, const Credit& credit)
    : credit_(credit),
      all_(world),
      talkative_(world),
      queued_(world),
      awake_(world),
      untried_(world),
      quiet_(world),
      refused_(world),
      stale_(world),
      unticked_(world),
      timers_(world * peer_timers.size()) {}

void Peers::put(std::unique_ptr<Peer> peer) {
    const std::uint16_t rank = peer->rank;
    all_[rank] = std::move(peer);
    mark(rank);
}

bool Peers::speaks(std::uint16_t rank, Nanos now) {
    if (look(rank).has_words()) return true;
    const Nanos at = std::min(timer(rank, PeerTimer::report), timer(rank, PeerTimer::path));
    if (at <= now) return true;
    if (at == never) talkative_.clear(rank);
    awake_.clear(rank);
    quiet_.set(rank, at);
    return false;
}

void Peers::wake(Nanos now) {
    for (const Timers::Owner rank : quiet_.take_due(now, [&](Timers::Owner each) { return quiet_.at(each); }))
        awake_.set(rank);
    for (const Timers::Owner rank : refused_.take_due(now, [&](Timers::Owner each) { return refused_.at(each); }))
        untried_.set(rank);
}

void Peers::refused(std::uint16_t rank, Nanos until) {
    untried_.clear(rank);
    refused_.set(rank, until);
}

void Peers::queue(Outgoing& message) {
    Peer& peer = (*this)[message.peer];
    if (peer.left()) return;  // a patient exchange still waits, but nobody is there
    peer.queue.push(message);
    queued_.set(message.peer);
}

bool Peers::queueing() {
    for (std::size_t rank = queued_.next(0); rank < all_.size(); rank = queued_.next(rank + 1)) {
        if (!idle(static_cast<std::uint16_t>(rank))) return true;
    }
    return false;
}

bool Peers::idle(std::uint16_t rank) {
    if (!look(rank).queue.empty()) return false;
    queued_.clear(rank);
    refused(rank, never);
    return true;
}

std::vector<std::uint16_t> Peers::take_due(Nanos now) {
    for (const Timers::Owner owner : timers_.take_due(now, [&](Timers::Owner each) { return timer_of(each); })) {
        const auto rank = static_cast<std::uint16_t>(owner / peer_timers.size());
        stale_.set(rank);  // its entry was taken out
        unticked_.set(rank);
    }
    std::vector<std::uint16_t> due;
    for (std::size_t rank = unticked_.next(0); rank < all_.size(); rank = unticked_.next(rank + 1)) {
        unticked_.clear(rank);
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
        case PeerTimer::doubt: return peer.doubt_timer();
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
