#include "paths/path_mtu.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace storm {
namespace {

// UDP payloads of usual MTUs, with IPv6's headers taken off: 1200 (QUIC's least), 1280 (IPv6's least), 1420
// (WireGuard), 1492 (PPPoE), 1500, 9000, and steps between.
constexpr std::array<std::size_t, 12> usual{512, 768, 1024, 1152, 1232, 1372, 1444, 2000, 4048, 8952, 16'336, 32'720};
// Start a search after `many_lost` losses in a row, or after `some_lost` that span `a_while`.
constexpr std::uint32_t many_lost = 16, some_lost = 2;
constexpr Nanos a_while = 250 * millisecond, forgotten = second;
// A search ends without a result after so many rounds. Further losses start another.
constexpr unsigned most_rounds = 8;
// The path counts as narrower when the losses have a probability below e^-12 (about 1 in 160,000) of being chance. A
// wrong result does not last: larger sizes are tried again soon.
constexpr double certainty = 12.0;
// Probes of the smallest and of the largest size per round, to compare the two.
constexpr std::size_t copies = 3;
constexpr Nanos first_climb = second, last_climb = 60 * second;

std::vector<std::size_t> usual_between(std::size_t low, std::size_t high) {
    std::vector<std::size_t> sizes;
    for (const std::size_t size : usual) {
        if (size > low && size < high) sizes.push_back(size);
    }
    return sizes;
}

}  // namespace

PathMtu::PathMtu(std::size_t least, std::size_t most)
    : least_(std::min(least, most)), most_(most), bytes_(most), announced_(most), climb_every_(first_climb) {}

void PathMtu::on_acked(std::size_t bytes, Nanos sent_at) {
    if (bytes >= passed_bytes_ || sent_at > passed_at_ + forgotten) {
        passed_at_ = bytes == passed_bytes_ ? std::max(passed_at_, sent_at) : sent_at;
        passed_bytes_ = bytes;
    }
    if (bytes > bytes_) bytes_ = std::min(bytes, most_);  // a probe, or a datagram from before the size was lowered
    if (lost_ > 0 && bytes >= lost_bytes_) {
        // Large datagrams pass, so the losses were chance.
        lost_ = 0;
        if (phase_ == Phase::searching) settle();
    } else if (phase_ == Phase::searching && bytes >= least_) {
        best_ = std::max(best_, bytes);
        for (std::size_t k = 0; k < sizes_.size(); ++k) {
            if (sizes_[k] != bytes || arrived_[k] == sent_[k]) continue;
            ++arrived_[k];
            break;
        }
    }
}

void PathMtu::on_lost(std::size_t bytes, Nanos sent_at, Nanos now) {
    // A datagram above the current size was a probe for a larger one: its loss says nothing new.
    if (bytes <= least_ || bytes > bytes_) return;
    if (bytes <= passed_bytes_ && sent_at <= passed_at_) return;
    if (lost_ > 0 && bytes < lost_bytes_) {
        if (now - lost_at_ < forgotten) return;
        lost_ = 0;  // the larger ones are not sent any more
    }
    if (lost_++ == 0) lost_since_ = now;
    lost_at_ = now;
    lost_bytes_ = bytes;
    if (lost_ >= many_lost || (lost_ >= some_lost && now - lost_since_ >= a_while)) suspect(now);
}

void PathMtu::on_refused(std::size_t bytes, Nanos now) {
    if (bytes <= least_ || bytes > bytes_) return;
    lost_bytes_ = bytes;
    lost_ = std::max(lost_, many_lost);
    suspect(now);
}

void PathMtu::suspect(Nanos now) {
    if (phase_ == Phase::searching) return;
    best_ = rounds_ = 0;
    sizes_ = usual_between(least_, bytes_);
    sizes_.insert(sizes_.begin(), copies, least_);
    sizes_.insert(sizes_.end(), copies, bytes_);
    sent_.assign(sizes_.size(), 0);
    arrived_.assign(sizes_.size(), 0);
    begin_round(Phase::searching, now);
}

void PathMtu::begin_round(Phase phase, Nanos now) {
    phase_ = phase;
    next_ = 0;
    send_at_ = now;
    judge_at_ = never;
    ++rounds_;
}

std::size_t PathMtu::take_probe(bool in_use, Nanos probe_timeout, Nanos now) {
    if (phase_ == Phase::trusting && in_use && bytes_ < most_ && now >= climb_at_) {
        rounds_ = 0;
        sizes_ = usual_between(bytes_, most_);
        sizes_.push_back(most_);
        begin_round(Phase::climbing, now);
    }
    if (now < send_at_) return 0;
    if (next_ < sizes_.size()) {
        if (phase_ == Phase::searching) ++sent_[next_];
        return sizes_[next_++];
    }
    send_at_ = never;
    // Later rounds wait longer: the round trip may be longer than was thought.
    judge_at_ = now + (probe_timeout << std::min(rounds_ - 1, 2U));
    return 0;
}

bool PathMtu::tick(Nanos now) {
    if (now >= judge_at_) {
        const bool inconclusive = phase_ == Phase::searching && chance_explains();
        if (phase_ == Phase::climbing) {
            settle();
        } else if (!inconclusive) {
            // On a path that keeps changing, wait longer each time before trying larger sizes.
            if (now - narrowed_at_ > last_climb) climb_every_ = first_climb;
            narrowed_at_ = now;
            bytes_ = best_;
            lost_ = 0;
            settle();
        } else if (rounds_ < most_rounds) {
            begin_round(Phase::searching, now);
        } else {
            lost_ = 0;
            settle();
        }
        if (bytes_ < most_ && !inconclusive) {
            climb_at_ = now + climb_every_;
            climb_every_ = std::min(2 * climb_every_, last_climb);
        }
    }
    const bool changed = bytes_ != announced_;
    announced_ = bytes_;
    return changed;
}

void PathMtu::settle() {
    phase_ = Phase::trusting;
    send_at_ = judge_at_ = never;
}

// Whether chance may explain that all large probes were lost. Fisher's exact test: if size made no difference, how
// likely is it that only small probes arrived? Data does not count, as a chunk in pieces is lost with any one of them.
bool PathMtu::chance_explains() const {
    if (best_ < least_ || best_ >= lost_bytes_) return true;
    std::uint32_t small = 0, arrived = 0, large = 0;
    for (std::size_t k = 0; k < sizes_.size(); ++k) {
        if (sizes_[k] <= best_) {
            small += sent_[k];
            arrived += arrived_[k];
        } else {
            large += sent_[k];
        }
    }
    double log_chance = 0.0;
    for (std::uint32_t k = 0; k < arrived; ++k)
        log_chance += std::log(static_cast<double>(small - k) / static_cast<double>(small + large - k));
    return log_chance > -certainty;
}

Nanos PathMtu::timer(bool in_use) const {
    const bool climbs = phase_ == Phase::trusting && in_use && bytes_ < most_;
    return std::min({send_at_, judge_at_, climbs ? climb_at_ : never});
}

}  // namespace storm
