// All peers of an endpoint, their timers, and which of them have something to send.
//
// `operator[]` is the only way to change a peer, and it marks the peer. Only marked peers are looked at, so with a
// thousand peers of which one sends, the cost is that of one; and no change is missed.
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
    probe,       // nothing in flight was acknowledged: send a probe
    path,        // a path MTU probe is to be sent or judged
    report,      // what arrived is to be acknowledged
    unreachable  // its kernel reports its port closed: ping it again
};
inline constexpr std::array peer_timers{PeerTimer::loss, PeerTimer::probe, PeerTimer::path, PeerTimer::report,
                                        PeerTimer::unreachable};

class Peers {
public:
    // `credit` decides when reports are due.
    Peers(std::size_t world, const Credit& credit);

    // Replaces the peer of this rank.
    void put(std::unique_ptr<Peer> peer);
    // Null at our own rank. Throws std::out_of_range beyond the world.
    [[nodiscard]] const Peer* find(std::uint16_t rank) const { return all_.at(rank).get(); }
    [[nodiscard]] const Peer& look(std::uint16_t rank) const { return *all_[rank]; }
    // For a change: marks the peer.
    [[nodiscard]] Peer& operator[](std::uint16_t rank) {
        mark(rank);
        return *all_[rank];
    }
    // For an attempt to send that may send nothing: does not mark the peer. The caller must mark it after a change.
    [[nodiscard]] Peer& attempt(std::uint16_t rank) { return *all_[rank]; }
    void mark(std::uint16_t rank) {
        may_have_control_.set(rank);
        awake_.set(rank);
        may_send_data_.set(rank);
        stale_.set(rank);
        needs_tick_.set(rank);
    }
    [[nodiscard]] std::size_t world() const { return all_.size(); }

    // Peers to which a control datagram or a probe may have to be sent, now or later. No other peer has one waiting.
    [[nodiscard]] const Bitmap& may_have_control() const { return may_have_control_; }
    // The `may_have_control` peers that were marked, or whose time came, since they last had nothing to send. With a
    // thousand peers, looking at all of them for every datagram would take most of the time. Call `wake` first.
    [[nodiscard]] const Bitmap& awake() const { return awake_; }
    void wake(Nanos now);
    // Whether a control datagram may have to be sent now. A peer with nothing to send now is no longer `awake`; one
    // with nothing to send later either is no longer `may_have_control`.
    [[nodiscard]] bool may_send_control(std::uint16_t rank, Nanos now);
    // Peers whose queue may hold messages. The queues of all others are empty.
    [[nodiscard]] const Bitmap& queued() const { return queued_; }
    // Whether any queue holds a message.
    [[nodiscard]] bool any_queued();
    // Puts a message into the queue of its peer.
    void queue(Outgoing& message);
    // Whether the peer's queue is empty; if so, it is no longer among `queued`.
    [[nodiscard]] bool idle(std::uint16_t rank);
    // Peers to which data may be sent: marked since `defer_sending`, or their time has come. Call `wake` first.
    [[nodiscard]] const Bitmap& may_send_data() const { return may_send_data_; }
    // No data is sent to this peer until it is marked or this time has come.
    void defer_sending(std::uint16_t rank, Nanos until);
    // Ends all deferrals.
    void clear_deferrals() { may_send_data_.add(queued_); }
    // When the first deferral ends.
    [[nodiscard]] Nanos deferred_until() const { return deferred_.earliest(); }

    // Peers that need a tick, in rising order. Looks only at those marked since the last call or with a due timer.
    [[nodiscard]] std::vector<std::uint16_t> take_due(Nanos now);
    // Calls `visit(rank)` for each peer that was marked since the last call, and brings its timers up to date.
    template <class Visit>
    void refresh(Visit&& visit);
    // The credit of peers may have shrunk, so reports are due earlier.
    void credit_shrank() {
        stale_.add(may_have_control_);
        awake_.add(may_have_control_);
    }
    // When the next timer of any peer is due. Call `refresh` first.
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
    Timers control_asleep_, deferred_;  // by rank: until when its controls, or its queue, need not be looked at
    Bitmap stale_;                      // changed since their timers were computed
    Bitmap needs_tick_;                 // changed since the last `take_due`
    Timers timers_;                     // for each rank, in the order of `peer_timers`
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
