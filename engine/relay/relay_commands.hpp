// Commands to a relay: one per line, each with one line of answer. relay_commands.cpp lists them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "relay/relay.hpp"

namespace storm {

// A host that is to be connected: its TUN device does not exist yet.
struct RelayHostRequest {
    std::uint16_t host{};
    std::string netns_path, device;
};

class RelayCommands {
public:
    // Makes the device or throws std::runtime_error that says what is missing.
    using OpenHost = std::function<void(const RelayHostRequest&)>;
    RelayCommands(Relay& relay, OpenHost open_host) : relay_(relay), open_host_(std::move(open_host)) {}

    // The answer, without a newline: "ok", "error TEXT", or the statistics as JSON. A command in error changes nothing.
    [[nodiscard]] std::string execute(std::string_view line, Nanos now);

private:
    using Words = std::vector<std::string_view>;

    void host(const Words& words);
    void rate(const Words& words, Nanos now);
    void queue(const Words& words);
    void link(const Words& words);
    void trace(const Words& words);
    void cut(const Words& words);
    void mtu(const Words& words);
    void overhead(const Words& words);
    [[nodiscard]] std::uint16_t known_host(std::string_view word) const;
    [[nodiscard]] std::pair<std::uint16_t, std::uint16_t> known_link(const Words& words) const;

    Relay& relay_;
    OpenHost open_host_;
};

[[nodiscard]] std::string to_json(const RelayStats& stats);

}  // namespace storm
