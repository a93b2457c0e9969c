// What processes agree on: who is there, and where their sessions begin.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include "base/ranks.hpp"

namespace storm {

// A process: the slot that it has, and how many processes had it before.
struct Member {
    std::uint16_t rank{};
    std::uint32_t incarnation{};
    auto operator<=>(const Member&) const = default;
};

// Where one session of a process stands.
struct Position {
    std::uint32_t session{};
    std::uint64_t steps{};    // steps that are complete; a frozen process completes no further one
    std::uint32_t settled{};  // the latest view that is known to be in place on all its members, for this session
    bool operator==(const Position&) const = default;
};

// Where a session begins in a view: the most steps, and the latest settled view, of all who had it and were in the view
// before.
struct Start {
    std::uint32_t session{};
    std::uint64_t steps{};
    std::uint32_t base{};
    bool operator==(const Start&) const = default;
};

struct View {
    std::uint32_t number{};
    std::vector<Member> members{};  // by rising rank
    std::vector<Member>
        joined{};   // those of the members who were not in the view before: they hold nothing of its state
    Ranks blank{};  // of the members: those that hold nothing, because they joined with it or since
    std::vector<Member> leaving{};  // no members: they hand over what they own, and go
    std::vector<Start> starts{};    // by rising session

    [[nodiscard]] bool has(Member who) const;         // among the members
    [[nodiscard]] bool is_leaving(Member who) const;  // among those that leave
    [[nodiscard]] bool has_joined(Member who) const;
    [[nodiscard]] const Member* at(std::uint16_t rank) const;  // the member with that rank, if any
    [[nodiscard]] const Start* start(std::uint32_t session) const;
    [[nodiscard]] Ranks ranks() const;  // of the members
    bool operator==(const View&) const = default;
};

// Whether `who` is a quorum of the view's members: more than half of them, or half with the lowest rank of those who did
// not join with it. Any two quorums have a member in common.
[[nodiscard]] bool is_quorum(const View& view, const Ranks& who);

}  // namespace storm
