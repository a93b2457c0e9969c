// When the timers of an exchange are due. Each message has one timer, the earliest of those that concern it:
//   deadline   its stage ends, whatever is missing
//   close      chunks that the end of a lossy message overtook had their moment
//   ask        a receiver tells the sender again that it waits
//   silence    nothing was heard of the peer for too long
//   ping       a peer that we only wait for is asked whether it lives
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

    // The true time of a timer, as `Timers` asks for it.
    [[nodiscard]] Nanos operator()(Exchange& exchange, Timers::Owner timer) const;
    [[nodiscard]] Nanos of(const Exchange& exchange, const Incoming& message) const;
    [[nodiscard]] Nanos of(const Exchange& exchange, const Outgoing& message) const;

private:
    const Peers& peers_;
    Nanos silence_;
};

}  // namespace storm
