// An exchange as its caller sees it: what is to be sent and received, how much of it may be missing, and what came of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "clock.hpp"
#include "reduction.hpp"
#include "wire.hpp"

namespace storm {

struct SendSpec {
    std::uint16_t peer{};
    bool second_stage{};      // sends the reduction's result, each chunk as soon as it is final
    const std::byte* data{};  // stays as it is until the exchange ends
    std::uint64_t bytes{};
};

struct ReceiveSpec {
    std::uint16_t peer{};
    bool second_stage{};
    bool reduce{};      // contributes to the reduction, in the order of these specs; else placed
    std::byte* into{};  // what is missing keeps its old value
    std::uint64_t bytes{};
};

// How much of each message may be missing when the stage ends, and when it ends at the latest.
struct StageSpec {
    double budget{};        // 0 is exact, 1 never repairs
    Nanos deadline{never};  // absolute
};

struct ExchangeSpec {
    std::uint32_t channel{}, seq{};
    std::vector<SendSpec> sends{};
    std::vector<ReceiveSpec> receives{};
    std::optional<ReductionSpec> reduction{};
    std::array<StageSpec, 2> stages{};
    Nanos timeout_at{never};  // absolute; passing it is an error, not a loss
};

// What one message brought.
struct Arrival {
    std::uint16_t peer{};
    bool second_stage{};
    std::uint32_t chunks{}, arrived{};
    std::uint64_t bytes{}, missing_bytes{};
    std::vector<std::uint64_t> mask;  // bit c: chunk c arrived
};

struct Outcome {
    Status status{Status::running};
    std::uint16_t peer{};                               // with whom the error was met
    Blame blame;                                        // whose fault it was: that peer's, or as the peer tells
    std::uint64_t missing_bytes{};                      // what that peer owed, or had not acknowledged
    std::uint64_t expected_bytes{}, announced_bytes{};  // size_mismatch
    std::uint32_t repaired{};                           // chunks that we sent again
    Nanos started{}, ended{};
    std::vector<Arrival> arrivals;
    std::vector<std::uint16_t> counts;  // the reduction's copies per chunk
};

// Throws std::invalid_argument if an exchange makes no sense for this rank of the world.
void validate(const ExchangeSpec& spec, std::uint16_t rank, std::uint16_t world);

}  // namespace storm
