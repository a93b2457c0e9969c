#include "link/link.hpp"

#include <algorithm>
#include <cstdlib>

namespace storm {
namespace {

constexpr double loss_memory_bytes = 256 << 10;
constexpr unsigned many_probes = 32;   // without an answer: the gap between probes doubles
constexpr unsigned early_probes = 16;  // as many are sent in quick succession on every link
constexpr Nanos least_probe_gap = millisecond / 2;
// Bytes that may be sent while nothing is acknowledged: more than a burst of losses takes, yet little to send into an
// outage.
constexpr std::uint64_t most_unanswered_bytes = 768 << 10;

}  // namespace

std::uint64_t Outbound::depart(Flight flight, Nanos now) {
    // Only a peer that never reports lets flights pile up to the bound; data stops well below it.
    if (flights_in_use() >= max_flights) forget_oldest();
    if (flights_in_use() >= ring_.size()) retire();  // membership messages need no answer, so no report retires them
    if (flights_in_use() >= ring_.size()) grow();
    if (flight.settled) {
        flight.bytes = 0;
    } else {
        flight.stamp = meter_.on_send(in_flight_bytes_, now);
        train_.on_send(next_, in_flight_bytes_ == 0);
        if (in_flight_bytes_ == 0) waiting_since_ = now;
        in_flight_bytes_ += flight.bytes;
        unanswered_bytes_ += flight.bytes;
        active_at_ = now;
    }
    at(next_) = flight;
    return next_++;
}

Nanos Outbound::probe_timeout() const {
    if (smooth_rtt_ == 0) return 20 * millisecond;
    return smooth_rtt_ + std::max(4 * rtt_variation_, millisecond) + millisecond;
}

Nanos Outbound::ack_overdue_at() const {
    // Before the first answer, the round trip is unknown.
    if (in_flight_bytes_ == 0 || smooth_rtt_ == 0 || unanswered_bytes_ >= most_unanswered_bytes) return never;
    return waiting_since_ + probe_timeout();
}

Nanos Outbound::probe_at() const {
    if (in_flight_bytes_ == 0) return never;
    // Numbers are running out: what is in flight must be declared lost, however often something else is sent meanwhile.
    if (out_of_numbers()) return waiting_since_ + probe_timeout();
    // Probes follow each other closely at first, and for longer on a link that loses much: a burst of losses that
    // counts datagrams ends only if some are sent, and one that counts time is over soon. Before the first answer the
    // round trip is unknown, so the first probe is sent early, too.
    const bool close = probes_ > 0 && (lossy() || probes_ < early_probes);
    const bool unknown = smooth_rtt_ == 0;
    const unsigned doublings = unknown || probes_quickly_ ? 0 : std::min(probes_, 3U);
    const Nanos gap = close                     ? std::max(probe_timeout() / (unknown ? 8 : 4), least_probe_gap)
                      : unknown && probes_ == 0 ? probe_timeout() / 4
                                                : probe_timeout() << doublings;
    // A peer that has not answered for long is unreachable: it is probed less and less often, but at least once a
    // second.
    const Nanos longest = std::clamp(8 * probe_timeout(), second / 2, second);
    return active_at_ + std::min(gap << std::min(probes_ / many_probes, 16U), longest);
}

void Outbound::probed(Nanos now) {
    ++probes_;
    active_at_ = now;
}

void Outbound::grow() {
    std::vector<Flight> larger(ring_.size() * 2);
    for (std::uint64_t number = base_; number < next_; ++number) larger[number & (larger.size() - 1)] = at(number);
    ring_ = std::move(larger);
}

void Outbound::forget_oldest() {
    if (!at(base_).settled) in_flight_bytes_ -= at(base_).bytes;
    ++base_;
}

Nanos Outbound::time_trip(Nanos sent_at, Nanos held, std::uint32_t arrived_us, Nanos now) {
    const Nanos trip = std::max<Nanos>(now - sent_at - held, 1);
    sample_rtt(trip);
    // Reports may wait in queues on the way back. Our rate only affects the way out, so queueing is measured there: the
    // one-way time minus the least one-way time. The offset between the two clocks cancels.
    const std::uint32_t raw_us = arrived_us - static_cast<std::uint32_t>(sent_at / microsecond);
    way_us_ +=
        static_cast<std::int32_t>(raw_us - static_cast<std::uint32_t>(way_us_));  // the nearest that fits 32 bits
    const Nanos way = way_us_ * microsecond;
    return way - least_way_.add(way, now) + least_trip_.add(trip, now);
}

void Outbound::sample_rtt(Nanos rtt) {
    latest_rtt_ = rtt;
    if (smooth_rtt_ == 0) {
        smooth_rtt_ = rtt;
        rtt_variation_ = rtt / 2;
        return;
    }
    rtt_variation_ += (std::abs(smooth_rtt_ - rtt) - rtt_variation_) / 4;
    smooth_rtt_ += (rtt - smooth_rtt_) / 8;
}

void Outbound::sample_loss(std::uint64_t arrived_bytes, std::uint64_t lost_bytes) {
    const auto lost = static_cast<double>(lost_bytes), all = static_cast<double>(arrived_bytes + lost_bytes);
    if (all <= 0) return;
    loss_ += (lost / all - loss_) * all / (all + loss_memory_bytes);
    const double kept = std::max(1 - all / (16 * loss_memory_bytes), 0.0);
    counted_bytes_ = kept * counted_bytes_ + all;
    counted_lost_bytes_ = kept * counted_lost_bytes_ + lost;
}

void Outbound::retire() {
    while (base_ < next_ && at(base_).settled && (!at(base_).lost || base_ + late_limit < largest_acked_)) ++base_;
}

bool Inbound::seen(std::uint64_t number) const {
    if (number == 0) return true;
    if (number > largest_) return false;
    if (largest_ - number >= bits) return true;
    return (window_[number % bits / 64] >> (number % 64) & 1) != 0;
}

void Inbound::arrive(std::uint64_t number, std::size_t bytes, bool elicits, Nanos now, Nanos arrived_at) {
    if (number > largest_) {
        // Forget the numbers that the window moves over.
        const std::uint64_t steps = std::min<std::uint64_t>(number - largest_, bits);
        for (std::uint64_t i = 1; i <= steps; ++i) {
            const std::uint64_t old = number - steps + i;
            window_[old % bits / 64] &= ~(1ULL << (old % 64));
        }
        largest_ = number;
    }
    if (elicits && number > timed_) {
        timed_ = number;
        timed_at_ = arrived_at;
    }
    window_[number % bits / 64] |= 1ULL << (number % 64);
    ++arrived_;
    if (!elicits) return;
    unreported_bytes_ += bytes;
    unreported_since_ = std::min(unreported_since_, now);
}

Nanos Inbound::report_at(std::uint64_t credit_bytes, Nanos delay) const {
    if (largest_ == 0) return never;
    if (urgent_ > 0 || unreported_bytes_ * 4 >= credit_bytes) return unreported_bytes_ > 0 || urgent_ > 0 ? 0 : never;
    return unreported_since_ == never ? never : unreported_since_ + delay;
}

Report Inbound::make_report(std::uint64_t credit_bytes, std::uint32_t overflow, Nanos now, bool whole,
                            std::size_t most_words) {
    Report report;
    report.largest = largest_;
    report.credit_bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(credit_bytes, 0xffff'ffff));
    report.timed_back = static_cast<std::uint32_t>(std::min<std::uint64_t>(largest_ - timed_, 0xffff'ffff));
    report.timed_us = static_cast<std::uint32_t>(timed_at_ / microsecond);
    report.held_us = static_cast<std::uint32_t>(std::min<Nanos>((now - timed_at_) / microsecond, 0xffff'ffff));
    report.overflow = overflow;
    std::uint64_t& fourth = reported_[reports_++ % reported_.size()];
    const std::uint64_t reach = whole ? bits : std::min<std::uint64_t>(largest_ - fourth + 64, bits);
    fourth = largest_;
    report.words = static_cast<std::uint32_t>((std::min(reach, largest_) + 63) / 64);
    report.words =
        std::clamp<std::uint32_t>(report.words, 1, static_cast<std::uint32_t>(std::min(most_words_, most_words)));
    for (std::uint64_t i = 0; i < std::uint64_t{report.words} * 64 && i < largest_; ++i) {
        const std::uint64_t number = largest_ - i;
        if ((window_[number % bits / 64] >> (number % 64) & 1) != 0) report.arrived[i / 64] |= 1ULL << (i % 64);
    }
    unreported_bytes_ = 0;
    unreported_since_ = never;
    urgent_ = 0;
    return report;
}

}  // namespace storm
