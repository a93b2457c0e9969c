// The bottleneck of an endpoint, or one per path. All links of a path share it, in proportion to what each still has to
// send.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.hpp"
#include "link/delivery_meter.hpp"

namespace storm {

class SharedBottleneck {
public:
    SharedBottleneck(std::size_t world, Nanos now, std::size_t paths = 1)
        : meters_(paths, BottleneckMeter(now)), loads_(world) {}

    // Bytes that a report says were delivered, over any link of the path. Returns the rate of the path's bottleneck in
    // bytes per second, if known.
    double on_report(std::uint64_t delivered_bytes, Nanos now, std::size_t path = 0) {
        return meters_[path].on_report(delivered_bytes, now);
    }

    // Shares are recomputed at most once per millisecond: `begin`, then `add` for every message, then `share`.
    [[nodiscard]] bool due(Nanos now) const { return now >= due_at_; }
    void begin(Nanos now) {
        due_at_ = now + millisecond;
        std::fill(loads_.begin(), loads_.end(), Load{});
    }
    // `deadline`: the message's time limit; `never` if it has none.
    void add(std::uint16_t peer, std::uint64_t bytes, Nanos deadline) {
        loads_[peer].bytes += bytes;
        loads_[peer].deadline = std::min(loads_[peer].deadline, deadline);
    }
    // Calls `set(peer, share, busy, deadline)` for each of the `busy` peers that have something to send; shares add to
    // 1.
    template <class Set>
    void share(Set&& set) const {
        std::uint64_t total = 0;
        std::size_t busy = 0;
        for (const Load& load : loads_) {
            total += load.bytes;
            busy += load.bytes > 0 ? 1 : 0;
        }
        for (std::size_t peer = 0; peer < loads_.size(); ++peer) {
            const Load& load = loads_[peer];
            if (load.bytes == 0) continue;
            set(static_cast<std::uint16_t>(peer), static_cast<double>(load.bytes) / static_cast<double>(total), busy,
                load.deadline);
        }
    }

private:
    struct Load {
        std::uint64_t bytes{};
        Nanos deadline{never};  // the shortest of its messages
    };
    std::vector<BottleneckMeter> meters_;  // by path
    Nanos due_at_{};
    std::vector<Load> loads_;  // by rank
};

}  // namespace storm
