// How much an endpoint's line carried at most: out, in, and both ways together, over windows of a fixed length.
//
// A window begins with the first bytes after the one before it, so that pauses do not count; those first bytes belong to
// the time before it, and are left out. The most of many windows is what the line can carry, as long as anything filled it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "clock.hpp"

namespace storm {

class LinePeaks {
public:
    // Long enough that a burst of reports does not count as speed, short enough to be filled by one exchange.
    static constexpr Nanos window = 50 * millisecond;

    struct Peaks {
        double out{}, in{}, both{};  // bytes per second; 0 if no window has ended
    };

    // Bytes that a report says were delivered.
    void out(std::uint64_t bytes, Nanos now) { count(out_, bytes, now); }
    // Bytes that have arrived from peers.
    void in(std::uint64_t bytes, Nanos now) { count(in_, bytes, now); }
    // The most since the last call.
    [[nodiscard]] Peaks take(Nanos now) {
        if (now - since_ >= window) close(never);
        const Peaks found = peaks_;
        peaks_ = {};
        return found;
    }

private:
    void count(std::uint64_t& into, std::uint64_t bytes, Nanos now) {
        if (now - since_ >= window) {
            close(now);
            return;
        }
        into += bytes;
    }
    // Ends the window, and begins another now, or with the next bytes.
    void close(Nanos now) {
        constexpr double window_s = static_cast<double>(window) / static_cast<double>(second);
        const double out = static_cast<double>(out_) / window_s, in = static_cast<double>(in_) / window_s;
        peaks_ = {std::max(peaks_.out, out), std::max(peaks_.in, in), std::max(peaks_.both, out + in)};
        out_ = in_ = 0;
        since_ = now == never ? -never / 2 : now;
    }

    Nanos since_{-never / 2};
    std::uint64_t out_{}, in_{};
    Peaks peaks_;
};

}  // namespace storm
