// Fuzz target: untrusted commands and packets into a relay under virtual time. Each input is split at its newlines; a
// piece that begins with a small byte is a packet of that host, any other is a command. Whatever they are, every
// command has one line of answer, and every packet is delivered, counted where it was dropped, or still held.
#include "relay/relay.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "relay/relay_commands.hpp"

using namespace storm;

namespace {

constexpr std::uint16_t hosts = 3;

void require(bool holds) {
    if (!holds) std::abort();
}

void check_balance(const Relay& relay, std::uint64_t sent) {
    const RelayStats stats = relay.stats();
    std::uint64_t sum = stats.cut + stats.strays + stats.refused + stats.delivered + relay.packets_held();
    for (const RelayHostStats& host : stats.hosts) sum += host.up.overflowed + host.down.overflowed;
    for (const RelayLinkStats& link : stats.links) sum += link.lost + link.overflowed;
    require(sum == sent);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Relay relay([](std::uint16_t, std::span<const std::byte> packet) { return packet.size() % 7 != 0; });
    RelayCommands commands(relay, [](const RelayHostRequest&) {});
    Nanos now = 0;
    std::uint64_t sent = 0;
    for (const std::string_view line : {"host 0 a b 0.0.0.0", "host 1 a b 0.0.0.1", "host 2 a b 0.0.0.2"})
        require(commands.execute(line, now) == "ok");

    std::string_view input(reinterpret_cast<const char*>(data), size);
    while (!input.empty()) {
        const std::string_view piece = input.substr(0, input.find('\n'));
        input.remove_prefix(std::min(piece.size() + 1, input.size()));
        if (!piece.empty() && piece.front() >= 0 && piece.front() < hosts) {
            const std::string_view packet = piece.substr(1, Relay::max_packet_bytes);
            std::memcpy(relay.buffer().data(), packet.data(), packet.size());
            relay.receive(static_cast<std::uint16_t>(piece.front()), piece.size() - 1, now);
            ++sent;
        } else {
            const std::string answer = commands.execute(piece, now);
            require(answer == "ok" || answer.starts_with("error ") || answer.starts_with("{"));
            require(answer.find('\n') == std::string::npos);
        }
        now += 100 * microsecond;
        relay.advance(now);
        require(relay.next_at() > now);
    }
    check_balance(relay, sent);
    return 0;
}
