// Whose fault recent errors were: the answer for peers that ask about an exchange that failed here, and what our goodbye
// says. An error is healed, and no longer in the goodbye, once the job goes on without it.
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
    // So many of the latest failed exchanges are remembered.
    static constexpr std::size_t most = 1024;

    // `silence`: how long a peer may be silent. Errors within twice that time count as one cascade.
    FailureCauses(std::uint16_t own_rank, Nanos silence) : own_rank_(own_rank), silence_(silence) {}

    // The exchange `key` ended with an error. The first error of a cascade stays the one that the goodbye names; an
    // exchange that was closed by its own caller is remembered, but is no error.
    void on_failed(std::uint64_t key, Status status, FailureCause failure_cause, Nanos now);
    // An exchange that began at `started` ended well. `culprit_received_at`: when the culprit of the last error was last
    // heard, if it took part in the exchange. The error is healed if the exchange began after it and the culprit spoke
    // since, or is ourselves, or the job has long gone on without it.
    void on_success(Nanos started, std::optional<Nanos> culprit_received_at);

    // Why that exchange failed here; empty if it did not, or too long ago.
    [[nodiscard]] FailureCause of(std::uint64_t key) const;
    // The last error that has not healed, if any.
    [[nodiscard]] FailureCause last() const { return last_; }
    // Whether the last error says that this peer fell silent, and it has not spoken since.
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
