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
    states_.at(rank).ignore_until = 0;
    add_candidate(rank, address, now, offered_lifetime);
}

bool Routes::add_candidate(std::uint16_t rank, const Address& address, Nanos now, Nanos lasts) {
    State& state = states_[rank];
    std::vector<Candidate>& candidates = state.candidates;
    if (now < state.ignore_until) return false;
    const bool replies = now >= state.reply_at;
    if (replies) state.reply_at = now + reply_every;
    for (Candidate& each : candidates) {
        if (each.address != address) continue;
        each.ends_at = std::max(each.ends_at, now + lasts);
        return replies;
    }
    // An attacker who can forge a datagram can name addresses without end: the oldest candidate is dropped.
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

void Routes::answered(std::uint16_t rank, const Replies& replies, Nanos probe_timeout, Nanos now) {
    State& state = states_[rank];
    state.answered = std::max(state.answered, replies.sent_at);
    for (const std::uint32_t id : replies.challenges) {
        for (Candidate& each : state.candidates) {
            if (each.id != id || each.decide_at != never) continue;
            const bool contested = state.answered > 0 && each.address != present_[rank];
            each.decide_at =
                contested ? each.began + std::clamp(2 * probe_timeout, least_contest, longest_contest) : now;
            due_at_ = std::min(due_at_, each.decide_at);
        }
    }
}

Routes::CandidateState Routes::check_candidate(std::uint16_t rank, const Candidate& candidate, Nanos now) {
    State& state = states_[rank];
    if (candidate.address == present_[rank]) {
        if (candidate.decide_at == never)
            return now < candidate.ends_at ? CandidateState::open : CandidateState::dropped;
        state.answered = std::max(state.answered, candidate.began);
        return CandidateState::dropped;
    }
    if (state.answered > 0 && state.answered >= candidate.began) {
        state.ignore_until = now + rest;
        return CandidateState::dropped;
    }
    if (now < candidate.decide_at) return now < candidate.ends_at ? CandidateState::open : CandidateState::dropped;
    present_[rank] = candidate.address;
    state.answered = now;
    if (keepalive_at_ == never) keepalive_at_ = now + keepalive_interval;
    return CandidateState::moved;
}

void Routes::enable_keepalive(Nanos now) {
    keepalive_all_ = true;
    keepalive_at_ = std::min(keepalive_at_, now + keepalive_interval);
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
