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
    std::uint64_t whole{};  // bytes of the whole message, if this is one lane's part of it; 0 if this is all of it
};

struct ReceiveSpec {
    std::uint16_t peer{};
    bool second_stage{};
    bool reduce{};      // true: contributes to the reduction, in the order of these specs; false: written to `into`
    std::byte* into{};  // bytes that do not arrive keep their old value
    std::uint64_t bytes{};
    std::uint64_t whole{};  // as in SendSpec
};

// Reliability of a stage: how much of each message may be missing at its end, and when it ends at the latest.
struct StageSpec {
    double budget{};        // 0 is exact, 1 never retransmits
    Nanos deadline{never};  // absolute
    // Forward error correction, as parity per chunk of data: 0 is none; with `automatic`, a model of the link decides
    // how much pays off (coding_model.hpp).
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
    // The view that the exchange belongs to; 0 is none. With a view, the exchange waits across views: it waits for a
    // peer that is silent, blocked or has left until a later view is known. Peers that are not in the later view are
    // then dropped, also in exact stages: what they did not send is missing, which is not an error.
    std::uint32_t view{};
    bool low{};  // uses the endpoint's low-priority lane: see endpoint.hpp. Must be the same on all ranks
};

// How much of one message arrived.
struct Arrival {
    std::uint16_t peer{};
    bool second_stage{};
    std::uint32_t chunks{}, arrived{};
    std::uint32_t recovered{};  // chunks of `arrived` that were decoded from parity
    std::uint64_t bytes{}, missing_bytes{};
    std::vector<std::uint64_t> mask;  // bit c: chunk c arrived
};

struct Outcome {
    Status status{Status::running};
    std::uint16_t peer{};           // the peer at which the error showed
    FailureCause failure_cause{};   // the cause: that peer, or the rank that the peer reports
    std::uint64_t missing_bytes{};  // bytes that had not arrived from it, or it had not acknowledged
    std::uint64_t expected_bytes{}, announced_bytes{};  // size_mismatch
    std::uint32_t repaired{};  // chunks of ours that were lost, then retransmitted or decoded from parity
    Nanos started{}, ended{};
    std::vector<Arrival> arrivals{};
    std::vector<std::uint16_t> counts{};  // contributions to the reduction, by chunk
};

// Throws std::invalid_argument if the spec is invalid for this rank and world size.
void validate(const ExchangeSpec& spec, std::uint16_t rank, std::uint16_t world);

}  // namespace storm
