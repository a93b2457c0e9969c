// Views: membership, and which of the members are a quorum.
#include "views/view.hpp"

#include <algorithm>

namespace storm {

bool View::has(Member who) const {
    const Member* found = at(who.rank);
    return found != nullptr && *found == who;
}

bool View::is_leaving(Member who) const { return std::find(leaving.begin(), leaving.end(), who) != leaving.end(); }

bool View::has_joined(Member who) const { return std::find(joined.begin(), joined.end(), who) != joined.end(); }

const Member* View::at(std::uint16_t rank) const {
    const auto found = std::lower_bound(members.begin(), members.end(), Member{rank, 0});
    return found == members.end() || found->rank != rank ? nullptr : &*found;
}

const Start* View::start(std::uint32_t session) const {
    for (const Start& each : starts) {
        if (each.session == session) return &each;
    }
    return nullptr;
}

Ranks View::ranks() const {
    Ranks all;
    for (const Member who : members) all.add(who.rank);
    return all;
}

bool is_quorum(const View& view, const Ranks& who) {
    std::size_t count = 0;
    for (const Member each : view.members) count += who.has(each.rank) ? 1 : 0;
    const std::size_t all = view.members.size();
    if (2 * count != all || all == 0) return 2 * count > all;
    // The tie goes to the lowest rank that did not just join: a newcomer may die before it learns that it was admitted.
    for (const Member each : view.members) {
        if (!view.has_joined(each)) return who.has(each.rank);
    }
    return who.has(view.members.front().rank);
}

}  // namespace storm
