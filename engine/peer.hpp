// All that a core knows of one peer. Private to the core.
#pragma once

#include <algorithm>
#include <deque>

#include "core.hpp"
#include "path_mtu.hpp"

namespace storm {

// A receiver that waits says so at least this often, which also shows that it lives.
inline constexpr Nanos longest_ask = second / 2;

struct Core::Peer {
    Peer(std::uint16_t its_rank, std::uint64_t credit, const RateControl& control_of_rate, const PathMtu& its_path,
         std::size_t chunk_bytes, Nanos now)
        : rank(its_rank),
          out(credit, now),
          in(report_words(its_path.bytes())),
          rate(control_of_rate),
          path(its_path),
          pieces(chunk_bytes),
          last_heard(now) {}

    // How much a report may name so that it fits a datagram.
    static std::size_t report_words(std::size_t datagram_bytes) {
        return (datagram_bytes - header_bytes - tag_bytes - Report::fixed_bytes) / 8;
    }

    std::uint16_t rank;
    Outbound out;
    Inbound in;
    RateControl rate;
    PathMtu path;
    Pieces pieces;                 // chunks from it that are not complete
    std::deque<Outgoing*> queue;   // messages with something to send, oldest first
    std::deque<Control> controls;  // bounded: equal ones are merged
    Nanos last_heard;
    std::uint64_t backlog{};  // bytes that are still to be sent to it, as of the last time the line was shared out
    Nanos deadline{never};    // the shortest time that a message to it was given, as of then
    std::uint32_t open_receives{};  // messages that we wait for
    Nanos ping_at{};                // not before this, while we only wait for it
    // Since when all data to it was lost, `never` when the latest arrived; and when it was last.
    Nanos data_lost_since{never}, data_lost_at{};
    bool silent{};     // nothing heard for too long; heals by itself
    bool forsaken{};   // fell silent just now: what is in flight to it is lost
    bool left{};       // said goodbye
    Blame left_for{};  // because of this, if it said so
    bool told{};       // knows that we leave
    bool refused{};    // the pool turned something of it away

    // A report may wait this long for more to report.
    [[nodiscard]] Nanos report_delay() const {
        return std::clamp<Nanos>(out.smooth_rtt() / 8, millisecond / 2, 10 * millisecond);
    }
};

}  // namespace storm
