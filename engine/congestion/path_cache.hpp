// What this process has learned of paths to other hosts, kept for the next link to them: of a peer that returns, or of a
// new group. A link starts with it and believes its own measurements.
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

// What a link knows of its path.
struct PathMetrics {
    double bytes_per_s{};  // of the line: the rate of the link times the links that shared it
    Nanos round_trip{};    // without a queue
};

class PathCache {
public:
    static constexpr Nanos stale_after = 600 * second;  // others use the line by then, or the route has changed
    static constexpr std::size_t most = 4096;           // paths; the oldest is forgotten

    // The one of this process. Safe to use from any thread.
    [[nodiscard]] static PathCache& of_process();

    // `lane`: each has links of its own, which share the line.
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
