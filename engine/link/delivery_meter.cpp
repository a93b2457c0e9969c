#include "link/delivery_meter.hpp"

#include <algorithm>

namespace storm {

SendStamp DeliveryMeter::on_send(std::uint64_t in_flight_bytes_before, Nanos now) {
    if (in_flight_bytes_before == 0) {
        first_sent_at_ = delivered_at_ = now;
        limited_until_ = std::min(limited_until_, delivered_);  // what was lost will not be delivered
    }
    return {delivered_, delivered_at_, first_sent_at_, now, limited_until_ > 0 && delivered_ <= limited_until_};
}

double DeliveryMeter::on_report(const SendStamp& newest, std::uint64_t newly_delivered_bytes, Nanos held, Nanos now) {
    delivered_ += newly_delivered_bytes;
    delivered_at_ = std::max(delivered_at_, now - held);
    first_sent_at_ = std::max(first_sent_at_, newest.sent_at);
    const Nanos elapsed = std::max(delivered_at_ - newest.delivered_at, newest.sent_at - newest.first_sent_at);
    if (elapsed <= 0) return 0;
    return static_cast<double>(delivered_ - newest.delivered_bytes) / seconds(elapsed);
}

double BottleneckMeter::on_report(std::uint64_t delivered_bytes, Nanos now) {
    // Long enough that a burst of reports does not count as speed.
    constexpr Nanos span = 100 * millisecond, memory = 30 * second;
    bytes_ += delivered_bytes;
    const Nanos elapsed = now - since_;
    if (elapsed >= span) {
        const double rate = static_cast<double>(bytes_) / seconds(elapsed);
        const double kept = std::max(1 - static_cast<double>(elapsed) / static_cast<double>(memory), 0.0);
        best_ = std::max(rate, best_ * kept);
        bytes_ = 0;
        since_ = now;
    }
    return best_;
}

}  // namespace storm
