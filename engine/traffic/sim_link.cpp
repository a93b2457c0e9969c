#include "traffic/sim_link.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace storm {

namespace {

// A class that was idle may catch up by two packets at least, or its share would be lost between two of the other's.
constexpr double least_credit = 2 * 1514;

}  // namespace

SimLink::SimLink(const SimLinkSettings& settings) : settings_(settings) {
    if (!(settings.low_share >= 0 && settings.low_share < 1)) {
        throw std::invalid_argument("low_share must lie in [0, 1), got " + std::to_string(settings.low_share));
    }
    if (!(settings.bytes_per_s >= 0)) throw std::invalid_argument("bytes_per_s must not be negative");
    if (!(settings.burst_bytes >= 0)) throw std::invalid_argument("burst_bytes must not be negative");
    constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();
    of(Priority::normal).limit = settings.queue_bytes == 0 ? unlimited : settings.queue_bytes;
    of(Priority::low).limit = settings.low_queue_bytes == 0 ? unlimited : settings.low_queue_bytes;
    of(Priority::normal).share = 1 - settings.low_share;
    of(Priority::low).share = settings.low_share;
    // A class without a share has no credit ever: it can only borrow.
    of(Priority::low).credit = settings.low_share > 0 ? 0 : -1;
}

bool SimLink::offer(std::uint32_t packet, std::size_t bytes, Priority priority, Nanos now) {
    Class& own = of(priority);
    // A packet that can leave at once waits nowhere.
    const bool at_once = free_at_ <= now && classes_[0].queue.empty() && classes_[1].queue.empty();
    if (!at_once && own.bytes + bytes > own.limit) {
        ++own.counts.drops;
        return false;
    }
    own.queue.push_back({packet, bytes});
    own.bytes += bytes;
    return true;
}

Nanos SimLink::next_at() const { return classes_[0].queue.empty() && classes_[1].queue.empty() ? never : free_at_; }

void SimLink::refill(Nanos now) {
    const double most = std::max(settings_.burst_bytes, least_credit);
    const double passed_s = static_cast<double>(now - refilled_at_) * 1e-9;
    for (Class& each : classes_) {
        each.credit = std::min(each.credit + each.share * settings_.bytes_per_s * passed_s, most);
    }
    refilled_at_ = now;
}

SimLink::Departure SimLink::take(Nanos now) {
    refill(now);
    Class& normal = of(Priority::normal);
    Class& low = of(Priority::low);
    const bool affords = !low.queue.empty() && low.credit >= 0;
    const bool low_first = normal.queue.empty() || (normal.credit < 0 && affords);
    Class& own = low_first ? low : normal;
    const Waiting next = own.queue.front();
    own.queue.pop_front();
    own.bytes -= next.bytes;
    ++own.counts.packets;
    own.counts.bytes += next.bytes;
    // A class that uses what the other leaves does not pay for it with its own share.
    if (own.credit >= 0) own.credit -= static_cast<double>(next.bytes);
    if (settings_.bytes_per_s == 0) return {next.packet, free_at_ = now};
    const auto nanos = [&](double bytes) { return static_cast<Nanos>(bytes / settings_.bytes_per_s * 1e9); };
    clear_at_ = std::max(clear_at_, now) + nanos(static_cast<double>(next.bytes));
    free_at_ = std::max(now, clear_at_ - nanos(settings_.burst_bytes));
    return {next.packet, free_at_};
}

}  // namespace storm
