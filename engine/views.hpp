// Membership without any input or output: notes of peers and time go in; notes and agreed views come out.
//
// A view is a numbered list of members. View v+1 is decided by a majority of the members of view v, so that two different
// views of one number cannot exist. docs/membership.md has the argument.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "clock.hpp"

namespace storm {

// A process: the slot that it has, and how many processes had it before.
struct Member {
    std::uint16_t rank{}, incarnation{};
    auto operator<=>(const Member&) const = default;
};

// Where one session of a process stands.
struct Position {
    std::uint32_t session{};
    std::uint64_t steps{};    // steps that are complete; a frozen process completes no further one
    std::uint32_t settled{};  // the latest view that is known to be in place on all its members, for this session
    bool operator==(const Position&) const = default;
};

// Where a session begins in a view: the most steps, and the latest settled view, of all members that had it.
struct Start {
    std::uint32_t session{};
    std::uint64_t steps{};
    std::uint32_t base{};
    bool operator==(const Start&) const = default;
};

struct View {
    std::uint32_t number{};
    std::vector<Member> members;  // by rising rank
    std::vector<Member> leaving;  // no members: they hand over what they own, and go
    std::vector<Start> starts;
    [[nodiscard]] bool has(Member who) const;
    bool operator==(const View&) const = default;
};

struct Note {
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
    void hear(std::uint16_t from, Nanos now);
    // It said goodbye: it is lost at once.
    void gone(std::uint16_t from, Nanos now);
    // It answers, but no data reaches it: the link counts as dead for a while.
    void blocked(std::uint16_t from, Nanos now);
    // Another process has the slot now.
    void readmitted(Member who, Nanos now);

    void tick(Nanos now);
    [[nodiscard]] Nanos next_timer() const;
    [[nodiscard]] std::optional<Note> take_note();

    // Sessions of this process.
    void enroll(const Position& position);
    // Whether the session may go on to that position. False while frozen, if the steps differ: nothing has changed then.
    [[nodiscard]] bool advance(const Position& position);
    void withdraw(std::uint32_t session);

    // Another process, or this one, wants to come in; `card` is what the others need to reach it.
    void ask_in(Member who, std::span<const std::byte> card, Nanos now);
    // This process wants to leave.
    void ask_out(Nanos now);

    // The latest view whose members' cards are all known; null as long as this process knows none.
    [[nodiscard]] const View* view() const;
    // Whether this process is a member of that view, or leaving in it.
    [[nodiscard]] bool inside() const;
    // Whether a promise forbids to complete a step.
    [[nodiscard]] bool frozen() const;
    [[nodiscard]] std::optional<std::span<const std::byte>> card(Member who) const;

    struct Standing {
        std::vector<std::optional<Nanos>> heard_at;     // by rank
        std::vector<std::vector<std::uint16_t>> hears;  // by rank: whom it says that it hears
        bool quorum{};                                  // whether this process hears a quorum of the latest view
        bool proposing{}, knocking{};
    };
    [[nodiscard]] Standing standing(Nanos now) const;

private:
    ViewsConfig config_;
    bool watching_{};
    View view_;
    std::vector<Nanos> heard_;
    std::vector<Note> notes_;
    std::vector<Position> positions_;
    Nanos tick_at_{never};
    void leave_out(std::uint16_t rank);
};

}  // namespace storm
