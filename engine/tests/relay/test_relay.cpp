// The relay under virtual time: every packet at its nanosecond, every drop in its counter.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "check.hpp"
#include "relay/relay.hpp"
#include "relay_network.hpp"

using namespace storm;
using namespace storm::check;

TEST(an_unlimited_network_delivers_at_once_and_unchanged) {
    Network net;
    net.now = 5;
    net.send(0, 3, 7, 100);
    CHECK_EQUAL(net.arrived.size(), 1U);
    CHECK_EQUAL(net.arrived[0].host, 3);
    CHECK_EQUAL(net.arrived[0].number, 7U);
    CHECK_EQUAL(net.arrived[0].bytes, 100U);
    CHECK_EQUAL(net.arrived[0].at, 5);
    CHECK_EQUAL(net.relay.next_at(), never);
    CHECK_EQUAL(net.relay.packets_held(), 0U);
    CHECK_EQUAL(net.up(0).packets, 1U);
    CHECK_EQUAL(net.down(3).bytes, 100U);
}

TEST(a_rate_holds_in_both_directions_and_counts_the_overhead) {
    for (const char* direction : {"up", "down"}) {
        Network net;
        net.tell(std::string("rate ") + (direction[0] == 'u' ? "0 up" : "1 down") + " 100000000");
        net.tell(std::string("queue ") + (direction[0] == 'u' ? "0 up" : "1 down") + " 3000000");
        for (std::uint32_t i = 0; i < 1001; ++i) net.send(0, 1, i);
        net.run_until(second);
        CHECK_EQUAL(net.arrived.size(), 1001U);
        for (std::size_t i = 0; i < 1001; ++i) {
            CHECK_EQUAL(net.arrived[i].number, i);
            CHECK_EQUAL(net.arrived[i].at, static_cast<Nanos>(i + 1) * 120 * microsecond);  // 1500 bytes at 100 Mbit/s
        }
        CHECK_EQUAL(direction[0] == 'u' ? net.up(0).busy : net.down(1).busy, 1001 * 120 * microsecond);
    }
    Network net;
    net.tell("rate 0 up 100000000");
    net.tell("overhead 0");
    net.send(0, 1, 0, 1250);
    net.run_until(second);
    CHECK_EQUAL(net.arrived[0].at, 100 * microsecond);
}

TEST(a_rate_holds_when_the_relay_is_looked_after_late) {
    Network net;
    net.tell("rate 0 up 333000000");
    net.tell("rate 1 down 200000000");
    net.tell("link 0 1 delay_us 1000");
    std::uint64_t sent = 0;
    for (int round = 0; round < 1000; ++round) {
        net.now = round * 700 * microsecond;  // 15 packets come together, and whatever is due waits for the next round
        for (int i = 0; i < 15; ++i, ++sent) net.send(0, 1);
    }
    net.relay.advance(net.now);
    const double bits = static_cast<double>(net.down(1).packets) * 1500 * 8;
    CHECK(std::abs(bits / (0.7 * 200e6) - 1) < 0.01);
    CHECK(net.relay.stats().late_max <= 700 * microsecond);
    CHECK(net.relay.stats().late_max > 0);
    CHECK(net.balanced(sent));
}

TEST(a_full_queue_drops_what_comes_last_and_counts_it) {
    Network net;
    net.tell("rate 0 up 1000000");
    net.tell("queue 0 up 15000");
    for (std::uint32_t i = 0; i < 20; ++i) net.send(0, 1, i);
    CHECK_EQUAL(net.up(0).overflowed, 9U);  // one is being sent, ten wait
    net.run_until(12 * millisecond);        // the first has left
    net.send(0, 1, 20);
    net.send(0, 1, 21);
    CHECK_EQUAL(net.up(0).overflowed, 10U);
    net.run_until(second);
    CHECK_EQUAL(net.arrived.size(), 12U);
    CHECK_EQUAL(net.arrived[10].number, 10U);
    CHECK_EQUAL(net.arrived[11].number, 20U);
    CHECK(net.balanced(22));

    // Three senders into one downlink: the queue stands at the receiver.
    Network incast;
    incast.tell("rate 3 down 1000000");
    incast.tell("queue 3 down 3000");
    for (std::uint16_t from = 0; from < 3; ++from)
        for (int i = 0; i < 4; ++i) incast.send(from, 3);
    incast.run_until(second);
    CHECK_EQUAL(incast.arrived.size(), 3U);
    CHECK_EQUAL(incast.down(3).overflowed, 9U);
    CHECK(incast.balanced(12));

    // Without a queue, an idle link still carries what it can send at once.
    Network bufferless;
    bufferless.tell("rate 0 up 1000000");
    bufferless.tell("queue 0 up 0");
    bufferless.send(0, 1);
    bufferless.send(0, 1);
    bufferless.run_until(second);
    CHECK_EQUAL(bufferless.arrived.size(), 1U);
}

TEST(a_delay_is_exact_and_adds_to_the_sending_times) {
    Network net;
    net.tell("link 0 1 delay_us 20000.5");
    net.tell("rate 0 up 100000000");
    net.tell("rate 1 down 50000000");
    net.send(0, 1);
    net.send(0, 1);
    net.send(1, 0);  // the other direction has no delay
    CHECK_EQUAL(net.arrived.size(), 1U);
    net.run_until(second);
    CHECK_EQUAL(net.arrived.size(), 3U);
    CHECK_EQUAL(net.arrived[1].at, 20'000'500 + (120 + 240) * microsecond);
    CHECK_EQUAL(net.arrived[2].at, net.arrived[1].at + 240 * microsecond);
}

TEST(jitter_is_spread_over_its_range_and_keeps_the_order) {
    Network net;
    net.tell("link 0 1 delay_us 1000 jitter_us 500 seed 3");
    std::vector<Nanos> sent_at;
    for (std::uint32_t i = 0; i < 2000; ++i) {
        net.run_until(i * 20 * microsecond);  // much closer than the jitter
        sent_at.push_back(net.now);
        net.send(0, 1, i);
    }
    net.run_until(second);
    CHECK_EQUAL(net.arrived.size(), 2000U);
    Nanos least = never, most = 0;
    for (std::size_t i = 0; i < 2000; ++i) {
        CHECK_EQUAL(net.arrived[i].number, i);
        least = std::min(least, net.arrived[i].at - sent_at[i]);
        most = std::max(most, net.arrived[i].at - sent_at[i]);
    }
    CHECK(least >= millisecond && least < millisecond + 200 * microsecond);
    CHECK(most <= millisecond + 500 * microsecond && most > millisecond + 480 * microsecond);
}

TEST(a_shorter_delay_does_not_let_packets_overtake) {
    Network net;
    net.tell("link 0 1 delay_us 10000");
    net.send(0, 1, 0);
    net.tell("link 0 1 delay_us 0");
    net.send(0, 1, 1);
    net.send(2, 1, 2);  // another link is not held up
    CHECK_EQUAL(net.arrived.size(), 1U);
    net.run_until(second);
    CHECK_EQUAL(net.arrived[0].number, 2U);
    CHECK_EQUAL(net.arrived[1].number, 0U);
    CHECK_EQUAL(net.arrived[2].number, 1U);
    CHECK_EQUAL(net.arrived[2].at, 10 * millisecond);
}

TEST(loss_has_its_fraction_and_its_burst_length_on_its_link_only) {
    constexpr std::uint32_t count = 200'000;
    for (const double burst : {1.0, 8.0}) {
        Network net;
        net.tell("link 0 1 loss 0.1 seed 1 burst " + std::to_string(burst));
        for (std::uint32_t i = 0; i < count; ++i) {
            net.send(0, 1, i, 40);
            if (i % 100 == 0) net.send(1, 0, i, 40);
        }
        CHECK_EQUAL(net.link(0, 1).seen, count);
        CHECK_EQUAL(net.link(1, 0).lost, 0U);
        const double lost = static_cast<double>(net.link(0, 1).lost);
        CHECK(std::abs(lost / count - 0.1) < (burst > 1 ? 0.01 : 0.003));
        double bursts = 0;
        std::uint32_t expected = 0;
        for (const Network::Arrival& arrival : net.arrived) {
            if (arrival.host != 1) continue;
            bursts += arrival.number != expected;
            expected = arrival.number + 1;
        }
        CHECK(std::abs(lost / bursts / (burst > 1 ? 8.0 : 1 / 0.9) - 1) < 0.06);
        // The receiver cannot see a burst that has not ended.
        const double counted = static_cast<double>(net.link(0, 1).bursts);
        CHECK(counted == bursts || counted == bursts + 1);
        CHECK(net.balanced(count + count / 100));
    }
}

// Packets cross the link when the uplink has sent them: here every millisecond, in bursts of five on average.
TEST(a_burst_that_lasts_some_time_ends_while_nobody_sends) {
    Network net;
    net.tell("link 0 1 loss 0.5 burst_us 5000 seed 4");
    std::uint32_t number = 0;
    const auto lost_at = [&](Nanos at) {
        const std::uint64_t before = net.link(0, 1).lost;
        net.run_until(at);
        net.send(0, 1, number++, 40);
        return net.link(0, 1).lost > before;
    };
    double soon = 0, late = 0, bursts = 0;
    for (Nanos at = second; at <= 4000 * second; at += second) {
        if (!lost_at(at)) continue;
        ++bursts;
        soon += lost_at(at + 100 * microsecond);
        late += lost_at(at + 100 * millisecond);
    }
    CHECK(std::abs(bursts / 4000 - 0.5) < 0.04);
    CHECK(std::abs(soon / bursts - 0.98) < 0.016);  // 0.5 + 0.5 e^(-0.1 / 2.5), five standard deviations
    CHECK(std::abs(late / bursts - 0.5) < 0.056);
}

TEST(the_same_seed_loses_the_same_packets) {
    const auto numbers = [](const std::string& seed) {
        Network net;
        net.tell("link 0 1 loss 0.3 seed " + seed);
        for (std::uint32_t i = 0; i < 100; ++i) net.send(0, 1, i);
        std::vector<std::uint32_t> all;
        for (const Network::Arrival& arrival : net.arrived) all.push_back(arrival.number);
        return all;
    };
    CHECK(numbers("5") == numbers("5"));
    CHECK(numbers("5") != numbers("6"));
}

TEST(a_trace_is_replayed_in_a_loop_until_it_is_ended) {
    Network net;
    net.tell("link 0 1 loss 1");
    net.tell("trace 0 1 00100");
    for (std::uint32_t i = 0; i < 50; ++i) net.send(0, 1, i);
    CHECK_EQUAL(net.arrived.size(), 40U);
    std::vector<bool> lost(50, true);
    for (const Network::Arrival& arrival : net.arrived) lost[arrival.number] = false;
    for (std::size_t i = 0; i + 5 < 50; ++i) CHECK_EQUAL(lost[i], lost[i + 5]);
    net.tell("trace 0 1 -");
    net.send(0, 1);
    CHECK_EQUAL(net.arrived.size(), 40U);   // back to a loss of 1
    CHECK_EQUAL(net.link(0, 1).seen, 51U);  // counted on, though the random sequence restarted
    CHECK_EQUAL(net.link(0, 1).lost, 11U);
}

TEST(a_host_that_is_cut_off_hears_and_says_nothing_until_it_rejoins) {
    Network net;
    net.tell("link 0 1 delay_us 1000");
    net.tell("link 1 0 delay_us 1000");
    net.tell("rate 1 up 1000000");
    net.send(0, 1);  // under way when the cut comes
    net.send(1, 2);  // waits in the uplink when the cut comes
    net.tell("cut 1 1");
    net.send(0, 1);
    net.send(1, 0);
    net.send(0, 2, 5);
    net.run_until(20 * millisecond);
    CHECK_EQUAL(net.arrived.size(), 1U);
    CHECK_EQUAL(net.arrived[0].number, 5U);
    CHECK_EQUAL(net.relay.stats().cut, 4U);
    CHECK_EQUAL(net.link(0, 1).seen, 1U);  // the cut is no loss of the link
    net.tell("cut 1 0");
    net.send(0, 1, 6);
    net.send(1, 0, 7);
    net.run_until(second);
    CHECK_EQUAL(net.arrived.size(), 3U);
    CHECK(net.balanced(7));
}

TEST(a_link_that_is_cut_carries_nothing_while_the_way_back_does) {
    Network net;
    net.tell("link 0 1 delay_us 1000");
    net.send(0, 1);  // under way when the cut comes
    net.tell("cut 0 1 1");
    net.send(0, 1);
    net.send(1, 0, 5);
    net.send(0, 2, 6);
    net.run_until(20 * millisecond);
    CHECK_EQUAL(net.arrived.size(), 2U);
    CHECK_EQUAL(net.relay.stats().cut, 2U);
    net.tell("cut 0 1 0");
    net.send(0, 1, 7);
    net.run_until(second);
    CHECK_EQUAL(net.arrived.size(), 3U);
    CHECK_EQUAL(net.arrived[2].number, 7U);
    CHECK(net.balanced(5));
}

TEST(packets_above_the_mtu_of_either_end_vanish_until_it_is_lifted) {
    Network net;
    const auto send = [&net](std::uint16_t from, std::uint16_t to) { net.send(from, to, 1, 1000); };
    net.tell("mtu 1 999");
    send(0, 1);
    send(1, 0);
    send(0, 2);
    CHECK_EQUAL(net.arrived.size(), 1U);
    CHECK_EQUAL(net.relay.stats().too_large, 2U);
    net.tell("mtu 1 1000");
    send(0, 1);
    net.tell("mtu 1 0");
    send(0, 1);
    CHECK_EQUAL(net.arrived.size(), 3U);
    CHECK(net.balanced(5));
}

TEST(what_waits_drains_at_the_new_rate) {
    for (const char* direction : {"0 up", "1 down"}) {
        Network net;
        const std::string rate = std::string("rate ") + direction + " ";
        net.tell(rate + "100000000");  // a packet takes 120 us
        for (std::uint32_t i = 0; i < 100; ++i) net.send(0, 1, i);
        net.run_until(10 * 120 * microsecond + 30 * microsecond);  // a quarter of the eleventh is sent
        CHECK_EQUAL(net.arrived.size(), 10U);
        net.tell(rate + "50000000");
        const Nanos changed_at = net.now;
        net.run_until(changed_at + 180 * microsecond - 1);
        CHECK_EQUAL(net.arrived.size(), 10U);
        net.run_until(changed_at + 180 * microsecond);
        CHECK_EQUAL(net.arrived.size(), 11U);
        net.run_until(changed_at + (180 + 39 * 240) * microsecond);
        CHECK_EQUAL(net.arrived.size(), 50U);
        net.tell(rate + "1000000000");
        net.run_until(net.now + 39 * 12 * microsecond);
        CHECK_EQUAL(net.arrived.size(), 89U);
        net.tell(rate + "0");  // no limit: all that waits leaves now
        CHECK_EQUAL(net.arrived.size(), 100U);
        CHECK_EQUAL(net.arrived.back().at, net.now);
        net.run_until(second);  // events of the old rates do no harm
        CHECK_EQUAL(net.arrived.size(), 100U);
        for (std::size_t i = 0; i < 100; ++i) CHECK_EQUAL(net.arrived[i].number, i);
        CHECK_EQUAL(net.relay.packets_held(), 0U);
    }
}

TEST(a_delay_line_is_bounded) {
    Network net;
    net.tell("link 0 1 delay_us 1000000");
    for (std::size_t i = 0; i < Relay::max_line_packets + 5; ++i) net.send(0, 1);
    CHECK_EQUAL(net.link(0, 1).overflowed, 5U);
    CHECK_EQUAL(net.relay.packets_held(), Relay::max_line_packets);
    net.send(0, 2);  // other links are free
    CHECK_EQUAL(net.arrived.size(), 1U);
    net.run_until(2 * second);
    CHECK_EQUAL(net.arrived.size(), Relay::max_line_packets + 1);
    CHECK(net.balanced(Relay::max_line_packets + 6));
}

TEST(all_queues_together_are_bounded) {
    Network net(2);
    net.tell("rate 0 up 1000");
    net.tell("queue 0 up 268435456");
    for (std::size_t i = 0; i < Relay::max_packets + 7; ++i) net.send(0, 1, 0, 40);
    CHECK_EQUAL(net.up(0).overflowed, 7U);
    CHECK_EQUAL(net.relay.packets_held(), Relay::max_packets);
    net.send(1, 0);
    CHECK_EQUAL(net.up(1).overflowed, 1U);
    net.tell("rate 0 up 0");
    CHECK_EQUAL(net.arrived.size(), Relay::max_packets);
    net.send(1, 0);
    CHECK_EQUAL(net.arrived.size(), Relay::max_packets + 1);
    CHECK(net.balanced(Relay::max_packets + 9));
}

TEST(packets_that_are_not_for_a_host_here_are_strays) {
    Network net;
    const auto bent = [](std::size_t at, unsigned value) {
        auto packet = packet_to(first_address + 1, 0, 100);
        packet[at] = static_cast<std::byte>(value);
        return packet;
    };
    std::vector<std::vector<std::byte>> strays{
        {},
        {std::byte{0x45}},
        packet_to(first_address),      // to itself
        packet_to(first_address + 9),  // to no host
        packet_to(0xe000'0001),        // multicast
        packet_to(0xffff'ffff),        // broadcast
        bent(0, 0x65),                 // IPv6
        bent(0, 0x44),                 // a header shorter than a header
        bent(3, 99),                   // a length that is too short
        bent(3, 101),                  // a length that is too long
        bent(2, 255),                  // a length of 65 KB
        std::vector<std::byte>(2048, std::byte{0xff}),
    };
    auto half_a_header = packet_to(first_address + 1, 0, 20);
    half_a_header[3] = std::byte{10};
    half_a_header.resize(10);
    strays.push_back(half_a_header);
    auto options_beyond_the_end = packet_to(first_address + 1, 0, 40);
    options_beyond_the_end[0] = std::byte{0x4f};
    strays.push_back(options_beyond_the_end);
    for (const auto& packet : strays) net.send_bytes(0, packet);
    net.relay.receive(0, Relay::max_packet_bytes + 1, net.now);  // a false length
    CHECK_EQUAL(net.relay.stats().strays, strays.size() + 1);
    CHECK_EQUAL(net.arrived.size(), 0U);
    for (const std::size_t bytes : {std::size_t{20}, Relay::max_packet_bytes}) net.send(0, 1, 0, bytes);
    CHECK_EQUAL(net.arrived.size(), 2U);
}

TEST(a_packet_that_cannot_be_handed_over_is_counted) {
    Network net;
    net.accepts = false;
    net.send(0, 1);
    CHECK_EQUAL(net.relay.stats().refused, 1U);
    CHECK(net.balanced(1));
}
