// Finds the rate of one link from what is delivered and how long it waits; loss alone never slows it down.
//
// A BBR-like model (delivery-rate maximum over ten rounds, minimum round trip over ten seconds) bounds a rate that follows
// delay: each link aims to keep the same few kilobytes in the bottleneck's queue. All links that share a queue see the
// same wait, so equal occupancy makes equal rates, and the total settles where the queue is short and never empty.
// Delivered rate is corrected by the loss seen while no queue stands, so random loss costs nothing; loss that comes with a
// full queue is not corrected for and pulls the rate down to what is delivered.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "clock.hpp"
#include "pacer.hpp"

namespace storm {

enum class RateMode : std::uint8_t {
    unlimited,    // only the credit window holds the sender: right on loopback, where no queue lies between
    fixed,        // a given rate, shared by all links of an endpoint (the endpoint owns that Pacer)
    automatic,    // find the bottleneck from delivery rate and delay
    low_priority  // automatic, and yields as soon as a standing queue is seen
};

// What a report taught about the link.
struct Delivery {
    Nanos now{};
    Nanos rtt{};           // of the newest packet it names, less the time the receiver held it
    double bytes_per_s{};  // delivery rate over the packet's flight (DeliveryMeter); 0 when it cannot be told
    std::uint64_t delivered_bytes{};  // newly delivered
    std::uint64_t lost_bytes{};       // newly declared lost
    std::uint64_t in_flight_bytes{};  // after this report
    bool app_limited{};               // the sender had nothing more to send when that packet left (its stamp says so)
};

// What a packet remembers of the moment it left; kept by the link beside the packet number.
struct SendStamp {
    std::uint64_t delivered_bytes{};  // the link's total then
    Nanos delivered_at{};             // when that total was reached
    Nanos first_sent_at{};            // when the packet that total ends with was sent
    Nanos sent_at{};
    bool app_limited{};
};

// Delivery rate of a flight, as in BBR's draft: reports are counted from the last one before the packet left, and the
// slower of sending and arriving counts. Measuring from the packet's own departure instead would count a whole report
// quantum too much, several times the rate on short links.
class DeliveryMeter {
public:
    [[nodiscard]] SendStamp on_send(std::uint64_t in_flight_bytes_before, Nanos now);
    // Nothing is left to send: packets are marked until what is in flight now has been delivered.
    void on_app_limited(std::uint64_t in_flight_bytes) { limited_until_ = delivered_ + in_flight_bytes; }
    // `newest` belongs to the newest packet the report names, `held` is the time the receiver kept that packet before it
    // reported. Returns bytes per second, 0 when the interval is too short to tell.
    [[nodiscard]] double on_report(const SendStamp& newest, std::uint64_t newly_delivered_bytes, Nanos held, Nanos now);

private:
    std::uint64_t delivered_{}, limited_until_{};
    Nanos delivered_at_{}, first_sent_at_{};
};

// Rate control of one link.
class RateControl {
public:
    RateControl(RateMode mode, std::size_t datagram_bytes, Nanos now);
    // Whether a batch of `bytes` may leave now; counts it if so.
    [[nodiscard]] bool try_send(std::size_t bytes, std::uint64_t in_flight_bytes, Nanos now);
    // When to try again after a refusal; `never` when only a report can help (the window is full).
    [[nodiscard]] Nanos next_send_at(Nanos now) const;
    // How many bytes one batch should carry at most, so that pacing stays smooth (GSO batches are bursts).
    [[nodiscard]] std::size_t batch_bytes() const { return batch_bytes_; }
    void on_delivery(const Delivery& delivery);

    [[nodiscard]] double bytes_per_s() const;                 // the current pacing rate; infinity when unlimited
    [[nodiscard]] Nanos min_rtt() const { return min_rtt_; }  // `never` before the first sample
    [[nodiscard]] double window_bytes() const;                // bytes in flight allowed; infinity when unlimited

private:
    enum class Phase : std::uint8_t { startup, drain, cruise, probe_rtt };
    // Sums over one round: a round trip, stretched on short links until it holds enough to average.
    struct Round {
        Nanos begin{}, min_rtt{never};
        double delivered{}, lost{}, rated{}, weight{};  // weight: bytes whose rate was not app-limited
        double rtt_sum_s{}, rtts{};
        double limited_rate{};  // best app-limited sample
        std::uint32_t reports{};
    };

    [[nodiscard]] bool paced() const { return mode_ == RateMode::automatic || mode_ == RateMode::low_priority; }
    [[nodiscard]] double best_delivery() const;
    [[nodiscard]] double target_queue_s() const;
    void learn_min_rtt(Nanos rtt, Nanos now);
    void end_round(Nanos now);
    [[nodiscard]] double deviation(double loss, double bytes) const;
    void learn_delivery(double queue_s);
    void advance(double queue_s, double round_s, Nanos now);
    [[nodiscard]] Nanos dip_period() const;
    void begin_dip(Nanos now);
    [[nodiscard]] bool dipping(Nanos now) const;
    void learn_from_dip();
    void follow_delay(double queue_s, double round_s);
    void yield(double queue_s);
    void grow(bool queued, bool empty, double share);
    void apply(double gain, Nanos now);

    RateMode mode_;
    Phase phase_{Phase::startup};
    bool window_full_{}, app_limited_{};
    double datagram_bytes_;
    std::size_t batch_bytes_;
    Pacer pacer_;
    double rate_, pace_, window_;  // bytes per second, the same with gain, bytes in flight
    double step_;                  // relative growth of the next queue-free round
    double noise_s_;               // delay seen without a queue
    double loss_{};                // share lost while no queue stood
    double most_loss_;             // what loss_ may grow to: what the last dip saw, with its uncertainty
    double shallow_{1};            // below 1 where the queue overflowed before the target was reached
    bool overflowed_{};            // this round lost more than the link does without a queue

    Nanos min_rtt_{never}, older_min_{never}, newer_min_{never}, bucket_;
    Nanos dip_until_{}, dip_seen_at_{}, next_dip_at_{}, sent_at_{};
    Round round_;
    std::array<double, 10> delivery_{};  // of the last rounds with data
    std::array<double, 10> quantum_{};   // largest report of the same rounds
    std::size_t slot_{};
    double plateau_rate_{};
    int plateau_rounds_{}, drain_rounds_{}, free_rounds_{};
};

}  // namespace storm
