// How an exchange is divided between the lanes of an endpoint, and how its parts become one outcome again.
//
// Every message is cut into runs of whole chunks, one per lane, by a rule that knows nothing but the message's size, the
// size of chunks and the number of lanes: so sender and receiver agree without a word. Small messages stay in lane 0, and
// every exchange has a part there. A chunk is summed in one lane, in the order in which it would be in a single one: the
// bits of the result do not depend on the number of lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "exchange/exchange_spec.hpp"

namespace storm {

struct Lanes {
    std::size_t lanes{1};
    std::size_t chunk_bytes{};

    // A part is at least so large: below, waking another thread costs more than it brings.
    static constexpr std::uint64_t least_part = 256 << 10;

    // The run of bytes of a message that travels in a lane; empty if none does.
    struct Run {
        std::uint64_t first{}, bytes{};
        bool empty{};
    };
    [[nodiscard]] Run run_of(std::uint64_t message_bytes, std::size_t lane) const;
    // The number of lanes that carry a part of a message.
    [[nodiscard]] std::size_t lanes_of(std::uint64_t message_bytes) const;
    // The number of lanes that have a part of an exchange: its largest message's.
    [[nodiscard]] std::size_t lanes_of(const ExchangeSpec& spec) const;
    // The part of an exchange that belongs to a lane.
    [[nodiscard]] ExchangeSpec part_of(const ExchangeSpec& spec, std::size_t lane) const;
};

// Adds the outcome of the next lane's part to that of the lanes before it. An error outweighs success, and an earlier
// error a later one; parts that were cancelled because of another's error count least.
void merge_outcome(Outcome& whole, Outcome&& part);

}  // namespace storm
