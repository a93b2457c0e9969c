// FaultyLink: which datagrams of one link are lost, delayed or corrupted.
// Every random test has a fixed seed; bounds are five standard deviations, so a failure is a fault of the code.
#include <array>
#include <cmath>
#include <set>
#include <vector>

#include "check.hpp"
#include "wire/faults.hpp"

using namespace storm;

namespace {

std::vector<bool> losses(const LinkFaults& faults, std::size_t count, std::uint64_t seed, std::uint16_t source = 0,
                         std::uint16_t target = 1) {
    FaultyLink link(faults, seed, source, target);
    std::vector<bool> lost;
    while (lost.size() < count) lost.push_back(link.next(0).lost);
    return lost;
}

double mean(const std::vector<bool>& bits) {
    double sum = 0;
    for (const bool bit : bits) sum += bit;
    return sum / static_cast<double>(bits.size());
}

// Standard deviation of a mean of n zeros and ones, whose correlation falls by the factor `memory` per step.
double deviation(double p, std::size_t n, double memory = 0) {
    return std::sqrt(p * (1 - p) / static_cast<double>(n) * (1 + memory) / (1 - memory));
}

// The memory of a Gilbert-Elliott chain: 1 - enter - leave.
double memory_of(const LinkFaults& f) { return 1 - f.loss / ((1 - f.loss) * f.burst) - 1 / f.burst; }

bool near(double value, double expected, double sigma) { return std::abs(value - expected) <= 5 * sigma; }

}  // namespace

TEST(independent_loss_has_its_rate_and_no_memory) {
    for (const double p : {0.01, 0.1, 0.4}) {
        const auto lost = losses({.loss = p}, 200'000, 1);
        CHECK(near(mean(lost), p, deviation(p, lost.size())));
        std::vector<bool> pairs;
        for (std::size_t i = 0; i + 1 < lost.size(); i += 2) pairs.push_back(lost[i] && lost[i + 1]);
        CHECK(near(mean(pairs), p * p, deviation(p * p, pairs.size())));
    }
    CHECK_EQUAL(mean(losses({.loss = 0}, 10'000, 1)), 0.0);
    CHECK_EQUAL(mean(losses({.loss = 1}, 10'000, 1)), 1.0);
}

TEST(bursts_have_their_mean_length_and_keep_the_loss_rate) {
    for (const LinkFaults& f : {LinkFaults{.loss = 0.1, .burst = 8}, LinkFaults{.loss = 0.6, .burst = 1.5},
                                LinkFaults{.loss = 0.2, .burst = 64}}) {
        const auto lost = losses(f, 2'000'000, 2);
        CHECK(near(mean(lost), f.loss, deviation(f.loss, lost.size(), memory_of(f))));
        double bursts = 0, length = 0;
        for (std::size_t i = 1; i < lost.size(); ++i) bursts += lost[i] && !lost[i - 1];
        for (const bool bit : lost) length += bit;
        CHECK(near(length / bursts, f.burst, std::sqrt(f.burst * (f.burst - 1) / bursts) + f.burst / bursts));
    }
}

TEST(the_first_datagram_of_a_bursty_link_is_lost_as_often_as_any) {
    std::vector<bool> first;
    for (std::uint64_t seed = 0; seed < 20'000; ++seed) first.push_back(losses({.loss = 0.2, .burst = 64}, 1, seed)[0]);
    CHECK(near(mean(first), 0.2, deviation(0.2, first.size())));
}

TEST(bursts_of_different_links_are_independent) {
    const LinkFaults f{.loss = 0.2, .burst = 8};
    const auto base = losses(f, 1'000'000, 3, 0, 1);
    // The reverse direction, another source, another target, another seed.
    for (const auto& other : {losses(f, base.size(), 3, 1, 0), losses(f, base.size(), 3, 2, 1),
                              losses(f, base.size(), 3, 0, 2), losses(f, base.size(), 4, 0, 1)}) {
        std::vector<bool> both;
        for (std::size_t i = 0; i < base.size(); ++i) both.push_back(base[i] && other[i]);
        CHECK(near(mean(both), 0.04, deviation(0.04, both.size(), memory_of(f))));
    }
}

TEST(shared_loss_takes_the_same_chunks_from_all_receivers) {
    constexpr std::size_t n = 100'000;
    const auto chunk = [](std::size_t i) {
        return Header{.kind = Kind::data,
                      .channel = 3,
                      .seq = static_cast<std::uint32_t>(i / 100),
                      .chunk = static_cast<std::uint32_t>(i % 100)};
    };
    // By position in the sequence, whatever the order of arrival.
    const auto lost_of = [&](const LinkFaults& f, std::uint64_t seed, std::uint16_t source, std::uint16_t target,
                             std::uint8_t flags = 0, Kind kind = Kind::data, bool backwards = false) {
        FaultyLink link(f, seed, source, target);
        std::vector<bool> lost(n);
        for (std::size_t i = 0; i < n; ++i) {
            const std::size_t at = backwards ? n - 1 - i : i;
            Header header = chunk(at);
            header.flags = flags;
            header.kind = kind;
            lost[at] = link.next(0, &header).lost;
        }
        return lost;
    };
    const auto both = [](const std::vector<bool>& a, const std::vector<bool>& b) {
        std::vector<bool> found;
        for (std::size_t i = 0; i < a.size(); ++i) found.push_back(a[i] && b[i]);
        return found;
    };
    const LinkFaults only{.shared = 0.2};
    const auto base = lost_of(only, 5, 0, 1);
    CHECK(near(mean(base), 0.2, deviation(0.2, n)));
    CHECK(base == lost_of(only, 5, 0, 2));
    CHECK(base == lost_of(only, 5, 0, 7, 0, Kind::data, true));
    CHECK(base == lost_of(only, 5, 0, 1, flag_last));
    // Neighbours in a message, and what another seed, source or stage loses, are independent of it.
    std::vector<bool> next(base.begin() + 1, base.end());
    next.push_back(base.front());
    for (const auto& other :
         {next, lost_of(only, 6, 0, 1), lost_of(only, 5, 1, 2), lost_of(only, 5, 0, 1, flag_second_stage)})
        CHECK(near(mean(both(base, other)), 0.04, deviation(0.04, n)));
    // A retransmission goes to one receiver; were it lost as the chunk was, it would be lost for ever.
    for (const auto& [flags, kind] : {std::pair{flag_repair, Kind::data}, std::pair{std::uint8_t{0}, Kind::report}}) {
        const auto one = lost_of(only, 5, 0, 1, flags, kind), two = lost_of(only, 5, 0, 2, flags, kind);
        CHECK(near(mean(one), 0.2, deviation(0.2, n)));
        CHECK(near(mean(both(one, two)), 0.04, deviation(0.04, n)));
        CHECK(near(mean(both(one, base)), 0.04, deviation(0.04, n)));
    }
    FaultyLink same(only, 5, 0, 1);
    Header repair = chunk(7);
    repair.flags = flag_repair;
    std::vector<bool> attempts;
    while (attempts.size() < n) attempts.push_back(same.next(0, &repair).lost);
    CHECK(near(mean(attempts), 0.2, deviation(0.2, n)));

    // With loss of its own on each link, which is the same as without.
    const LinkFaults more{.loss = 0.1, .shared = 0.2};
    const auto one = lost_of(more, 5, 0, 1), two = lost_of(more, 5, 0, 2), own = losses({.loss = 0.1}, n, 5);
    CHECK(near(mean(one), 0.28, deviation(0.28, n)));
    CHECK(near(mean(both(one, two)), 0.2 + 0.8 * 0.01, deviation(0.208, n)));
    for (std::size_t i = 0; i < n; ++i) CHECK_EQUAL(one[i], own[i] || base[i]);
}

TEST(a_trace_is_replayed_exactly_in_a_loop_from_an_offset_of_the_seed) {
    const std::vector<std::uint8_t> trace{1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1};  // no two rotations are equal
    std::set<std::size_t> offsets;
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        const auto lost = losses({.loss = 0.9, .trace = trace}, 5 * trace.size() + 3, seed);
        std::size_t fits = 0;
        for (std::size_t offset = 0; offset < trace.size(); ++offset) {
            bool same = true;
            for (std::size_t i = 0; i < lost.size(); ++i) same &= lost[i] == (trace[(offset + i) % trace.size()] != 0);
            if (!same) continue;
            ++fits;
            offsets.insert(offset);
        }
        CHECK_EQUAL(fits, 1U);
    }
    CHECK_EQUAL(offsets.size(), trace.size());
}

TEST(fates_are_a_function_of_seed_source_target_and_count) {
    const LinkFaults f{
        .loss = .2, .burst = 3, .duplicate = .3, .reorder = .3, .corrupt = .3, .delay = 9, .jitter = 1000};
    const auto fates = [&f](std::uint64_t seed, std::uint16_t source, std::uint16_t target) {
        FaultyLink link(f, seed, source, target);
        std::vector<Fate> all;
        for (int i = 0; i < 500; ++i) all.push_back(link.next(0));
        CHECK_EQUAL(link.seen(), 500U);
        CHECK(link.lost() > 0 && link.lost() < 500);
        return all;
    };
    CHECK(fates(5, 1, 2) == fates(5, 1, 2));
    CHECK(fates(5, 1, 2) != fates(6, 1, 2));
    CHECK(fates(5, 1, 2) != fates(5, 2, 1));
    CHECK(fates(5, 1, 2) != fates(5, 3, 2));
    CHECK(fates(5, 1, 2) != fates(5, 1, 3));
    // A seed in a bug report must mean the same losses in every version and on every machine.
    std::uint64_t first = 0;
    for (const bool lost : losses({.loss = 0.3}, 64, 42)) first = first << 1 | std::uint64_t{lost};
    CHECK_EQUAL(first, 0x1222101a40804U);
}

TEST(each_fault_strikes_the_same_datagrams_whatever_else_is_set) {
    for (LinkFaults f :
         {LinkFaults{.loss = .2}, LinkFaults{.loss = .2, .burst = 4}, LinkFaults{.trace = {1, 0, 0, 1, 0}}}) {
        const auto plain = losses(f, 5000, 9);
        f.duplicate = f.reorder = f.corrupt = .3;
        FaultyLink some(f, 9, 0, 1);
        f.delay = 10, f.jitter = 1000;
        FaultyLink all(f, 9, 0, 1);
        FaultyLink lossless({.duplicate = .3, .reorder = .3, .corrupt = .3, .delay = 10, .jitter = 1000}, 9, 0, 1);
        for (const bool lost : plain) {
            Fate a = some.next(0);
            const Fate b = all.next(0), c = lossless.next(0);
            CHECK_EQUAL(a.lost, lost);
            CHECK(lost ? b == a && b.copies == 0 : b == c);
            a.delay = b.delay;
            CHECK(a == b);
        }
    }
}

TEST(rates_of_the_other_faults_and_the_spread_of_their_sizes_are_right) {
    constexpr std::size_t n = 100'000;
    FaultyLink link({.duplicate = .1, .reorder = .2, .corrupt = .3, .delay = 1000, .jitter = 9}, 11, 0, 1);
    std::vector<bool> duplicate, reorder, corrupt;
    std::array<double, reorder_depth + 1> depth{};
    std::array<double, 10> jitter{};
    std::array<double, 16> bit{};
    for (std::size_t i = 0; i < n; ++i) {
        const Fate fate = link.next(0);
        duplicate.push_back(fate.copies == 2);
        reorder.push_back(fate.behind > 0);
        corrupt.push_back(fate.corrupted);
        depth.at(fate.behind) += 1;
        jitter.at(static_cast<std::size_t>(fate.delay - 1000)) += 1;
        if (fate.corrupted) bit.at(fate.corrupt_bit % 16) += 1;
    }
    CHECK(near(mean(duplicate), .1, deviation(.1, n)));
    CHECK(near(mean(reorder), .2, deviation(.2, n)));
    CHECK(near(mean(corrupt), .3, deviation(.3, n)));
    for (std::size_t i = 1; i <= reorder_depth; ++i) CHECK(near(depth[i] / n, .2 / 8, deviation(.2 / 8, n)));
    for (const double count : jitter) CHECK(near(count / n, .1, deviation(.1, n)));
    for (const double count : bit) CHECK(near(count / n, .3 / 16, deviation(.3 / 16, n)));
}
