// The link to one peer: packet numbers, acknowledgement (ACK), loss detection, datagrams in flight, round trip, replay
// window.
//
// Every datagram on a link has its own number, never used twice. A receiver reports which numbers arrived; the sender
// knows what each number carried and so which data to retransmit, without a timer for the whole message.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.hpp"
#include "link/burst_meter.hpp"
#include "link/delivery_meter.hpp"
#include "link/packet_train.hpp"
#include "wire/slots.hpp"
#include "wire/wire.hpp"

namespace storm {

// What one numbered datagram carried, kept until it is acknowledged or lost.
struct Flight {
    SendStamp stamp{};
    std::uint32_t bytes{};
    Kind kind{};
    std::uint8_t flags{};
    bool settled{};     // it arrived or is counted as lost
    bool lost{};        // it is counted as lost, but may still arrive late
    bool more{};        // a piece of a chunk that others follow: the last piece represents the chunk
    SlotRef message{};  // the outgoing message, for data
    std::uint32_t chunk{};
    std::uint32_t channel{}, seq{};  // for control datagrams that are retransmitted
    FailureCause failure_cause{};
    std::uint32_t challenge{};  // path challenge: it went to an unvalidated address, see routes.hpp
};

// The minimum of the last ten to twenty seconds. Older values are dropped: routes change, and clocks drift apart.
class RecentMin {
public:
    Nanos add(Nanos value, Nanos now) {
        if (now - since_ >= 10 * second) {
            older_ = newer_;
            newer_ = never;
            since_ = now;
        }
        newer_ = std::min(newer_, value);
        return std::min(older_, newer_);
    }

private:
    Nanos older_{never}, newer_{never}, since_{};
};

// The sending half: datagrams in flight, and whether they arrived.
class Outbound {
public:
    // At most so many numbers are in flight: a report can name no more.
    static constexpr std::uint64_t max_flights = std::uint64_t{Report::max_words} * 64;
    // Data may use so many of them; the rest is for control datagrams.
    static constexpr std::uint64_t max_data_flights = max_flights - 1024;
    // A number this far below an arrived one is lost and not merely reordered.
    static constexpr std::uint64_t reorder_limit = 8;
    // A lost number is remembered until so many later ones were sent, in case it was only late.
    static constexpr std::uint64_t late_limit = 512;
    // A probe retransmits up to this many of the latest datagrams.
    static constexpr std::uint64_t probe_reach = 64;

    explicit Outbound(std::uint64_t credit_bytes, Nanos now) : credit_bytes_(credit_bytes), active_at_(now) {}

    // Records a datagram that is sent and returns its number.
    std::uint64_t depart(Flight flight, Nanos now);
    // Processes an acknowledgement report; settled flights go to `acked(flight)` or `lost(flight)`.
    template <class Acked, class Lost>
    void settle(const Report& report, Nanos now, Acked&& acked, Lost&& lost);
    // Calls `lost(flight)` for each flight whose time threshold has passed.
    template <class Lost>
    void expire(Nanos now, Lost&& lost);
    // Calls `lost(flight)` for everything in flight.
    template <class Lost>
    void mark_all_lost(Lost&& lost);
    // True if so much is in flight without an answer that flights would soon be forgotten: call `forget_all` then.
    [[nodiscard]] bool out_of_numbers() const { return flights_in_use() >= max_data_flights; }
    // Calls `lost(flight)` for everything in flight, and forgets it: a later acknowledgement of it is ignored.
    template <class Lost>
    void forget_all(Lost&& lost);
    // Probes are sent without growing pauses: another path may work where this one does not.
    void probe_quickly() { probes_quickly_ = true; }
    // A datagram arrived from the peer, so it is alive: the next probe need not wait long.
    void on_received() { probes_ = std::min(probes_, 2U); }

    [[nodiscard]] bool window_open(std::size_t bytes) const {
        return flights_in_use() < max_data_flights &&
               (in_flight_bytes_ == 0 || in_flight_bytes_ + bytes <= credit_bytes_);
    }
    [[nodiscard]] std::uint64_t window_bytes() const {
        return in_flight_bytes_ >= credit_bytes_ ? 0 : credit_bytes_ - in_flight_bytes_;
    }
    [[nodiscard]] std::uint64_t flights_in_use() const { return next_ - base_; }
    [[nodiscard]] std::uint64_t in_flight_bytes() const { return in_flight_bytes_; }
    // True if acknowledgements are overdue. A burst of losses takes whole windows: a sender that waited for their
    // acknowledgement would stall within the burst. So while acknowledgements are overdue, windows do not hold it back,
    // up to a bound, as the peer may be unreachable.
    [[nodiscard]] bool ack_overdue(Nanos now) const { return now >= ack_overdue_at(); }
    // When acknowledgements become overdue if none arrives; `never` if nothing is in flight, or so much that the bound
    // is reached.
    [[nodiscard]] Nanos ack_overdue_at() const;
    [[nodiscard]] Nanos smooth_rtt() const { return smooth_rtt_; }
    [[nodiscard]] Delivery last_delivery() const { return delivery_; }
    // When to probe because what is in flight was not acknowledged; `never` when nothing is in flight.
    [[nodiscard]] Nanos probe_at() const;
    // Since when nothing was acknowledged, if something is in flight.
    [[nodiscard]] Nanos waiting_since() const { return waiting_since_; }
    [[nodiscard]] Nanos loss_at() const { return loss_at_; }
    void probed(Nanos now);
    // Calls `again(flight)` for the latest datagrams that are neither acknowledged nor lost.
    template <class Again>
    void each_unanswered(Again&& again) const;
    [[nodiscard]] unsigned probes() const { return probes_; }  // unanswered, since the peer last reported
    // How long to wait for an answer before acting: the round trip and its variation.
    [[nodiscard]] Nanos probe_timeout() const;
    // True if so much is lost (more than one in fifty of the latest datagrams) that urgent datagrams should be sent
    // twice.
    [[nodiscard]] bool lossy() const { return loss() > 0.02; }
    // Between two bursts of losses, the latest hundreds of datagrams show none: what thousands lost counts as well.
    [[nodiscard]] double loss() const {
        return counted_bytes_ > 0 ? std::max(loss_, counted_lost_bytes_ / counted_bytes_) : 0;
    }
    // How many datagrams are lost in a row, on average over the latest tens of losses; 1 if nothing is known.
    [[nodiscard]] double burst() const { return bursts_.mean(); }
    // Nothing is left to send for now, so the delivery rate no longer shows what the link could carry.
    void on_app_limited() { meter_.on_app_limited(in_flight_bytes_); }

private:
    Flight& at(std::uint64_t number) { return ring_[number & (ring_.size() - 1)]; }
    [[nodiscard]] const Flight& at(std::uint64_t number) const { return ring_[number & (ring_.size() - 1)]; }
    void grow();
    // Takes a sample of the round trip. Returns the one for congestion control, which counts queueing on the way out
    // only.
    Nanos time_trip(Nanos sent_at, Nanos held, std::uint32_t arrived_us, Nanos now);
    void sample_rtt(Nanos rtt);
    void sample_loss(std::uint64_t arrived, std::uint64_t lost);
    void retire();
    void forget_oldest();
    template <class Lost>
    void detect(Nanos now, Lost&& lost);

    // Grows as needed: with a thousand peers, most of which send little, their rings take most of the memory of an
    // endpoint.
    std::vector<Flight> ring_ = std::vector<Flight>(8);
    std::uint64_t base_{1}, next_{1};  // numbers in [base_, next_) are in the ring; 0 is no number
    std::uint64_t largest_acked_{};
    std::uint64_t credit_bytes_;
    std::uint64_t in_flight_bytes_{};
    std::uint64_t unanswered_bytes_{};  // sent since something was last acknowledged
    Nanos waiting_since_{};             // when that was, or since when something is in flight
    DeliveryMeter meter_;
    PacketTrain train_;
    Nanos smooth_rtt_{}, rtt_variation_{}, latest_rtt_{};
    Nanos active_at_;                   // last transmission or progress
    RecentMin least_trip_, least_way_;  // least round trip; least one-way time, by two clocks with an unknown offset
    Nanos way_us_{};
    Nanos loss_at_{never};
    unsigned probes_{};
    bool probes_quickly_{};
    double loss_{};                                  // fraction lost of the latest hundreds of datagrams
    double counted_bytes_{}, counted_lost_bytes_{};  // of the latest thousands
    BurstMeter bursts_;
    Delivery delivery_{};
};

// The receiving half: which numbers arrived (which is also the replay window), and what to report.
class Inbound {
public:
    // A report names at most so many words of 64 numbers: what fits a datagram.
    explicit Inbound(std::size_t most_words = Report::max_words)
        : most_words_(std::min(most_words, Report::max_words)) {}

    void set_most_words(std::size_t words) { most_words_ = std::min(words, Report::max_words); }

    [[nodiscard]] std::uint64_t largest() const { return largest_; }
    // True if the number is a duplicate, or too old to tell.
    [[nodiscard]] bool seen(std::uint64_t number) const;
    // `elicits`: whether the datagram calls for a report; reports themselves do not.
    void arrive(std::uint64_t number, std::size_t bytes, bool elicits, Nanos now) {
        arrive(number, bytes, elicits, now, now);
    }
    // `arrived_at`: when it arrived at this machine; its delay counts up to then.
    void arrive(std::uint64_t number, std::size_t bytes, bool elicits, Nanos now, Nanos arrived_at);
    // A report is due at once, in so many copies.
    void report_now(unsigned copies = 1) { urgent_ = std::max(urgent_, copies); }
    // Whether something arrived that was not reported.
    [[nodiscard]] bool has_unreported() const { return unreported_bytes_ > 0; }
    // How many copies of the next report were requested; 0 if it may wait.
    [[nodiscard]] unsigned urgent() const { return urgent_; }
    // When the next report is due; `never` when there is nothing to report.
    [[nodiscard]] Nanos report_at(std::uint64_t credit_bytes, Nanos delay) const;
    // With `whole`, the report reaches back as far as it can; otherwise to the fourth report before it. It names no
    // more than `most_words`.
    [[nodiscard]] Report make_report(std::uint64_t credit_bytes, std::uint32_t overflow, Nanos now, bool whole = false,
                                     std::size_t most_words = Report::max_words);
    [[nodiscard]] std::size_t most_words() const { return most_words_; }

    // How many of the numbers up to `largest` arrived; the rest were lost on this link.
    [[nodiscard]] std::uint64_t arrived() const { return arrived_; }

private:
    static constexpr std::size_t bits = Report::max_words * 64;
    std::size_t most_words_;
    std::array<std::uint64_t, Report::max_words> window_{};
    std::uint64_t largest_{};
    std::uint64_t arrived_{};
    std::uint64_t timed_{};  // highest number that calls for a report
    Nanos timed_at_{};
    std::uint64_t unreported_bytes_{};
    Nanos unreported_since_{never};
    unsigned urgent_{};
    // Reports overlap, so that a lost report loses no information: each reaches back to the fourth before it.
    std::array<std::uint64_t, 4> reported_{};
    std::size_t reports_{};
};

template <class Acked, class Lost>
void Outbound::settle(const Report& report, Nanos now, Acked&& acked, Lost&& lost) {
    if (report.largest >= next_) return;  // acknowledges what was never sent
    credit_bytes_ = report.credit_bytes;
    Delivery delivery;
    SendStamp newest{};
    const Nanos held = Nanos{report.held_us} * microsecond;
    const std::uint64_t covered = std::uint64_t{report.words} * 64;
    const std::uint64_t from =
        report.largest >= covered ? std::max(base_, report.largest - covered + 1) : std::max<std::uint64_t>(base_, 1);
    for (std::uint64_t number = from; number <= report.largest; ++number) {
        Flight& flight = at(number);
        const std::uint64_t bit = report.largest - number;
        if ((flight.settled && !flight.lost) || (report.arrived[bit / 64] >> (bit % 64) & 1) == 0) continue;
        if (flight.lost) {
            flight.lost = false;
            acked(flight);
            continue;
        }
        flight.settled = true;
        in_flight_bytes_ -= flight.bytes;
        delivery.delivered_bytes += flight.bytes;
        if (number > largest_acked_) largest_acked_ = number;
        train_.on_arrived(number, flight.bytes);
        if (number + report.timed_back == report.largest) {
            delivery.rtt = time_trip(flight.stamp.sent_at, held, report.timed_us, now);
            train_.on_timed(number, flight.stamp.sent_at, report.timed_us);
        }
        newest = flight.stamp;
        acked(flight);
    }
    if (delivery.delivered_bytes > 0) {
        delivery.bytes_per_s = meter_.on_report(newest, delivery.delivered_bytes, held, now);
        delivery.app_limited = newest.app_limited;
        active_at_ = waiting_since_ = now;
        unanswered_bytes_ = 0;
        probes_ = 0;
    }
    detect(now, [&](const Flight& flight) {
        delivery.lost_bytes += flight.bytes;
        lost(flight);
    });
    sample_loss(delivery.delivered_bytes, delivery.lost_bytes);
    delivery.now = now;
    delivery.in_flight_bytes = in_flight_bytes_;
    delivery.burst = burst();
    delivery.train = train_.take();
    delivery_ = delivery;
}

template <class Again>
void Outbound::each_unanswered(Again&& again) const {
    for (std::uint64_t number = next_ - std::min(next_ - base_, probe_reach); number < next_; ++number) {
        if (!at(number).settled) again(at(number));
    }
}

template <class Lost>
void Outbound::mark_all_lost(Lost&& lost) {
    loss_at_ = never;
    for (std::uint64_t number = base_; number < next_; ++number) {
        Flight& flight = at(number);
        if (flight.settled) continue;
        flight.settled = flight.lost = true;
        in_flight_bytes_ -= flight.bytes;
        lost(flight);
    }
}

template <class Lost>
void Outbound::forget_all(Lost&& lost) {
    mark_all_lost(lost);
    base_ = next_;
}

template <class Lost>
void Outbound::expire(Nanos now, Lost&& lost) {
    if (now >= loss_at_) detect(now, lost);
}

template <class Lost>
void Outbound::detect(Nanos now, Lost&& lost) {
    loss_at_ = never;
    const Nanos delay = std::max(smooth_rtt_, latest_rtt_) * 5 / 4 + 50 * microsecond;
    for (std::uint64_t number = base_; number < largest_acked_; ++number) {
        Flight& flight = at(number);
        if (flight.settled) continue;
        if (largest_acked_ - number >= reorder_limit || flight.stamp.sent_at + delay <= now) {
            flight.settled = flight.lost = true;
            in_flight_bytes_ -= flight.bytes;
            bursts_.on_lost(number);
            lost(flight);
        } else {
            loss_at_ = std::min(loss_at_, flight.stamp.sent_at + delay);
        }
    }
    retire();
}

}  // namespace storm
