// Single-decree Paxos for the next view: the state of a process as acceptor, and its own proposal. The voters are the
// members of the view before; a quorum of them (view.hpp) decides.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "views/view.hpp"
#include "views/view_messages.hpp"

namespace storm {

// Injected bugs that the model checker must find. They exist only in builds with STORM_VIEWS_BUG.
enum class ViewsBug : std::uint8_t { none, majority, answers, commit };
#ifdef STORM_VIEWS_BUG
inline ViewsBug views_bug = ViewsBug::none;
#else
inline constexpr ViewsBug views_bug = ViewsBug::none;
#endif

// Paxos acceptor: what a process has promised and accepted for the next view. It holds until that view is known.
struct AcceptorState {
    Ballot promised;  // lower ballots are refused
    Ballot accepted;
    View value;  // the view accepted in that ballot

    [[nodiscard]] bool promise(Ballot ballot);
    [[nodiscard]] bool accept(Ballot ballot, const View& view);
};

// Whether the ranks that answered are a quorum of the view before. `heard` is used by ViewsBug::majority only, which
// takes a majority of those ranks.
[[nodiscard]] bool has_quorum(const View& before, const Ranks& answered, const Ranks& heard);

// Paxos proposer: a ballot of this process's own.
struct Proposal {
    Ballot ballot{};
    Nanos began_at{}, resend_at{};
    Ranks replaced{};  // members of the view before whose slot now belongs to another process; fixed from the start

    // First phase: promises.
    Ranks promised{};
    std::vector<std::pair<std::uint16_t, std::vector<Position>>> positions{};  // of the ranks that promised
    Ranks state_holders{};        // ranks of `promised` that hold session state, that is, are not blank
    Ballot highest{};             // the highest ballot that any of them had accepted before
    std::optional<View> found{};  // the value of that ballot, once it has arrived

    // Second phase: votes.
    bool voting{};
    View value{};
    Ranks accepted{};

    void on_promise(std::uint16_t rank, Ballot accepted_before, std::vector<Position> where, bool has_state);
    void on_value(Ballot of, const View& view);
    // Where sessions start in the next view, if these ranks go on.
    [[nodiscard]] std::vector<Start> starts(const Ranks& among) const;
    // Whether every member of `before` has answered, or the process that now has its slot. This suffices where the
    // remaining members are no quorum.
    [[nodiscard]] bool all_answered(const View& before, const Ranks& answered) const;
};

}  // namespace storm
