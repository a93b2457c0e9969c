// Startup of congestion control: the first rate, from a packet train (packet_train.hpp) or from the cached metrics of
// the path (path_cache.hpp).
#include <algorithm>
#include <cmath>

#include "congestion/rate_control.hpp"

namespace storm {
namespace {

// Where a round trip is shorter, doubling takes no longer than a packet train does.
constexpr Nanos least_train_rtt = 4 * millisecond;
constexpr double trickle_bytes_per_s = 1e6;  // by all links of an endpoint, before anything is answered
constexpr double most_trickled = 128;        // datagrams in flight before anything is answered
constexpr double recalled_share = 0.9;       // of a cached rate: too little costs less than too much
// Bytes in flight; cached metrics that imply more are implausible.
constexpr double most_recalled = 64e6;

}  // namespace

void RateControl::recall(const PathMetrics& metrics) {
    if (!(metrics.bytes_per_s > 0) || !std::isfinite(metrics.bytes_per_s) || metrics.round_trip < least_train_rtt)
        return;
    recalled_ = metrics;
}

std::optional<PathMetrics> RateControl::metrics() const {
    if (!paced() || phase_ == Phase::startup || phase_ == Phase::drain) return std::nullopt;
    if (min_rtt_ == never || min_rtt_ < least_train_rtt) return std::nullopt;
    const bool crowd = crowd_rate_ > 0 && crowd_ > 0;
    const double line = crowd ? crowd_rate_ * static_cast<double>(crowd_) : rate_ * static_cast<double>(busy_);
    return PathMetrics{.bytes_per_s = line, .round_trip = min_rtt_};
}

// Our share of the cached bottleneck rate; 0 if none is cached.
double RateControl::recalled_rate() const {
    return recalled_share * recalled_.bytes_per_s / static_cast<double>(std::max<std::size_t>(busy_, 1));
}

// Before the first answer the window is small, as the path's rate is unknown. Over a long path, waiting for the answer
// would leave the path idle, so a little goes on being sent, or as much as the path carried according to the cache.
bool RateControl::may_trickle(std::uint64_t in_flight_bytes, Nanos now) {
    const double trip_s = seconds(recalled_.round_trip);
    const double most = std::max(most_trickled * datagram_bytes_, std::min(recalled_rate() * trip_s, most_recalled));
    trickles_ = std::isinf(rate_) && static_cast<double>(in_flight_bytes) < most;
    return trickles_ && now >= trickle_at_;
}

double RateControl::trickle_rate() const { return std::max(trickle_bytes_per_s / links_, recalled_rate()); }

// A train that arrived more slowly than it was sent has passed at the rate of the bottleneck, or of our share of it.
// Any other only shows that the path is faster than that: startup goes on.
void RateControl::on_train(const Dispersion& train, Nanos now) {
    if (now >= learn_until_ || !train.spread || min_rtt_ == never || min_rtt_ < least_train_rtt) return;
    // Loss is not known yet: what did not arrive may have overflowed a queue.
    cruise_at(train.bytes_per_s / (1 - loss_), now);
}

void RateControl::cruise_at(double rate, Nanos now) {
    rate_ = std::max(rate, least_rate());
    if (phase_ != Phase::cruise) {
        phase_ = Phase::cruise;
        learn_until_ = now + 2 * min_rtt_;
        step_ = most_step;
        next_probe_rtt_at_ = now + probe_rtt_period();
        probe_rtt_until_ = now;
        round_ = {};
        round_.begin = now;
    }
    // The rate stays within what was delivered, and nothing else is known of that yet.
    delivery_.fill(0);
    delivery_[slot_] = rate_;
    apply(1, now);
}

}  // namespace storm
