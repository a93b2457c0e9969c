#include "views/connectivity.hpp"

#include <algorithm>
#include <utility>

namespace storm {
namespace {

constexpr Nanos never_received = -never;
// How long a link that carries no data counts as dead, in units of `silence`.
constexpr Nanos blocked_silences = 10;

}  // namespace

Connectivity::Connectivity(std::uint16_t own_rank, std::uint16_t capacity, Nanos silence)
    : own_(own_rank),
      silence_(silence),
      last_received_at_(capacity, never_received),
      blocked_until_(capacity, 0),
      reports_(capacity) {
    reports_[own_].reachable.add(own_);
    reports_[own_].received = true;
}

void Connectivity::on_received(std::uint16_t rank, Nanos now) {
    if (rank == own_ || left_.has(rank)) return;
    last_received_at_[rank] = now;
    if (reachable().has(rank) || now < blocked_until_[rank]) return;
    reports_[own_].reachable.add(rank);
    changed_ = true;
    next_ = std::min(next_, now + silence_);
}

void Connectivity::on_goodbye(std::uint16_t rank) {
    if (rank == own_ || left_.has(rank)) return;
    left_.add(rank);
    reports_[own_].reachable.remove(rank);
    reports_[rank] = {};
    changed_ = true;
}

void Connectivity::blocked(std::uint16_t rank, Nanos now) {
    if (rank == own_) return;
    blocked_until_[rank] = now + blocked_silences * silence_;
    if (!reachable().has(rank)) return;
    reports_[own_].reachable.remove(rank);
    changed_ = true;
}

void Connectivity::reset(std::uint16_t rank) {
    if (rank == own_) return;
    left_.remove(rank);
    reports_[own_].reachable.remove(rank);
    reports_[rank] = {};
    last_received_at_[rank] = never_received;
    blocked_until_[rank] = 0;
    changed_ = true;
}

void Connectivity::trust(std::uint16_t rank, Nanos now) { on_received(rank, now); }

void Connectivity::report(std::uint16_t rank, const Ranks& reachable, Nanos now) {
    ReachabilityReport& row = reports_[rank];
    if (rank == own_ || left_.has(rank)) return;
    if (!row.received || row.reachable != reachable) changed_ = true;
    row = {.reachable = reachable, .at = now, .received = true};
}

void Connectivity::slept(Nanos now) {
    for (const std::uint16_t rank : reachable()) {
        if (rank != own_) last_received_at_[rank] = std::max(last_received_at_[rank], now - silence_ / 2);
    }
    next_ = now;
}

void Connectivity::refresh(Nanos now) {
    if (now < next_) return;
    next_ = never;
    Ranks& own = reports_[own_].reachable;
    for (const std::uint16_t rank : Ranks(own)) {
        if (rank == own_) continue;
        const Nanos until = last_received_at_[rank] + silence_;
        if (until <= now) {
            own.remove(rank);
            // The last report of a silent process no longer holds.
            reports_[rank] = {};
            changed_ = true;
        } else {
            next_ = std::min(next_, until);
        }
    }
}

std::optional<Nanos> Connectivity::last_received_at(std::uint16_t rank) const {
    return last_received_at_[rank] == never_received ? std::nullopt : std::optional(last_received_at_[rank]);
}

bool Connectivity::good(std::uint16_t a, std::uint16_t b) const {
    return (!reports_[a].received || reports_[a].reachable.has(b)) &&
           (!reports_[b].received || reports_[b].reachable.has(a));
}

bool Connectivity::good(std::uint16_t who, const Ranks& others) const {
    for (const std::uint16_t each : others) {
        if (each != who && !good(who, each)) return false;
    }
    return true;
}

Ranks Connectivity::choose(Ranks from, const Ranks& dispensable) const {
    // Fast path: almost always, all ranks can reach each other.
    bool whole = true;
    for (const std::uint16_t rank : from)
        whole = whole && (!reports_[rank].received || reports_[rank].reachable.contains(from));
    if (whole) return from;
    std::vector<Ranks> bad(reports_.size());
    for (const std::uint16_t a : from) {
        for (const std::uint16_t b : from) {
            if (a < b && !good(a, b)) {
                bad[a].add(b);
                bad[b].add(a);
            }
        }
    }
    while (true) {
        std::pair<std::size_t, bool> worst{0, false};
        std::uint16_t who = 0;
        for (const std::uint16_t rank : from) {
            const std::pair each{(bad[rank] & from).count(), dispensable.has(rank)};
            if (each.first == 0 || each < worst) continue;
            worst = each;
            who = rank;
        }
        if (worst.first == 0) return from;
        from.remove(who);
    }
}

}  // namespace storm
