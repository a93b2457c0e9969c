// How long an all-reduce takes where a switch stands between: automatic rate control against the line's own speed.
// Ideal is 2 (n - 1) / n * bytes / rate; headers and reports cost about three percent of it.
#include "jobs.hpp"
#include "sim.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr std::uint16_t world = 4;
constexpr double mbit = 125'000;  // bytes per second

struct Line {
    double bytes_per_s;
    Nanos delay;  // one way
    double loss;
};

struct Measured {
    double times_ideal;
    double dropped;  // share of all datagrams that the switch had no room for
};

// The first all-reduce of a job: nothing is known of the links yet.
Measured all_reduce(const Line& line, std::size_t bytes, bool exact) {
    SimConfig config;
    config.core.world = world;
    config.core.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
    config.core.rate_mode = RateMode::automatic;
    config.core.receive_buffer = 4 << 20;
    config.faults.seed = 1;
    config.faults.default_link.loss = line.loss;
    config.delay = line.delay;
    config.bytes_per_s = line.bytes_per_s;
    config.queue_bytes = 512 << 10;
    Sim sim(config);
    Watch watch(sim, world);
    AllReduce job(world, bytes / 4, 5);
    const StageSpec stage{.budget = exact ? 0.0 : 1.0};
    const Nanos start = sim.now();
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < world; ++rank) {
        ids.push_back(sim.post(rank, job.spec(rank, 0, exact ? Reduce::in_order : Reduce::arrived, stage, stage)));
    }
    watch.wait_all(ids);
    if (exact) job.check_exact();
    Nanos ended = 0;
    std::uint64_t sent = 0;
    for (std::uint16_t rank = 0; rank < world; ++rank) {
        ended = std::max(ended, watch.outcome(rank, ids[rank])->ended);
        sent += sim.core(rank).counters().datagrams_sent;
        for (const Arrival& arrival : watch.outcome(rank, ids[rank])->arrivals) {
            // What a lossy all-reduce misses is what the network lost, and not much that the engine gave up.
            CHECK(static_cast<double>(arrival.missing_bytes) <= (1.2 * line.loss + 0.01) * static_cast<double>(arrival.bytes));
        }
    }
    const double ideal_s = 2.0 * (world - 1) / world * static_cast<double>(bytes) / line.bytes_per_s;
    return {.times_ideal = static_cast<double>(ended - start) * 1e-9 / ideal_s,
            .dropped = static_cast<double>(sim.queue_drops()) / static_cast<double>(sent)};
}

void check_at_most(const Measured& measured, double times_ideal) {
    CHECK(measured.dropped <= 0.01);
    if (measured.times_ideal <= times_ideal) return;
    throw std::runtime_error("took " + std::to_string(measured.times_ideal) + " x ideal, more than " + std::to_string(times_ideal));
}

constexpr Line office{.bytes_per_s = 400 * mbit, .delay = 500 * microsecond, .loss = 0};
constexpr Line lossy_office{.bytes_per_s = 400 * mbit, .delay = 500 * microsecond, .loss = 0.1};
constexpr Line lossy_wan{.bytes_per_s = 100 * mbit, .delay = 20 * millisecond, .loss = 0.1};

}  // namespace

// Goals of the design stand behind; what is checked is what is reached, with a margin of some percent.
TEST(all_reduce_on_a_clean_line_comes_close_to_its_speed_without_overflowing_the_switch) {
    check_at_most(all_reduce(office, 25'000'000, true), 1.35);  // goal 1.2
}

TEST(lossy_all_reduce_on_a_line_that_loses_a_tenth_comes_close_to_its_speed) {
    check_at_most(all_reduce(lossy_office, 25'000'000, false), 1.7);  // goal 1.25
}

TEST(exact_all_reduce_on_a_line_that_loses_a_tenth_pays_little_more_than_the_repairs) {
    check_at_most(all_reduce(lossy_office, 25'000'000, true), 2.0);  // goal 1.5
}

TEST(lossy_all_reduce_over_forty_milliseconds_is_not_ruled_by_round_trips) {
    check_at_most(all_reduce(lossy_wan, 5'000'000, false), 2.5);  // goal 1.4
}

TEST(exact_all_reduce_over_forty_milliseconds_is_not_ruled_by_round_trips) {
    check_at_most(all_reduce(lossy_wan, 5'000'000, true), 3.0);  // goal 2
}
