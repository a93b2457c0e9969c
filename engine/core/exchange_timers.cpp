#include "core/exchange_timers.hpp"

#include <algorithm>

#include "peers/peers.hpp"

namespace storm {

Nanos ExchangeTimers::operator()(Exchange& exchange, Timers::Owner timer) const {
    if (const Incoming* message = exchange.received_by(timer)) return of(exchange, *message);
    if (const Outgoing* message = exchange.sent_by(timer)) return of(exchange, *message);
    return exchange.timeout_at;
}

Nanos ExchangeTimers::of(const Exchange& exchange, const Incoming& message) const {
    if (message.closed) return never;
    const Nanos silent_at =
        exchange.waits_across_views() ? never : peers_.look(message.peer).silent_at(exchange.outcome.started, silence_);
    return std::min({exchange.stage(message.second_stage).deadline, message.close_at, message.ready_at, silent_at});
}

Nanos ExchangeTimers::of(const Exchange& exchange, const Outgoing& message) const {
    // A message that is no longer wanted only waits until its last batch has been sent.
    if (!message.wanted) return never;
    const Peer& peer = peers_.look(message.peer);
    const Nanos started = exchange.outcome.started;
    const Nanos blocked_from = std::max(started, message.blocked_from);
    return std::min({exchange.stage(message.second_stage).deadline,
                     exchange.waits_across_views() ? never : peer.silent_at(started, silence_),
                     peer.ping_at(started, silence_),
                     message.parked ? never : peer.blocked_at(blocked_from, silence_)});
}

}  // namespace storm
