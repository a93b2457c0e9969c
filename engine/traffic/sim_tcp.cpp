#include "traffic/sim_tcp.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace storm {

namespace {

constexpr double initial_window = 10;
constexpr double after_loss = 0.7;                                  // CUBIC's part of the window that is kept
constexpr double growth = 3 * (1 - after_loss) / (1 + after_loss);  // per round trip: as fast as Reno, which keeps half
constexpr Nanos least_timeout = 200 * millisecond;
constexpr Nanos first_timeout = second;
constexpr Nanos longest_delay_of_ack = 40 * millisecond;
constexpr Nanos probe_slack = 8 * millisecond;  // two ticks of 250 Hz
constexpr int most_backoff = 8;
// HyStart.
constexpr double least_hystart_window = 16;
constexpr Nanos train_gap = 2 * millisecond;
constexpr double bundle_bytes = 4 * 65536;
constexpr int round_samples = 8;

}  // namespace

void TcpSender::open(Nanos rtt) { learn_rtt(rtt); }

Nanos TcpSender::timeout() const {
    if (srtt_ == 0) return first_timeout;
    return (srtt_ + std::max(4 * rttvar_, least_timeout)) << backoff_;
}

void TcpSender::write(std::uint32_t segments, Nanos now) {
    if (flight_.empty()) {
        if (sent_at_ != 0) {
            // The window is halved for each timeout of idle time.
            const double least = std::min(initial_window, window_);
            if (now - sent_at_ > timeout()) threshold_ = std::max(threshold_, 0.75 * window_);
            for (Nanos idle = now - sent_at_ - timeout(); idle > 0 && window_ > least; idle -= timeout()) window_ /= 2;
            window_ = std::max(window_, least);
        }
        most_pipe_ = 0;
        limited_ = false;
        round_end_ = unacked_;
    }
    written_ += segments;
}

std::optional<TcpSender::Transmission> TcpSender::next(Nanos now) {
    if (probe_ && !flight_.empty()) {
        probe_ = false;
        const std::size_t last = flight_.size() - 1;
        if (flight_[last].sacked) return std::nullopt;
        if (flight_[last].lost) ++pipe_;
        return transmit(last, now);
    }
    const bool more = unacked_ + flight_.size() < written_;
    if (pipe_ + 1 > std::floor(window_)) {
        limited_ = limited_ || more;
        return std::nullopt;
    }
    if (state_ != State::open) {
        for (std::size_t index = 0; index < flight_.size(); ++index) {
            if (!flight_[index].lost) continue;
            ++pipe_;
            return transmit(index, now);
        }
    }
    if (!more) return std::nullopt;
    flight_.emplace_back();
    ++pipe_;
    most_pipe_ = std::max(most_pipe_, pipe_);
    return transmit(flight_.size() - 1, now);
}

TcpSender::Transmission TcpSender::transmit(std::size_t index, Nanos now) {
    Flight& segment = flight_[index];
    segment.resent = segment.order != 0;
    if (segment.resent) ++resent_;
    segment.lost = false;
    segment.order = ++order_;
    segment.sent_at = sent_at_ = now;
    if (timer_ == never) arm(now);
    return {static_cast<std::uint32_t>(unacked_ + index), segment.order};
}

void TcpSender::arm(Nanos now) {
    if (flight_.empty()) {
        timer_ = never;
        return;
    }
    Nanos wait = timeout();
    probes_ = state_ == State::open && !probed_ && srtt_ > 0;
    if (probes_) {
        // A single segment may wait for an acknowledgement that is delayed.
        wait = std::min(wait, 2 * srtt_ + (pipe_ == 1 ? least_timeout : probe_slack));
    }
    timer_ = now + wait;
}

void TcpSender::on_timer(Nanos now) {
    if (probes_) {
        probed_ = probe_ = true;
        arm(now);
        return;
    }
    ++timeouts_;
    if (state_ != State::loss) shrink();
    state_ = State::loss;
    recover_to_ = static_cast<std::uint32_t>(unacked_ + flight_.size());
    window_ = 1;
    pipe_ = 0;
    for (Flight& each : flight_) each.lost = !each.sacked;
    backoff_ = std::min(backoff_ + 1, most_backoff);
    arm(now);
}

void TcpSender::learn_rtt(Nanos rtt) {
    least_rtt_ = std::min(least_rtt_, rtt);
    if (srtt_ == 0) {
        srtt_ = rtt;
        rttvar_ = rtt / 2;
        return;
    }
    rttvar_ += (std::abs(rtt - srtt_) - rttvar_) / 4;
    srtt_ = std::max<Nanos>(srtt_ + (rtt - srtt_) / 8, 1);
}

void TcpSender::shrink() {
    threshold_ = std::max(after_loss * window_, 2.0);
    window_ = threshold_;
}

void TcpSender::find_losses(Nanos now) {
    bool found = false;
    for (Flight& each : flight_) {
        if (each.sacked || each.lost || each.order >= newest_delivered_) continue;
        each.lost = found = true;
        --pipe_;
    }
    if (!found || state_ != State::open) return;
    state_ = State::recovery;
    recover_to_ = static_cast<std::uint32_t>(unacked_ + flight_.size());
    shrink();
    arm(now);
}

void TcpSender::on_ack(std::uint32_t next, std::uint32_t sacked, std::uint64_t order, Nanos now) {
    newest_delivered_ = std::max(newest_delivered_, order);
    std::uint32_t acked = 0;
    Nanos rtt = 0;
    while (unacked_ < next && !flight_.empty()) {
        const Flight& first = flight_.front();
        if (!first.sacked && !first.lost) --pipe_;
        if (!first.resent) rtt = now - first.sent_at;
        flight_.pop_front();
        ++unacked_;
        ++acked;
    }
    if (sacked >= unacked_ && sacked < unacked_ + flight_.size()) {
        Flight& one = flight_[sacked - unacked_];
        if (!one.sacked && !one.lost) --pipe_;
        one.sacked = true;
        one.lost = false;
    }
    if (rtt > 0) learn_rtt(rtt);
    find_losses(now);
    if (acked == 0) return;
    backoff_ = 0;
    probed_ = probe_ = false;
    if (state_ != State::open && unacked_ >= recover_to_) state_ = State::open;
    if (state_ != State::recovery) grow(acked, rtt, now);
    arm(now);
}

void TcpSender::grow(std::uint32_t acked, Nanos rtt, Nanos now) {
    if (window_ < threshold_) {
        if (window_ < 2.0 * most_pipe_) window_ = std::min(window_ + acked, std::max(threshold_, window_));
        if (state_ == State::open && queue_builds_up(rtt, now)) threshold_ = window_;
    } else if (limited_) {
        window_ += growth * acked / window_;
    }
    limited_ = false;
}

bool TcpSender::queue_builds_up(Nanos rtt, Nanos now) {
    if (unacked_ > round_end_ || round_start_ == 0) {
        round_end_ = static_cast<std::uint32_t>(unacked_ + flight_.size());
        round_start_ = last_ack_ = now;
        round_rtt_ = never;
        round_samples_ = 0;
    }
    if (rtt > 0 && round_samples_ < round_samples) {
        round_rtt_ = std::min(round_rtt_, rtt);
        ++round_samples_;
    }
    const bool train = now - last_ack_ <= train_gap;
    if (train) last_ack_ = now;
    if (window_ < least_hystart_window || least_rtt_ == never) return false;
    const double rate = 2 * window_ * tcp_payload_bytes / static_cast<double>(srtt_);  // bytes per nanosecond
    const auto bundle = std::min(millisecond, static_cast<Nanos>(bundle_bytes / rate));
    if (train && now - round_start_ > (least_rtt_ + bundle) / 2) return true;
    return round_samples_ >= round_samples &&
           round_rtt_ > least_rtt_ + std::clamp(least_rtt_ / 8, 4 * millisecond, 16 * millisecond);
}

bool TcpReceiver::on_data(std::uint32_t number, std::uint64_t order, Nanos now) {
    newest_ = number;
    order_ = std::max(order_, order);
    // Duplicates and segments around a gap are answered at once.
    if (number != next_ || !beyond_.empty()) {
        if (number > next_) beyond_.insert(number);
        if (number == next_) ++next_;
        while (!beyond_.empty() && *beyond_.begin() == next_) {
            beyond_.erase(beyond_.begin());
            ++next_;
        }
        return true;
    }
    ++next_;
    if (++unacked_ >= 2) return true;
    timer_ = now + longest_delay_of_ack;
    return false;
}

}  // namespace storm
