// Hosts joined by one switch, under virtual time: each has a line up to it and a line down from it, which all of the
// host's packets share, those of a training and those of a service.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <queue>
#include <vector>

#include "sim_line.hpp"

namespace storm {

// What TCP writes into a packet, as far as the model of the service knows it. Segments are counted, not bytes.
struct Segment {
    enum class Kind : std::uint8_t { open, opened, request, data, ack };
    std::uint32_t connection{};
    Kind kind{};
    std::uint32_t number{};  // of data: which segment of the connection
    std::uint64_t order{};   // of data: which transmission of the connection; of an ack: the one that it answers
    std::uint32_t next{}, sacked{};  // of an ack: the first segment that is missing, and the one that just came
};

struct SimPacket {
    std::uint16_t source{}, target{};
    Priority priority{};
    std::uint32_t wire_bytes{};         // with all headers
    std::optional<Segment> segment{};   // of the service; none for a datagram of a core
    std::vector<std::byte> datagram{};  // as the core made it
};

struct SwitchSettings {
    LineSettings up{}, down{};
    Nanos delay{50 * microsecond};  // from host to host
};

class SimSwitch {
public:
    SimSwitch(std::size_t hosts, const SwitchSettings& settings);

    void send(SimPacket packet, Nanos now);
    // When the next thing happens; `never` if nothing is under way.
    [[nodiscard]] Nanos next_at() const { return events_.empty() ? never : events_.top().at; }
    // Lets it happen, and returns the packet that thereby reached its host, if one did.
    std::optional<SimPacket> step();

    [[nodiscard]] const SimLine& up(std::size_t host) const { return lines_.at(2 * host); }
    [[nodiscard]] const SimLine& down(std::size_t host) const { return lines_.at(2 * host + 1); }
    [[nodiscard]] std::uint64_t drops() const;

private:
    enum class What : std::uint8_t { line_is_free, reaches_switch, reaches_host };
    struct Event {
        Nanos at{};
        std::uint64_t order{};
        What what{};
        std::uint32_t which{};  // line, or packet
        bool operator>(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
    };

    void put(std::size_t line, std::uint32_t packet, Nanos now);
    void pull(std::size_t line, Nanos now);
    [[nodiscard]] std::uint32_t keep(SimPacket packet);
    void schedule(Nanos at, What what, std::uint32_t which) { events_.push({at, ++order_, what, which}); }

    Nanos delay_;
    std::vector<SimLine> lines_;  // up and down of each host
    std::vector<bool> awaited_;   // lines for which an event says when they are free
    std::vector<SimPacket> packets_;
    std::vector<std::uint32_t> free_;  // places in packets_
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
    std::uint64_t order_{};
};

}  // namespace storm
