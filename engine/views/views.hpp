// Membership without any input or output: notes of peers and time go in; notes and agreed views come out.
//
// A view is a numbered list of members. View v+1 is decided by a majority of the members of view v, so that two different
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
    std::vector<Member> members;  // of view 1; a process that comes later knows none and is an outsider
    std::uint32_t number{1};      // of that view
    std::uint16_t capacity{};     // slots
    Nanos silence{};              // a peer that is not heard for so long is taken for lost
    std::uint64_t seed{};         // of the delays that keep proposers apart
};

class Views {
public:
    Views(const ViewsConfig& config, Nanos now);

    // Begins to send notes by itself. Before, it only answers.
    void watch(Nanos now);
    [[nodiscard]] bool watching() const;

    // A note came from the process that has this slot now; `body` may be anything.
    void receive(std::uint16_t from, std::span<const std::byte> body, Nanos now);
    // An authenticated datagram of any kind came from it.
    void on_received(std::uint16_t from, Nanos now);
    // It said goodbye: it is lost at once.
    void on_goodbye(std::uint16_t from, Nanos now);
    // The kernel of its machine says that nobody is there, and nothing has come from it: it is lost, until it is heard.
    void refused(std::uint16_t from, Nanos now);
    // It answers, but no data reaches it: the link counts as dead for a while.
    void blocked(std::uint16_t from, Nanos now);
    // Another process has the slot now.
    void readmitted(Member who, Nanos now);

    void tick(Nanos now);
    [[nodiscard]] Nanos next_timer() const;
    [[nodiscard]] std::optional<OutgoingViewMessage> take_view_message();

    // Sessions of this process, at most `most_sessions`. One that is enrolled where the latest view has no start for it
    // belongs to that view; any other must settle in it first.
    void add_session(const Position& position);
    // Whether the session may go on to that position; if not, nothing has changed. Its steps do not change while this
    // process is frozen or outside. In a view that began after the session last settled they go up to that view's start
    // and no further: the step was made in an older view. `settled` is taken if it is the number of the latest view, or of
    // the one from which all go on to that, also while frozen; but what the session began that view with must be kept
    // until more steps are granted, as the next view may have been agreed on without knowing that this one is in place.
    [[nodiscard]] bool advance(const Position& position);
    void remove_session(std::uint32_t session);
    // Whether this process came in, and the session has not settled since: what it holds is of no worth in the view.
    [[nodiscard]] bool blank(std::uint32_t session) const;

    // Another process, or this one, wants to come in; `card` is what the others need to reach it.
    void request_admission(Member who, std::span<const std::byte> card, Nanos now);
    // This process wants to leave.
    void request_leave(Nanos now);
    // This process wants another view, even with the same members: their sessions divide their work anew in it.
    void request_view(Nanos now);

    // The latest view whose members' cards are all known; null as long as this process knows none.
    [[nodiscard]] const View* view() const;
    // The latest view of all, even if some of its members' cards are missing; number 0 as long as none is known.
    [[nodiscard]] const View& latest() const { return latest_; }
    // Whether this process is a member of that view, or leaving in it.
    [[nodiscard]] bool inside() const;
    // Whether a promise forbids to complete a step.
    [[nodiscard]] bool frozen() const;
    [[nodiscard]] std::optional<std::span<const std::byte>> card(Member who) const;
    // Processes that want in, are not in the latest view, and whose cards are known: whoever can reach them helps.
    [[nodiscard]] std::vector<Member> join_requests() const;

    struct MembershipStatus {
        std::vector<std::optional<Nanos>> last_received_at;  // by rank
        std::vector<std::vector<std::uint16_t>> reachable;   // by rank: whom it says that it hears
        bool quorum{};                                       // whether this process hears a quorum of the latest view
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
        bool own{};  // asked here: this process tells the others
    };
    struct Session {
        Position position;
        std::uint32_t place{};  // the view that it has settled in, or was enrolled in
        bool blank{};
    };
    struct Card {
        Member who;
        std::vector<std::byte> bytes;
    };
    // Who would be in the next view, if those who are asked about were to decide.
    struct Choice {
        std::vector<Member> members, joined, leaving;
        Ranks retained;  // of the members before, those who go on or leave
        bool quorum{};
        bool lost{};  // somebody is left out who has not said that it goes: time must show whether it is so
    };

    // views.cpp: time, notes that are no votes
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
    // `candidates` are members; `successors` are slots of members that other processes have now, who come in.
    [[nodiscard]] Choice choose(const Ranks& candidates, const Ranks& successors) const;
    [[nodiscard]] Ranks alive() const;
    [[nodiscard]] Ranks reachable_by_any() const;
    [[nodiscard]] Ranks replaced() const;
    [[nodiscard]] bool lost_a_leaver() const;
    void consider(Nanos now);
    void propose(Nanos now);
    void drive(Nanos now);  // the proposal of this process
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
    Ranks refused_;                 // nobody listens there; the others are not told, as each finds out by itself
    std::vector<Session> sessions_;
    std::vector<Card> cards_;
    std::vector<JoinRequest> join_requests_;
    std::deque<OutgoingViewMessage> out_;

    View latest_, usable_;    // decided; decided and with all cards
    AcceptorState acceptor_;  // about the view after the latest
    std::optional<Proposal> proposal_;
    std::uint32_t round_{};      // highest seen of any ballot
    Nanos active_at_{};          // when the proposer to whom this process has promised last showed itself
    Nanos wanted_since_{never};  // since when another view seems better
    Nanos consider_at_{never};
    Nanos proposer_backoff_{};  // drawn anew after each failure, so that proposers part
    unsigned failures_{};

    bool watching_{}, wants_leave_{}, wants_new_view_{};
    bool blank_{};  // it came in, and no session has settled since
    bool dirty_{};  // something has changed that `consider` must see
    Nanos last_tick_{}, beat_at_{never}, last_beat_at_{}, cards_at_{never};
    unsigned beats_{};
    unsigned next_helper_{};  // whom to ask for a card
    Nanos join_request_at_{}, join_backoff_{}, inside_since_{};
};

}  // namespace storm
