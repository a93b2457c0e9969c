// A web service between the hosts of a simulation: every host is client and server. Requests of all hosts together
// arrive as a Poisson process; each requests a response of a given size from a random other host, over an idle
// connection of the pair or a new one. A request's time counts from its arrival to the last byte of the response.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <queue>
#include <random>
#include <vector>

#include "traffic/sim_switch.hpp"
#include "traffic/sim_tcp.hpp"

namespace storm {

struct ServiceSettings {
    double requests_per_s{};  // of all hosts together
    std::uint32_t response_bytes{100'000};
    std::uint32_t request_bytes{128};
    std::uint64_t seed{};
};

class SimService {
public:
    // Throws std::invalid_argument.
    SimService(const ServiceSettings& settings, std::size_t hosts, Nanos now);

    // No request arrives from now on; those that did are still answered.
    void stop() { arrival_ = never; }
    // One more request, now.
    void begin_request(std::uint16_t client, std::uint16_t server, Nanos now, SimSwitch& network);
    [[nodiscard]] Nanos next_at() const;
    void tick(Nanos now, SimSwitch& network);
    void receive(const SimPacket& packet, Nanos now, SimSwitch& network);

    struct Answered {
        Nanos requested_at{}, took{};
    };
    [[nodiscard]] const std::vector<Answered>& answered() const { return answered_; }
    [[nodiscard]] std::uint64_t requested() const { return asked_; }
    [[nodiscard]] std::size_t connections() const { return connections_.size(); }
    [[nodiscard]] std::uint64_t resent() const;    // segments
    [[nodiscard]] std::uint64_t timeouts() const;  // of senders, after which they begin again with one segment

private:
    struct Connection {
        std::uint16_t client{}, server{};
        bool open{};
        std::uint32_t requests{}, responses{};  // sent by the client; begun by the server
        Nanos requested_at{};
        Nanos opened_at{};
        Nanos retry_at{never};  // the client retries: what it sent last may be lost
        TcpSender sender{};     // at the server
        TcpReceiver receiver{};
        Nanos armed_at{never};
    };
    struct Timer {
        Nanos at{};
        std::uint32_t connection{};
        bool operator>(const Timer& other) const {
            return at != other.at ? at > other.at : connection > other.connection;
        }
    };

    [[nodiscard]] std::vector<std::uint32_t>& idle(std::uint16_t client, std::uint16_t server);
    void send(const Connection& from, bool by_client, Segment segment, std::uint32_t payload, Nanos now,
              SimSwitch& network) const;
    void send_first(std::uint32_t which, Nanos now, SimSwitch& network);
    void send_data(std::uint32_t which, Nanos now, SimSwitch& network);
    void send_ack(std::uint32_t which, Nanos now, SimSwitch& network);
    void receive_data(std::uint32_t which, const Segment& segment, Nanos now, SimSwitch& network);
    void arm(std::uint32_t which);
    void arrive_after(Nanos now);

    ServiceSettings settings_;
    std::size_t hosts_;
    std::uint32_t segments_;  // of a response
    std::mt19937_64 chance_;
    Nanos arrival_{never};
    std::deque<Connection> connections_;
    std::vector<std::vector<std::uint32_t>> idle_;  // by pair; the last one used is reused first
    std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
    std::vector<Answered> answered_;
    std::uint64_t asked_{};
};

}  // namespace storm
