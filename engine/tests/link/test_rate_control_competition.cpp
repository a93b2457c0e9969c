// Congestion control on a bottleneck with other traffic: what it takes, and what it leaves.
#include "bottleneck.hpp"

using namespace storm;
using namespace storm::check;

namespace {

// Throughput of one bulk TCP flow and of `links` of ours on a shared path, in the steady state.
struct Shares {
    double ours, tcp, ours_at_least;
};
Shares beside_cubic(Path path, RateMode mode, int links, bool tcp_first) {
    path.links = static_cast<std::size_t>(links);
    path.most_held = std::max(path.rtt / 8, millisecond / 2);
    Bottleneck network(path, 21);
    std::size_t tcp = 0;
    if (tcp_first) {
        tcp = network.add_cubic();
        network.run(5 * second);
    }
    std::vector<std::size_t> ours;
    for (int i = 0; i < links; ++i) ours.push_back(network.add(mode));
    network.run(5 * second);
    if (!tcp_first) tcp = network.add_cubic();
    network.run(5 * second);
    Shares shares{0, 0, 1};
    constexpr int spans = 6;
    for (int span = 0; span < spans; ++span) {  // longer than anything that a link remembers
        network.measure();
        network.run(5 * second);
        double sum = 0;
        for (const std::size_t link : ours) sum += network.throughput(link) / path.bytes_per_s;
        shares.ours += sum / spans;
        shares.tcp += network.throughput(tcp) / path.bytes_per_s / spans;
        shares.ours_at_least = std::min(shares.ours_at_least, sum);
    }
    return shares;
}

}  // namespace

TEST(low_priority_leaves_nine_tenths_to_others_and_returns_when_they_leave) {
    for (const Path& path : paths) {
        for (const bool greedy : {false, true}) {
            Bottleneck network(path, 11);
            const std::size_t low = network.add(RateMode::low_priority);
            network.run(second + rounds(path, 100));
            network.measure();
            network.run(second);
            CHECK(network.throughput(low) > 0.6 * path.bytes_per_s);
            const double window = path.bytes_per_s * static_cast<double>(path.rtt) / 1e9 + 300'000;
            const auto backlog = static_cast<std::uint64_t>(path.bytes_per_s * 6);
            const RateMode mode = greedy ? RateMode::unlimited : RateMode::automatic;
            const std::size_t other = network.add(mode, backlog, greedy ? window : 0);
            network.run(rounds(path, 70));
            network.measure();
            network.run(second);
            CHECK(network.throughput(other) > 0.9 * path.bytes_per_s);
            while (!network.finished(other)) network.run(second);
            network.run(second + rounds(path, 100));
            network.measure();
            network.run(4 * second);
            CHECK(network.throughput(low) > 0.55 * path.bytes_per_s);
        }
    }
}

// Measured: 0.32 of the bottleneck over the long path and 0.44 over the short one, 0.39 where TCP started first.
TEST(beside_a_bulk_tcp_flow_both_keep_a_good_part_of_the_line) {
    for (const Path& path : {wan, lab}) {
        const Shares shares = beside_cubic(path, RateMode::automatic, 3, false);
        CHECK(shares.ours > 0.28 && shares.tcp > 0.3);
        CHECK(shares.ours_at_least > 0.17);  // also when the bare round trip was last seen long ago
    }
    const Shares late = beside_cubic(lab, RateMode::automatic, 3, true);
    CHECK(late.ours > 0.28 && late.tcp > 0.3);
}

TEST(low_priority_leaves_a_bulk_tcp_flow_nine_tenths_for_as_long_as_it_lasts) {
    for (const Path& path : paths) {
        for (const bool tcp_first : {false, true}) {
            CHECK(beside_cubic(path, RateMode::low_priority, 3, tcp_first).tcp > 0.9);
        }
    }
}

TEST(alone_a_job_that_yields_to_latency_fills_the_line_as_any_other) {
    for (const Path& path : paths) {
        double carried[2]{};
        for (const bool low : {false, true}) {
            Bottleneck network(path, 13);
            network.add(low ? RateMode::low_latency : RateMode::automatic);
            network.run(second + rounds(path, 100));
            network.measure();
            network.run(10 * second);
            carried[low ? 1 : 0] = network.throughput();
        }
        CHECK(carried[1] > 0.95 * carried[0]);
    }
}

TEST(yielding_to_latency_leaves_most_to_a_bulk_tcp_flow) {
    for (const Path& path : paths) {
        // Over a long path, what counts as a queue is longer: 0.78 there.
        CHECK(beside_cubic(path, RateMode::low_latency, 3, false).tcp > (path.rtt > 10 * millisecond ? 0.7 : 0.9));
        // A queue that never empties looks like a part of the path to a flow that starts later.
        CHECK(beside_cubic(path, RateMode::low_latency, 3, true).tcp > 0.7);
    }
}

TEST(yielding_to_latency_notices_who_keeps_the_queue_short) {
    for (const Path& path : paths) {
        if (path.rtt > 10 * millisecond) continue;  // there, such a short queue counts as none
        Bottleneck network(path, 19);
        const std::size_t low = network.add(RateMode::low_latency);
        network.run(second);
        // Three milliseconds, little more than what counts as a queue: as BBR does, and in contrast to CUBIC.
        const double window = path.bytes_per_s * (static_cast<double>(path.rtt) / 1e9 + 0.003);
        const std::size_t service = network.add(RateMode::unlimited, 0, window);
        network.give(service, static_cast<std::uint64_t>(20 * path.bytes_per_s));
        network.run(2 * second);
        network.measure();
        network.run(8 * second);
        CHECK(network.throughput(service) > 0.85 * path.bytes_per_s);
        CHECK(network.throughput(low) < 0.15 * path.bytes_per_s);
    }
}

TEST(yielding_to_latency_takes_and_returns_the_line_within_a_second) {
    for (const Path& path : paths) {
        Bottleneck network(path, 17);
        const std::size_t low = network.add(RateMode::low_latency);
        network.run(2 * second + rounds(path, 100));
        const double window = path.bytes_per_s * static_cast<double>(path.rtt) / 1e9 + 300'000;
        const std::size_t service = network.add(RateMode::unlimited, 0, window);
        for (int burst = 0; burst < 5; ++burst) {
            network.give(service, static_cast<std::uint64_t>(2.5 * path.bytes_per_s));
            network.run(second);
            network.measure();
            network.run(second);
            // Over the long path it has 0.91 alone, and its queue is hardly longer than what counts as one there.
            CHECK(network.throughput(service) > (path.rtt > 10 * millisecond ? 0.55 : 0.85) * path.bytes_per_s);
            while (!network.finished(service)) network.run(10 * millisecond);
            network.run(second);
            network.measure();
            network.run(second);
            CHECK(network.throughput(low) > 0.85 * path.bytes_per_s);
        }
    }
}
