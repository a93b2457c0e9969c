// How much parity pays: a model of what retransmission and forward error correction cost on a link.
// src/stormtorch/theory/coding.py derives it.
#pragma once

#include <cstddef>
#include <vector>

namespace storm {

// A link as the model sees it. Losses come in bursts: a chain of two states, of which one loses everything.
struct CodedLink {
    double loss{};      // fraction of datagrams that are lost
    double burst{1.0};  // mean number of datagrams that are lost in a row
    double round_trip_s{};
    double chunk_s{};  // transmission time of one chunk
};

// Chances that more than m of `chunks + m` datagrams are lost, for m = 0, 1, ..., `most`. The datagrams are `apart`
// positions apart on the link, as the blocks of a stretch are interleaved.
[[nodiscard]] std::vector<double> block_failures(const CodedLink& link, std::size_t chunks, std::size_t most,
                                                 std::size_t apart);

// A stretch of a message.
struct CodedStretch {
    std::size_t chunks{}, blocks{};
    std::size_t after{};   // chunks still to be sent behind it, which hide the time of its retransmissions
    double messages{1.0};  // messages like this one, all of which are waited for
};

// Chunks of parity for each block of the stretch; 0 where retransmission is as good.
[[nodiscard]] std::size_t parity_that_pays(const CodedLink& link, const CodedStretch& stretch);

}  // namespace storm
