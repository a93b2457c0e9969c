// Path MTU discovery (RFC 8899): finds the largest datagram that one path carries now by probes, without ICMP messages.
//
// A job's datagrams fit the interfaces of its ranks, but not always what lies between: a tunnel, a VPN, an MTU that is
// lowered in mid-run. There small datagrams pass and large ones vanish. A run of large ones that are all lost starts a
// search: probes of several sizes, in rounds, until either a large one arrives after all or chance no longer explains
// their loss. Then the largest size that arrived is what the path carries, and from time to time larger ones are tried
// again. Loss alone never shrinks a path: the search compares large datagrams with small ones sent at the same time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.hpp"

namespace storm {

class PathMtu {
public:
    // `most`: the size of the job's datagrams, which the path is assumed to carry at first. `least`: the smallest size
    // ever used; a path that does not carry it is useless.
    PathMtu(std::size_t least, std::size_t most);

    // The largest datagram to send now.
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    [[nodiscard]] std::size_t least() const { return least_; }
    // A datagram of this size, data or a probe, arrived or was lost. A report names many at once, so the order of
    // sending decides: a datagram that was sent before one that arrived was lost by chance.
    void on_acked(std::size_t bytes, Nanos sent_at);
    void on_lost(std::size_t bytes, Nanos sent_at, Nanos now);
    // Our own interface refuses this size, so there is no need to wait for losses.
    void on_refused(std::size_t bytes, Nanos now);

    // The size of the probe to send now, which counts as sent; 0 if none is due. `in_use`: messages wait for this peer,
    // so that a larger size would help. `probe_timeout`: how long an answer may take.
    [[nodiscard]] std::size_t take_probe(bool in_use, Nanos probe_timeout, Nanos now);
    // Evaluates a round of probes that is over. True if the size that the path carries has changed since the last call.
    [[nodiscard]] bool tick(Nanos now);
    // Whether `tick` would do anything now.
    [[nodiscard]] bool due(Nanos now) const { return now >= judge_at_ || bytes_ != announced_; }
    // When to call `take_probe` and `tick` at the latest.
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
    // The current run of losses: the largest size lost, how many of that size, and since when. None of that size
    // arrived.
    std::size_t lost_bytes_{};
    std::uint32_t lost_{};
    Nanos lost_since_{}, lost_at_{};
    // A large datagram that arrived, and when it was sent.
    std::size_t passed_bytes_{};
    Nanos passed_at_{};
    // The search: the next probe of this round, and how many probes of each size were sent and arrived so far.
    std::size_t next_{};
    Nanos send_at_{never}, judge_at_{never};
    std::size_t best_{};  // the largest that arrived
    std::vector<std::uint32_t> sent_, arrived_;
    unsigned rounds_{};
    std::size_t announced_;  // as of the last `tick`
    Nanos climb_at_{never}, climb_every_, narrowed_at_{};
};

}  // namespace storm
