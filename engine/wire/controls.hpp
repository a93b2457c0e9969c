// Queue of control datagrams to one peer. It is bounded, and equal entries are merged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "wire/wire.hpp"

namespace storm {

// Content of a control datagram.
struct Control {
    Kind kind{};
    std::uint8_t flags{};
    std::uint32_t channel{}, seq{};
    FailureCause failure_cause{};
    bool operator==(const Control&) const = default;
};

class Controls {
public:
    // Every control that matters is retransmitted or requested again, so dropping those above the bound does no harm.
    static constexpr std::size_t most = 1024;

    // Appends a control, unless an equal one waits already or the queue is full.
    void push(const Control& what);
    // Removes and returns the oldest entry. The queue must not be empty.
    [[nodiscard]] Control pop();
    [[nodiscard]] bool empty() const { return waiting_.empty(); }

private:
    std::deque<Control> waiting_;
};

// What a sender knows of a link when it decides how often to send a control.
struct LinkState {
    double loss{};      // fraction of datagrams that are lost
    bool lossy{};       // loss is so high that sending twice pays
    unsigned probes{};  // unanswered pings since the peer last acknowledged something
};

// How many copies of a control are sent at once. More than one where a lost copy would make a peer wait: for `end`; for
// a ping after unanswered pings; and on a lossy link for urgent reports, pings and `done`, from which alone a sender
// that relied on parity learns that a message is closed. `urgent`: how many copies of a report were requested, 0 if
// none.
[[nodiscard]] unsigned copies_of(Kind kind, unsigned urgent, const LinkState& link);

}  // namespace storm
