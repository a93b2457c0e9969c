// Failure detector: which ranks can reach which, as one process knows it, and the choice of members that can all reach
// each other.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/ranks.hpp"

namespace storm {

class Connectivity {
public:
    Connectivity(std::uint16_t own_rank, std::uint16_t capacity, Nanos silence);

    // A datagram arrived from that process. What arrives after its goodbye is old and is ignored.
    void on_received(std::uint16_t rank, Nanos now);
    void on_goodbye(std::uint16_t rank);
    void blocked(std::uint16_t rank, Nanos now);
    // Another process has the slot: forgets what was known of the old one.
    void reset(std::uint16_t rank);
    // Treats it as reachable from now on: it has one silence to send something.
    void trust(std::uint16_t rank, Nanos now);
    // That process reports which ranks it can reach.
    void report(std::uint16_t rank, const Ranks& reachable, Nanos now);
    // This process did not run for a while: datagrams that arrived meanwhile may still be in its queues.
    void slept(Nanos now);

    // Finds ranks that have fallen silent by now. Costs nothing before `next_silence`.
    void refresh(Nanos now);
    [[nodiscard]] Nanos next_silence() const { return next_; }
    [[nodiscard]] bool changed() const { return changed_; }
    // Whether anything has changed since the last call.
    [[nodiscard]] bool take_changed() { return std::exchange(changed_, false); }

    // The ranks that are reachable from this process, itself included.
    [[nodiscard]] const Ranks& reachable() const { return reports_[own_].reachable; }
    [[nodiscard]] const Ranks& left() const { return left_; }
    [[nodiscard]] std::optional<Nanos> last_received_at(std::uint16_t rank) const;
    // The ranks that a process reports as reachable; empty as long as no report has arrived.
    [[nodiscard]] const Ranks& reported(std::uint16_t rank) const { return reports_[rank].reachable; }
    // Whether both ends can reach each other. Where one has reported nothing, the report of the other decides.
    [[nodiscard]] bool good(std::uint16_t a, std::uint16_t b) const;
    // Whether the links of `who` to all others of the set are good.
    [[nodiscard]] bool good(std::uint16_t who, const Ranks& others) const;
    // Drops the rank with the most bad links until no bad link is left. Among equals, a `dispensable` rank goes first,
    // then the highest rank. The result is deterministic: processes with the same knowledge choose the same.
    [[nodiscard]] Ranks choose(Ranks from, const Ranks& dispensable) const;

private:
    struct ReachabilityReport {
        Ranks reachable;
        Nanos at{};  // when it arrived
        bool received{};
    };

    std::uint16_t own_;
    Nanos silence_;
    Nanos next_{never};
    bool changed_{true};
    Ranks left_;
    std::vector<Nanos> last_received_at_, blocked_until_;  // by rank; `never_received` if never
    std::vector<ReachabilityReport> reports_;              // by rank
};

}  // namespace storm
