// Packet-train estimate of the bottleneck's rate: the spacing on arrival of the first datagrams after a pause shows it
// one round trip after the start, where delivery rates would take several round trips to grow up to it.
//
// A train is what is sent between a pause and the first answer. Reports time one datagram each by the receiver's clock,
// so two reports show how long the bytes between them took to arrive; no clocks are compared. Several links that start
// together share the bottleneck while their trains pass it, so each sees its own share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/clock.hpp"

namespace storm {

// What a train has shown so far.
struct Dispersion {
    double bytes_per_s{};  // of what arrived, and never above the speed at which it was sent; 0 when unknown
    bool spread{};         // it arrived more slowly than it was sent, so this is what the path carries
};

class PacketTrain {
public:
    PacketTrain() = default;

    // Fewer datagrams are inconclusive: what one system call sends, or one interrupt delivers, has no spacing.
    static constexpr std::uint32_t least_datagrams = 12;

    // `quiet`: nothing was in flight when this datagram left.
    void on_send(std::uint64_t number, bool quiet) {
        if (quiet) *this = PacketTrain(number);
        if (!answered_) last_ = number;
    }
    // A datagram of the link arrived. Within a report they are in rising order, the timed one last.
    void on_arrived(std::uint64_t number, std::uint32_t bytes) {
        answered_ = true;
        if (!timed_ || number < from_ || number > last_) return;
        bytes_ += bytes;
        ++datagrams_;
    }
    // The report times this datagram, in the receiver's microseconds modulo 2^32.
    void on_timed(std::uint64_t number, Nanos sent_at, std::uint32_t arrived_us) {
        if (number < from_ || number > last_) return;
        if (!timed_) {
            timed_ = true;
            sent_at_ = sent_at;
            arrived_us_ = arrived_us;
            return;
        }
        const std::uint32_t took_us = arrived_us - arrived_us_;
        if (datagrams_ < least_datagrams || took_us >> 31 != 0) return;  // too early to tell, or invalid
        const Nanos arriving = Nanos{took_us} * microsecond, sending = sent_at - sent_at_;
        const Nanos longer = std::max({arriving, sending, microsecond});
        seen_ = {.bytes_per_s = static_cast<double>(bytes_) * static_cast<double>(second) / static_cast<double>(longer),
                 .spread = 4 * arriving > 5 * sending};
        fresh_ = true;
    }
    // How the train was spread on arrival, if reports have added to it since the last call; otherwise zeros.
    [[nodiscard]] Dispersion take() {
        if (!fresh_) return {};
        fresh_ = false;
        return seen_;
    }

private:
    explicit PacketTrain(std::uint64_t from) : from_(from) {}

    std::uint64_t from_{}, last_{};  // numbers of the train
    std::uint64_t bytes_{};          // that arrived after the first timed datagram
    std::uint32_t datagrams_{};      // the same
    Nanos sent_at_{};                // the first timed datagram,
    std::uint32_t arrived_us_{};     // by two clocks
    bool answered_{}, timed_{}, fresh_{};
    Dispersion seen_{};
};

}  // namespace storm
