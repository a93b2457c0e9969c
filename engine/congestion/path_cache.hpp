// Cache of path metrics by host, for the next link to the same host: of a peer that reconnects, or of a new group. A
// link starts with the cached values and replaces them by its own measurements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.hpp"

namespace storm {

// Metrics of one path.
struct PathMetrics {
    double bytes_per_s{};  // of the bottleneck: the rate of the link times the links that shared it
    Nanos round_trip{};    // without a queue
};

class PathCache {
public:
    static constexpr Nanos stale_after = 600 * second;  // by then, other traffic or the route has changed
    static constexpr std::size_t most = 4096;           // paths; the oldest is forgotten

    // The cache of this process. Thread-safe.
    [[nodiscard]] static PathCache& of_process();

    // `lane`: each has links of its own, which share the bottleneck.
    void store(const std::string& host, std::uint16_t lane, const PathMetrics& metrics, Nanos now);
    [[nodiscard]] std::optional<PathMetrics> recall(const std::string& host, std::uint16_t lane, Nanos now);

private:
    struct Entry {
        PathMetrics metrics;
        Nanos at{};
    };
    std::mutex mutex_;
    std::map<std::pair<std::string, std::uint16_t>, Entry> all_;
};

}  // namespace storm
