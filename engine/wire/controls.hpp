// Control datagrams that wait to be sent to one peer: few, as equal ones are merged and there is a bound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "wire/wire.hpp"

namespace storm {

// What a control datagram says.
struct Control {
    Kind kind{};
    std::uint8_t flags{};
    std::uint32_t channel{}, seq{};
    FailureCause failure_cause{};
    bool operator==(const Control&) const = default;
};

class Controls {
public:
    // Every control that matters is sent again or asked for again, so dropping those above the bound does no harm.
    static constexpr std::size_t most = 1024;

    // Appends a control, unless an equal one waits already or the queue is full.
    void push(const Control& what);
    // Takes the oldest; there must be one.
    [[nodiscard]] Control pop();
    [[nodiscard]] bool empty() const { return waiting_.empty(); }

private:
    std::deque<Control> waiting_;
};

// What a sender knows of a link when it decides how often to send a control.
struct LinkState {
    double loss{};      // fraction of datagrams that are lost
    bool lossy{};       // so many datagrams are lost that sending twice pays
    unsigned probes{};  // pings without an answer since the peer last acknowledged something
};

// How many copies of a control leave at once. More than one, where somebody waits for it: at the end of a lossy message;
// for a ping after unanswered ones, as the link is having a bad time; and on a lossy link for urgent reports, pings, and
// what says that a message is closed: a sender that relied on parity learns it from nothing else. `urgent`: how many copies of a report were asked for, 0 if none was.
[[nodiscard]] unsigned copies_of(Kind kind, unsigned urgent, const LinkState& link);

}  // namespace storm
