// Counters of one endpoint since it began. Garbage from the network is counted here and reported nowhere else.
#pragma once

#include <cstdint>

namespace storm {

struct Counters {
    std::uint64_t datagrams_sent{}, bytes_sent{}, datagrams_received{}, bytes_received{};
    std::uint64_t authenticated{};  // datagrams received with a correct check or seal: only peers send such
    std::uint64_t repaired{};       // chunks sent again
    std::uint64_t duplicates{};     // datagrams or chunks that had arrived before
    std::uint64_t late{};           // chunks of messages that were already closed
    std::uint64_t malformed{}, foreign{}, corrupt{}, unexpected{};
    std::uint64_t pooled{}, pool_refused{}, pool_bytes{}, pool_peak_bytes{};
    std::uint64_t reports{}, probes{}, asks{};
    std::uint64_t shared_bytes_sent{}, shared_bytes_received{};  // data that passed through shared memory
    std::uint64_t shelved_bytes_sent{};                          // of it, what lay there already for another peer
    std::uint64_t parity_bytes{};                                // sent, headers included
    std::uint64_t blocks_saved{}, blocks_topped_up{};  // of those sent: parity made up for losses, or did not suffice
    std::uint64_t recovered{};                         // chunks that did not arrive and were decoded
    std::uint64_t reroutes{};                          // peers that were found at another address
    std::uint64_t path_outages{};                      // paths that stopped answering while others of the peer did
    std::uint64_t path_probes{}, path_changes{}, pieces{};  // paths that carry less than a whole datagram
};

}  // namespace storm
