// Startup of congestion control: first exchanges over links without path metrics, or with wrong ones.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "jobs.hpp"
#include "sim/sim.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr double mbit = 125'000;  // bytes per second

struct Path {
    double bytes_per_s;
    Nanos round_trip;
    double loss;
    std::size_t bytes;  // of the tensor
    std::uint16_t world{2};
};
constexpr Path steady_wan{.bytes_per_s = 100 * mbit, .round_trip = 40 * millisecond, .loss = 0.1, .bytes = 4'000'000};
constexpr Path lossy_wan{.bytes_per_s = 50 * mbit, .round_trip = 80 * millisecond, .loss = 0.23, .bytes = 3'000'000};
constexpr Path thin{.bytes_per_s = 20 * mbit, .round_trip = 150 * millisecond, .loss = 0.03, .bytes = 1'000'000};
constexpr Path clean{.bytes_per_s = 100 * mbit, .round_trip = 40 * millisecond, .loss = 0, .bytes = 4'000'000};

Path among(Path path, std::uint16_t world) {
    path.world = world;
    return path;
}

class Job {
public:
    Job(const Path& path, std::uint64_t seed) : path_(path), sim_(config(path, seed)), watch_(sim_, path.world) {}

    // As a multiple of the ideal, which counts neither loss nor headers.
    double all_reduce() {
        AllReduce job(path_.world, path_.bytes / 4, 5);
        const Nanos began = sim_.now();
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < path_.world; ++rank)
            ids.push_back(
                sim_.post(rank, job.spec(rank, seq_, Reduce::arrived, StageSpec{.budget = 1}, StageSpec{.budget = 1})));
        ++seq_;
        watch_.wait_all(ids);
        const double ideal_s =
            2.0 * (path_.world - 1) / path_.world * static_cast<double>(path_.bytes) / path_.bytes_per_s;
        return static_cast<double>(sim_.now() - began) * 1e-9 / ideal_s;
    }
    // The longer of the third and the fourth.
    double steady() {
        (void)all_reduce();
        return std::max(all_reduce(), all_reduce());
    }
    void recall(double line_bytes_per_s) {
        for (std::uint16_t rank = 0; rank < path_.world; ++rank) {
            for (std::uint16_t peer = 0; peer < path_.world; ++peer)
                sim_.core(rank).recall(peer, {.bytes_per_s = line_bytes_per_s, .round_trip = path_.round_trip});
        }
    }
    [[nodiscard]] double dropped() {
        double sent = 0;
        for (std::uint16_t rank = 0; rank < path_.world; ++rank)
            sent += static_cast<double>(sim_.core(rank).counters().datagrams_sent);
        return static_cast<double>(sim_.queue_drops()) / sent;
    }
    Sim& sim() { return sim_; }

private:
    static SimConfig config(const Path& path, std::uint64_t seed) {
        SimConfig config;
        config.core.world = path.world;
        config.core.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
        config.core.rate_mode = RateMode::automatic;
        config.core.receive_buffer = 4 << 20;
        config.core.datagram_bytes = 1472;
        config.faults.seed = seed;
        config.faults.default_link.loss = path.loss;
        config.delay = path.round_trip / 2;
        config.bytes_per_s = path.bytes_per_s;
        return config;
    }

    Path path_;
    Sim sim_;
    Watch<Sim> watch_;
    std::uint32_t seq_{};
};

void check_at_most(double found, double most) {
    if (found > most) throw std::runtime_error(std::to_string(found) + " is more than " + std::to_string(most));
}

}  // namespace

// Without packet trains: 1.3 to 2.1 times.
TEST(the_first_exchange_over_a_long_path_takes_little_longer_than_later_ones) {
    for (const Path& path : {steady_wan, lossy_wan, thin, clean, among(thin, 6)}) {
        Job job(path, 1);
        const double first = job.all_reduce();
        check_at_most(job.dropped(), 0.002);
        check_at_most(first / job.steady(), 1.3);
    }
}

TEST(a_path_that_is_remembered_starts_at_once) {
    for (const Path& path : {steady_wan, thin, among(thin, 4)}) {
        Job job(path, 2);
        job.recall(path.bytes_per_s);
        const double first = job.all_reduce();
        check_at_most(job.dropped(), 0.002);
        // The first one does not know yet what is lost, and goes without parity.
        check_at_most(first / job.steady(), 1.2);
    }
}

TEST(a_memory_that_is_wrong_by_ten_times_costs_a_round_trip_or_two) {
    for (const double wrong : {0.1, 10.0}) {
        for (const Path& path : {steady_wan, thin, among(thin, 4)}) {
            Job job(path, 3);
            job.recall(wrong * path.bytes_per_s);
            const double first = job.all_reduce();
            check_at_most(job.dropped(), wrong > 1 ? 0.1 : 0.002);
            check_at_most(first / job.steady(), 1.6);
        }
    }
}

TEST(what_a_link_has_learned_is_what_its_line_carries) {
    Job job(among(steady_wan, 4), 4);
    CHECK(!job.sim().core(0).path_metrics(1));
    (void)job.steady();
    const auto metrics = job.sim().core(0).path_metrics(1);
    CHECK(metrics->bytes_per_s > 0.6 * steady_wan.bytes_per_s && metrics->bytes_per_s < 1.5 * steady_wan.bytes_per_s);
    CHECK(metrics->round_trip >= steady_wan.round_trip &&
          metrics->round_trip < steady_wan.round_trip + 2 * millisecond);
    CHECK(!job.sim().core(0).path_metrics(0));
}
