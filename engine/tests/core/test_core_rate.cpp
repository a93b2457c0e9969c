// Congestion control in Core: how long an all-reduce through a switch takes, compared with the ideal at link capacity.
// The ideal is 2 (n - 1) / n * bytes / rate; headers and reports cost about three percent of it.
#include "jobs.hpp"
#include "sim/sim.hpp"
#include "tapped.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr double mbit = 125'000;  // bytes per second

struct Line {
    double bytes_per_s;
    Nanos delay;  // one way
    double loss;
    std::uint16_t world{4};
    std::size_t queue_bytes{512 << 10};
    double burst{1};  // datagrams lost in a row, on average
};

struct Measured {
    double times_ideal;
    double dropped;  // fraction of all datagrams that the switch dropped, its queue being full
};

// Collectives one after the other on the same links; the first knows nothing of them yet.
class Job {
public:
    Job(const Line& line, std::uint64_t seed)
        : line_(line), seed_(seed), sim_(config(line, seed)), watch_(sim_, line.world) {}

    Measured all_reduce(std::size_t bytes, bool exact) {
        AllReduce job(line_.world, bytes / 4, 5);
        const StageSpec stage{.budget = exact ? 0.0 : 1.0};
        const Measured measured = run(
            2.0 * (line_.world - 1) / line_.world * static_cast<double>(bytes),
            [&](auto rank) { return job.spec(rank, seq_, exact ? Reduce::in_order : Reduce::arrived, stage, stage); });
        if (exact) job.check_exact();
        return measured;
    }

    // Incast: every rank sends `bytes` to rank 0.
    Measured incast(std::size_t bytes) {
        const Buffer sent = random_buffer(bytes, 6);
        std::vector<Buffer> got(line_.world, Buffer(bytes));
        return run(static_cast<double>(line_.world - 1) * static_cast<double>(bytes), [&](std::uint16_t rank) {
            ExchangeSpec spec = exchange_on(0, seq_);
            if (rank > 0) spec.sends.push_back({.peer = 0, .data = sent.data(), .bytes = bytes});
            for (std::uint16_t peer = 1; rank == 0 && peer < line_.world; ++peer) {
                spec.receives.push_back({.peer = peer, .into = got[peer].data(), .bytes = bytes});
            }
            return spec;
        });
    }

    // From now on.
    void change(double bytes_per_s, double loss) {
        line_.bytes_per_s = bytes_per_s;
        line_.loss = loss;
        sim_.set_rate(bytes_per_s);
        sim_.set_faults(config(line_, seed_).faults);
    }

private:
    template <class Spec>
    Measured run(double ideal_bytes, Spec&& spec) {
        const Nanos start = sim_.now();
        const std::uint64_t sent_before = sent(), dropped_before = sim_.queue_drops();
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < line_.world; ++rank) ids.push_back(sim_.post(rank, spec(rank)));
        ++seq_;
        watch_.wait_all(ids);
        Nanos ended = 0;
        for (std::uint16_t rank = 0; rank < line_.world; ++rank) {
            const Outcome& outcome = *watch_.outcome(rank, ids[rank]);
            ended = std::max(ended, outcome.ended);
            for (const Arrival& arrival : outcome.arrivals) {
                // A lossy all-reduce misses what the network lost, and little that the engine skipped.
                const double missing = static_cast<double>(arrival.missing_bytes) / static_cast<double>(arrival.bytes);
                CHECK(line_.burst > 1 || missing <= 1.5 * line_.loss + 0.015);
            }
        }
        return {.times_ideal = static_cast<double>(ended - start) * 1e-9 / (ideal_bytes / line_.bytes_per_s),
                .dropped = static_cast<double>(sim_.queue_drops() - dropped_before) /
                           static_cast<double>(sent() - sent_before)};
    }
    static SimConfig config(const Line& line, std::uint64_t seed) {
        SimConfig config;
        config.core.world = line.world;
        config.core.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
        config.core.rate_mode = RateMode::automatic;
        config.core.receive_buffer = 4 << 20;
        config.faults.seed = seed;
        config.faults.default_link.loss = line.loss;
        config.faults.default_link.burst = line.burst;
        config.delay = line.delay;
        config.bytes_per_s = line.bytes_per_s;
        config.queue_bytes = line.queue_bytes;
        return config;
    }
    [[nodiscard]] std::uint64_t sent() {
        std::uint64_t all = 0;
        for (std::uint16_t rank = 0; rank < line_.world; ++rank) all += sim_.core(rank).counters().datagrams_sent;
        return all;
    }

    Line line_;
    std::uint64_t seed_;
    Sim sim_;
    Watch<Sim> watch_;
    std::uint32_t seq_{};
};

void check_at_most(const Measured& measured, double times_ideal, double dropped = 0.01) {
    if (measured.dropped > dropped) throw std::runtime_error("dropped " + std::to_string(measured.dropped));
    if (measured.times_ideal <= times_ideal) return;
    throw std::runtime_error("took " + std::to_string(measured.times_ideal) + " x ideal, more than " +
                             std::to_string(times_ideal));
}

constexpr Line office{.bytes_per_s = 400 * mbit, .delay = 500 * microsecond, .loss = 0};
constexpr Line lossy_office{.bytes_per_s = 400 * mbit, .delay = 500 * microsecond, .loss = 0.1};
constexpr Line lossy_wan{.bytes_per_s = 100 * mbit, .delay = 20 * millisecond, .loss = 0.1};

}  // namespace

// Measured, over several seeds: 1.07, 1.10 and 1.21.
TEST(all_reduce_on_a_clean_line_comes_close_to_its_speed_without_overflowing_the_switch) {
    check_at_most(Job(office, 1).all_reduce(25'000'000, true), 1.12);
}

TEST(lossy_all_reduce_on_a_line_that_loses_a_tenth_comes_close_to_its_speed) {
    check_at_most(Job(lossy_office, 1).all_reduce(25'000'000, false), 1.2);
}

TEST(exact_all_reduce_on_a_line_that_loses_a_tenth_pays_little_more_than_the_repairs) {
    check_at_most(Job(lossy_office, 1).all_reduce(25'000'000, true), 1.35);
}

// Ideal is fifteen round trips here. Measured, over several seeds: 1.3 to 1.4 and then 1.2 to 1.35; exact 1.6 to 1.8
// and then 1.45 to 1.65.
TEST(lossy_all_reduce_over_forty_milliseconds_is_not_ruled_by_round_trips) {
    Job job(lossy_wan, 1);
    check_at_most(job.all_reduce(5'000'000, false), 1.5);
    check_at_most(job.all_reduce(5'000'000, false), 1.4);
    check_at_most(job.all_reduce(5'000'000, false), 1.4);
}

TEST(exact_all_reduce_over_forty_milliseconds_is_not_ruled_by_round_trips) {
    Job job(lossy_wan, 1);
    check_at_most(job.all_reduce(5'000'000, true), 1.9);
    check_at_most(job.all_reduce(5'000'000, true), 1.75);
    check_at_most(job.all_reduce(5'000'000, true), 1.75);
}

TEST(no_lossy_all_reduce_takes_much_longer_than_the_others) {
    Job job(lossy_office, 2);
    std::vector<double> all;
    for (int i = 0; i < 53; ++i) {
        const double took = job.all_reduce(2'000'000, false).times_ideal;
        if (i >= 3) all.push_back(took);
    }
    std::sort(all.begin(), all.end());
    CHECK(all.back() <= 1.3 * all[all.size() / 2]);
}

// Every few seconds a link slows down to measure its path without a queue, unless a pause has done so. The end of an
// exchange is a pause, although on a long path the last datagrams are not acknowledged before the next exchange.
TEST(exchanges_over_a_long_path_show_it_without_a_queue_so_that_none_is_slowed_down_for_that) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
        Job job({.bytes_per_s = 20 * mbit, .delay = 75 * millisecond, .loss = 0}, seed);
        std::vector<double> all;
        for (int i = 0; i < 23; ++i) {
            const double took = job.all_reduce(1'000'000, false).times_ideal;
            if (i >= 3) all.push_back(took);
        }
        std::sort(all.begin(), all.end());
        check_at_most({.times_ideal = all.back() / all[all.size() / 2], .dropped = 0}, 1.15);
    }
}

TEST(all_to_one_overflows_shallow_queues_hardly_even_where_nothing_is_known_yet) {
    for (const std::size_t queue : {64 << 10, 128 << 10, 512 << 10}) {
        Job job({.bytes_per_s = 400 * mbit, .delay = 100 * microsecond, .loss = 0, .world = 8, .queue_bytes = queue},
                1);
        // Seven links have nine kilobytes each of the smallest queue, noise included.
        const double dropped = queue < (128 << 10) ? 0.025 : 0.01;
        for (int i = 0; i < 3; ++i) check_at_most(job.incast(3'000'000), 1.15, dropped);
    }
}

TEST(all_reduce_settles_soon_after_the_line_lost_half_its_speed_and_began_to_lose) {
    Job job({.bytes_per_s = 400 * mbit, .delay = 100 * microsecond, .loss = 0, .world = 8}, 1);
    for (int i = 0; i < 4; ++i) (void)job.all_reduce(4'000'000, true);
    job.change(200 * mbit, 0.05);
    for (int i = 0; i < 10; ++i) (void)job.all_reduce(4'000'000, true);
    for (int i = 0; i < 4; ++i) check_at_most(job.all_reduce(4'000'000, true), 1.4);
}

// A burst loses whole windows, reports, probes and ends. Over many seeds: lossy 1.05 to 1.25, exact 1.15 to 1.45.
TEST(losses_in_bursts_cost_little_more_than_others) {
    for (const double burst : {8.0, 20.0, 64.0}) {
        Job job({.bytes_per_s = 100 * mbit, .delay = 100 * microsecond, .loss = 0.1, .burst = burst}, 1);
        for (const bool exact : {false, true}) {
            std::vector<double> all;
            for (int i = 0; i < 7; ++i) {
                const double took = job.all_reduce(4'000'000, exact).times_ideal;
                if (i >= 2) all.push_back(took);
            }
            std::sort(all.begin(), all.end());
            CHECK(all[all.size() / 2] <= (exact ? 1.5 : 1.25));
            CHECK(all.back() <= 2);
        }
    }
}

// All peers share the fixed rate: when nothing may be sent to one of them, nothing may be sent to any.
TEST(peers_are_served_in_turn_at_a_rate_that_is_set_and_one_that_never_answers_does_not_hold_up_the_others) {
    CoreConfig config;
    config.world = 6;
    config.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
    config.rate_mode = RateMode::fixed;
    config.bytes_per_s = 4e6;
    config.datagram_bytes = 1472;
    Tapped net(config);
    std::vector<std::uint16_t> order;
    Nanos last{};
    double sent_bytes{};
    net.tap = [&](Datagram& each) {
        if (each.source == 3) return false;
        if (each.source != 0 || each.header.kind != Kind::data) return true;
        if (order.empty() || order.back() != each.target) order.push_back(each.target);  // a batch goes to one peer
        last = net.now();
        sent_bytes += static_cast<double>(each.bytes.size());
        return true;
    };
    constexpr std::size_t bytes = 200'000;
    AllToAll job(config.world, 7, [&](auto from, auto) { return from == 0 ? bytes : 1; });
    const Nanos began = net.now();
    for (std::uint16_t rank = 0; rank < config.world; ++rank) net.post(rank, job.spec(rank, 0, {.budget = 1}));
    net.run(2 * second);
    for (const std::size_t peer : {1, 2, 4, 5}) CHECK(job.got[peer][0] == job.sent[0][peer]);
    for (std::size_t at = 0; at < 100; ++at) CHECK_EQUAL(order.at(at), 1 + at % 5);
    // Not faster than the rate; and slower only by what is not data, although the silent peer takes no more.
    const double ideal_s = sent_bytes / config.bytes_per_s;
    CHECK(sent_bytes < 5.0 * bytes);
    CHECK(seconds(last - began) > 0.98 * ideal_s);
    CHECK(seconds(last - began) < 1.1 * ideal_s);
}
