// An exchange as its caller sees it: what to send and to receive, how much of it may be missing, and how it ended.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/clock.hpp"
#include "math/reduction.hpp"
#include "wire/wire.hpp"

namespace storm {

struct SendSpec {
    std::uint16_t peer{};
    bool second_stage{};      // sends the reduction's result, each chunk as soon as it is final
    const std::byte* data{};  // must not change until the exchange ends
    std::uint64_t bytes{};
    std::uint64_t whole{};  // of the message of which this is a lane's part; 0 if this is all of it
};

struct ReceiveSpec {
    std::uint16_t peer{};
    bool second_stage{};
    bool reduce{};      // contributes to the reduction, in the order of these specs; otherwise written to `into`
    std::byte* into{};  // bytes that do not arrive keep their old value
    std::uint64_t bytes{};
    std::uint64_t whole{};  // as of a SendSpec
};

// How much of each message may be missing when the stage ends, and when it ends at the latest.
struct StageSpec {
    double budget{};        // 0 is exact, 1 never repairs
    Nanos deadline{never};  // absolute
    // Parity per chunk of data: 0 is none; `automatic` is what the model of the link says pays (coding_model.hpp).
    static constexpr double automatic = -1.0, most = 4.0;
    double redundancy{};
};

struct ExchangeSpec {
    std::uint32_t channel{}, seq{};
    std::vector<SendSpec> sends{};
    std::vector<ReceiveSpec> receives{};
    std::optional<ReductionSpec> reduction{};
    std::array<StageSpec, 2> stages{};
    Nanos timeout_at{never};  // absolute; passing it is an error, not a loss
    // The view for which the exchange is made; 0 is none. With a view it is patient: a peer that is silent, blocked or gone
    // is waited for until a later view is known. Peers that are not in that one are then dropped, also where stages are
    // exact: what they did not send is missing, which is no error.
    std::uint32_t view{};
    bool low{};  // goes by the endpoint's lane of low priority: see endpoint.hpp. The same on all ranks
};

// How much of one message arrived.
struct Arrival {
    std::uint16_t peer{};
    bool second_stage{};
    std::uint32_t chunks{}, arrived{};
    std::uint32_t recovered{};  // of those that arrived: decoded from parity
    std::uint64_t bytes{}, missing_bytes{};
    std::vector<std::uint64_t> mask;  // bit c: chunk c arrived
};

struct Outcome {
    Status status{Status::running};
    std::uint16_t peer{};                               // the peer at which the error showed
    FailureCause failure_cause{};                       // whose fault it was: that peer's, or whoever that peer blames
    std::uint64_t missing_bytes{};                      // bytes that the peer had not sent, or not acknowledged
    std::uint64_t expected_bytes{}, announced_bytes{};  // size_mismatch
    std::uint32_t repaired{};  // chunks of ours that were lost and sent again, or that parity made up for
    Nanos started{}, ended{};
    std::vector<Arrival> arrivals{};
    std::vector<std::uint16_t> counts{};  // the reduction's copies per chunk
};

// Throws std::invalid_argument if an exchange makes no sense for this rank of the world.
void validate(const ExchangeSpec& spec, std::uint16_t rank, std::uint16_t world);

}  // namespace storm
