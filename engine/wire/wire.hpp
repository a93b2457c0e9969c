// The wire format: parses and writes headers, acknowledgement reports and control messages. docs/protocol.md explains
// it.
//
//   0        1        2                 4
//   +--------+--------+-----------------+-----------------------------------+
//   |ver|kind| flags  |     source      |              check                |
//   +--------+--------+-----------------+-----------------------------------+
//   |              cookie               |              number               |
//   +-----------------------------------+-----------------------------------+
//   |              channel              |                seq                |
//   +-----------------------------------+-----------------------------------+
//   |               chunk               |           message_bytes           |
//   +-----------------------------------+-----------------------------------+
//   |  payload ... (sealed: ciphertext, then a tag of 16 bytes)             |
//
// All integers are little-endian, as are all tensors on the wire.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace storm {

static_assert(std::endian::native == std::endian::little, "tensors travel in host order, which must be little-endian");

inline constexpr std::uint8_t wire_version = 2;
inline constexpr std::size_t header_bytes = 32;
inline constexpr std::size_t tag_bytes = 16;
// The largest UDP payload over IPv4; a datagram never exceeds it.
inline constexpr std::size_t max_datagram_bytes = 65'507;

enum class Kind : std::uint8_t {
    data = 1,    // one chunk of a message
    report = 2,  // acknowledgement: which packet numbers arrived, and how much may be in flight
    ready = 3,   // the exchange is posted here: send beyond the eager bytes
    wait = 4,    // the pool is full: hold this message until `ready`
    end = 5,     // the first pass of a lossy message is over
    done = 6,    // this message is closed here: stop sending it
    ping = 7,    // request for an immediate report; a payload only pads it, to probe the path MTU
    bye = 8,  // goodbye: this endpoint leaves; carries a last report, and a failure cause if it leaves after an error
    failed = 9,  // the exchange failed here, with the failure cause: no rank should wait for us in it
    note = 10,   // membership message (view_messages.hpp); neither acknowledged nor retransmitted
};

// How an exchange ended. The numbers travel in `failed` and `bye`.
enum class Status : std::uint8_t {
    running,
    ok,
    timed_out,
    peer_silent,
    peer_left,
    peer_failed,
    size_mismatch,
    closed,
    path_blocked,  // the peer answers, but no data reaches it
    memory_broken  // the peer has written invalid data into shared memory
};

// Flags. `second_stage` may be set in `data`, `end`, `done` and `wait`; `sealed` in every kind.
inline constexpr std::uint8_t flag_second_stage = 1;  // the message belongs to the exchange's second stage
inline constexpr std::uint8_t flag_last = 2;    // nothing more of the message is to be sent for now: report at once
inline constexpr std::uint8_t flag_repair = 4;  // a retransmitted chunk; with `end`: nothing more will be sent at all
inline constexpr std::uint8_t flag_sealed = 8;  // the payload is ciphertext, a tag follows
inline constexpr std::uint8_t flag_piece =
    16;  // with `data`: the payload is a prefix and a piece of the chunk (pieces.hpp)
inline constexpr std::uint8_t flag_parity = 32;  // with `data`: a chunk of parity, named as in coding.hpp
inline constexpr std::uint8_t flag_coded = 64;   // with `data`: parity of this chunk's stretch will follow
// The stage of a message as a flag.
[[nodiscard]] constexpr std::uint8_t stage_flag(bool second_stage) {
    return second_stage ? flag_second_stage : std::uint8_t{0};
}
inline constexpr std::uint8_t known_flags =
    flag_second_stage | flag_last | flag_repair | flag_sealed | flag_piece | flag_parity | flag_coded;

struct Header {
    Kind kind{};
    std::uint8_t flags{};
    std::uint16_t source{};
    std::uint32_t check{};
    std::uint32_t cookie{};
    std::uint32_t number{};  // low half of the packet number on this link
    std::uint32_t channel{};
    std::uint32_t seq{};
    std::uint32_t chunk{};
    std::uint32_t message_bytes{};

    [[nodiscard]] bool has(std::uint8_t flag) const { return (flags & flag) != 0; }
    bool operator==(const Header&) const = default;
};

inline constexpr std::size_t check_offset = 4;

// Bytes are untrusted: malformed input is an empty result, never a throw.
[[nodiscard]] std::optional<Header> parse_header(std::span<const std::byte> datagram);
void write_header(const Header& header, std::span<std::byte, header_bytes> out);

// Failure cause: which rank caused a failure, and what happened. It names the first cause; ranks pass it on unchanged.
struct FailureCause {
    std::uint16_t culprit{};
    Status cause{Status::running};  // never `ok` or `peer_failed`; `running` if there is none

    [[nodiscard]] explicit operator bool() const { return cause != Status::running; }
    bool operator==(const FailureCause&) const = default;
};

// The failure cause in a `failed` or `bye`: the field `chunk` holds the culprit, `message_bytes` the cause.
[[nodiscard]] std::optional<FailureCause> parse_failure_cause(const Header& header, std::uint16_t world);
void write_failure_cause(const FailureCause& failure_cause, Header& header);

// Acknowledgement of a link's packets by their receiver. Bit i of `arrived` says that packet `largest - i` arrived.
struct Report {
    static constexpr std::size_t max_words = 128;
    static constexpr std::size_t fixed_bytes = 32;

    std::uint64_t largest{};       // highest packet number that arrived
    std::uint32_t credit_bytes{};  // receive window: how much the sender may have in flight on this link
    std::uint32_t overflow{};      // datagrams that the receiver's socket buffer dropped, over all links
    // The timed packet is the one with the highest number that is not itself a report.
    std::uint32_t timed_back{};  // `largest` minus its number
    std::uint32_t timed_us{};    // when it arrived, by the receiver's clock, in microseconds modulo 2^32
    std::uint32_t held_us{};     // time between that arrival and this report
    std::uint32_t words{};       // valid words of `arrived`
    std::array<std::uint64_t, max_words> arrived{};
};

[[nodiscard]] std::optional<Report> parse_report(std::span<const std::byte> body);
// The bytes that the first of several reports says it has.
[[nodiscard]] std::size_t report_bytes(std::span<const std::byte> body);
// Returns the bytes written; `out` holds at least `Report::fixed_bytes + 8 * report.words`.
std::size_t write_report(const Report& report, std::span<std::byte> out);

// The key under which an exchange is looked up.
[[nodiscard]] constexpr std::uint64_t exchange_key(std::uint32_t channel, std::uint32_t seq) {
    return std::uint64_t{channel} << 32 | seq;
}

// The packet number nearest to `expected` whose low half is `low`.
[[nodiscard]] std::uint64_t widen_number(std::uint32_t low, std::uint64_t expected);

}  // namespace storm
