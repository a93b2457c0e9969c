// When the timers of an exchange are due. Each message has one timer, the earliest of these:
//   deadline   its stage ends, whatever is missing
//   close      the grace period ends for chunks that the end of a lossy message overtook
//   ready      a waiting receiver sends `ready` again
//   silence    nothing has arrived from the peer for too long
//   ping       a peer from which we only receive is pinged, to see whether it is alive
//   blocked    the peer answers, but no data reaches it
#pragma once

#include "base/clock.hpp"
#include "base/timers.hpp"
#include "exchange/exchange.hpp"

namespace storm {

class Peers;

class ExchangeTimers {
public:
    ExchangeTimers(const Peers& peers, Nanos silence) : peers_(peers), silence_(silence) {}

    // The true time of a timer, for `Timers`.
    [[nodiscard]] Nanos operator()(Exchange& exchange, Timers::Owner timer) const;
    [[nodiscard]] Nanos of(const Exchange& exchange, const Incoming& message) const;
    [[nodiscard]] Nanos of(const Exchange& exchange, const Outgoing& message) const;

private:
    const Peers& peers_;
    Nanos silence_;
};

}  // namespace storm
