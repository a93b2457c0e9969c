// How one view number is decided: what a process has answered, and what it asks the others. This is Paxos for one value,
// whose voters are the members of the view before.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "views/view.hpp"
#include "views/view_messages.hpp"

namespace storm {

// Mistakes that the checker must find. They exist in programs that are compiled for that; elsewhere this is a constant.
enum class ViewsBug : std::uint8_t { none, majority, answers, commit };
#ifdef STORM_VIEWS_BUG
inline ViewsBug views_bug = ViewsBug::none;
#else
inline constexpr ViewsBug views_bug = ViewsBug::none;
#endif

// What a process has answered about the next view. It never goes back on it as long as that view is not known.
struct AcceptorState {
    Ballot promised;  // no lower ballot is answered
    Ballot accepted;
    View value;  // what was accepted

    [[nodiscard]] bool promise(Ballot ballot);
    [[nodiscard]] bool accept(Ballot ballot, const View& view);
};

// Whether those who answered are a quorum of the view before. `heard` is what a wrong rule would count them of.
[[nodiscard]] bool has_quorum(const View& before, const Ranks& answered, const Ranks& heard);

// A ballot of this process's own.
struct Proposal {
    Ballot ballot{};
    Nanos began_at{}, resend_at{};
    Ranks replaced{};  // members of the view before whose slot another process has now; fixed from the start

    // First the promises.
    Ranks promised{};
    std::vector<std::pair<std::uint16_t, std::vector<Position>>> positions{};  // of those who promised
    Ranks state_holders{};        // of those, whoever has a part in the state of its sessions
    Ballot highest{};             // of all that was accepted before, as the promises say
    std::optional<View> found{};  // the value of that ballot, once it is here

    // Then the votes.
    bool voting{};
    View value{};
    Ranks accepted{};

    void on_promise(std::uint16_t rank, Ballot accepted_before, std::vector<Position> where, bool has_state);
    void on_value(Ballot of, const View& view);
    // Where sessions begin, if these go on.
    [[nodiscard]] std::vector<Start> starts(const Ranks& among) const;
    // Whether all members of `before` have answered, or the process that now has their slot: where those who are left
    // are no quorum, that will do too.
    [[nodiscard]] bool all_answered(const View& before, const Ranks& answered) const;
};

}  // namespace storm
