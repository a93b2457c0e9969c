// All exchanges of an endpoint: those under way, those that have ended but whose buffers a batch still points into, and
// the outcomes that the caller has not taken yet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/timers.hpp"
#include "exchange/exchange.hpp"

namespace storm {

class Exchanges {
public:
    struct Finished {
        std::uint64_t id{};
        Outcome outcome;
    };

    // Adds an exchange under its channel and sequence number, and assigns its id. Ids rise.
    Exchange& add(std::unique_ptr<Exchange> exchange);
    // Null if no such exchange is under way.
    [[nodiscard]] Exchange* find(std::uint32_t channel, std::uint32_t seq) const;
    [[nodiscard]] Exchange* find(std::uint64_t id) const;
    // Ends an exchange that was concluded: queues its outcome and destroys it. If batches still point into its buffers,
    // that happens at `unpinned`, when the last of them has been sent.
    void end(Exchange& exchange);
    void unpinned(Exchange& exchange);
    [[nodiscard]] std::optional<Finished> take_finished();

    using ByKey = std::unordered_map<std::uint64_t, std::unique_ptr<Exchange>>;  // by channel and sequence number
    [[nodiscard]] const ByKey& active() const { return active_; }
    // Calls `visit` with every exchange under way; it may end any of them.
    template <class Visit>
    void each(Visit&& visit);

    // Timers of all exchanges: one entry per exchange under way, the earliest of its own timers. Entries may be early
    // and are then corrected: see `Timers`.
    // A timer of an exchange became earlier.
    void set_earlier(Exchange& exchange, Timers::Owner timer, Nanos at);
    // `true_time(exchange, timer)`: when that timer of the exchange is due.
    template <class TrueTime>
    [[nodiscard]] Nanos next_timer(TrueTime&& true_time);
    // Ids of the exchanges with a timer that is due, in rising order. Call `timers_changed` for each still under way.
    template <class TrueTime>
    [[nodiscard]] std::vector<std::uint64_t> take_due(Nanos now, TrueTime&& true_time);
    void timers_changed(const Exchange& exchange) { timers_.set(exchange.slot, exchange.timers.earliest()); }

private:
    template <class TrueTime>
    [[nodiscard]] auto earliest_by(TrueTime& true_time) {
        return [&](Timers::Owner slot) {
            Exchange& exchange = *by_slot_[slot];
            return exchange.timers.next([&](Timers::Owner timer) { return true_time(exchange, timer); });
        };
    }

    ByKey active_;
    std::unordered_map<std::uint64_t, Exchange*> by_id_;
    std::vector<std::unique_ptr<Exchange>> ended_pinned_;  // ended, but batches still point into their buffers
    std::deque<Finished> finished_;
    std::vector<Exchange*> by_slot_;  // null where free
    std::vector<std::uint32_t> free_slots_;
    Timers timers_;  // by slot
    std::uint64_t next_id_{1};
};

template <class Visit>
void Exchanges::each(Visit&& visit) {
    std::vector<std::uint64_t> keys;
    keys.reserve(active_.size());
    for (const auto& [key, exchange] : active_) keys.push_back(key);
    for (const std::uint64_t key : keys) {
        const auto found = active_.find(key);
        if (found != active_.end()) visit(*found->second);
    }
}

template <class TrueTime>
Nanos Exchanges::next_timer(TrueTime&& true_time) {
    return timers_.next(earliest_by(true_time));
}

template <class TrueTime>
std::vector<std::uint64_t> Exchanges::take_due(Nanos now, TrueTime&& true_time) {
    std::vector<std::uint64_t> due;
    for (const Timers::Owner slot : timers_.take_due(now, earliest_by(true_time))) due.push_back(by_slot_[slot]->id);
    std::sort(due.begin(), due.end());
    return due;
}

}  // namespace storm
