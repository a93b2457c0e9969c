#include "views/connectivity.hpp"

#include <algorithm>
#include <utility>

namespace storm {
namespace {

constexpr Nanos unheard = -never;
// A path that carries no data stays out of use for so many silences.
constexpr Nanos blocked_silences = 10;

}  // namespace

Connectivity::Connectivity(std::uint16_t own_rank, std::uint16_t capacity, Nanos silence)
    : own_(own_rank), silence_(silence), heard_at_(capacity, unheard), blocked_until_(capacity, 0), rows_(capacity) {
    rows_[own_].hears.add(own_);
    rows_[own_].said = true;
}

void Connectivity::hear(std::uint16_t rank, Nanos now) {
    if (rank == own_ || left_.has(rank)) return;
    heard_at_[rank] = now;
    if (hears().has(rank) || now < blocked_until_[rank]) return;
    rows_[own_].hears.add(rank);
    changed_ = true;
    next_ = std::min(next_, now + silence_);
}

void Connectivity::gone(std::uint16_t rank) {
    if (rank == own_ || left_.has(rank)) return;
    left_.add(rank);
    rows_[own_].hears.remove(rank);
    rows_[rank] = {};
    changed_ = true;
}

void Connectivity::blocked(std::uint16_t rank, Nanos now) {
    if (rank == own_) return;
    blocked_until_[rank] = now + blocked_silences * silence_;
    if (!hears().has(rank)) return;
    rows_[own_].hears.remove(rank);
    changed_ = true;
}

void Connectivity::reset(std::uint16_t rank) {
    if (rank == own_) return;
    left_.remove(rank);
    rows_[own_].hears.remove(rank);
    rows_[rank] = {};
    heard_at_[rank] = unheard;
    blocked_until_[rank] = 0;
    changed_ = true;
}

void Connectivity::trust(std::uint16_t rank, Nanos now) { hear(rank, now); }

void Connectivity::report(std::uint16_t rank, const Ranks& hears, Nanos now) {
    Row& row = rows_[rank];
    if (rank == own_ || left_.has(rank)) return;
    if (!row.said || row.hears != hears) changed_ = true;
    row = {.hears = hears, .at = now, .said = true};
}

void Connectivity::slept(Nanos now) {
    for (const std::uint16_t rank : hears()) {
        if (rank != own_) heard_at_[rank] = std::max(heard_at_[rank], now - silence_ / 2);
    }
    next_ = now;
}

void Connectivity::refresh(Nanos now) {
    if (now < next_) return;
    next_ = never;
    Ranks& own = rows_[own_].hears;
    for (const std::uint16_t rank : Ranks(own)) {
        if (rank == own_) continue;
        const Nanos until = heard_at_[rank] + silence_;
        if (until <= now) {
            own.remove(rank);
            // What a silent process said last is no longer true.
            rows_[rank] = {};
            changed_ = true;
        } else {
            next_ = std::min(next_, until);
        }
    }
}

std::optional<Nanos> Connectivity::heard_at(std::uint16_t rank) const {
    return heard_at_[rank] == unheard ? std::nullopt : std::optional(heard_at_[rank]);
}

bool Connectivity::good(std::uint16_t a, std::uint16_t b) const {
    return (!rows_[a].said || rows_[a].hears.has(b)) && (!rows_[b].said || rows_[b].hears.has(a));
}

bool Connectivity::good(std::uint16_t who, const Ranks& others) const {
    for (const std::uint16_t each : others) {
        if (each != who && !good(who, each)) return false;
    }
    return true;
}

Ranks Connectivity::choose(Ranks from, const Ranks& dispensable) const {
    // Almost always everybody hears everybody.
    bool whole = true;
    for (const std::uint16_t rank : from) whole = whole && (!rows_[rank].said || rows_[rank].hears.contains(from));
    if (whole) return from;
    std::vector<Ranks> bad(rows_.size());
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
