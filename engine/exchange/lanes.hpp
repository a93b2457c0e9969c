// Lanes (several sockets and threads of one endpoint): how an exchange is divided between them, and how the outcomes of
// its parts are merged.
//
// Every message is divided into runs of whole chunks, one per lane. The division depends only on the message's size,
// the chunk size and the number of lanes, so sender and receiver need not negotiate it. Small messages stay in lane 0,
// and every exchange has a part there. Each chunk is summed in one lane, in the same order as with a single lane, so
// the result is the same to the bit for any number of lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "exchange/exchange_spec.hpp"

namespace storm {

struct Lanes {
    std::size_t lanes{1};
    std::size_t chunk_bytes{};

    // The least size of a part. For a smaller one, waking another thread costs more than it saves.
    static constexpr std::uint64_t least_part = 256 << 10;

    // The run of bytes of a message that a lane carries; empty if it carries none.
    struct Run {
        std::uint64_t first{}, bytes{};
        bool empty{};
    };
    [[nodiscard]] Run run_of(std::uint64_t message_bytes, std::size_t lane) const;
    // The number of lanes that carry a part of a message.
    [[nodiscard]] std::size_t lanes_of(std::uint64_t message_bytes) const;
    // The number of lanes that have a part of an exchange: as many as its largest message needs.
    [[nodiscard]] std::size_t lanes_of(const ExchangeSpec& spec) const;
    // The part of an exchange that belongs to a lane.
    [[nodiscard]] ExchangeSpec part_of(const ExchangeSpec& spec, std::size_t lane) const;
};

// Merges the outcome of the next lane's part into that of the lanes before it. An error outweighs success, and the
// first error outweighs later ones. Of errors, cancelled parts weigh least: they only follow an error in another lane.
void merge_outcome(Outcome& whole, Outcome&& part);

}  // namespace storm
