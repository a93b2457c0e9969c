// FaultyLink: bursts of loss that last for a time, however much is sent.
// Every random test has a fixed seed; bounds are five standard deviations, so a failure is a fault of the code.
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "wire/faults.hpp"

using namespace storm;

namespace {

// Looks at a link every `step`.
std::vector<bool> losses(const LinkFaults& faults, std::size_t count, Nanos step, std::uint64_t seed,
                         std::uint16_t source = 0, std::uint16_t target = 1) {
    FaultyLink link(faults, seed, source, target);
    std::vector<bool> lost;
    for (Nanos now = 7 * second; lost.size() < count; now += step) lost.push_back(link.next(now).lost);
    return lost;
}

double mean(const std::vector<bool>& bits) {
    double sum = 0;
    for (const bool bit : bits) sum += bit;
    return sum / static_cast<double>(bits.size());
}

bool near(double value, double expected, double sigma) { return std::abs(value - expected) <= 5 * sigma; }

double deviation(double p, std::size_t n, double memory = 0) {
    return std::sqrt(p * (1 - p) / static_cast<double>(n) * (1 + memory) / (1 - memory));
}

// Correlation of a link's state, losing or not, with its state `time` earlier.
double memory(const LinkFaults& f, Nanos time) {
    return std::exp(-static_cast<double>(time) / (static_cast<double>(f.burst_time) * (1 - f.loss)));
}

// Fraction of links that lose a second datagram, `gap` after a first one that was lost.
double still_lost(const LinkFaults& f, Nanos gap, std::size_t& count) {
    std::vector<bool> second_lost;
    for (std::uint64_t seed = 0; seed < 40'000; ++seed) {
        FaultyLink link(f, seed, 0, 1);
        if (link.next(second).lost) second_lost.push_back(link.next(second + gap).lost);
    }
    count = second_lost.size();
    return mean(second_lost);
}

}  // namespace

// Sampled at even intervals, the continuous-time chain is a Gilbert-Elliott chain, whose runs have a known mean length.
TEST(timed_bursts_have_their_mean_duration_and_keep_the_loss_rate) {
    constexpr Nanos step = 100 * microsecond;
    for (const LinkFaults& f :
         {LinkFaults{.loss = 0.1, .burst_time = 5 * millisecond}, LinkFaults{.loss = 0.6, .burst_time = millisecond},
          LinkFaults{.loss = 0.02, .burst_time = 300 * microsecond}}) {
        const auto lost = losses(f, 2'000'000, step, 2);
        CHECK(near(mean(lost), f.loss, deviation(f.loss, lost.size(), memory(f, step))));
        double bursts = 0, length = 0;
        for (std::size_t i = 1; i < lost.size(); ++i) bursts += lost[i] && !lost[i - 1];
        for (const bool bit : lost) length += bit;
        const double run = 1 / ((1 - f.loss) * (1 - memory(f, step)));
        CHECK(near(length / bursts, run, std::sqrt(run * (run - 1) / bursts) + run / bursts));
    }
}

TEST(a_silent_sender_leaves_a_timed_burst_and_stays_in_one_of_datagrams) {
    const LinkFaults timed{.loss = 0.2, .burst_time = 5 * millisecond}, counted{.loss = 0.2, .burst = 64};
    std::size_t n = 0;
    for (const Nanos gap : {50 * microsecond, millisecond, 5 * millisecond, 100 * millisecond, 3600 * second}) {
        const double expected = 0.2 + 0.8 * memory(timed, gap);
        CHECK(near(still_lost(timed, gap, n), expected, deviation(expected, n)));
        CHECK(n > 7000 && n < 9000);  // the first datagram is lost as often as any
        CHECK(near(still_lost(counted, gap, n), 1 - 1.0 / 64, deviation(1.0 / 64, n)));
    }
}

TEST(timed_bursts_depend_on_seed_and_link_and_not_on_how_much_is_sent) {
    const LinkFaults f{.loss = 0.3, .burst_time = 2 * millisecond};
    constexpr std::size_t n = 20'000;
    const auto often = losses(f, 10 * n, 10 * microsecond, 3), seldom = losses(f, n, 100 * microsecond, 3);
    for (std::size_t i = 0; i < n; ++i) CHECK_EQUAL(seldom[i], often[10 * i]);
    for (const auto& other : {losses(f, n, 100 * microsecond, 4), losses(f, n, 100 * microsecond, 3, 1, 0),
                              losses(f, n, 100 * microsecond, 3, 2, 1), losses(f, n, 100 * microsecond, 3, 0, 2)}) {
        std::vector<bool> both;
        for (std::size_t i = 0; i < n; ++i) both.push_back(seldom[i] && other[i]);
        CHECK(near(mean(both), 0.09, deviation(0.09, n, memory(f, 100 * microsecond))));
    }
}

TEST(timed_bursts_leave_all_other_faults_as_they_are) {
    LinkFaults f{.duplicate = .3, .reorder = .3, .corrupt = .3, .delay = 10, .jitter = 1000};
    FaultyLink lossless(f, 9, 0, 1);
    f.loss = 0.5, f.burst_time = millisecond;
    FaultyLink timed(f, 9, 0, 1);
    std::size_t arrived = 0;
    for (Nanos now = 0; now < second; now += 100 * microsecond) {
        const Fate with = timed.next(now), without = lossless.next(now);
        if (with.lost) continue;
        ++arrived;
        CHECK(with == without);
    }
    CHECK(arrived > 1000 && arrived < 9000);
}

// The pattern must be the one from before bursts could be timed, at any time.
TEST(bursts_of_datagrams_are_the_same_whenever_they_are_sent) {
    for (const Nanos step : {Nanos{0}, millisecond, 3600 * second}) {
        std::uint64_t bits = 0;
        for (const bool lost : losses({.loss = 0.3, .burst = 4}, 64, step, 42)) bits = bits << 1 | std::uint64_t{lost};
        CHECK_EQUAL(bits, 0xffff1e00006007fcU);
    }
}

TEST(short_bursts_cost_little_after_a_long_silence) {
    const LinkFaults f{.loss = 0.25, .burst_time = 1};
    std::vector<bool> lost;
    FaultyLink link(f, 5, 0, 1);
    for (Nanos now = 0; lost.size() < 10'000; now += 3600 * second) lost.push_back(link.next(now).lost);
    CHECK(near(mean(lost), f.loss, deviation(f.loss, lost.size())));
    // Bursts so rare that the next one lies beyond any clock.
    CHECK_EQUAL(mean(losses({.loss = 1e-300, .burst_time = second}, 100, second, 1)), 0.0);
    CHECK_EQUAL(mean(losses({.loss = 0, .burst_time = second}, 100, second, 1)), 0.0);
}

TEST(timed_bursts_that_make_no_sense_are_refused_by_name) {
    const auto complaint = [](const LinkFaults& f) {
        try {
            f.validate();
        } catch (const std::invalid_argument& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(complaint({.loss = .1, .burst_time = -1}).starts_with("burst_time must lie in"));
    CHECK(complaint({.loss = .1, .burst_time = max_fault_delay + 1}).starts_with("burst_time must lie in"));
    CHECK(complaint({.loss = .1, .burst = 2, .burst_time = 1}).starts_with("burst must be 1 beside"));
    CHECK(complaint({.loss = 1, .burst_time = 1}).starts_with("burst_time must be 0 when loss is 1"));
    CHECK(complaint({.loss = .999, .burst_time = 1}).empty());
}
