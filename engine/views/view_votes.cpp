// Voting on the next view (Paxos): its members, which process proposes it and when, how each answers, and which side of a
// network partition goes on: the one with a quorum.
#include <algorithm>

#include "views/views.hpp"

namespace storm {

// Members that are reachable and whose slot belongs to no other process.
Ranks Views::alive() const {
    Ranks all;
    for (const Member who : latest_.members) {
        const bool present = who == self_ || (net_.reachable().has(who.rank) && !refused_.has(who.rank));
        all.set(who.rank, present && slots_[who.rank].incarnation == who.incarnation);
    }
    return all;
}

// Members that are reachable from this process or from any member that it can reach. Where a link is dead, both of its
// ends must count each other, or they would choose differently from all others.
Ranks Views::reachable_by_any() const {
    Ranks heard = net_.reachable();
    for (const std::uint16_t rank : alive()) heard = heard | net_.reported(rank);
    return (latest_.ranks() & heard) - replaced() - net_.left() - refused_;
}

// Members whose slot now belongs to another process.
Ranks Views::replaced() const {
    Ranks all;
    for (const Member who : latest_.members) all.set(who.rank, slots_[who.rank].incarnation > who.incarnation);
    return all;
}

Views::Choice Views::choose(const Ranks& candidates, const Ranks& successors) const {
    Ranks leavers;
    for (const Member who : latest_.members) {
        const bool wishes = who == self_ ? wants_leave_ : (slots_[who.rank].flags & view_flag_wants_leave) != 0;
        leavers.set(who.rank, wishes && leavers.count() < most_leaving);
    }
    Choice choice;
    choice.retained = net_.choose(candidates, leavers);
    choice.quorum = has_quorum(latest_, choice.retained, alive());
    choice.lost = !(latest_.ranks() - choice.retained - net_.left() - replaced() - refused_).empty();
    for (const std::uint16_t rank : choice.retained) {
        const Member who = *latest_.at(rank);
        (leavers.has(rank) ? choice.leaving : choice.members).push_back(who);
    }
    // Never evict a member to admit a joiner. A joiner whose request comes through a member has no links yet that could
    // be judged. A joiner that sends its own request has, and they must be good.
    Ranks all = choice.retained;
    for (std::uint16_t rank = 0; rank < capacity_; ++rank) {
        if (all.has(rank) || rank == self_.rank || net_.left().has(rank)) continue;
        const SlotState& slot = slots_[rank];
        const bool brought =
            successors.has(rank) ||
            std::any_of(join_requests_.begin(), join_requests_.end(), [&](const JoinRequest& pending) {
                // Only with its card: otherwise the card could be lost with the member that holds it.
                return pending.who == Member{rank, slot.incarnation} && find_card(pending.who) != nullptr;
            });
        // A join request counts only if its sender knows the latest view: an older one may be from a process that died.
        const bool wants_join = (slot.flags & view_flag_wants_join) != 0 && slot.number == latest_.number &&
                                net_.reachable().has(rank) && net_.good(rank, all);
        if ((!brought && !wants_join) || latest_.has({rank, slot.incarnation})) continue;
        all.add(rank);
        choice.joined.push_back({rank, slot.incarnation});
    }
    choice.members.insert(choice.members.end(), choice.joined.begin(), choice.joined.end());
    std::sort(choice.members.begin(), choice.members.end());
    return choice;
}

// Whether a leaving process is lost while a session still waits for its shards. The next view no longer lists it.
bool Views::lost_a_leaver() const {
    const bool waits = std::any_of(sessions_.begin(), sessions_.end(),
                                   [&](const Session& each) { return each.place < latest_.number; });
    return waits && std::any_of(latest_.leaving.begin(), latest_.leaving.end(), [&](Member who) {
               return who != self_ &&
                      (!net_.reachable().has(who.rank) || slots_[who.rank].incarnation != who.incarnation);
           });
}

// Decides whether another view is wanted, and whether this process proposes it now. The lowest rank of the members that
// go on proposes at once; each further rank waits longer, so that proposers do not compete.
void Views::consider(Nanos now) {
    dirty_ = false;
    consider_at_ = never;
    if (proposal_ || !latest_.has(self_)) {
        wanted_since_ = never;
        return;
    }
    const Ranks present = alive(), successors = replaced() & net_.reachable();
    const Choice choice = choose(reachable_by_any(), successors);
    const bool all_accounted_for = !successors.empty() && (present | successors).contains(latest_.ranks());
    const bool possible = choice.quorum || all_accounted_for;
    const bool orphaned = lost_a_leaver();
    const bool wanted = acceptor_.promised || choice.members != latest_.members || orphaned || wants_new_view_;
    if (!possible || !wanted || choice.members.empty() || !choice.retained.has(self_.rank)) {
        wanted_since_ = never;
        return;
    }
    if (wanted_since_ == never) wanted_since_ = now;
    Nanos turn = 0;
    for (const Member who : choice.members) {
        if (choice.retained.has(who.rank) && (who < self_ || wants_leave_))
            turn = std::min(turn + (refused_.empty() ? silence_ / 16 : silence_ / 64), silence_ / 2);
    }
    Nanos due = turn + proposer_backoff_;
    if (acceptor_.promised && !refused_.has(acceptor_.promised.rank)) {
        due += active_at_ + 3 * silence_ / 8;
    } else {
        // After a goodbye or a refusal (port unreachable) it proposes at once. After a silence it waits two more beats,
        // so that all others notice the silence too. For joiners it waits one beat, as several may come at once.
        due += wanted_since_ + (choice.lost || orphaned ? 2 * period_ : choice.joined.empty() ? 0 : period_);
        // Other members of this lineage of views may be alive but not reachable yet.
        if (!choice.quorum) due += silence_;
    }
    if (now >= due) {
        propose(now);
    } else {
        consider_at_ = due;
    }
}

void Views::propose(Nanos now) {
    round_ = std::max(round_, acceptor_.promised.round) + 1;
    proposal_.emplace();
    Proposal& own = *proposal_;
    own.ballot = {round_, self_.rank, self_.incarnation};
    own.began_at = own.resend_at = now;
    own.replaced = replaced();
    (void)acceptor_.promise(own.ballot);
    own.on_promise(self_.rank, acceptor_.accepted, positions(), !blank_);
    if (acceptor_.accepted) own.on_value(acceptor_.accepted, acceptor_.value);
    drive(now);
}

// Drives the proposal: moves it on or aborts it, and asks again the voters that have not answered.
void Views::drive(Nanos now) {
    if (now < proposal_->resend_at) return;
    if (now >= proposal_->began_at + silence_) return abort_proposal(now);
    if (!proposal_->voting) try_vote(now);
    if (!proposal_) return;
    proposal_->resend_at = now + silence_ / 64;
    request_votes();
}

void Views::request_votes() {
    const Proposal& own = *proposal_;
    ViewMessage message = make(own.voting ? ViewMessageKind::propose : ViewMessageKind::prepare);
    message.ballot = own.ballot;
    if (own.voting) message.view = own.value;
    const std::vector<std::byte> body = write_view_message(message);
    for (const std::uint16_t rank : voters() - (own.voting ? own.accepted : own.promised)) {
        if (rank != self_.rank && !net_.left().has(rank)) out_.push_back({rank, body});
    }
}

Ranks Views::voters() const {
    Ranks all = latest_.ranks();
    for (const Member who : latest_.leaving) all.add(who.rank);
    return all;
}

void Views::abort_proposal(Nanos now) {
    proposal_.reset();
    ++failures_;
    proposer_backoff_ = draw((silence_ / 8) << std::min(failures_, 3U));
    active_at_ = now;
    dirty_ = true;
}

// Starts the second phase of Paxos once all reachable voters have promised, or after a while once a quorum has.
void Views::try_vote(Nanos now) {
    Proposal& own = *proposal_;
    if (own.voting) return;
    Ranks awaited;
    for (const std::uint16_t rank : (voters() & net_.reachable()) - own.promised - refused_) {
        awaited.set(rank, net_.good(self_.rank, rank));
    }
    if (!awaited.empty() && now < own.began_at + silence_ / 4) return;
    const bool quorum = has_quorum(latest_, own.promised - own.replaced, alive());
    if (!quorum && !own.all_answered(latest_, own.promised)) return;
    if (own.highest && !own.found) return;  // the value comes with the next promise, as `drive` asks again
    if (own.found) {
        // Paxos: this value may have been decided already. Its members have promised in that ballot, if not in ours, so
        // their positions have not changed since.
        own.value = *own.found;
    } else {
        const Choice choice = choose(own.promised & (latest_.ranks() - own.replaced), own.promised & own.replaced);
        if (choice.members.empty() || !choice.retained.has(self_.rank) || (quorum && !choice.quorum))
            return abort_proposal(now);
        Ranks among = choice.retained;
        own.value.members = choice.members;
        own.value.joined = choice.joined;
        own.value.leaving = choice.leaving;
        // A process that was leaving and is still here has shards left to transfer.
        for (const Member who : latest_.leaving) {
            const bool there = own.promised.has(who.rank) && slots_[who.rank].incarnation == who.incarnation;
            const bool listed = std::any_of(choice.members.begin(), choice.members.end(),
                                            [&](Member each) { return each.rank == who.rank; });
            if (!there || listed || own.value.leaving.size() >= most_leaving || !net_.good(who.rank, choice.retained))
                continue;
            own.value.leaving.push_back(who);
            among.add(who.rank);
        }
        std::sort(own.value.leaving.begin(), own.value.leaving.end());
        // Blank members must not start over while a process with state may return: the proposal is aborted, and they
        // wait. Once all others are gone for good, a view without state holders is proposed.
        const bool lost = (voters() - own.promised - own.replaced - net_.left()).empty();
        if (!latest_.starts.empty() && (own.state_holders & among).empty() && !lost) return abort_proposal(now);
        own.value.blank = own.value.ranks() - (own.state_holders & choice.retained);
        own.value.starts = own.starts(among);
        // Without a quorum, the number jumps above all numbers that views of the replaced members can have reached.
        own.value.number = quorum ? latest_.number + 1 : (latest_.number | 0xffffU) + 1;
    }
    own.voting = true;
    own.accepted.add(self_.rank);
    if (!acceptor_.accept(own.ballot, own.value)) return abort_proposal(now);
    own.resend_at = now + silence_ / 64;
    request_votes();
    try_decide(now);
}

void Views::try_decide(Nanos now) {
    const Proposal& own = *proposal_;
    const bool decided =
        has_quorum(latest_, own.accepted - own.replaced, alive()) || own.all_answered(latest_, own.accepted);
    if (!decided && views_bug != ViewsBug::commit) return;
    Ranks readers = voters();
    for (const Member who : own.value.members) readers.add(who.rank);
    readers.remove(self_.rank);
    install(View(own.value), now);
    ViewMessage record = make(ViewMessageKind::record);
    record.view = latest_;
    const std::vector<std::byte> body = write_view_message(record);
    for (const std::uint16_t rank : readers - net_.left()) out_.push_back({rank, body});
}

// Whether this process answers proposals for the view after the latest. Members vote; leaving processes answer with
// their positions; a process whose predecessor in the slot was a member answers in its stead.
bool Views::votes() const {
    const Member* present = latest_.at(self_.rank);
    return is_participant() || (present != nullptr && present->incarnation < self_.incarnation);
}

void Views::on_prepare(std::uint16_t from, const ViewMessage& message, Nanos now) {
    if (message.number != latest_.number || !latest_.has({from, message.incarnation}) || !votes()) return;
    round_ = std::max(round_, message.ballot.round);
    if (!acceptor_.promise(message.ballot)) return refuse(from);
    active_at_ = now;
    dirty_ = true;
    if (proposal_ && proposal_->ballot < message.ballot) abort_proposal(now);
    ViewMessage promise = make(ViewMessageKind::promise);
    promise.ballot = message.ballot;
    promise.accepted = acceptor_.accepted;
    promise.positions = positions();
    promise.flags = blank_ ? view_flag_blank : 0;
    send(from, promise);
    if (!acceptor_.accepted) return;
    ViewMessage value = make(ViewMessageKind::value);
    value.ballot = acceptor_.accepted;
    value.view = acceptor_.value;
    send(from, value);
}

void Views::on_propose(std::uint16_t from, const ViewMessage& message, Nanos now) {
    if (message.number != latest_.number || !latest_.has({from, message.incarnation}) || !votes()) return;
    if (message.view.number <= latest_.number) return;
    round_ = std::max(round_, message.ballot.round);
    if (!acceptor_.accept(message.ballot, message.view)) return refuse(from);
    active_at_ = now;
    dirty_ = true;
    if (proposal_ && proposal_->ballot < message.ballot) abort_proposal(now);
    ViewMessage accepted = make(ViewMessageKind::accepted);
    accepted.ballot = message.ballot;
    send(from, accepted);
}

void Views::refuse(std::uint16_t to) {
    ViewMessage refusal = make(ViewMessageKind::refusal);
    refusal.ballot = acceptor_.promised;
    send(to, refusal);
}

std::vector<Position> Views::positions() const {
    std::vector<Position> all;
    for (const Session& each : sessions_) all.push_back(each.position);
    return all;
}

// splitmix64
Nanos Views::draw(Nanos below) {
    std::uint64_t z = random_ += 0x9e37'79b9'7f4a'7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58'476d'1ce4'e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d0'49bb'1331'11ebULL;
    return below <= 0 ? 0 : static_cast<Nanos>((z ^ (z >> 31)) % static_cast<std::uint64_t>(below));
}

}  // namespace storm
