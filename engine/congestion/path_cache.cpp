#include "congestion/path_cache.hpp"

#include <algorithm>

namespace storm {

PathCache& PathCache::of_process() {
    // Never destroyed: an endpoint may be closed after static objects are.
    static auto* memory = new PathCache;
    return *memory;
}

void PathCache::store(const std::string& host, std::uint16_t lane, const PathMetrics& metrics, Nanos now) {
    const std::lock_guard guard(mutex_);
    if (all_.size() >= most && !all_.contains({host, lane})) {
        all_.erase(std::min_element(all_.begin(), all_.end(), [](const auto& one, const auto& other) {
            return one.second.at < other.second.at;
        }));
    }
    all_[{host, lane}] = {metrics, now};
}

std::optional<PathMetrics> PathCache::recall(const std::string& host, std::uint16_t lane, Nanos now) {
    const std::lock_guard guard(mutex_);
    const auto found = all_.find({host, lane});
    if (found == all_.end()) return std::nullopt;
    if (now - found->second.at < stale_after) return found->second.metrics;
    all_.erase(found);
    return std::nullopt;
}

}  // namespace storm
