// A view (epoch, configuration): the numbered list of members that processes agree on, their quorum (which of them may
// decide the next view), and where their sessions start.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include "base/ranks.hpp"

namespace storm {

// A process: its slot, and how many processes had the slot before (fencing).
struct Member {
    std::uint16_t rank{};
    std::uint32_t incarnation{};
    auto operator<=>(const Member&) const = default;
};

// The position of one session of a process.
struct Position {
    std::uint32_t session{};
    std::uint64_t steps{};    // steps that are complete; a frozen process completes no further step
    std::uint32_t settled{};  // the latest view that all its members are known to have applied, for this session
    bool operator==(const Position&) const = default;
};

// Where a session starts in a view: the most steps and the latest settled view among the processes that had the session
// and were in the view before.
struct Start {
    std::uint32_t session{};
    std::uint64_t steps{};
    std::uint32_t base{};
    bool operator==(const Start&) const = default;
};

struct View {
    std::uint32_t number{};
    std::vector<Member> members{};  // by rising rank
    std::vector<Member> joined{};   // members that were not in the view before: they hold none of its state
    Ranks blank{};  // members that hold no state: they joined now, or earlier and have not settled since
    std::vector<Member> leaving{};  // no longer members: they transfer the shards that they own, then leave
    std::vector<Start> starts{};    // by rising session

    [[nodiscard]] bool has(Member who) const;         // among the members
    [[nodiscard]] bool is_leaving(Member who) const;  // among the leaving processes
    [[nodiscard]] bool has_joined(Member who) const;
    [[nodiscard]] const Member* at(std::uint16_t rank) const;  // the member with that rank, if any
    [[nodiscard]] const Start* start(std::uint32_t session) const;
    [[nodiscard]] Ranks ranks() const;  // of the members
    bool operator==(const View&) const = default;
};

// Whether `who` is a quorum of the view's members: more than half of them, or half of them if that includes the lowest
// rank that did not join with this view. Any two quorums have a member in common.
[[nodiscard]] bool is_quorum(const View& view, const Ranks& who);

}  // namespace storm
