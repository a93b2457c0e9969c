#include "paths/paths.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace storm {
namespace {

// How many words a report may have in a datagram of this size.
std::size_t report_words(std::size_t datagram_bytes) {
    return (datagram_bytes - header_bytes - tag_bytes - Report::fixed_bytes) / 8;
}

// A path may leave everything unanswered for this many probe timeouts.
constexpr Nanos most_probe_timeouts = 3;

}  // namespace

Link::Link(std::uint8_t path_index, std::uint64_t credit_bytes, const RateControl& its_rate, const PathMtu& its_path,
           std::size_t chunk_bytes, Nanos now)
    : index(path_index),
      out(credit_bytes, now),
      in(report_words(its_path.bytes())),
      rate(its_rate),
      path(its_path),
      pieces(chunk_bytes) {}

void Link::fit_reports(std::size_t datagram_bytes) { in.set_most_words(report_words(datagram_bytes)); }

Nanos Link::report_delay() const { return std::clamp<Nanos>(out.smooth_rtt() / 8, millisecond / 2, 10 * millisecond); }

PieceLayout Link::layout(std::size_t chunk_bytes, std::size_t seal_bytes) const {
    const std::size_t overhead = header_bytes + seal_bytes;
    if (chunk_bytes + overhead <= path.bytes()) return {chunk_bytes, 1};
    return PieceLayout::for_datagram(chunk_bytes, path.bytes(), overhead);
}

bool Link::unanswered(Nanos now) const {
    const Nanos longest = out.smooth_rtt() == 0 ? unknown_rtt_timeout : most_probe_timeouts * out.probe_timeout();
    return out.probes() >= 2 && now - out.waiting_since() >= longest;
}

void Link::mark_down(Nanos now) {
    down = true;
    asks = false;
    ++outages;
    probe_interval = std::min(out.probe_timeout(), longest_probe_interval);
    probe_due_at = now;
}

void Link::on_probe_sent(Nanos now) {
    asks = true;
    probe_due_at = now + probe_interval;
    probe_interval = std::min(2 * probe_interval, longest_probe_interval);
}

void Link::on_answer(Nanos now) {
    answered_at = now;
    down = false;
    probe_due_at = never;
}

Nanos Link::delay(Nanos now) const {
    return suspect(now) ? most_probe_timeouts * out.probe_timeout() : out.smooth_rtt() / 2;
}

Links::Links(std::size_t count, std::uint64_t credit_bytes, const RateControl& rate, const PathMtu& path,
             std::size_t chunk_bytes, Nanos now) {
    for (std::size_t index = 0; index < count; ++index)
        all_.emplace_back(static_cast<std::uint8_t>(index), credit_bytes, rate, path, chunk_bytes, now);
    if (!several()) return;
    for (Link& link : all_) {
        link.asks = true;  // so that its round trip is known before there is data
        link.out.probe_quickly();
    }
}

Links::Order Links::order(Nanos now) const {
    Order found;
    for (const Link& link : all_) {
        if (!link.down) found.paths[found.count++] = link.index;
    }
    if (found.count < 2) return found;
    // With the number as the last key: a stable sort would allocate memory at every batch.
    std::array<std::tuple<bool, Nanos, std::uint8_t>, most_paths> keys{};
    for (const std::uint8_t path : found) {
        const Nanos trip = all_[path].out.smooth_rtt();
        keys[path] = {all_[path].suspect(now), trip == 0 ? never : trip, path};
    }
    std::sort(found.paths.begin(), found.paths.begin() + static_cast<std::ptrdiff_t>(found.count),
              [&](std::uint8_t a, std::uint8_t b) { return keys[a] < keys[b]; });
    return found;
}

bool Links::survives(const Link& link) const {
    return std::any_of(all_.begin(), all_.end(), [&](const Link& other) {
        return other.index != link.index && !other.down && other.answered_at > link.out.waiting_since();
    });
}

bool Links::better_without(const Link& link, const Order& order, std::uint64_t waiting_bytes, Nanos now) const {
    double rate = 0;
    Nanos delay = 0;
    for (const std::uint8_t path : order) {
        if (path == link.index) break;
        rate += all_[path].rate.bytes_per_s();
        delay = std::max(delay, all_[path].delay(now));
    }
    if (!(rate > 0) || std::isinf(rate)) return false;
    const double seconds = static_cast<double>(waiting_bytes) / rate;
    return seconds * static_cast<double>(second) + static_cast<double>(delay) < static_cast<double>(link.delay(now));
}

void Links::report_unreported() {
    for (Link& link : all_) {
        if (link.index == last_received_ || link.in.has_unreported()) link.in.report_now();
    }
}

void Links::report_now() {
    for (Link& link : all_) link.in.report_now();
}

double Links::loss() const {
    if (!several()) return all_[0].out.loss();
    double lost = 0, all = 0;
    for (const Link& link : all_) {
        if (link.down) continue;
        const double rate = std::isinf(link.rate.bytes_per_s()) ? 1.0 : link.rate.bytes_per_s();
        lost += rate * link.out.loss();
        all += rate;
    }
    return all > 0 ? lost / all : 0;
}

double Links::burst() const {
    double longest = 1;
    for (const Link& link : all_) longest = std::max(longest, link.down ? 1 : link.out.burst());
    return several() ? longest : all_[0].out.burst();
}

double Links::bytes_per_s() const {
    double sum = 0;
    for (const Link& link : all_) sum += link.down ? 0 : link.rate.bytes_per_s();
    return sum;
}

Nanos Links::round_trip() const {
    Nanos longest = 0;
    for (const Link& link : all_) longest = std::max(longest, link.down ? 0 : link.out.smooth_rtt());
    return longest;
}

Nanos Links::probe_timeout() const {
    Nanos longest = 0;
    for (const Link& link : all_) longest = std::max(longest, link.down ? 0 : link.out.probe_timeout());
    return longest;
}

Nanos Links::spread() const {
    Nanos least = never;
    for (const Link& link : all_) {
        if (!link.down && link.out.smooth_rtt() > 0) least = std::min(least, link.out.smooth_rtt());
    }
    return least == never ? 0 : (round_trip() - least) / 2;
}

bool Links::splits_chunks(std::size_t chunk_bytes, std::size_t seal_bytes) const {
    return std::any_of(all_.begin(), all_.end(),
                       [&](const Link& link) { return !link.down && link.layout(chunk_bytes, seal_bytes).count > 1; });
}

std::vector<PathHealth> Links::health() const {
    std::vector<PathHealth> found;
    for (const Link& link : all_) {
        const double expected = static_cast<double>(link.in.largest());
        found.push_back({.up = !link.down,
                         .round_trip = link.out.smooth_rtt(),
                         .loss = expected > 0 ? 1.0 - static_cast<double>(link.in.arrived()) / expected : 0.0,
                         .bytes_per_s = link.rate.bytes_per_s(),
                         .bytes_sent = link.bytes_sent,
                         .bytes_received = link.bytes_received,
                         .outages = link.outages});
    }
    return found;
}

}  // namespace storm
