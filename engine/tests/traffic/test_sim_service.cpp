// The service in simulations: times that can be computed by hand, shared links, and losses that TCP repairs.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "check.hpp"
#include "sim/sim.hpp"
#include "traffic/shared_network.hpp"

using namespace storm;

namespace {

constexpr double bytes_per_s = 125e6;  // 1 Gbit/s
constexpr Nanos delay = 50 * microsecond;

SwitchSettings lines(std::size_t queue_bytes = 512 << 10) {
    const SimLinkSettings down{.bytes_per_s = bytes_per_s, .queue_bytes = queue_bytes};
    SimLinkSettings up = down;
    up.queue_bytes = 0;
    return {.up = up, .down = down, .delay = delay};
}

// A service without arrivals of its own: tests send the requests.
struct World {
    explicit World(std::size_t hosts, const SwitchSettings& settings = lines(), std::uint32_t response = 100'000)
        : network(hosts, settings), service({.response_bytes = response}, hosts, second) {}

    void begin_request(std::uint16_t client, std::uint16_t server) {
        service.begin_request(client, server, now, network);
    }
    bool advance() {
        const Nanos next = std::min(network.next_at(), service.next_at());
        if (next == never) return false;
        now = next;
        if (service.next_at() <= next) {
            service.tick(now, network);
        } else if (const auto packet = network.step()) {
            service.receive(*packet, now, network);
        }
        return true;
    }
    void run() {
        while (service.answered().size() < service.requested() && advance()) {
        }
    }
    Nanos took(std::size_t index) { return service.answered().at(index).took; }

    Nanos now{second};
    SimSwitch network;
    SimService service;
};

Nanos on_a_line(std::uint32_t bytes) { return static_cast<Nanos>(bytes / bytes_per_s * 1e9); }
// Up to the switch and down from it.
Nanos crosses(std::uint32_t bytes) { return 2 * on_a_line(bytes) + delay; }
bool near(Nanos a, Nanos b, Nanos by = 200) { return std::abs(a - b) <= by; }

}  // namespace

TEST(a_response_of_one_segment_takes_the_request_and_its_own_way_on_an_open_connection) {
    World world(2, lines(), 1448);
    world.begin_request(0, 1);
    world.run();
    const Nanos first = 2 * crosses(74) + crosses(128 + 66) + crosses(1448 + 66);
    CHECK(near(world.took(0), first));
    world.begin_request(0, 1);
    world.run();
    CHECK(near(world.took(1), crosses(128 + 66) + crosses(1448 + 66)));
    CHECK_EQUAL(world.service.connections(), 1U);
}

TEST(a_response_of_ten_segments_leaves_in_one_window) {
    World world(2, lines(), 14480);
    world.begin_request(0, 1);
    world.run();
    CHECK(near(world.took(0), 2 * crosses(74) + crosses(128 + 66) + crosses(1514) + 9 * on_a_line(1514)));
}

TEST(the_eleventh_segment_waits_for_an_acknowledgement_of_the_first_two) {
    // On a long link the window is much shorter than a round trip.
    SwitchSettings far = lines();
    far.delay = 10 * millisecond;
    World world(2, far, 11 * 1448);
    world.begin_request(0, 1);
    world.run();
    const Nanos trip = 2 * on_a_line(1514) + far.delay;
    const Nanos requested = 3 * far.delay + 4 * on_a_line(74) + 2 * on_a_line(128 + 66);
    const Nanos ack = far.delay + 2 * on_a_line(66);
    CHECK(near(world.took(0), requested + trip + on_a_line(1514) + ack + trip, 20 * microsecond));
}

TEST(a_window_is_kept_between_responses_and_forgotten_in_a_long_pause) {
    SwitchSettings far = lines();
    far.delay = 10 * millisecond;
    World world(2, far);
    for (int i = 0; i < 3; ++i) {
        world.begin_request(0, 1);
        world.run();
    }
    // Slow start takes 10, 20 and 40 segments of 70; later ones find the window open.
    CHECK(world.took(0) > 80 * millisecond);
    CHECK(world.took(2) < 25 * millisecond);
    while (world.advance()) {  // the last acknowledgements
    }
    world.now += 30 * second;
    world.begin_request(0, 1);
    world.run();
    CHECK(world.took(3) > 60 * millisecond);
}

TEST(two_responses_to_one_host_share_its_line) {
    World world(3);
    world.begin_request(0, 1);
    world.begin_request(0, 2);
    world.run();
    const Nanos both = on_a_line(2 * (100'000 + 70 * 66));
    CHECK(world.took(1) > both && world.took(1) < both + millisecond);
    CHECK(world.took(0) > both * 3 / 4);  // neither waits for the other's end
}

TEST(responses_of_different_hosts_do_not_wait_for_each_other) {
    World alone(4), beside(4);
    alone.begin_request(0, 1);
    alone.run();
    beside.begin_request(0, 1);
    beside.begin_request(2, 3);
    beside.run();
    CHECK_EQUAL(beside.took(0), alone.took(0));
    CHECK_EQUAL(beside.took(1), alone.took(0));
}

TEST(what_a_full_queue_drops_is_sent_again_and_most_responses_wait_for_no_timer) {
    // Six hosts send their first windows, of ten segments each, into a queue that holds thirty.
    World world(7, lines(30 * 1514));
    for (std::uint16_t server = 1; server < 7; ++server) world.begin_request(0, server);
    world.run();
    CHECK_EQUAL(world.service.answered().size(), 6U);
    CHECK(world.network.down(0).counts(Priority::normal).drops > 0);
    CHECK_EQUAL(world.service.resent(), world.network.down(0).counts(Priority::normal).drops);
    CHECK(world.took(3) < 8 * millisecond);
    // The last segment of a response may be lost alone: Linux then waits for 200 ms.
    CHECK(world.took(5) < 250 * millisecond);
}

TEST(a_lost_tail_is_probed_for) {
    TcpSender sender;
    sender.open(millisecond);
    sender.write(4, second);
    std::vector<std::uint64_t> orders;
    while (const auto sent = sender.next(second)) orders.push_back(sent->order);
    CHECK_EQUAL(orders.size(), 4U);
    sender.on_ack(2, 1, orders[1], second + millisecond);  // the last two are lost
    CHECK(sender.timer() < second + 20 * millisecond);
    Nanos now = sender.timer();
    sender.on_timer(now);
    const auto probe = sender.next(now);
    CHECK(probe && probe->number == 3);
    sender.on_ack(2, 3, probe->order, now + millisecond);
    const auto repair = sender.next(now + millisecond);
    CHECK(repair && repair->number == 2);
    CHECK(sender.window() < 10);
    sender.on_ack(4, 2, repair->order, now + 2 * millisecond);
    CHECK_EQUAL(sender.timer(), never);
    CHECK_EQUAL(sender.timeouts(), 0U);
}

TEST(a_sender_that_hears_nothing_begins_again_with_one_segment_ever_more_rarely) {
    TcpSender sender;
    sender.open(millisecond);
    sender.write(10, second);
    while (sender.next(second)) {
    }
    sender.on_timer(sender.timer());
    CHECK(sender.next(sender.timer()).has_value());  // the probe
    Nanos before = 0;
    for (int i = 0; i < 3; ++i) {
        const Nanos now = sender.timer();
        sender.on_timer(now);
        CHECK(sender.next(now).has_value());
        CHECK(!sender.next(now));
        CHECK(sender.timer() - now >= 2 * before && sender.timer() - now >= 200 * millisecond);
        before = (sender.timer() - now) * 9 / 10;
    }
    CHECK_EQUAL(sender.timeouts(), 3U);
}

TEST(requests_arrive_at_the_asked_rate_and_a_seed_repeats_them) {
    const auto times = [](std::uint64_t seed) {
        SimConfig config;
        config.core.world = 4;
        SharedNetwork network(4, {.network = lines()});
        config.medium = &network;
        Sim sim(config);
        network.serve({.requests_per_s = 1000, .seed = seed}, sim.now());
        sim.run_until(sim.now() + 2 * second);
        std::vector<Nanos> all;
        for (const auto& each : network.service().answered()) all.push_back(each.took);
        return all;
    };
    const std::vector<Nanos> one = times(1);
    CHECK(one.size() > 1850 && one.size() < 2150);
    CHECK(one == times(1));
    CHECK(one != times(2));
}

TEST(all_requests_are_answered_in_the_end_however_much_was_lost) {
    SimConfig config;
    config.core.world = 4;
    SharedNetwork network(4, {.network = lines(20 << 10)});
    config.medium = &network;
    Sim sim(config);
    network.serve({.requests_per_s = 8000, .seed = 4}, sim.now());  // more than the links carry
    sim.run_until(sim.now() + second / 4);
    network.service().stop();
    CHECK(network.service().timeouts() > 10);
    sim.run_until(sim.now() + 200 * second);
    CHECK_EQUAL(network.service().answered().size(), network.service().requested());
}

TEST(datagrams_of_cores_share_the_lines_with_the_service_and_wait_for_it_if_they_are_low) {
    const auto run = [](std::optional<Priority> priority, std::size_t bytes) {
        SimConfig config;
        config.core.world = 2;
        config.core.rate_mode = RateMode::fixed;
        config.core.bytes_per_s = bytes_per_s;
        SharedNetworkSettings shared{.network = lines(64 << 20), .priority = priority.value_or(Priority::normal)};
        shared.network.up.low_queue_bytes = shared.network.down.low_queue_bytes = 64 << 20;
        SharedNetwork network(2, shared);
        config.medium = &network;
        Sim sim(config);
        std::vector<std::byte> from(bytes), into(bytes);
        ExchangeSpec send, receive;
        send.sends.push_back({.peer = 1, .data = from.data(), .bytes = bytes});
        receive.receives.push_back({.peer = 0, .into = into.data(), .bytes = bytes});
        if (priority) {
            sim.post(0, send);
            sim.post(1, receive);
        }
        network.serve({.requests_per_s = 300, .seed = 3}, sim.now());
        sim.run_until(sim.now() + second / 5);
        if (priority) CHECK_EQUAL(sim.take_finished(1).size(), 1U);
        const auto& low = network.lines().down(1).counts(Priority::low);
        CHECK_EQUAL(low.packets > 0, priority == Priority::low);
        Nanos sum = 0;
        for (const auto& each : network.service().answered()) sum += each.took;
        return sum / static_cast<Nanos>(network.service().answered().size());
    };
    constexpr std::size_t large = 10 << 20;
    const Nanos alone = run(std::nullopt, large);
    const Nanos below = run(Priority::low, large);
    const Nanos beside = run(Priority::normal, large);
    CHECK(below < alone * 11 / 10);
    CHECK(beside > alone * 13 / 10);
}
