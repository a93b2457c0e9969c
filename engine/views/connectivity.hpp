// Who hears whom, as one process knows it, and the choice of those that all hear each other.
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

    // Something came from that process. What comes after its goodbye is old, and says nothing.
    void on_received(std::uint16_t rank, Nanos now);
    void on_goodbye(std::uint16_t rank);
    void blocked(std::uint16_t rank, Nanos now);
    // Another process has the slot: nothing that was known of it holds.
    void reset(std::uint16_t rank);
    // Takes it for heard just now: it has a whole silence from here on to show that it is there.
    void trust(std::uint16_t rank, Nanos now);
    // That process says whom it hears.
    void report(std::uint16_t rank, const Ranks& reachable, Nanos now);
    // This process did not run for a while: what it has not heard meanwhile may still wait in its queues.
    void slept(Nanos now);

    // Looks who has fallen silent by now. Costs nothing before `next_silence`.
    void refresh(Nanos now);
    [[nodiscard]] Nanos next_silence() const { return next_; }
    [[nodiscard]] bool changed() const { return changed_; }
    // Whether anything has changed since the last call.
    [[nodiscard]] bool take_changed() { return std::exchange(changed_, false); }

    // Whom this process hears, itself included.
    [[nodiscard]] const Ranks& reachable() const { return reports_[own_].reachable; }
    [[nodiscard]] const Ranks& left() const { return left_; }
    [[nodiscard]] std::optional<Nanos> last_received_at(std::uint16_t rank) const;
    // Whom a process says that it hears; nobody, as long as it has said nothing.
    [[nodiscard]] const Ranks& reported(std::uint16_t rank) const { return reports_[rank].reachable; }
    // Whether both ends hear each other; where one has said nothing, the other decides.
    [[nodiscard]] bool good(std::uint16_t a, std::uint16_t b) const;
    // Whether the links of `who` to all others of the set are good.
    [[nodiscard]] bool good(std::uint16_t who, const Ranks& others) const;
    // Drops the one with most bad links until none is left. Of several, one that is `dispensable` goes first, then the
    // highest rank: all who know the same choose the same.
    [[nodiscard]] Ranks choose(Ranks from, const Ranks& dispensable) const;

private:
    struct ReachabilityReport {
        Ranks reachable;
        Nanos at{};  // when it was said
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
