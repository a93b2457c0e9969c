#include "congestion/rate_control.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace storm {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double gso_bytes = 65'536;      // what one system call carries at most
constexpr double batch_s = 0.00025;       // a batch is this long at the current rate: a small part of a switch's queue
constexpr double shared_batch_s = 0.001;  // the same where several links share a bottleneck, and so its rate
constexpr double late_s = 0.001;          // how late a thread may wake without losing what it could have sent
constexpr double initial_datagrams = 32;  // sent before anything is known,
constexpr double initial_bytes_per_s = 30e6;  // at this rate by all links of an endpoint together
constexpr double startup_gain = 2;            // of the best rate delivered so far: doubles it each round
constexpr double most_weight = 2;             // of a link that lags behind; the inverse of one that is ahead
constexpr double most_occupancy = 24'576;     // what a link keeps in the bottleneck's queue
constexpr double shared_occupancy = 49'152;   // what all links of an endpoint keep there together
constexpr double queue_time_share = 0.25;     // a queue may last this much of a message's deadline
constexpr double least_target_s = 0.0002;     // delay below which a queue cannot be told from scheduling noise
constexpr double most_noise_s = 0.001;        // delay that is never taken for noise, whatever PROBE_RTT shows
constexpr double max_loss = 0.45;             // more than this is taken for an outage, not for a lossy link
constexpr double least_datagrams_per_s = 20;
constexpr double floor_bytes = 3'000;   // per round trip, always: two Ethernet datagrams keep the measurements alive
constexpr double probe_rtt_gain = 0.3;  // of the rate while the queue is emptied to see the bare round trip
constexpr double peak_memory_s = 30;    // how long the longest queue is remembered
constexpr Nanos min_rtt_bucket = 5 * second;  // two of them make the window of ten seconds

}  // namespace

RateControl::RateControl(RateMode mode, std::size_t datagram_bytes, Nanos now, std::size_t links, Nanos yield_delay)
    : mode_(mode),
      datagram_bytes_(static_cast<double>(datagram_bytes)),
      occupancy_bytes_(std::max(std::min(shared_occupancy / static_cast<double>(links), most_occupancy),
                                2.0 * static_cast<double>(datagram_bytes))),
      shared_bytes_(static_cast<double>(links) * occupancy_bytes_),
      initial_rate_(initial_bytes_per_s / static_cast<double>(links)),
      links_(static_cast<double>(links)),
      yield_delay_s_(seconds(yield_delay)),
      batch_bytes_(std::max<std::size_t>(datagram_bytes, static_cast<std::size_t>(gso_bytes))),
      pacer_(infinity, 0, now),
      rate_(infinity),
      pace_(infinity),
      window_(infinity),
      step_(least_step),
      noise_s_(least_target_s),
      most_loss_(max_loss),
      bucket_(now / min_rtt_bucket) {
    round_.begin = now;
    recent_rtt_.fill(never);
    if (!paced()) return;
    window_ = initial_datagrams * datagram_bytes_;
    pacer_.set_rate(initial_rate_, now);
    batch_bytes_ =
        std::max(datagram_bytes, std::min<std::size_t>(4 * datagram_bytes, static_cast<std::size_t>(gso_bytes)));
}

bool RateControl::try_send(std::size_t bytes, std::uint64_t in_flight_bytes, Nanos now, bool ack_overdue) {
    if (!paced()) return true;
    window_full_ = !ack_overdue && in_flight_bytes > 0 &&
                   static_cast<double>(in_flight_bytes) + static_cast<double>(bytes) > window_;
    const bool known = phase_ == Phase::cruise || phase_ == Phase::probe_rtt;
    const bool paused = in_flight_bytes == 0 && app_limited_ && now - sent_at_ > 4 * least_round;
    // Where the path is long, not just its queue, the next exchange begins while the last data of this one is still
    // unacknowledged. Then a pause counts if it is longer than what the link keeps in the queue.
    const Nanos silence = now - ready_at_;
    const bool long_since = known && !window_full_ && silence > std::max(16 * least_round, min_rtt_ / 4) &&
                            seconds(std::min(silence, min_rtt_ / 2)) > target_queue_s();
    if (known && (paused || long_since)) {
        // A pause empties the queue. So send at full rate at once, and postpone the next PROBE_RTT: the first datagrams
        // see the path without a queue anyway.
        phase_ = Phase::cruise;
        pacer_.set_burst(0, now);  // not with a burst of every link at once
        // The last exchange may have ended with this link alone on the bottleneck.
        if (busy_ >= crowd_ && crowd_rate_ > 0) rate_ = std::min(rate_, 1.1 * crowd_rate_);
        crowd_ = busy_;
        next_probe_rtt_at_ = now + probe_rtt_period();
        apply(1, now);
    }
    if (window_full_ && !may_trickle(in_flight_bytes, now)) return false;
    if (!pacer_.try_send(bytes, now)) return false;
    trickle_at_ = now + static_cast<Nanos>(static_cast<double>(bytes) / trickle_rate() * static_cast<double>(second));
    sent_at_ = now;
    ready_at_ = pacer_.next_send_at(now);
    return true;
}

Nanos RateControl::next_send_at(Nanos now) const {
    if (!paced()) return now;
    if (window_full_ && !trickles_) return never;
    return window_full_ ? std::max(trickle_at_, pacer_.next_send_at(now)) : pacer_.next_send_at(now);
}

void RateControl::set_share(double share, std::size_t busy, Nanos deadline) {
    busy_ = busy;
    deadline_s_ = deadline == never ? infinity : seconds(deadline);
    weight_ = std::clamp(share * static_cast<double>(busy), 1 / most_weight, most_weight);
}

double RateControl::bytes_per_s() const { return pace_; }
double RateControl::window_bytes() const { return window_; }

double RateControl::best_delivery() const { return *std::max_element(delivery_.begin(), delivery_.end()); }

// The target is an equal occupancy for all links, which makes their rates equal, plus an allowance for noise.
double RateControl::target_queue_s() const {
    // Noise is scaled less: a threshold within it would hold the link back for ever.
    const double noise_s = std::max(std::max(shallow_, 0.5) * noise_s_, shallow_ * rtt_noise * seconds(min_rtt_));
    // A datagram that misses its deadline is lost: data must not queue behind datagrams that are too late already.
    return noise_s + std::min(shallow_ * weight_ * occupancy_bytes_ / rate_, queue_time_share * deadline_s_);
}

void RateControl::learn_min_rtt(Nanos rtt, Nanos now) {
    const Nanos bucket = now / min_rtt_bucket;
    // While others keep the queue full, the round trip without a queue cannot be seen.
    const bool hidden = competing_ || crowded_rounds_ > 0 || yielded_lately(now);
    if (bucket != bucket_ && !hidden) {
        older_min_ = bucket == bucket_ + 1 ? newer_min_ : never;
        newer_min_ = never;
        bucket_ = bucket;
    }
    newer_min_ = std::min(newer_min_, rtt);
    min_rtt_ = std::min(older_min_, newer_min_);
}

void RateControl::on_delivery(const Delivery& delivery) {
    if (!paced()) return;
    window_full_ = false;
    app_limited_ = delivery.app_limited;
    const Nanos now = delivery.now;
    if (delivery.rtt > 0) {
        learn_min_rtt(delivery.rtt, now);
        round_.min_rtt = std::min(round_.min_rtt, delivery.rtt);
        round_.max_rtt = std::max(round_.max_rtt, delivery.rtt);
        round_.rtt_sum_s += seconds(delivery.rtt);
        ++round_.rtts;
        recent_rtt_[recent_++ % recent_rtt_.size()] = delivery.rtt;
    }
    in_flight_ = static_cast<double>(delivery.in_flight_bytes);
    bottleneck_bytes_per_s_ = delivery.bottleneck_bytes_per_s;
    most_bottleneck_ = std::max(most_bottleneck_, bottleneck_bytes_per_s_);
    burst_ = delivery.burst;
    const auto delivered = static_cast<double>(delivery.delivered_bytes);
    const auto lost = static_cast<double>(delivery.lost_bytes);
    round_.delivered += delivered;
    round_.lost += lost;
    quantum_[slot_] = std::max(quantum_[slot_], delivered + lost);
    ++round_.reports;
    if (delivery.app_limited) {
        round_.limited_rate = std::max(round_.limited_rate, delivery.bytes_per_s);
    } else if (delivery.bytes_per_s > 0) {
        round_.rated += delivery.bytes_per_s * delivered;
        round_.weight += delivered;
        round_.best_rate = std::max(round_.best_rate, delivery.bytes_per_s);
    }
    if (round_.min_rtt == never) return;
    // A round needs some reports for its least delay to mean a queue, but may not wait for them long.
    const Nanos elapsed = now - round_.begin;
    const bool enough =
        phase_ == Phase::startup || (elapsed >= least_round && round_.reports >= 4) || elapsed >= 4 * least_round;
    // Startup doubles in a round: a queue that three reports have seen is acted upon at once. So is its end.
    const bool filled =
        phase_ == Phase::startup && round_.weight > 0 && std::isfinite(rate_) && recent_queue_s() > target_queue_s();
    const bool sooner = filled || (phase_ == Phase::drain && drained(now));
    if ((enough && elapsed >= round_.min_rtt) || sooner) end_round(now);
    on_train(delivery.train, now);
}

void RateControl::end_round(Nanos now) {
    const double round_s = std::min(seconds(now - round_.begin), 4 * seconds(std::max(round_.min_rtt, least_round)));
    const double queue_s = seconds(round_.min_rtt - min_rtt_);
    if (std::isinf(rate_)) {
        rate_ = pace_ = std::min(initial_rate_, initial_datagrams * datagram_bytes_ / seconds(round_.min_rtt));
        if (recalled_rate() > rate_) return cruise_at(recalled_rate(), now);
    }
    if (phase_ == Phase::cruise && learn_until_ == never) learn_until_ = now + 2 * round_.min_rtt;
    learn_delivery(queue_s, round_s);
    advance(queue_s, round_s, now);
    if (busy_ >= crowd_) {
        crowd_ = busy_;
        crowd_rate_ = rate_;
    }
    round_ = {};
    round_.begin = now;
}

// Standard deviation of a loss fraction measured over `bytes`. Never zero: a link that lost nothing so far may still
// lose.
double RateControl::deviation(double loss, double bytes) const {
    // Losses that come in runs of b vary as if there were 2b - 1 times fewer datagrams.
    return std::sqrt(std::max(loss * (1 - loss), 0.01) * (2 * burst_ - 1) * datagram_bytes_ / bytes);
}

void RateControl::learn_delivery(double queue_s, double round_s) {
    const double total = round_.delivered + round_.lost;
    const double loss = total > 0 ? std::min(round_.lost / total, max_loss) : 0;
    overflowed_ = false;
    peak_queue_s_ =
        std::max(seconds(round_.max_rtt - min_rtt_), peak_queue_s_ * (1 - std::min(round_s / peak_memory_s, 1.0)));
    if (total > 0) {
        const double spread = 0.02 + 3 * deviation(loss_, total);
        const double weight = std::min(0.25, total / (400 * datagram_bytes_));
        if (loss < loss_ - spread) {  // what was taken for the link's loss came from a queue after all
            loss_ += 0.5 * (loss - loss_);
        } else if (queue_s <= loss_queue_s()) {
            if (loss_ + weight * (loss - loss_) > most_loss_)  // more than the last PROBE_RTT saw: probe again
                next_probe_rtt_at_ =
                    std::min(next_probe_rtt_at_, probe_rtt_until_ + 16 * (round_.min_rtt + least_round));
            loss_ = std::min(loss_ + weight * (loss - loss_), std::max(loss_, most_loss_));
        } else {
            // A queue that overflows is as long as it can be. (A burst of losses may come at any length.)
            overflowed_ = loss > loss_ + spread && seconds(round_.max_rtt - min_rtt_) > 0.7 * peak_queue_s_;
        }
    }
    shallow_ = overflowed_ ? std::max(0.8 * shallow_, 0.1) : std::min(1.004 * shallow_, 1.0);
    const double limited = round_.limited_rate / (1 - loss_);
    if (round_.weight > 0) {
        slot_ = (slot_ + 1) % delivery_.size();
        // While the rate doubles from round to round, a round's mean lags behind by half of it.
        const double sampled = phase_ == Phase::startup ? round_.best_rate : round_.rated / round_.weight;
        delivery_[slot_] = std::max(sampled / (1 - loss_), limited > best_delivery() ? limited : 0);
        quantum_[slot_] = 0;
    } else if (limited > best_delivery()) {
        delivery_[slot_] = limited;
    }
}

void RateControl::advance(double queue_s, double round_s, Nanos now) {
    const double best = best_delivery();
    const bool has_data = round_.weight > 0;
    const double target_s = target_queue_s();
    switch (phase_) {
        case Phase::startup: {
            rate_ = std::max(rate_, best);
            if (has_data) {
                plateau_rounds_ = best >= 1.25 * plateau_rate_ ? 0 : plateau_rounds_ + 1;
                plateau_rate_ = std::max(plateau_rate_, plateau_rounds_ == 0 ? best : 0);
            }
            const bool filled = std::max(queue_s, recent_queue_s()) > target_s || overflowed_;
            if (plateau_rounds_ >= 3 || (has_data && filled)) {
                phase_ = Phase::drain;
                begin_probe_rtt(now);
            } else {
                apply(startup_gain, now);
                return;
            }
            [[fallthrough]];
        }
        case Phase::drain:
            if (!drained(now) && ++drain_rounds_ <= 8) {
                apply(probe_rtt_gain, now);
                return;
            }
            if (!probing_rtt(now)) learn_from_probe_rtt();
            phase_ = Phase::cruise;
            step_ = most_step;  // startup may have stopped short
            [[fallthrough]];
        case Phase::cruise:
            if (mode_ != RateMode::automatic) {
                yield(queue_s, round_s, now);
            } else {
                notice_competition(queue_s, now);
                if (competing_) {
                    compete(round_s);
                    apply(1, now);
                    return;
                }
                follow_delay(queue_s, round_s);
            }
            if (has_data && now >= next_probe_rtt_at_) {
                phase_ = Phase::probe_rtt;
                begin_probe_rtt(now);
                apply(probe_rtt_gain, now);
                return;
            }
            break;
        case Phase::probe_rtt:
            if (probing_rtt(now)) return;
            learn_from_probe_rtt();
            phase_ = Phase::cruise;
            break;
    }
    const double excess_s = queue_s - target_s;
    apply(1 - std::clamp(0.5 * excess_s / round_s, 0.0, 0.5), now);
}

double RateControl::bare_noise_s() const { return std::max(noise_s_, rtt_noise * seconds(min_rtt_)); }

// With no more delay than this, loss does not come from a queue. It lies below the target: a link that takes random
// loss for an overflow slows down until its queue falls below this and it learns its loss.
double RateControl::loss_queue_s() const {
    // Not scaled by shallow_: a link that has slowed down far enough must learn its loss, however late threads wake.
    const double own_s = occupancy_bytes_ / rate_;
    return std::min(bare_noise_s() + 0.25 * own_s, 0.5 * (bare_noise_s() + own_s));
}

double RateControl::recent_queue_s() const {
    return seconds(*std::min_element(recent_rtt_.begin(), recent_rtt_.end()) - min_rtt_);
}

// Whether the queue that startup built has drained. On short round trips, also wait to see the path without a queue.
bool RateControl::drained(Nanos now) const {
    const double quantum = *std::max_element(quantum_.begin(), quantum_.end());
    return now >= drain_from_ + 8 * least_round && in_flight_ <= rate_ * seconds(min_rtt_) + quantum;
}

// A PROBE_RTT costs some 40 ms of a short path's capacity; until there was one, links that started late get less.
Nanos RateControl::probe_rtt_period() const { return std::clamp(100 * min_rtt_, 2 * second, min_rtt_bucket); }

// Links of one endpoint share a clock, so most of them probe together and see the path without their own queue.
void RateControl::begin_probe_rtt(Nanos now) {
    next_probe_rtt_at_ = (now / probe_rtt_period() + 1) * probe_rtt_period();
    probe_rtt_until_ = now + std::max(3 * min_rtt_ / 2, 8 * least_round);
    probe_rtt_seen_at_ = now + min_rtt_;
    drain_rounds_ = 0;
    drain_from_ = now;
}

// A round counts for PROBE_RTT when all it reports was sent within it.
bool RateControl::probing_rtt(Nanos now) const { return now < probe_rtt_until_ || round_.begin < probe_rtt_seen_at_; }

// Delay seen while the queue is empty is noise: threads that wake late, Wi-Fi, batches. Loss seen then is no overflow.
void RateControl::learn_from_probe_rtt() {
    const double mean_s = round_.rtt_sum_s / round_.rtts - seconds(min_rtt_);
    if (!yielded_lately(round_.begin))
        noise_s_ = std::clamp(0.5 * (noise_s_ + 1.25 * mean_s), least_target_s, most_noise_s);
    const double total = round_.delivered + round_.lost;
    if (total <= 0) return;
    const double loss = std::min(round_.lost / total, max_loss);
    most_loss_ = std::min(loss + 0.05 + 2 * deviation(loss, total), max_loss);
    loss_ += std::min(0.5, total / (400 * datagram_bytes_)) * (loss - loss_);
}

// Automatic: grows the rate while the queue is below its target, and drains what stands above it.
void RateControl::follow_delay(double queue_s, double round_s) {
    const double target_s = target_queue_s();
    const double excess_s = queue_s - target_s;
    if (excess_s > 0 || overflowed_) {
        // Far above, the rate falls at once to what is delivered: the path became slower or was joined by others.
        // A single report may just have been late, as threads are on a busy machine.
        const bool sure = queued_before_ || overflowed_ || round_.reports > 1;
        if (sure && round_.weight > 0 && (overflowed_ || queue_s > 3 * target_s))
            rate_ = std::min(rate_, std::max(delivery_[slot_], 0.7 * rate_));
        rate_ *= 1 - std::clamp(0.125 * excess_s / round_s, overflowed_ ? 0.05 : 0.0, sure ? 0.2 : 0.05);
    }
    queued_before_ = excess_s > 0;
    const bool queued = excess_s > 0 || overflowed_;
    grow(queued, queue_s < target_s / 4, 1 - queue_s / target_s);
}

// Grows the rate in rounds with data, faster after several that met no queue, within what the model allows.
void RateControl::grow(bool queued, bool empty, double share) {
    if (queued) {
        step_ = least_step;
        free_rounds_ = 0;
    } else if (round_.weight > 0 && round_.rated / round_.weight > 0.8 * (1 - loss_) * rate_) {
        if (empty && ++free_rounds_ > 2) step_ = std::min(2 * step_, most_step);
        rate_ *= 1 + step_ * share;
    } else if (round_.weight > 0) {
        // A rate that was not used is not proven: let it grow slowly, only so that it is not stuck for ever.
        rate_ *= 1 + unused_step * share;
    }
    const double best = best_delivery();
    if (best > 0) rate_ = std::min(rate_, 1.25 * best);
    rate_ = std::max(rate_, least_rate());
}

// Before the first round trip is known, and over the longest ones, some datagrams a second must leave all the same.
// And no more than that: the floors of all links must fit a slow bottleneck.
double RateControl::least_rate() const {
    return std::max(floor_bytes / std::max(seconds(min_rtt_), 0.01), least_datagrams_per_s * datagram_bytes_);
}

void RateControl::apply(double gain, Nanos now) {
    pace_ = gain * rate_;
    // What the kernel does for a batch costs nearly the same whatever its size.
    const double lasts_s = busy_ > 1 ? shared_batch_s : batch_s;
    const double batch = std::clamp(lasts_s * rate_, 2 * datagram_bytes_, std::max(gso_bytes, 2 * datagram_bytes_));
    batch_bytes_ = static_cast<std::size_t>(std::max(std::min(batch, gso_bytes), datagram_bytes_));
    pacer_.set_rate(pace_, now);
    // A thread that woke late may catch up: otherwise a busy machine would never reach the rate.
    pacer_.set_burst(std::max(2 * static_cast<double>(batch_bytes_), late_s * pace_), now);
    // A queue that other flows keep full counts as part of the path.
    const bool theirs = competing_ && round_.min_rtt != never;
    const double bdp = rate_ * seconds(theirs ? round_.min_rtt : min_rtt_);
    const double quantum = *std::max_element(quantum_.begin(), quantum_.end());
    const double bdps = phase_ == Phase::startup ? startup_gain : phase_ == Phase::cruise && gain >= 1 ? 2.0 : 1.1;
    // What the link keeps in the queue is in flight, too: a window without it would hold a slow link back for ever.
    const double queued = std::isfinite(rate_) && min_rtt_ != never ? rate_ * target_queue_s() : 0;
    const double batch_room = static_cast<double>(batch_bytes_);
    window_ = std::max(bdps * bdp + weight_ * quantum + std::max(queued, weight_ * batch_room) + batch_room,
                       2 * datagram_bytes_);
}

}  // namespace storm
