// The exchanges of an endpoint: those under way, those that have ended but whose buffers a batch still points into, and
// the outcomes that nobody has taken yet.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "exchange.hpp"

namespace storm {

class Exchanges {
public:
    struct Finished {
        std::uint64_t id{};
        Outcome outcome;
    };

    // Adds an exchange under its channel and sequence number, and gives it its id. Ids rise.
    Exchange& add(std::unique_ptr<Exchange> exchange);
    // Null if no such exchange is under way.
    [[nodiscard]] Exchange* find(std::uint32_t channel, std::uint32_t seq) const;
    [[nodiscard]] Exchange* find(std::uint64_t id) const;
    // An exchange that was concluded is no longer under way. Its outcome comes out, and the exchange is gone, now or, if
    // batches still point into its buffers, when `unpinned` says that the last of them has left.
    void end(Exchange& exchange);
    void unpinned(Exchange& exchange);
    [[nodiscard]] std::optional<Finished> take_finished();

    using ByKey = std::unordered_map<std::uint64_t, std::unique_ptr<Exchange>>;  // by channel and sequence number
    [[nodiscard]] const ByKey& active() const { return active_; }
    // Calls `visit` with every exchange under way; it may end any of them.
    template <class Visit>
    void each(Visit&& visit);

private:
    ByKey active_;
    std::unordered_map<std::uint64_t, Exchange*> by_id_;
    std::vector<std::unique_ptr<Exchange>> leaving_;  // ended, but pinned
    std::deque<Finished> finished_;
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

}  // namespace storm
