// View messages: the heartbeats, Paxos messages, view records and cards that processes send each other. Layout, parser
// and writer. docs/membership.md lists them.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "views/view.hpp"

namespace storm {

// These bounds keep every message within `most_view_message_bytes`, even if 256 ranks were each restarted 1000 times.
inline constexpr std::size_t most_view_message_bytes = 1390;
inline constexpr std::size_t most_sessions = 24, most_leaving = 16, most_join_requests = 16, most_card_bytes = 400;

// Paxos ballot number: the round and the proposer. No two proposals have the same ballot.
struct Ballot {
    std::uint32_t round{};  // 0: none
    std::uint16_t rank{};
    std::uint32_t incarnation{};
    [[nodiscard]] explicit operator bool() const { return round != 0; }
    auto operator<=>(const Ballot&) const = default;
};

enum class ViewMessageKind : std::uint8_t {
    beat = 1,      // heartbeat: the ranks that the sender can reach, whether it wants to join or leave, join requests
    prepare = 2,   // Paxos prepare: accept no lower ballot, and complete no further step
    promise = 3,   // the answer: the positions of the sender's sessions, and the ballot that it has accepted, if any
    value = 4,     // the view that the sender has accepted; follows a promise that names its ballot
    propose = 5,   // Paxos accept request: accept this as the next view
    accepted = 6,  // the answer: accepted
    refusal = 7,   // the answer: the sender has promised a higher ballot
    record = 8,    // a view that was decided
    request = 9,   // asks for the card of a process
    card = 10,     // what is needed to reach a process; opaque here
};

inline constexpr std::uint8_t view_flag_frozen = 1;       // a promise forbids the sender to complete a step
inline constexpr std::uint8_t view_flag_wants_join = 2;   // the sender wants to join
inline constexpr std::uint8_t view_flag_wants_leave = 4;  // the sender wants to leave
inline constexpr std::uint8_t view_flag_blank = 8;        // the sender joined, and no session of it has settled since
inline constexpr std::uint8_t view_flags_all = 15;

// A message of any kind. Each field names the kinds that use it.
struct ViewMessage {
    ViewMessageKind kind{};
    std::uint32_t incarnation{};  // of the sender
    std::uint32_t number{};       // of the sender's latest view; 0 if it knows none

    std::uint8_t flags{};                 // beat, promise
    Ranks reachable{};                    // beat
    std::vector<Member> join_requests{};  // beat: processes that the sender wants admitted
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
