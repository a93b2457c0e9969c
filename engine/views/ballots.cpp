#include "views/ballots.hpp"

#include <algorithm>

namespace storm {

bool AcceptorState::promise(Ballot ballot) {
    if (ballot < promised) return false;
    // Injected bug: forgets the accepted value, so that another ballot may get a different one accepted.
    if (ballot != promised && views_bug == ViewsBug::answers) accepted = {};
    promised = ballot;
    return true;
}

bool AcceptorState::accept(Ballot ballot, const View& view) {
    if (ballot < promised && views_bug != ViewsBug::answers) return false;
    promised = std::max(promised, ballot);
    accepted = ballot;
    value = view;
    return true;
}

bool has_quorum(const View& before, const Ranks& answered, const Ranks& heard) {
    if (views_bug != ViewsBug::majority) return is_quorum(before, answered);
    View shrunk = before;
    std::erase_if(shrunk.members, [&](Member who) { return !heard.has(who.rank); });
    return is_quorum(shrunk, answered);
}

void Proposal::on_promise(std::uint16_t rank, Ballot accepted_before, std::vector<Position> where, bool has_state) {
    if (voting) return;
    if (accepted_before > highest) {
        highest = accepted_before;
        found.reset();
    }
    const auto same = [&](const auto& each) { return each.first == rank; };
    // A promise that is sent again includes sessions added meanwhile. Steps are frozen, so they are the same.
    if (const auto old = std::find_if(positions.begin(), positions.end(), same); old != positions.end()) {
        old->second = std::move(where);
    } else {
        positions.emplace_back(rank, std::move(where));
    }
    promised.add(rank);
    state_holders.set(rank, has_state);
}

void Proposal::on_value(Ballot of, const View& view) {
    if (!voting && of == highest) found = view;
}

std::vector<Start> Proposal::starts(const Ranks& among) const {
    std::vector<Start> all;
    for (const auto& [rank, where] : positions) {
        if (!among.has(rank)) continue;
        for (const Position& each : where) {
            const auto at = std::lower_bound(all.begin(), all.end(), each.session,
                                             [](const Start& start, std::uint32_t id) { return start.session < id; });
            if (at != all.end() && at->session == each.session) {
                at->steps = std::max(at->steps, each.steps);
                at->base = std::max(at->base, each.settled);
            } else {
                all.insert(at, {each.session, each.steps, each.settled});
            }
        }
    }
    if (all.size() > most_sessions) all.resize(most_sessions);
    return all;
}

bool Proposal::all_answered(const View& before, const Ranks& answered) const {
    return !replaced.empty() && answered.contains(before.ranks());
}

}  // namespace storm
