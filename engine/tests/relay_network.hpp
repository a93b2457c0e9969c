// Four hosts joined by a relay under virtual time, and whatever came out of it.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "relay/relay.hpp"
#include "relay/relay_commands.hpp"

namespace storm::check {

inline constexpr std::size_t packet_bytes = 1486;            // charged as 1500
inline constexpr std::uint32_t first_address = 0xc612'0001;  // 198.18.0.1

inline std::vector<std::byte> packet_to(std::uint32_t address, std::uint32_t number = 0,
                                        std::size_t bytes = packet_bytes) {
    std::vector<std::byte> packet(bytes);
    packet[0] = std::byte{0x45};
    packet[2] = static_cast<std::byte>(bytes >> 8);
    packet[3] = static_cast<std::byte>(bytes);
    for (std::size_t i = 0; i < 4; ++i) packet[16 + i] = static_cast<std::byte>(address >> (24 - 8 * i));
    if (bytes >= 24) std::memcpy(packet.data() + 20, &number, sizeof number);
    return packet;
}

// A relay with its commands, four hosts, and whatever came out of it.
struct Network {
    struct Arrival {
        Nanos at{};
        std::uint16_t host{};
        std::uint32_t number{};
        std::size_t bytes{};
    };
    Nanos now{};
    std::vector<Arrival> arrived;
    std::vector<RelayHostRequest> opened;
    bool accepts{true};
    Relay relay{[this](std::uint16_t host, std::span<const std::byte> packet) {
        Arrival arrival{.at = now, .host = host, .bytes = packet.size()};
        if (packet.size() >= 24) std::memcpy(&arrival.number, packet.data() + 20, sizeof arrival.number);
        arrived.push_back(arrival);
        return accepts;
    }};
    RelayCommands commands{relay, [this](const RelayHostRequest& request) {
                               if (request.netns_path == "/missing") throw std::runtime_error("no namespace /missing");
                               opened.push_back(request);
                           }};

    explicit Network(int hosts = 4) {
        for (int i = 0; i < hosts; ++i) {
            const std::string index = std::to_string(i);
            tell("host " + index + " /ns" + index + " st" + index + " 198.18.0." + std::to_string(i + 1));
        }
    }
    std::string ask(const std::string& line) { return commands.execute(line, now); }
    void tell(const std::string& line) {
        CHECK(ask(line) == "ok");
        relay.advance(now);
    }
    void run_until(Nanos end) {
        while (relay.next_at() <= end) {
            now = relay.next_at();
            relay.advance(now);
        }
        now = end;
        relay.advance(now);
    }
    void send_bytes(std::uint16_t from, const std::vector<std::byte>& packet) {
        std::copy(packet.begin(), packet.end(), relay.buffer().begin());
        relay.receive(from, packet.size(), now);
        relay.advance(now);
    }
    void send(std::uint16_t from, std::uint16_t to, std::uint32_t number = 0, std::size_t bytes = packet_bytes) {
        send_bytes(from, packet_to(first_address + to, number, bytes));
    }
    RelayQueueStats up(std::size_t host) { return relay.stats().hosts.at(host).up; }
    RelayQueueStats down(std::size_t host) { return relay.stats().hosts.at(host).down; }
    RelayLinkStats link(std::uint16_t from, std::uint16_t to) {
        for (const RelayLinkStats& each : relay.stats().links)
            if (each.from == from && each.to == to) return each;
        throw std::runtime_error("no such link");
    }
    // Every packet sent is somewhere: that is what makes the counters worth reading.
    bool balanced(std::uint64_t sent) {
        const RelayStats stats = relay.stats();
        std::uint64_t sum =
            stats.cut + stats.too_large + stats.strays + stats.refused + stats.delivered + relay.packets_held();
        for (const RelayHostStats& host : stats.hosts) sum += host.up.overflowed + host.down.overflowed;
        for (const RelayLinkStats& each : stats.links) sum += each.lost + each.overflowed;
        return sum == sent;
    }
};

}  // namespace storm::check
