#include "paths/routes.hpp"

#include <algorithm>

namespace storm {

void Routes::assign(std::vector<Address> cards) {
    states_.clear();
    for (const Address& card : cards) states_.push_back({.card = card});
    present_ = std::move(cards);
    schedule();
}

void Routes::assign(std::uint16_t rank, const Address& card) {
    present_.at(rank) = card;
    states_[rank] = {.card = card};
    schedule();
}

Routes::Route Routes::look(std::uint16_t rank) const {
    const State& state = states_.at(rank);
    return {.address = present_[rank], .answers = state.answered > 0, .learned = present_[rank] != state.card};
}

void Routes::offer(std::uint16_t rank, const Address& address, Nanos now) {
    states_.at(rank).rest_until = 0;
    consider(rank, address, now, offered_lasts);
}

bool Routes::consider(std::uint16_t rank, const Address& address, Nanos now, Nanos lasts) {
    State& state = states_[rank];
    std::vector<Candidate>& candidates = state.candidates;
    if (now < state.rest_until) return false;
    const bool replies = now >= state.reply_at;
    if (replies) state.reply_at = now + reply_every;
    for (Candidate& each : candidates) {
        if (each.address != address) continue;
        each.ends_at = std::max(each.ends_at, now + lasts);
        return replies;
    }
    // Whoever can forge a datagram can name addresses without end: the oldest makes room.
    if (candidates.size() == most_candidates) candidates.erase(candidates.begin());
    candidates.push_back({.address = address,
                          .id = ++ids_ == 0 ? ++ids_ : ids_,
                          .began = now,
                          .ends_at = now + lasts,
                          .challenge_at = now,
                          .pause = first_pause});
    schedule();
    return replies;
}

void Routes::answered(std::uint16_t rank, const Replies& replies, Nanos patience, Nanos now) {
    State& state = states_[rank];
    state.answered = std::max(state.answered, replies.sent_at);
    for (const std::uint32_t id : replies.challenges) {
        for (Candidate& each : state.candidates) {
            if (each.id != id || each.decide_at != never) continue;
            const bool contested = state.answered > 0 && each.address != present_[rank];
            each.decide_at = contested ? each.began + std::clamp(2 * patience, least_contest, longest_contest) : now;
            due_at_ = std::min(due_at_, each.decide_at);
        }
    }
}

Routes::Verdict Routes::judge(std::uint16_t rank, const Candidate& candidate, Nanos now) {
    State& state = states_[rank];
    if (candidate.address == present_[rank]) {
        if (candidate.decide_at == never) return now < candidate.ends_at ? Verdict::open : Verdict::dropped;
        state.answered = std::max(state.answered, candidate.began);
        return Verdict::dropped;
    }
    if (state.answered > 0 && state.answered >= candidate.began) {
        state.rest_until = now + rest;
        return Verdict::dropped;
    }
    if (now < candidate.decide_at) return now < candidate.ends_at ? Verdict::open : Verdict::dropped;
    present_[rank] = candidate.address;
    state.answered = now;
    if (keep_at_ == never) keep_at_ = now + keep_every;
    return Verdict::moved;
}

void Routes::keep_open(Nanos now) {
    keeps_all_ = true;
    keep_at_ = std::min(keep_at_, now + keep_every);
}

void Routes::schedule() {
    active_.clear();
    due_at_ = never;
    for (std::uint16_t rank = 0; rank < states_.size(); ++rank) {
        if (states_[rank].candidates.empty()) continue;
        active_.push_back(rank);
        for (const Candidate& each : states_[rank].candidates)
            due_at_ = std::min({due_at_, each.challenge_at, each.decide_at, each.ends_at});
    }
}

}  // namespace storm
