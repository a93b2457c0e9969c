// Membership without I/O: heartbeats, join and leave requests, and agreement on views by Paxos. View messages and time
// go in; view messages and agreed views come out.
//
// A view is a numbered list of members. View v+1 is decided by a quorum of the members of view v, so two different
// views of one number cannot exist. docs/membership.md has the argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.hpp"
#include "views/ballots.hpp"
#include "views/connectivity.hpp"
#include "views/view.hpp"
#include "views/view_messages.hpp"

namespace storm {

struct OutgoingViewMessage {
    std::uint16_t to{};
    std::vector<std::byte> body;
};

struct ViewsConfig {
    Member self;
    std::vector<Member> members;  // of the first view; empty for a late joiner, which is outside at first
    std::uint32_t number{1};      // of that view
    std::uint16_t capacity{};     // number of slots
    Nanos silence{};              // a peer from which nothing arrives for this long counts as lost
    std::uint64_t seed{};         // of the random backoff of proposers
};

class Views {
public:
    Views(const ViewsConfig& config, Nanos now);

    // Starts to send heartbeats and proposals. The first view message that arrives does so too.
    void watch(Nanos now);
    [[nodiscard]] bool watching() const;

    // A view message arrived from the process that has this slot now. `body` is not trusted: it may be malformed.
    void receive(std::uint16_t from, std::span<const std::byte> body, Nanos now);
    // An authenticated datagram of any kind arrived from it.
    void on_received(std::uint16_t from, Nanos now);
    // It said goodbye: it counts as lost at once.
    void on_goodbye(std::uint16_t from, Nanos now);
    // Its kernel reports its port closed, and nothing has arrived from it: it counts as lost until something does.
    void refused(std::uint16_t from, Nanos now);
    // It answers, but no data reaches it: the link to it counts as dead for a while.
    void blocked(std::uint16_t from, Nanos now);
    // Another process has the slot now.
    void readmitted(Member who, Nanos now);

    void tick(Nanos now);
    [[nodiscard]] Nanos next_timer() const;
    [[nodiscard]] std::optional<OutgoingViewMessage> take_view_message();

    // Adds a session of this process; there may be at most `most_sessions`. A session for which the latest view has no
    // start belongs to that view at once. Any other session must settle in it first.
    void add_session(const Position& position);
    // Advances the session to that position. False if it may not; then nothing has changed.
    // `steps` cannot change while this process is frozen or outside. In a view that is newer than the one in which the
    // session last settled, they rise to that view's start and no further: such a step was made in an older view.
    // `settled` is accepted, also while frozen, if it is the number of the latest view or of that view's base. But the
    // caller must keep the state with which the session began that view until more steps are granted: the next view may
    // have been agreed on without the knowledge that this one was settled.
    [[nodiscard]] bool advance(const Position& position);
    void remove_session(std::uint32_t session);
    // Whether this process joined and the session has not settled since: its state is not valid in the view.
    [[nodiscard]] bool blank(std::uint32_t session) const;

    // Another process, or this one, asks to join. `card` holds what the others need to reach it.
    void request_admission(Member who, std::span<const std::byte> card, Nanos now);
    // This process wants to leave.
    void request_leave(Nanos now);
    // This process wants a new view, even with the same members: the sessions repartition their shards in it.
    void request_view(Nanos now);

    // The latest usable view: the cards of all its members are known. Null as long as there is none.
    [[nodiscard]] const View* view() const;
    // The latest view of all, even if some of its members' cards are missing; number 0 as long as none is known.
    [[nodiscard]] const View& latest() const { return latest_; }
    // Whether this process is a member of that view, or leaving in it.
    [[nodiscard]] bool inside() const;
    // Whether a promise forbids this process to complete a step.
    [[nodiscard]] bool frozen() const;
    [[nodiscard]] std::optional<std::span<const std::byte>> card(Member who) const;
    // Processes that ask to join, are not in the latest view, and whose cards are known.
    [[nodiscard]] std::vector<Member> join_requests() const;

    struct MembershipStatus {
        std::vector<std::optional<Nanos>> last_received_at;  // by rank
        std::vector<std::vector<std::uint16_t>> reachable;   // by rank: the ranks that it reports as reachable
        bool quorum{};                                       // whether this process reaches a quorum of the latest view
        bool proposing{}, requesting_join{};
    };
    [[nodiscard]] MembershipStatus connectivity(Nanos now) const;
    [[nodiscard]] bool proposing() const { return proposal_.has_value(); }

private:
    struct SlotState {
        std::uint32_t incarnation{};
        std::uint32_t number{};  // of the latest view that it knows
        std::uint8_t flags{};    // of its last beat
        Nanos record_sent_at{-never / 2}, request_sent_at{-never / 2};
    };
    struct JoinRequest {
        Member who;
        Nanos until{};
        bool own{};  // requested at this process, so that it announces the request to the others
    };
    struct Session {
        Position position;
        std::uint32_t place{};  // the number of the view that it has settled in, or was added in
        bool blank{};
    };
    struct Card {
        Member who;
        std::vector<std::byte> bytes;
    };
    // The next view, if the given candidates were to decide it.
    struct Choice {
        std::vector<Member> members, joined, leaving;
        Ranks retained;  // members of the view before that go on or leave
        bool quorum{};
        bool lost{};  // drops a member that said no goodbye: it may only be late, so the proposal waits
    };

    // views.cpp: time, and messages other than votes
    void beat(Nanos now);
    void on_beat(std::uint16_t from, const ViewMessage& message, Nanos now);
    void on_card(const ViewMessage& message);
    void on_record(const View& view, Nanos now);
    void catch_up(std::uint16_t from, const ViewMessage& message, Nanos now);
    void fetch_cards(Nanos now);
    void update_usable();
    void occupy(Member who, Nanos now);
    void install(const View& view, Nanos now);
    void send(std::uint16_t to, const ViewMessage& message);
    [[nodiscard]] ViewMessage make(ViewMessageKind kind) const;
    [[nodiscard]] const Card* find_card(Member who) const;
    [[nodiscard]] bool lacks_cards() const;
    [[nodiscard]] bool is_participant() const;  // in the latest view, as a member or leaving
    [[nodiscard]] bool wants_join(Nanos now) const;
    void add_join_request(Member who, Nanos now, Nanos until, bool own);

    // view_votes.cpp: how the next view is decided
    // `candidates` are members. `successors` are slots of members that now belong to other processes, which join.
    [[nodiscard]] Choice choose(const Ranks& candidates, const Ranks& successors) const;
    [[nodiscard]] Ranks alive() const;
    [[nodiscard]] Ranks reachable_by_any() const;
    [[nodiscard]] Ranks replaced() const;
    [[nodiscard]] bool lost_a_leaver() const;
    void consider(Nanos now);
    void propose(Nanos now);
    void drive(Nanos now);
    void abort_proposal(Nanos now);
    void request_votes();
    void refuse(std::uint16_t to);
    [[nodiscard]] bool votes() const;
    void try_vote(Nanos now);
    void try_decide(Nanos now);
    void on_prepare(std::uint16_t from, const ViewMessage& message, Nanos now);
    void on_propose(std::uint16_t from, const ViewMessage& message, Nanos now);
    [[nodiscard]] std::vector<Position> positions() const;
    [[nodiscard]] Ranks voters() const;
    [[nodiscard]] Nanos draw(Nanos below);

    Member self_;
    std::uint16_t capacity_;
    Nanos silence_, period_;
    std::uint64_t random_;
    Connectivity net_;
    std::vector<SlotState> slots_;  // by rank
    Ranks refused_;                 // ports reported closed; not announced, as each process finds out by itself
    std::vector<Session> sessions_;
    std::vector<Card> cards_;
    std::vector<JoinRequest> join_requests_;
    std::deque<OutgoingViewMessage> out_;

    View latest_, usable_;    // decided; decided and with all cards
    AcceptorState acceptor_;  // about the view after the latest
    std::optional<Proposal> proposal_;
    std::uint32_t round_{};      // highest seen of any ballot
    Nanos active_at_{};          // when a message of the proposer that this process has promised last arrived
    Nanos wanted_since_{never};  // since when another view is wanted
    Nanos consider_at_{never};
    Nanos proposer_backoff_{};  // random, drawn after each failure, so that proposers do not collide again
    unsigned failures_{};

    bool watching_{}, wants_leave_{}, wants_new_view_{};
    bool blank_{};  // this process joined, and no session has settled since
    bool dirty_{};  // something has changed, so that `consider` must run
    Nanos last_tick_{}, beat_at_{never}, last_beat_at_{}, cards_at_{never};
    unsigned beats_{};
    unsigned next_helper_{};  // which member to request the next card from
    Nanos join_request_at_{}, join_backoff_{}, inside_since_{};
};

}  // namespace storm
