// Peak rates of an endpoint's bottleneck: out, in, and both ways together, over windows that hold enough to count.
//
// A window begins with the first bytes after the previous window, which are not counted in it, and is dropped at a
// pause: only time in which the link was in use counts. The maximum over many windows is what the bottleneck can carry.
// Delayed reports arrive in bunches and would count as speed. So within a window, the smaller of the bytes sent and the
// bytes reported as delivered counts.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/clock.hpp"

namespace storm {

class BottleneckPeaks {
public:
    static constexpr Nanos shortest = 50 * millisecond, pause = 250 * millisecond;
    static constexpr std::uint64_t least_bytes = 64 << 10;  // each way

    static constexpr std::uint64_t control_bytes = 256;  // less is no data, and goes on during pauses

    struct Peaks {
        double out{}, in{}, both{};  // bytes per second; 0 if no window was full
    };

    void sent(std::uint64_t bytes, Nanos now) {
        out_.count(Way::sent, bytes, now);
        both_.count(Way::sent, bytes, now);
    }
    // Bytes that a report says were delivered.
    void delivered(std::uint64_t bytes, Nanos now) {
        out_.count(Way::delivered, bytes, now);
        both_.count(Way::delivered, bytes, now);
    }
    // Bytes that have arrived from peers.
    void received(std::uint64_t bytes, Nanos now) {
        in_.count(Way::received, bytes, now);
        both_.count(Way::received, bytes, now);
    }
    // Peak rates since the last call.
    [[nodiscard]] Peaks take() { return {out_.take(), in_.take(), both_.take()}; }

private:
    enum class Way : std::uint8_t { sent, delivered, received };

    class Window {
    public:
        explicit Window(std::uint64_t least) : least_(least) {}
        void count(Way way, std::uint64_t bytes, Nanos now) {
            if (bytes < control_bytes) return;
            if (now - last_ > pause) open(now);
            last_ = now;
            if (now == since_) return;  // the first bytes
            bytes_[static_cast<std::size_t>(way)] += bytes;
            const std::uint64_t all = std::min(bytes_[0], bytes_[1]) + bytes_[2];
            if (now - since_ < shortest || all < least_) return;
            most_ = std::max(
                most_, static_cast<double>(all) * static_cast<double>(second) / static_cast<double>(now - since_));
            open(now);
        }
        [[nodiscard]] double take() { return std::exchange(most_, 0.0); }

    private:
        void open(Nanos now) {
            since_ = now;
            bytes_ = {};
        }
        std::uint64_t least_;
        Nanos since_{}, last_{-never / 2};
        std::array<std::uint64_t, 3> bytes_{};  // by way
        double most_{};
    };

    Window out_{least_bytes}, in_{least_bytes}, both_{2 * least_bytes};
};

}  // namespace storm
