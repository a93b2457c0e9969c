// Congestion control beside other flows: it holds its share against flows that do not yield (automatic), or yields to
// all of them (low priority, a scavenger).
#include <algorithm>

#include "congestion/rate_control.hpp"

namespace storm {
namespace {

constexpr double known_part = 0.8;       // of the bottleneck's peak rate, taken at once after yielding
constexpr double long_part = 0.4;        // of the round trip: a shorter queue never makes low_latency yield
constexpr double crowd_margin = 1.5;     // times the job's own queue: a longer one is foreign
constexpr double contested_share = 0.6;  // of its former rate, held beside a flow that does not yield
constexpr double overload_s = 0.3, most_overload = 0.03;  // for how long, and by how much, excess loss is tolerated
constexpr double line_memory_s = 60;                      // how long the bottleneck's peak rate is remembered
constexpr int foreign_queue_rounds = 144;                 // for which a queue must stand to count as foreign,
constexpr int sure_round = 6;     // and for how many of them a round counts in which it exceeds our own queue
constexpr Nanos lately = second;  // a foreign queue that was seen since then may still stand
constexpr Nanos longest_contest = 16 * second;  // after this time, test again whose queue it is

}  // namespace

// Links that run this algorithm all back off, and the queue falls to its target within some rounds. If it stays far
// above although this link has reduced its rate by much, it belongs to a flow that does not yield. That is tested again
// from time to time.
void RateControl::notice_competition(double queue_s, Nanos now) {
    if (round_.weight <= 0) return;
    // Judge by what arrived: startup tries rates that no bottleneck has.
    const double had = std::min(rate_, round_.rated / round_.weight / (1 - loss_));
    if (fair_ <= 0) fair_ = had;
    // All links of the job together keep no more than this in a queue, whichever of them send, as the bottleneck is no
    // slower than its peak rate.
    const double bare_s = bare_noise_s();
    const bool crowded = queue_s > crowd_margin * (bare_s + shared_bytes_ / std::max(fair_, bottleneck_bytes_per_s_));
    if (!crowded) {
        crowded_rounds_ = std::max(crowded_rounds_ - 2, 0);
        if (!competing_) {
            // Above the queue's target the rate falls in favour of other flows, so it says little about our fair share.
            const double time_s = had > fair_ ? 0.5 : queue_s <= bare_s + occupancy_bytes_ / fair_ ? 2 : 60;
            fair_ += (had - fair_) * std::min(seconds(now - round_.begin) / time_s, 0.5);
        }
    } else {
        if (crowded_rounds_ == 0) crowded_since_ = now;
        crowded_rounds_ = std::min(crowded_rounds_ + 1, 16);
    }
    roomy_rounds_ = crowded ? 0 : roomy_rounds_ + 1;
    if (competing_) {
        if (now >= compete_until_ || roomy_rounds_ >= 4) {
            competing_ = false;
            crowded_rounds_ = crowded ? 1 : 0;
            contest_ = crowded ? std::min(2 * contest_, longest_contest) : second;
        }
    } else if (crowded_rounds_ >= 8 && now - crowded_since_ >= 100 * least_round && rate_ < contested_share * fair_) {
        competing_ = true;
        overload_ = 0;
        // A link that started together with another flow never had the queue to itself, but may have had the bottleneck
        // briefly.
        fair_ = std::max(fair_, bottleneck_bytes_per_s_ / static_cast<double>(busy_));
        compete_until_ = now + contest_;
    }
}

void RateControl::compete(double round_s) {
    // A flow that fills the queue overflows it now and then. If overflow goes on, all flows send too much: the
    // bottleneck became slower, or the other flows are links of ours after all.
    const double total = round_.delivered + round_.lost;
    const double excess = total > 0 ? std::max(round_.lost / total - loss_, 0.0) : 0;
    overload_ += (excess - overload_) * std::min(round_s / overload_s, 1.0);
    if (overload_ > most_overload) fair_ *= 1 - std::min(round_s / overload_s, 0.1);
    const double goal = contested_share * fair_;
    rate_ = rate_ < goal ? std::min(1.25 * rate_, goal) : std::max(0.8 * rate_, goal);
    free_rounds_ = 0;
    step_ = least_step;
}

// The queue, as a delay, from which on this link yields. For low_priority that is any: the threshold lies below that of
// `automatic`, which keeps at least noise_s_ standing, so a scavenger sees a delay on every round it competes and falls
// to its floor. low_latency keeps the queue that `automatic` keeps, and so fills a bottleneck without other traffic.
double RateControl::yield_queue_s() const {
    if (mode_ == RateMode::low_priority) return std::max(0.75 * noise_s_, rtt_noise * seconds(min_rtt_));
    // No less than what the job keeps there itself. And over a long path, answers arrive so late that our own queue
    // varies by a part of the round trip.
    return bare_noise_s() + std::max({yield_delay_s_, own_queue_s(), long_part * seconds(min_rtt_)});
}

// What all links of the job together keep in a queue.
double RateControl::own_queue_s() const { return shared_bytes_ / std::max(most_bottleneck_, rate_); }

// True if all links of the endpoint together carry much less than the bottleneck has carried before.
bool RateControl::carries_little() const {
    if (round_.weight <= 0) return true;
    const double own = round_.rated / round_.weight / (1 - loss_);
    return own * static_cast<double>(busy_) / weight_ < known_part * most_bottleneck_;
}

// True if other flows were seen a moment ago. What they leave says nothing about the bottleneck and the path
// themselves.
bool RateControl::yielded_lately(Nanos now) const {
    return now - yielded_at_ < lately && now - crowded_since_ < longest_yield;
}

void RateControl::yield(double queue_s, double round_s, Nanos now) {
    const bool queued = queue_s > yield_queue_s();
    // A queue that is short for a moment is not gone: the flow that fills it lets it fall a little now and then.
    if (queued) {
        if (now - yielded_at_ >= lately) crowded_since_ = now;
        yielded_at_ = now;
    } else if (!yielded_lately(now)) {
        most_bottleneck_ *= 1 - std::min(round_s / line_memory_s, 1.0);
    }
    if (mode_ == RateMode::low_priority) {
        if (queued) rate_ *= 0.5;
        grow(queued, !queued, 1);
        return;
    }
    // A queue that stands although this endpoint carries less than the bottleneck can is foreign, the more surely so if
    // it is longer than this job would make it. Yield in proportion to the excess, at most to half in a round. A
    // transient queue, however long, says nothing: ranks of this job cause it, too, when their exchanges begin and end.
    const double limit_s = yield_queue_s();
    const bool foreign = queue_s > 0.5 * (bare_noise_s() + limit_s) && carries_little();
    crowded_rounds_ = foreign
                          ? std::min(crowded_rounds_ + (queued ? sure_round : 1), foreign_queue_rounds + 8 * sure_round)
                          : std::max(crowded_rounds_ - 8 * sure_round, 0);
    if (foreign && crowded_rounds_ > foreign_queue_rounds) {
        rate_ *= std::clamp(2 - queue_s / limit_s, 0.5, 0.9);
        return grow(true, false, 0);
    }
    // Up to the bottleneck's peak rate, the rate recovers quickly; beyond it, with care.
    if (rate_ * static_cast<double>(busy_) > known_part * most_bottleneck_) {
        step_ = least_step;
        free_rounds_ = 0;
    }
    follow_delay(queue_s, round_s);
}

}  // namespace storm
