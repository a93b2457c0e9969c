// Hosts connected by one switch, under virtual time: each has an uplink and a downlink, which all of the host's packets
// share, those of a training and those of a service. Or hosts in racks: each rack has its own switch, with an uplink to
// and a downlink from the switch that connects all racks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <queue>
#include <vector>

#include "traffic/sim_link.hpp"

namespace storm {

// What TCP writes into a packet, as far as the model of the service knows it. Segments are counted, not bytes.
struct Segment {
    enum class Kind : std::uint8_t { open, opened, request, data, ack };
    std::uint32_t connection{};
    Kind kind{};
    std::uint32_t number{};  // of data: which segment of the connection
    std::uint64_t order{};   // of data: which transmission of the connection; of an ack: the one that it answers
    std::uint32_t next{}, sacked{};  // of an ack: the first segment that is missing, and the one that just arrived
};

struct SimPacket {
    std::uint16_t source{}, target{};
    Priority priority{};
    std::uint32_t wire_bytes{};         // with all headers
    std::optional<Segment> segment{};   // of the service; none for a datagram of a core
    std::vector<std::byte> datagram{};  // as the core made it
};

struct SwitchSettings {
    SimLinkSettings up{}, down{};
    Nanos delay{50 * microsecond};  // from host to host of one switch; twice that to another rack
    std::size_t hosts_per_rack{};   // 0: all hosts share one switch
    SimLinkSettings trunk{};        // between a rack and the switch of all racks, each way
};

class SimSwitch {
public:
    SimSwitch(std::size_t hosts, const SwitchSettings& settings);

    void send(SimPacket packet, Nanos now);
    // Sets the rate of a rack's links to and from the switch of all racks, from now on. Throws std::out_of_range.
    void set_trunk(std::size_t rack, double bytes_per_s);
    // When the next event is; `never` if nothing is in flight.
    [[nodiscard]] Nanos next_at() const { return events_.empty() ? never : events_.top().at; }
    // Runs that event, and returns the packet that thereby reached its host, if one did.
    std::optional<SimPacket> step();

    [[nodiscard]] const SimLink& up(std::size_t host) const { return links_.at(2 * host); }
    [[nodiscard]] const SimLink& down(std::size_t host) const { return links_.at(2 * host + 1); }
    [[nodiscard]] std::uint64_t drops() const;
    // Packets that found a queue full on a link between a rack and the switch that connects the racks.
    [[nodiscard]] std::uint64_t trunk_drops() const;

private:
    enum class What : std::uint8_t { link_is_free, reaches_switch, reaches_host };
    struct Event {
        Nanos at{};
        std::uint64_t order{};
        What what{};
        std::uint32_t which{};  // link, or packet
        std::uint32_t into{};   // link that the packet waits for next
        bool operator>(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
    };

    [[nodiscard]] std::size_t rack(std::size_t host) const { return hosts_per_rack_ == 0 ? 0 : host / hosts_per_rack_; }
    // The link that a packet takes after this one.
    [[nodiscard]] std::size_t after(std::size_t line, const SimPacket& packet) const;
    void put(std::size_t line, std::uint32_t packet, Nanos now);
    void pull(std::size_t line, Nanos now);
    [[nodiscard]] std::uint32_t keep(SimPacket packet);
    void schedule(Nanos at, What what, std::uint32_t which, std::size_t into = 0) {
        events_.push({at, ++order_, what, which, static_cast<std::uint32_t>(into)});
    }

    Nanos delay_;
    std::size_t hosts_, hosts_per_rack_;
    std::vector<SimLink> links_;  // up and down of each host, then of each rack
    std::vector<bool> awaited_;   // links for which an event says when they are free
    std::vector<SimPacket> packets_;
    std::vector<std::uint32_t> free_;  // positions in packets_
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
    std::uint64_t order_{};
};

}  // namespace storm
