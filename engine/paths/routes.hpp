// NAT traversal and connection migration: the address of each peer, and how a validated one replaces an address that no
// longer answers.
//
// A rank's card names an address, which routers may make useless: a network address translator (NAT) shows others
// another address, and may replace that one in mid-job. Better addresses are learned from authenticated datagrams
// (`heard`) and from other ranks (`offer`). None of them is trusted before it is validated: a path challenge, a ping,
// is sent there and nowhere else, and only an answer to it counts. While the present address answers too, it stays in
// use. So an attacker who replays or forges datagrams from its own address cannot move a peer that is reachable.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.hpp"
#include "paths/address.hpp"

namespace storm {

// What a peer has answered since this was last taken.
struct Replies {
    static constexpr std::size_t most_challenges = 8;

    // A datagram sent at this time was answered; `challenge` is 0 if it went to the present address.
    void add(Nanos at, std::uint32_t challenge) {
        if (challenge == 0) {
            sent_at = std::max(sent_at, at);
        } else if (challenges.size() < most_challenges) {
            challenges.push_back(challenge);
        }
    }

    Nanos sent_at{};  // when the latest one left
    std::vector<std::uint32_t> challenges;
};

class Routes {
public:
    static constexpr std::size_t most_candidates = 4;
    // Routers drop idle NAT mappings after half a minute or more. The interval is shorter, so that a changed port is
    // noticed before its rank counts as silent.
    static constexpr Nanos keepalive_interval = 5 * second;

    // The addresses that the peers' cards name, by rank: used until others are validated.
    void assign(std::vector<Address> cards);
    // A new process has replaced a peer.
    void assign(std::uint16_t rank, const Address& card);

    // Where to send, by rank.
    [[nodiscard]] std::span<const Address> present() const { return present_; }
    struct Route {
        Address address;
        bool answers{};  // something sent there was answered
        bool learned{};  // it is not the card's
    };
    [[nodiscard]] Route look(std::uint16_t rank) const;

    // The peer may be reachable at this address. If it is the present one, it is pinged.
    void offer(std::uint16_t rank, const Address& address, Nanos now);
    // An authenticated datagram of the peer arrived from this address. `newest`: none of a higher number arrived
    // before, as the address of one that was delayed, perhaps by an attacker, may be out of date. True if an answer
    // should be sent there, too: the peer may be validating its path to us before we have validated its address.
    [[nodiscard]] bool heard(std::uint16_t rank, const Address& from, bool newest, Nanos now) {
        return newest && from != present_[rank] && add_candidate(rank, from, now, observed_lifetime);
    }
    // `probe_timeout`: how long an answer of the peer may take.
    void answered(std::uint16_t rank, const Replies& replies, Nanos probe_timeout, Nanos now);
    // Pings all peers from time to time, as a router translates our address. Peers at learned addresses always are
    // pinged.
    void enable_keepalive(Nanos now);

    struct Challenge {
        std::uint16_t rank{};
        std::uint32_t id{};
        Address to;
    };
    // Calls `challenge(Challenge)` for each ping that is due to another address, `ping(rank)` for each that is due to
    // the present one, and `moved(rank)` for each peer whose present address has changed.
    template <class Send, class Ping, class Moved>
    void tick(Nanos now, Send&& challenge, Ping&& ping, Moved&& moved);
    // When to call `tick` at the latest.
    [[nodiscard]] Nanos next_timer() const { return std::min(due_at_, keepalive_at_); }

private:
    static constexpr Nanos observed_lifetime = 5 * second, offered_lifetime = 30 * second;
    static constexpr Nanos first_pause = 20 * millisecond, longest_pause = second;
    // How long the present address may take to show that it still answers, unless the path is slower.
    static constexpr Nanos least_contest = 100 * millisecond, longest_contest = second;
    // A peer whose present address has just shown that it answers is not probed again so soon.
    static constexpr Nanos rest = second;
    static constexpr Nanos reply_every = 10 * millisecond;

    struct Candidate {
        Address address;
        std::uint32_t id{};
        Nanos began{}, ends_at{};
        Nanos challenge_at{}, pause{};
        Nanos decide_at{never};  // once it has answered
    };
    struct State {
        Address card;
        Nanos answered{};  // when the latest datagram that the present address answered was sent; 0 if it never did
        Nanos ignore_until{};
        Nanos reply_at{};  // the earliest time of another answer to an unvalidated address
        std::vector<Candidate> candidates{};
    };

    enum class CandidateState : std::uint8_t { open, dropped, moved };
    bool add_candidate(std::uint16_t rank, const Address& address, Nanos now, Nanos lasts);
    [[nodiscard]] CandidateState check_candidate(std::uint16_t rank, const Candidate& candidate, Nanos now);
    void schedule();

    std::vector<Address> present_;
    std::vector<State> states_;
    std::vector<std::uint16_t> active_;  // ranks with candidates
    std::uint32_t ids_{};
    Nanos due_at_{never}, keepalive_at_{never};
    bool keepalive_all_{};
};

template <class Send, class Ping, class Moved>
void Routes::tick(Nanos now, Send&& challenge, Ping&& ping, Moved&& moved) {
    if (now >= keepalive_at_) {
        keepalive_at_ = now + keepalive_interval;
        for (std::uint16_t rank = 0; rank < present_.size(); ++rank) {
            if (keepalive_all_ || look(rank).learned) ping(rank);
        }
    }
    if (now < due_at_) return;
    for (const std::uint16_t rank : std::vector(active_)) {
        std::vector<Candidate>& candidates = states_[rank].candidates;
        for (std::size_t at = 0; at < candidates.size();) {
            Candidate& each = candidates[at];
            const CandidateState verdict = check_candidate(rank, each, now);
            if (verdict == CandidateState::moved) {
                // The others were candidates to replace an address that is no longer used.
                candidates.clear();
                moved(rank);
                break;
            }
            if (verdict == CandidateState::dropped) {
                candidates.erase(candidates.begin() + static_cast<std::ptrdiff_t>(at));
                continue;
            }
            if (now >= each.challenge_at) {
                each.challenge_at = now + each.pause;
                each.pause = std::min(2 * each.pause, longest_pause);
                challenge(Challenge{.rank = rank, .id = each.id, .to = each.address});
                // The present address gets the same chance to answer.
                if (each.address != present_[rank]) ping(rank);
            }
            ++at;
        }
    }
    schedule();
}

}  // namespace storm
