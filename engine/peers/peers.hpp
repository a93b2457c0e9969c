// All peers of an endpoint, and which of them must be looked at: their timers, and whether they have something to send.
//
// Whoever changes a peer gets it by `operator[]`, which marks it. So with a thousand peers of which one sends, only that
// one is looked at; and nothing is forgotten, as there is no other way to change a peer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/bitmap.hpp"
#include "base/clock.hpp"
#include "base/timers.hpp"
#include "peers/peer.hpp"

namespace storm {

class Credit;

// The timers of one peer.
enum class PeerTimer : std::uint8_t {
    loss,        // a datagram in flight counts as lost
    probe,       // nothing was heard of what is in flight: ask with a ping
    path,        // a probe of the path's size is to be sent or judged
    report,      // what arrived is to be reported
    unreachable  // its machine says that nobody listens there: ask again
};
inline constexpr std::array peer_timers{PeerTimer::loss, PeerTimer::probe, PeerTimer::path, PeerTimer::report,
                                        PeerTimer::unreachable};

class Peers {
public:
    // `credit` decides when reports are due.
    Peers(std::size_t world, const Credit& credit);

    // The peer of this rank becomes another one.
    void put(std::unique_ptr<Peer> peer);
    // Null at our own rank. Throws std::out_of_range beyond the world.
    [[nodiscard]] const Peer* find(std::uint16_t rank) const { return all_.at(rank).get(); }
    [[nodiscard]] const Peer& look(std::uint16_t rank) const { return *all_[rank]; }
    // For a change: marks the peer.
    [[nodiscard]] Peer& operator[](std::uint16_t rank) {
        mark(rank);
        return *all_[rank];
    }
    // For an attempt to send that may come to nothing: whoever sends or says something then marks the peer.
    [[nodiscard]] Peer& attempt(std::uint16_t rank) { return *all_[rank]; }
    void mark(std::uint16_t rank) {
        may_have_control_.set(rank);
        awake_.set(rank);
        may_send_data_.set(rank);
        stale_.set(rank);
        needs_tick_.set(rank);
    }
    [[nodiscard]] std::size_t world() const { return all_.size(); }

    // Peers to which a control datagram or a probe may have to be sent, now or later: no other peer has one waiting.
    [[nodiscard]] const Bitmap& may_have_control() const { return may_have_control_; }
    // The `may_have_control` peers that were marked, or whose time came, since they last had nothing to send: with a thousand peers
    // to report to, looking at all of them for every datagram would take most of the time. `wake` must come first.
    [[nodiscard]] const Bitmap& awake() const { return awake_; }
    void wake(Nanos now);
    // Whether one may have to be sent now. A peer with nothing to send now is no longer `awake`, and one with nothing to send
    // later either is no longer `may_have_control`.
    [[nodiscard]] bool may_send_control(std::uint16_t rank, Nanos now);
    // Peers whose queue may hold messages: no other peer's queue does.
    [[nodiscard]] const Bitmap& queued() const { return queued_; }
    // Whether any queue holds a message.
    [[nodiscard]] bool any_queued();
    // Puts a message into the queue of its peer.
    void queue(Outgoing& message);
    // Whether the peer's queue is empty; if so, it is no longer among `queued`.
    [[nodiscard]] bool idle(std::uint16_t rank);
    // Peers to which data may be let go: those that were marked, or whose time came, since they were `defer_sending`. `wake` must
    // come first.
    [[nodiscard]] const Bitmap& may_send_data() const { return may_send_data_; }
    // No data may leave to this peer until it is marked or this time has come.
    void defer_sending(std::uint16_t rank, Nanos until);
    // Refusals do not count any more.
    void clear_deferrals() { may_send_data_.add(queued_); }
    // When the first of those that were refused may be tried again.
    [[nodiscard]] Nanos deferred_until() const { return deferred_.earliest(); }

    // Peers that need a tick, in rising order: only those marked since the last call and those with a timer that is due
    // are looked at.
    [[nodiscard]] std::vector<std::uint16_t> take_due(Nanos now);
    // Calls `visit(rank)` for each peer that was marked since the last call, and brings its timers up to date.
    template <class Visit>
    void refresh(Visit&& visit);
    // The credit of peers may have become smaller, so that reports are due earlier.
    void credit_shrank() {
        stale_.add(may_have_control_);
        awake_.add(may_have_control_);
    }
    // When the next timer of any peer is due. `refresh` must come first.
    [[nodiscard]] Nanos next();
    [[nodiscard]] Nanos timer(std::uint16_t rank, PeerTimer which) const;

private:
    [[nodiscard]] Nanos timer_of(Timers::Owner owner) const {
        return timer(static_cast<std::uint16_t>(owner / peer_timers.size()), peer_timers[owner % peer_timers.size()]);
    }
    void update(std::uint16_t rank);

    const Credit& credit_;
    std::vector<std::unique_ptr<Peer>> all_;  // by rank; null at our own
    Bitmap may_have_control_, queued_;
    Bitmap awake_, may_send_data_;
    Timers control_asleep_, deferred_;  // by rank: until when a peer that is talkative or queued need not be looked at
    Bitmap stale_;                      // changed since their timers were computed
    Bitmap needs_tick_;                 // changed since the last `take_due`
    Timers timers_;                     // of each rank, in the order of `peer_timers`
};

template <class Visit>
void Peers::refresh(Visit&& visit) {
    for (std::size_t rank = stale_.next(0); rank < all_.size(); rank = stale_.next(rank + 1)) {
        stale_.clear(rank);
        update(static_cast<std::uint16_t>(rank));
        visit(static_cast<std::uint16_t>(rank));
    }
}

}  // namespace storm
