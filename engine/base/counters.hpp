// Counters of one endpoint since it started: datagrams, bytes, retransmissions, duplicates, malformed input. Garbage
// from the network is counted here and logged nowhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace storm {

// A counter of a struct, with the name that users see.
template <class Struct>
struct Named {
    const char* name;
    std::uint64_t Struct::* counter;
};

// Whether a list names each counter of a struct exactly once. The struct must hold nothing but counters.
template <class Struct, std::size_t n>
consteval bool names_all(const std::array<Named<Struct>, n>& list) {
    for (std::size_t one = 0; one < n; ++one) {
        for (std::size_t other = 0; other < one; ++other) {
            if (list[one].counter == list[other].counter) return false;
        }
    }
    return sizeof(Struct) == n * sizeof(std::uint64_t);
}

struct Counters {
    std::uint64_t datagrams_sent{}, bytes_sent{}, datagrams_received{}, bytes_received{};
    std::uint64_t authenticated{};  // datagrams received with a correct checksum or seal: only peers send such
    std::uint64_t repaired{};       // chunks retransmitted
    std::uint64_t duplicates{};     // datagrams or chunks that had arrived before
    std::uint64_t late{};           // chunks of messages that were already closed
    std::uint64_t malformed{}, foreign{}, corrupt{}, unexpected{};
    std::uint64_t pooled{}, pool_refused{}, pool_bytes{}, pool_peak_bytes{};
    std::uint64_t reports{}, probes{}, asks{};
    std::uint64_t shared_bytes_sent{}, shared_bytes_received{};  // data sent and received through shared memory
    std::uint64_t shelved_bytes_sent{};  // of it, already in the broadcast buffer for another peer
    std::uint64_t parity_bytes{};        // sent, headers included
    std::uint64_t blocks_saved{},
        blocks_topped_up{};        // blocks sent whose parity made up for losses, or did not suffice
    std::uint64_t recovered{};     // chunks that did not arrive and were decoded from parity
    std::uint64_t reroutes{};      // peers that were found at another address
    std::uint64_t path_outages{};  // paths that stopped answering while other paths of the peer still did
    std::uint64_t path_probes{}, path_changes{}, pieces{};  // path MTU discovery, and fragments of chunks sent
};

// The list of all counters. Code that sums or shows counters iterates over it.
inline constexpr auto counter_names = std::to_array<Named<Counters>>({
    {"datagrams_sent", &Counters::datagrams_sent},
    {"bytes_sent", &Counters::bytes_sent},
    {"datagrams_received", &Counters::datagrams_received},
    {"bytes_received", &Counters::bytes_received},
    {"authenticated", &Counters::authenticated},
    {"repaired", &Counters::repaired},
    {"parity_bytes", &Counters::parity_bytes},
    {"blocks_saved", &Counters::blocks_saved},
    {"blocks_topped_up", &Counters::blocks_topped_up},
    {"recovered", &Counters::recovered},
    {"duplicates", &Counters::duplicates},
    {"late", &Counters::late},
    {"malformed", &Counters::malformed},
    {"foreign", &Counters::foreign},
    {"corrupt", &Counters::corrupt},
    {"unexpected", &Counters::unexpected},
    {"pooled", &Counters::pooled},
    {"pool_refused", &Counters::pool_refused},
    {"pool_bytes", &Counters::pool_bytes},
    {"pool_peak_bytes", &Counters::pool_peak_bytes},
    {"reports", &Counters::reports},
    {"probes", &Counters::probes},
    {"asks", &Counters::asks},
    {"shared_bytes_sent", &Counters::shared_bytes_sent},
    {"shelved_bytes_sent", &Counters::shelved_bytes_sent},
    {"shared_bytes_received", &Counters::shared_bytes_received},
    {"reroutes", &Counters::reroutes},
    {"path_outages", &Counters::path_outages},
    {"path_probes", &Counters::path_probes},
    {"path_changes", &Counters::path_changes},
    {"pieces", &Counters::pieces},
});
static_assert(names_all(counter_names), "a counter is missing from the list, or in it twice");

template <class Struct, std::size_t n>
void add(Struct& sum, const Struct& more, const std::array<Named<Struct>, n>& list) {
    for (const Named<Struct>& each : list) sum.*each.counter += more.*each.counter;
}

}  // namespace storm
