// A network whose links the datagrams of a simulation share with a web service's packets, in priority classes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "sim/medium.hpp"
#include "traffic/sim_service.hpp"
#include "traffic/sim_switch.hpp"

namespace storm {

struct SharedNetworkSettings {
    SwitchSettings network{};
    Priority priority{};             // of the cores' datagrams
    std::uint32_t header_bytes{42};  // of each datagram on the wire: Ethernet, IPv4 and UDP
};

class SharedNetwork final : public Medium {
public:
    SharedNetwork(std::size_t hosts, const SharedNetworkSettings& lines);

    [[nodiscard]] Nanos next_at() const override;
    void send(Datagram datagram, Nanos now) override;
    std::optional<Datagram> step(Nanos now) override;
    [[nodiscard]] std::uint64_t drops() const override { return network_.drops(); }

    // Begins a service between the hosts. Throws std::logic_error if one runs already.
    void serve(const ServiceSettings& settings, Nanos now);
    // Throws std::logic_error if there is none.
    [[nodiscard]] SimService& service();
    [[nodiscard]] const SimSwitch& lines() const { return network_; }
    // Sets the rate of a rack's links to the other racks, from now on. Throws if there are none.
    void set_trunk(std::size_t rack, double bytes_per_s) { network_.set_trunk(rack, bytes_per_s); }

private:
    std::size_t hosts_;
    Priority priority_;
    std::uint32_t header_bytes_;
    SimSwitch network_;
    std::optional<SimService> service_;
};

}  // namespace storm
