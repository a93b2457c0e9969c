// Failure causes of recent errors: which rank caused each, and why. They answer peers that still send for an exchange
// that failed here, and our goodbye carries the last one. An error is healed once the job goes on after it; then the
// goodbye no longer names it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "base/clock.hpp"
#include "wire/wire.hpp"

namespace storm {

class FailureCauses {
public:
    // The number of failed exchanges that are remembered: the latest ones.
    static constexpr std::size_t most = 1024;

    // `silence`: how long a peer may be silent. Errors within twice that time count as one cascade of errors.
    FailureCauses(std::uint16_t own_rank, Nanos silence) : own_rank_(own_rank), silence_(silence) {}

    // The exchange `key` ended with an error. The goodbye names the first error of a cascade. An exchange that its own
    // caller cancelled is remembered, but does not count as an error.
    void on_failed(std::uint64_t key, Status status, FailureCause failure_cause, Nanos now);
    // An exchange that began at `started` succeeded. `culprit_received_at`: when something last arrived from the
    // culprit of the last error; empty if the culprit took no part in the exchange. The error is healed if the exchange
    // began after it, and one of these holds: something has arrived from the culprit since, the culprit is this rank,
    // or the job has gone on without the culprit for long.
    void on_success(Nanos started, std::optional<Nanos> culprit_received_at);

    // Why that exchange failed here; empty if it did not fail, or failed too long ago.
    [[nodiscard]] FailureCause of(std::uint64_t key) const;
    // The last error that has not healed, if any.
    [[nodiscard]] FailureCause last() const { return last_; }
    // Whether the last error says that this peer fell silent, and nothing has arrived from it since.
    [[nodiscard]] bool silenced(std::uint16_t rank, Nanos last_received) const {
        return last_ == FailureCause{rank, Status::peer_silent} && last_received <= last_at_;
    }

private:
    std::uint16_t own_rank_;
    Nanos silence_;
    std::deque<std::pair<std::uint64_t, FailureCause>> failed_;  // oldest first
    FailureCause last_;
    Nanos last_at_{};
};

}  // namespace storm
