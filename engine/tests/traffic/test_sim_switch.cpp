// Hosts in racks: traffic inside a rack does not use the link between racks, other traffic does.
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "traffic/sim_switch.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr double host_bytes_per_s = 125e6;
constexpr std::uint32_t packet_bytes = 1'250;  // ten microseconds of a host's link

SwitchSettings racks_of_two(double trunk_bytes_per_s, std::size_t trunk_queue_bytes) {
    const SimLinkSettings host{.bytes_per_s = host_bytes_per_s, .queue_bytes = 0};
    return {.up = host,
            .down = host,
            .delay = 40 * microsecond,
            .hosts_per_rack = 2,
            .trunk = {.bytes_per_s = trunk_bytes_per_s, .queue_bytes = trunk_queue_bytes}};
}

// Sends packets at once, and returns when each of those that arrive does.
std::vector<Nanos> arrivals(SimSwitch& network, std::uint16_t source, std::uint16_t target, int packets) {
    for (int i = 0; i < packets; ++i) network.send({.source = source, .target = target, .wire_bytes = packet_bytes}, 0);
    std::vector<Nanos> all;
    while (network.next_at() != never) {
        const Nanos now = network.next_at();
        if (network.step()) all.push_back(now);
    }
    return all;
}

}  // namespace

TEST(within_a_rack_packets_go_by_its_own_switch) {
    SimSwitch network(4, racks_of_two(host_bytes_per_s / 100, 0));
    const std::vector<Nanos> at = arrivals(network, 0, 1, 100);
    CHECK(at.size() == 100);
    // Up, the delay, and down.
    CHECK(at.front() == (10 + 40 + 10) * microsecond);
    CHECK(at.back() == at.front() + 99 * 10 * microsecond);
}

TEST(to_another_rack_packets_share_the_line_between_racks) {
    SimSwitch network(4, racks_of_two(host_bytes_per_s / 4, 0));
    const std::vector<Nanos> at = arrivals(network, 0, 3, 100);
    CHECK(at.size() == 100);
    // Up, up to the other switch and down from it, four times as slowly, and down; with twice the delay.
    CHECK(at.front() == (10 + 40 + 40 + 20 + 40 + 20 + 10) * microsecond);
    CHECK(at.back() == at.front() + 99 * 40 * microsecond);
    CHECK(network.trunk_drops() == 0);
}

TEST(a_full_queue_between_racks_drops_and_counts) {
    SimSwitch network(4, racks_of_two(host_bytes_per_s / 4, 10 * packet_bytes));
    const std::vector<Nanos> at = arrivals(network, 0, 3, 100);
    CHECK(at.size() < 60);
    CHECK(network.trunk_drops() == 100 - at.size());
    CHECK(network.drops() == network.trunk_drops());
}

TEST(all_hosts_of_one_switch_have_no_line_between_racks) {
    SimSwitch network(4, {.up = {.bytes_per_s = host_bytes_per_s}, .down = {.bytes_per_s = host_bytes_per_s}});
    CHECK(arrivals(network, 0, 3, 10).size() == 10);
    CHECK(network.trunk_drops() == 0);
}

TEST(one_rack_may_have_a_slower_line_than_the_others) {
    SimSwitch network(6, racks_of_two(host_bytes_per_s, 0));
    network.set_trunk(1, host_bytes_per_s / 10);
    const std::vector<Nanos> slow = arrivals(network, 0, 3, 100);
    CHECK(slow.back() - slow.front() == 99 * 100 * microsecond);
    const std::vector<Nanos> other = arrivals(network, 0, 5, 100);
    CHECK(other.back() - other.front() == 99 * 10 * microsecond);
    bool refused = false;
    try {
        network.set_trunk(3, host_bytes_per_s);
    } catch (const std::out_of_range&) {
        refused = true;
    }
    CHECK(refused);
}
