// The largest datagram that one path carries now, found by probes as RFC 8899 does it, without a word from routers.
//
// A job's datagrams fit the interfaces of its ranks, but not always what lies between: a tunnel, a VPN, an MTU that
// somebody lowers in mid-run. There small datagrams pass and large ones vanish. A run of large ones that are all lost
// starts a search: probes of several sizes, in rounds, until either a large one arrives after all or chance no longer
// explains their loss. Then the largest size that arrived is what the path carries, and from time to time larger ones are
// tried again. Loss alone never shrinks a path: the search compares large datagrams with small ones sent at the same time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "clock.hpp"

namespace storm {

class PathMtu {
public:
    // `most`: the size of the job's datagrams, with which the path begins. `least`: smaller ones always pass, or nothing does.
    PathMtu(std::size_t least, std::size_t most);

    // The largest datagram to send now.
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    [[nodiscard]] std::size_t least() const { return least_; }
    // What became of a datagram of this size that carried data or was a probe. Of many that a report tells of at once, the
    // order of sending counts: what was sent before one that arrived was lost by chance.
    void on_acked(std::size_t bytes, Nanos sent_at);
    void on_lost(std::size_t bytes, Nanos sent_at, Nanos now);
    // Our own interface does not take this size, so there is no need to wait for losses.
    void on_refused(std::size_t bytes, Nanos now);

    // The size of the probe that is due, which counts as sent; 0 if none is. `in_use`: somebody has something to send, so
    // that it pays to look for a larger size again. `patience`: how long an answer may take.
    [[nodiscard]] std::size_t take_probe(bool in_use, Nanos patience, Nanos now);
    // Judges a round of probes that is over; true if the path carries less than was thought, or more.
    [[nodiscard]] bool tick(Nanos now);
    // Whether `tick` would do anything now.
    [[nodiscard]] bool due(Nanos now) const { return now >= judge_at_ || bytes_ != announced_; }
    // When to call these at the latest.
    [[nodiscard]] Nanos timer(bool in_use) const;

private:
    enum class Phase : std::uint8_t { trusting, searching, climbing };

    void suspect(Nanos now);
    void begin_round(Phase phase, Nanos now);
    void settle();
    [[nodiscard]] bool chance_explains() const;

    std::size_t least_, most_, bytes_;
    std::vector<std::size_t> sizes_;  // of the probes of a round, rising
    Phase phase_{Phase::trusting};
    // The run of losses: how many datagrams of the largest size that was lost, and since when; none of that size arrived.
    std::size_t lost_bytes_{};
    std::uint32_t lost_{};
    Nanos lost_since_{}, lost_at_{};
    // A large datagram that arrived, and when it was sent.
    std::size_t passed_bytes_{};
    Nanos passed_at_{};
    // The search: what is still to be sent of this round, and how many probes of each size were sent and arrived so far.
    std::size_t next_{};
    Nanos send_at_{never}, judge_at_{never};
    std::size_t best_{};  // the largest that arrived
    std::vector<std::uint32_t> sent_, arrived_;
    unsigned rounds_{};
    std::size_t announced_;  // what the last `tick` knew
    Nanos climb_at_{never}, climb_every_, narrowed_at_{};
};

}  // namespace storm
