// Pacing: a token bucket decides when bytes may be sent. rate_control.hpp decides its rate for one link.
#pragma once

#include <cstddef>

#include "base/clock.hpp"

namespace storm {

// Token bucket. Time is an argument, so a test runs an hour in a microsecond.
class Pacer {
public:
    Pacer(double bytes_per_s, double burst_bytes, Nanos now);
    void set_rate(double bytes_per_s, Nanos now);
    // How much may be sent at once, to make up for a late wake-up or after a pause.
    void set_burst(double burst_bytes, Nanos now);
    // How much of that may be sent after a pause in which nothing waited: all of it unless this is called.
    void set_rest(double rest_bytes);
    // Spends `bytes`, even into debt (a batch is not divisible), and returns true; or returns false while in debt.
    [[nodiscard]] bool try_send(std::size_t bytes, Nanos now);
    // When try_send will next succeed.
    [[nodiscard]] Nanos next_send_at(Nanos now) const;

private:
    [[nodiscard]] double tokens_at(Nanos now) const;

    double bytes_per_s_, burst_bytes_, rest_bytes_, tokens_;
    Nanos filled_at_;
    bool refused_{};  // at the last attempt: something waits
};

}  // namespace storm
