// The notes that processes send each other about views: layout, parse and write. docs/membership.md lists them.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "views/view.hpp"

namespace storm {

// Bounds that keep every note within `most_view_message_bytes`, with 256 ranks that all have been restarted some thousand times.
inline constexpr std::size_t most_view_message_bytes = 1390;
inline constexpr std::size_t most_sessions = 24, most_leaving = 16, most_join_requests = 16, most_card_bytes = 400;

// Who proposes, for the how manieth time. No two proposals have the same.
struct Ballot {
    std::uint32_t round{};  // 0: none
    std::uint16_t rank{};
    std::uint32_t incarnation{};
    [[nodiscard]] explicit operator bool() const { return round != 0; }
    auto operator<=>(const Ballot&) const = default;
};

enum class ViewMessageKind : std::uint8_t {
    beat = 1,      // I am here; whom I hear, what I wish
    prepare = 2,   // promise to answer no lower ballot, and freeze
    promise = 3,   // the answer: where my sessions stand, and the ballot of what I have accepted, if anything
    value = 4,     // what I have accepted; follows a promise that names its ballot
    propose = 5,   // accept this as the next view
    accepted = 6,  // the answer
    refusal = 7,   // the other answer: I have promised a higher ballot
    record = 8,    // a view that was decided
    request = 9,   // send me the card of that process
    card = 10,     // how to reach a process
};

inline constexpr std::uint8_t view_flag_frozen = 1;       // a promise forbids the sender to complete a step
inline constexpr std::uint8_t view_flag_wants_join = 2;   // the sender wants in
inline constexpr std::uint8_t view_flag_wants_leave = 4;  // the sender wants out
inline constexpr std::uint8_t view_flag_blank = 8;        // the sender came in, and no session of it has settled since
inline constexpr std::uint8_t view_flags_all = 15;

// All notes in one: a kind uses the fields that it names.
struct ViewMessage {
    ViewMessageKind kind{};
    std::uint32_t incarnation{};  // of the sender
    std::uint32_t number{};       // of the sender's latest view; 0: it knows none

    std::uint8_t flags{};                 // beat, promise
    Ranks reachable{};                    // beat
    std::vector<Member> join_requests{};  // beat: processes that the sender brings in
    Ballot ballot{};    // prepare, promise, propose, accepted, refusal (the higher one), value (its own)
    Ballot accepted{};  // promise
    std::vector<Position> positions{};  // promise
    View view{};                        // value, propose, record
    Member who{};                       // request, card
    std::vector<std::byte> card{};      // card
    bool operator==(const ViewMessage&) const = default;
};

[[nodiscard]] std::vector<std::byte> write_view_message(const ViewMessage& message);
// Bytes come from strangers: malformed input is an empty result, never a throw. Ranks in it are below `capacity`.
[[nodiscard]] std::optional<ViewMessage> parse_view_message(std::span<const std::byte> bytes, std::uint16_t capacity);

}  // namespace storm
