// Interface of a network model that replaces a simulation's own links, shared with other traffic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/clock.hpp"

namespace storm {

class Medium {
public:
    struct Datagram {
        std::uint16_t source{}, target{};
        std::vector<std::byte> bytes{};
    };

    virtual ~Medium() = default;
    // When the next event is; `never` if nothing is in flight.
    [[nodiscard]] virtual Nanos next_at() const = 0;
    virtual void send(Datagram datagram, Nanos now) = 0;
    // Runs that event, and returns the datagram that thereby reached its host, if one did.
    virtual std::optional<Datagram> step(Nanos now) = 0;
    // Packets that found a queue full.
    [[nodiscard]] virtual std::uint64_t drops() const = 0;
};

}  // namespace storm
