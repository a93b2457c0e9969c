// Congestion control: finds the rate of one link from delivery rate and queueing delay; loss alone never slows it down.
//
// A BBR-like model (delivery-rate maximum over ten rounds, minimum round trip over ten seconds) bounds a rate that
// follows delay: each link aims to keep the same few kilobytes in the bottleneck's queue. All links that share a queue
// see the same wait, so equal occupancy makes equal rates, and the total settles where the queue is short and never
// empty.
// Delivered rate is corrected by the loss seen while no queue stands, so random loss costs nothing; loss that comes
// with a full queue is not corrected for and pulls the rate down to what is delivered.
// If a foreign flow keeps the queue full although the link has backed off, the link stops yielding at 0.6 of its former
// rate: a flow that fills every queue, as most TCP does, would otherwise leave it nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "base/clock.hpp"
#include "congestion/pacer.hpp"
#include "congestion/path_cache.hpp"
#include "link/delivery_meter.hpp"

namespace storm {

enum class RateMode : std::uint8_t {
    unlimited,     // only the credit window holds the sender: right on loopback, where no queue lies between
    fixed,         // a given rate, shared by all links of an endpoint (the endpoint owns that Pacer)
    automatic,     // find the bottleneck from delivery rate and delay
    low_priority,  // automatic, and yields as soon as a standing queue is seen
    low_latency    // automatic, and yields while other flows keep the queue longer than `yield_delay`
};

// Rate control of one link.
class RateControl {
public:
    // `links`: how many may share a bottleneck, that is how many peers an endpoint of the job has. `yield_delay`:
    // queueing delay that other flows may cause before low_latency yields.
    RateControl(RateMode mode, std::size_t datagram_bytes, Nanos now, std::size_t links = 1,
                Nanos yield_delay = millisecond);
    // Whether a batch of `bytes` may leave now; counts it if so. While acknowledgements are overdue
    // (Outbound::ack_overdue), only the rate holds it back.
    [[nodiscard]] bool try_send(std::size_t bytes, std::uint64_t in_flight_bytes, Nanos now, bool ack_overdue = false);
    // When to try again after a refusal; `never` when only a report can help (the window is full).
    [[nodiscard]] Nanos next_send_at(Nanos now) const;
    // How many bytes one batch should carry at most, so that pacing stays smooth (GSO batches are bursts).
    [[nodiscard]] std::size_t batch_bytes() const { return batch_bytes_; }
    void on_delivery(const Delivery& delivery);
    // `share`: the fraction of the endpoint's unsent bytes that goes over this link. `busy`: links with something to
    // send.
    // An exchange ends with its slowest link, so a link that lags behind gets more of the bottleneck and others less.
    // `deadline`: the shortest time limit of its messages.
    void set_share(double share, std::size_t busy, Nanos deadline = never);

    // Starts with what an earlier link has learned of the same path, until this link has measured it.
    void recall(const PathMetrics& metrics);
    // What this link has learned of its path. None before it has found its rate, or on a path so short that finding it
    // takes no time.
    [[nodiscard]] std::optional<PathMetrics> metrics() const;

    [[nodiscard]] double bytes_per_s() const;                 // the current pacing rate; infinity when unlimited
    [[nodiscard]] Nanos min_rtt() const { return min_rtt_; }  // `never` before the first sample
    [[nodiscard]] double window_bytes() const;                // bytes in flight allowed; infinity when unlimited

private:
    enum class Phase : std::uint8_t { startup, drain, cruise, probe_rtt };
    static constexpr double least_step = 1.0 / 32, most_step = 1.0 / 4, unused_step = 1.0 / 128;
    static constexpr double rtt_noise = 0.05;             // of the round trip: delay that is noise on long paths
    static constexpr Nanos longest_yield = 300 * second;  // low priority: then the bare round trip may have changed
    static constexpr Nanos least_round = millisecond;     // short links: rates over less than this are noise of batches
    // Sums over one round: a round trip, stretched on short links until it holds enough to average.
    struct Round {
        Nanos begin{}, min_rtt{never}, max_rtt{};
        double delivered{}, lost{}, rated{}, weight{};  // weight: bytes whose rate was not app-limited
        double rtt_sum_s{}, rtts{};
        double limited_rate{}, best_rate{};  // the best sample that was app-limited, and the best other one
        std::uint32_t reports{};
    };

    [[nodiscard]] bool paced() const { return mode_ != RateMode::unlimited && mode_ != RateMode::fixed; }
    [[nodiscard]] double best_delivery() const;
    [[nodiscard]] double target_queue_s() const;
    [[nodiscard]] double bare_noise_s() const;
    [[nodiscard]] double recent_queue_s() const;
    [[nodiscard]] double loss_queue_s() const;
    [[nodiscard]] bool drained(Nanos now) const;
    void learn_min_rtt(Nanos rtt, Nanos now);
    // rate_start.cpp
    void on_train(const Dispersion& train, Nanos now);
    [[nodiscard]] bool may_trickle(std::uint64_t in_flight_bytes, Nanos now);
    [[nodiscard]] double trickle_rate() const;
    [[nodiscard]] double recalled_rate() const;
    void cruise_at(double rate, Nanos now);
    // rate_competition.cpp
    void notice_competition(double queue_s, Nanos now);
    void compete(double round_s);
    void yield(double queue_s, double round_s, Nanos now);
    [[nodiscard]] double yield_queue_s() const;
    [[nodiscard]] double own_queue_s() const;
    [[nodiscard]] bool carries_little() const;
    [[nodiscard]] bool yielded_lately(Nanos now) const;

    [[nodiscard]] double least_rate() const;
    void end_round(Nanos now);
    [[nodiscard]] double deviation(double loss, double bytes) const;
    void learn_delivery(double queue_s, double round_s);
    void advance(double queue_s, double round_s, Nanos now);
    [[nodiscard]] Nanos probe_rtt_period() const;
    void begin_probe_rtt(Nanos now);
    [[nodiscard]] bool probing_rtt(Nanos now) const;
    void learn_from_probe_rtt();
    void follow_delay(double queue_s, double round_s);
    void grow(bool queued, bool empty, double share);
    void apply(double gain, Nanos now);

    RateMode mode_;
    Phase phase_{Phase::startup};
    Nanos learn_until_{never};  // the first rate is not proven: until then packet trains decide
    PathMetrics recalled_{};
    bool window_full_{}, app_limited_{};
    double datagram_bytes_;
    double occupancy_bytes_,
        shared_bytes_;  // bytes the link keeps in the bottleneck's queue; bytes all links of the job keep
    double initial_rate_;
    double links_;
    double yield_delay_s_;
    Nanos trickle_at_{};  // when the next batch may be sent although nothing is answered yet
    bool trickles_{};
    std::size_t batch_bytes_;
    Pacer pacer_;
    double rate_, pace_, window_;    // bytes per second; bytes per second with gain; bytes in flight
    double step_;                    // relative growth of the next queue-free round
    double noise_s_;                 // delay seen without a queue
    double loss_{};                  // share lost while no queue stood
    double most_loss_;               // bound of loss_: the loss seen in the last PROBE_RTT plus its uncertainty
    double weight_{1};               // share of the endpoint's bottleneck, compared to an equal one
    std::size_t busy_{1}, crowd_{};  // links with something to send; the most since the last pause
    double deadline_s_{std::numeric_limits<double>::infinity()};
    double crowd_rate_{};    // our rate while they were that many
    double burst_{1};        // datagrams lost in a row, on average
    double peak_queue_s_{};  // the longest queue of the last minute or so: none overflows that is much shorter
    double shallow_{1};      // below 1 where the queue overflowed before the target was reached
    bool queued_before_{};   // the last round saw more than the target
    bool overflowed_{};      // this round lost more than the link does without a queue

    double bottleneck_bytes_per_s_{};
    double most_bottleneck_{};          // peak rate of the bottleneck within the last minute or so
    double fair_{};                     // the rate while the queue was ours
    double overload_{};                 // share lost beyond what the link always loses, while competing
    bool competing_{};                  // another flow keeps the queue full
    Nanos yielded_at_{-longest_yield};  // low priority: when another flow was last seen on the path
    int crowded_rounds_{}, roomy_rounds_{};
    Nanos crowded_since_{}, compete_until_{}, contest_{second};

    Nanos min_rtt_{never}, older_min_{never}, newer_min_{never}, bucket_;
    Nanos drain_from_{}, probe_rtt_until_{}, probe_rtt_seen_at_{}, next_probe_rtt_at_{}, sent_at_{};
    Nanos ready_at_{};  // from when on the rate would have allowed the next batch
    Round round_;
    std::array<Nanos, 3> recent_rtt_;  // of the latest reports
    std::size_t recent_{};
    double in_flight_{};                 // at the last report
    std::array<double, 10> delivery_{};  // of the last rounds with data
    std::array<double, 10> quantum_{};   // largest report of the same rounds
    std::size_t slot_{};
    double plateau_rate_{};
    int plateau_rounds_{}, drain_rounds_{}, free_rounds_{};
};

}  // namespace storm
