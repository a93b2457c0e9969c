#include "exchange/exchanges.hpp"

#include <algorithm>
#include <utility>

namespace storm {

Exchange& Exchanges::add(std::unique_ptr<Exchange> exchange) {
    Exchange& added = *exchange;
    added.id = next_id_++;
    by_id_[added.id] = &added;
    if (free_slots_.empty()) {
        free_slots_.push_back(static_cast<std::uint32_t>(by_slot_.size()));
        by_slot_.push_back(nullptr);
        timers_.resize(by_slot_.size());
    }
    added.slot = free_slots_.back();
    free_slots_.pop_back();
    by_slot_[added.slot] = &added;
    active_[exchange_key(added.channel, added.seq)] = std::move(exchange);
    return added;
}

Exchange* Exchanges::find(std::uint32_t channel, std::uint32_t seq) const {
    const auto found = active_.find(exchange_key(channel, seq));
    return found == active_.end() ? nullptr : found->second.get();
}

Exchange* Exchanges::find(std::uint64_t id) const {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : found->second;
}

void Exchanges::end(Exchange& exchange) {
    by_id_.erase(exchange.id);
    by_slot_[exchange.slot] = nullptr;
    timers_.set(exchange.slot, never);
    free_slots_.push_back(exchange.slot);
    const auto found = active_.find(exchange_key(exchange.channel, exchange.seq));
    std::unique_ptr<Exchange> owned = std::move(found->second);
    active_.erase(found);
    if (exchange.pinned()) {
        ended_pinned_.push_back(std::move(owned));
    } else {
        finished_.push_back({.id = exchange.id, .outcome = std::move(exchange.outcome)});
    }
}

void Exchanges::set_earlier(Exchange& exchange, Timers::Owner timer, Nanos at) {
    exchange.timers.set_earlier(timer, at);
    timers_.set_earlier(exchange.slot, at);
}

void Exchanges::unpinned(Exchange& exchange) {
    const auto found = std::find_if(ended_pinned_.begin(), ended_pinned_.end(),
                                    [&](const auto& each) { return each.get() == &exchange; });
    finished_.push_back({.id = exchange.id, .outcome = std::move(exchange.outcome)});
    ended_pinned_.erase(found);
}

std::optional<Exchanges::Finished> Exchanges::take_finished() {
    if (finished_.empty()) return std::nullopt;
    Finished first = std::move(finished_.front());
    finished_.pop_front();
    return first;
}

}  // namespace storm
