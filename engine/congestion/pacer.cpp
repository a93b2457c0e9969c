#include "congestion/pacer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace storm {

Pacer::Pacer(double bytes_per_s, double burst_bytes, Nanos now)
    : bytes_per_s_(bytes_per_s),
      burst_bytes_(burst_bytes),
      rest_bytes_(std::numeric_limits<double>::infinity()),
      tokens_(burst_bytes),
      filled_at_(now) {}

double Pacer::tokens_at(Nanos now) const {
    if (std::isinf(bytes_per_s_)) return burst_bytes_;
    const double elapsed_s = seconds(std::max<Nanos>(now - filled_at_, 0));
    const double most = refused_ ? burst_bytes_ : std::max(tokens_, std::min(rest_bytes_, burst_bytes_));
    return std::min(tokens_ + bytes_per_s_ * elapsed_s, most);
}

void Pacer::set_rate(double bytes_per_s, Nanos now) {
    tokens_ = tokens_at(now);
    filled_at_ = std::max(filled_at_, now);
    bytes_per_s_ = bytes_per_s;
}

void Pacer::set_burst(double burst_bytes, Nanos now) {
    tokens_ = std::min(tokens_at(now), burst_bytes);
    filled_at_ = std::max(filled_at_, now);
    burst_bytes_ = burst_bytes;
}

void Pacer::set_rest(double rest_bytes) {
    rest_bytes_ = rest_bytes;
    tokens_ = std::min(tokens_, rest_bytes);
}

bool Pacer::try_send(std::size_t bytes, Nanos now) {
    tokens_ = tokens_at(now);
    filled_at_ = std::max(filled_at_, now);
    // A millionth of a byte forgives the rounding of next_send_at.
    refused_ = tokens_ < -1e-6;
    if (refused_) return false;
    tokens_ -= static_cast<double>(bytes);
    return true;
}

Nanos Pacer::next_send_at(Nanos now) const {
    const double debt = -tokens_at(now);
    if (debt <= 0) return now;
    const double wait_ns = std::ceil(debt / bytes_per_s_ * static_cast<double>(second));
    // A rate of zero, or one so small that the wait leaves the clock, waits for set_rate.
    if (!(wait_ns < static_cast<double>(never / 4))) return never;
    return now + static_cast<Nanos>(wait_ns);
}

}  // namespace storm
