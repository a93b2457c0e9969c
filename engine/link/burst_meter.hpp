// Recent mean length of loss bursts on a link, in datagrams.
#pragma once

#include <cstdint>

namespace storm {

class BurstMeter {
public:
    // Numbers arrive in rising order. Reports have numbers too and are never counted as lost, so one number may be
    // missing within a run.
    void on_lost(std::uint64_t number) {
        if (number <= last_ || number > last_ + 2) {
            runs_ += 1.0;
            if (runs_ > memory_runs) {
                lost_ *= 0.5;
                runs_ *= 0.5;
            }
        }
        lost_ += 1.0;
        last_ = number;
    }
    // One as long as nothing is known.
    [[nodiscard]] double mean() const { return runs_ > 0.0 ? lost_ / runs_ : 1.0; }

private:
    static constexpr double memory_runs = 64.0;
    std::uint64_t last_{};
    double lost_{}, runs_{};
};

}  // namespace storm
