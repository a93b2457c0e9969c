// All that a core knows of one peer. Private to the core.
#pragma once

#include <algorithm>
#include <deque>

#include "core.hpp"

namespace storm {

// A receiver that waits says so at least this often, which also shows that it lives.
inline constexpr Nanos longest_ask = second / 2;

struct Core::Peer {
    Peer(std::uint16_t its_rank, std::uint64_t credit, RateMode mode, std::size_t datagram_bytes, std::size_t links,
         Nanos now)
        : rank(its_rank),
          out(credit, now),
          in((datagram_bytes - header_bytes - tag_bytes - Report::fixed_bytes) / 8),
          rate(mode, datagram_bytes, now, links),
          last_heard(now) {}

    std::uint16_t rank;
    Outbound out;
    Inbound in;
    RateControl rate;
    std::deque<Outgoing*> queue;   // messages with something to send, oldest first
    std::deque<Control> controls;  // bounded: equal ones are merged
    Nanos last_heard;
    std::uint64_t backlog{};  // bytes that are still to be sent to it, as of the last time the line was shared out
    Nanos deadline{never};    // the shortest time that a message to it was given, as of then
    std::uint32_t open_receives{};  // messages that we wait for
    Nanos ping_at{};                // not before this, while we only wait for it
    bool silent{};                  // nothing heard for too long; heals by itself
    bool forsaken{};                // fell silent just now: what is in flight to it is lost
    bool left{};                    // said goodbye
    Blame left_for{};               // because of this, if it said so
    bool told{};                    // knows that we leave
    bool refused{};                 // the pool turned something of it away

    // A report may wait this long for more to report.
    [[nodiscard]] Nanos report_delay() const {
        return std::clamp<Nanos>(out.smooth_rtt() / 8, millisecond / 2, 10 * millisecond);
    }
};

}  // namespace storm
