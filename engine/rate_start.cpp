// How rate control comes by its first rate: from a train of datagrams, or from what was remembered of the path.
#include <algorithm>
#include <cmath>

#include "rate_control.hpp"

namespace storm {
namespace {

// Where a round trip is shorter, doubling takes no longer than a train does.
constexpr Nanos least_train_rtt = 4 * millisecond;
constexpr double most_trickled = 128;  // datagrams in flight before anything is answered

}  // namespace

// A train that arrived more slowly than it was sent has passed at the speed of the bottleneck, or of our share of it. One
// that did not only shows that the path is faster than that: startup goes on.
void RateControl::heed_train(const Dispersion& train, Nanos now) {
    if (!learning_ || !train.spread || min_rtt_ == never || min_rtt_ < least_train_rtt) return;
    if (phase_ != Phase::cruise) {
        phase_ = Phase::cruise;
        step_ = most_step;
        next_dip_at_ = now + dip_period();
        dip_until_ = now;
        round_ = {};
        round_.begin = now;
    }
    // Loss is not known yet: what did not arrive may have found no room.
    rate_ = std::max(train.bytes_per_s / (1 - loss_), least_rate());
    delivery_[slot_] = rate_;
    apply(1, now);
}

// Before the first answer the window is small, as nobody knows how slow the path is. Over a long path, waiting for the answer
// would leave the line idle meanwhile, so a little goes on leaving.
bool RateControl::may_trickle(std::uint64_t in_flight_bytes, Nanos now) {
    trickles_ = std::isinf(rate_) && static_cast<double>(in_flight_bytes) < most_trickled * datagram_bytes_;
    return trickles_ && now >= trickle_at_;
}

}  // namespace storm
