// Every random test has a fixed seed; bounds are five standard deviations, so a failure is a fault of the code.
#include <array>
#include <cmath>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>

#include "check.hpp"
#include "faults.hpp"

using namespace storm;

namespace {

std::vector<bool> losses(const LinkFaults& faults, std::size_t count, std::uint64_t seed, std::uint16_t source = 0,
                         std::uint16_t target = 1) {
    FaultyLink link(faults, seed, source, target);
    std::vector<bool> lost;
    while (lost.size() < count) lost.push_back(link.next().lost);
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

std::shared_ptr<const FaultSettings> everywhere(const LinkFaults& faults, std::uint64_t seed = 7) {
    return std::make_shared<const FaultSettings>(FaultSettings{.seed = seed, .default_link = faults});
}

// An endpoint of rank 1 behind a FaultPath. Datagrams are numbered; buffers are overwritten after use, by the core as by
// the kernel, so whoever keeps a reference instead of a copy is found out.
struct Receiver {
    FaultPath path{1};
    std::vector<std::uint32_t> got;
    std::vector<Nanos> got_at;
    Nanos now{};

    auto sink() {
        return [this](std::span<std::byte> datagram) {
            std::uint32_t number{};
            std::memcpy(&number, datagram.data(), sizeof number);
            got.push_back(number);
            got_at.push_back(now);
            std::memset(datagram.data(), 0xee, datagram.size());
        };
    }
    void receive(std::uint32_t number, Nanos at, std::uint16_t source = 0, std::size_t bytes = 16) {
        now = at;
        std::vector<std::byte> buffer(bytes);
        std::memcpy(buffer.data(), &number, sizeof number);
        path.receive(source, buffer, at, sink());
        std::memset(buffer.data(), 0xdd, buffer.size());
    }
    void release(Nanos at) {
        now = at;
        path.release(at, sink());
    }
    void release_all() {
        while (path.next_release_at() != never) release(path.next_release_at());
    }
    [[nodiscard]] bool balanced() const {
        const FaultCounters& c = path.counters();
        return c.seen + c.duplicated == c.lost + c.dropped + got.size() + path.held_datagrams();
    }
};

std::string complaint(const FaultSettings& settings) {
    try {
        settings.validate();
    } catch (const std::invalid_argument& error) {
        return error.what();
    }
    return "";
}

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
    // By place in the sequence, whatever the order of arrival.
    const auto lost_of = [&](const LinkFaults& f, std::uint64_t seed, std::uint16_t source, std::uint16_t target,
                             std::uint8_t flags = 0, Kind kind = Kind::data, bool backwards = false) {
        FaultyLink link(f, seed, source, target);
        std::vector<bool> lost(n);
        for (std::size_t i = 0; i < n; ++i) {
            const std::size_t at = backwards ? n - 1 - i : i;
            Header header = chunk(at);
            header.flags = flags;
            header.kind = kind;
            lost[at] = link.next(&header).lost;
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
    // A repair goes to one receiver; were it lost as the chunk was, it would be lost for ever.
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
    while (attempts.size() < n) attempts.push_back(same.next(&repair).lost);
    CHECK(near(mean(attempts), 0.2, deviation(0.2, n)));

    // With loss of its own on each link, which is the same as without.
    const LinkFaults more{.loss = 0.1, .shared = 0.2};
    const auto one = lost_of(more, 5, 0, 1), two = lost_of(more, 5, 0, 2), own = losses({.loss = 0.1}, n, 5);
    CHECK(near(mean(one), 0.28, deviation(0.28, n)));
    CHECK(near(mean(both(one, two)), 0.2 + 0.8 * 0.01, deviation(0.208, n)));
    for (std::size_t i = 0; i < n; ++i) CHECK_EQUAL(one[i], own[i] || base[i]);
}

TEST(a_fault_path_reads_which_chunk_it_is) {
    FaultPath one{1}, two{2};
    one.set(everywhere({.shared = 0.5}), 0);
    two.set(everywhere({.shared = 0.5}), 0);
    std::size_t arrived = 0, differ = 0;
    for (std::uint32_t i = 0; i < 2000; ++i) {
        bool at_one = false, at_two = false;
        std::vector<std::byte> datagram(header_bytes + 8);
        const auto fill = [&](std::uint32_t number) {  // each link has numbers of its own
            const Header header{
                .kind = Kind::data, .number = number, .seq = i / 10, .chunk = i % 10, .message_bytes = 80};
            write_header(header, std::span<std::byte, header_bytes>(datagram.data(), header_bytes));
        };
        fill(i);
        one.receive(0, datagram, 0, [&](std::span<std::byte>) { at_one = true; });
        if (i % 3 == 0) two.receive(0, std::span(datagram).first(5), 0, [](std::span<std::byte>) {});  // is no datagram
        fill(i + 77);
        two.receive(0, datagram, 0, [&](std::span<std::byte>) { at_two = true; });
        arrived += at_one;
        differ += at_one != at_two;
    }
    CHECK_EQUAL(differ, 0U);
    CHECK(arrived > 880 && arrived < 1120);
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
        for (int i = 0; i < 500; ++i) all.push_back(link.next());
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
            Fate a = some.next();
            const Fate b = all.next(), c = lossless.next();
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
        const Fate fate = link.next();
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

TEST(without_faults_a_datagram_is_delivered_in_place) {
    std::array<std::byte, 16> buffer{};
    for (const auto& settings : {std::shared_ptr<const FaultSettings>(), everywhere({})}) {
        FaultPath path(1);
        path.set(settings, 0);
        const std::byte* at = nullptr;
        path.receive(0, buffer, 0, [&at](std::span<std::byte> datagram) { at = datagram.data(); });
        CHECK(at == buffer.data());
        CHECK_EQUAL(path.next_release_at(), never);
        CHECK_EQUAL(path.counters().held, 0U);
    }
}

TEST(a_datagram_is_overtaken_by_as_many_as_its_fate_says_and_lost_ones_do_not_count) {
    for (const double reorder : {0.2, 1.0}) {
        const LinkFaults f{.loss = .3, .duplicate = .2, .reorder = reorder};
        FaultyLink link(f, 7, 0, 1);
        Receiver receiver;
        receiver.path.set(everywhere(f), 0);
        std::vector<std::uint32_t> expected;
        std::vector<std::tuple<std::uint32_t, std::size_t, std::uint8_t>> waiting;  // number, leaves with, copies
        std::size_t arrived = 0;
        for (std::uint32_t i = 0; i < 2000; ++i) {
            receiver.receive(i, i);
            const Fate fate = link.next();
            if (fate.lost) continue;
            ++arrived;
            if (fate.behind == 0) expected.insert(expected.end(), fate.copies, i);
            if (fate.behind > 0) waiting.emplace_back(i, arrived + fate.behind, fate.copies);
            std::erase_if(waiting, [&](const auto& w) {
                if (std::get<1>(w) > arrived) return false;
                expected.insert(expected.end(), std::get<2>(w), std::get<0>(w));
                return true;
            });
            CHECK(receiver.got == expected);
        }
        CHECK(receiver.path.counters().reordered > 200);
        CHECK(!std::is_sorted(expected.begin(), expected.end()));
    }
}

TEST(the_tail_of_a_transfer_is_not_held_for_ever) {
    Receiver receiver;
    receiver.path.set(everywhere({.reorder = 1, .delay = millisecond}), 0);
    receiver.receive(1, 10);  // alone on its link
    CHECK_EQUAL(receiver.path.next_release_at(), 10 + reorder_patience);
    receiver.release_all();
    CHECK((receiver.got == std::vector<std::uint32_t>{1}));
    CHECK_EQUAL(receiver.got_at[0], 10 + reorder_patience + millisecond);
    // Its link goes on as before.
    for (std::uint32_t i = 2; i < 40; ++i) receiver.receive(i, second);
    receiver.release(second + millisecond - 1);
    CHECK_EQUAL(receiver.got.size(), 1U);
    receiver.release(second + millisecond);
    CHECK(receiver.got.size() > 30);
    receiver.release_all();
    CHECK_EQUAL(receiver.got.size(), 39U);
}

TEST(each_datagram_is_released_when_its_own_delay_is_over_and_in_order_without_jitter) {
    for (const Nanos jitter : {Nanos{0}, millisecond}) {
        const LinkFaults f{.delay = millisecond, .jitter = jitter};
        FaultyLink link(f, 7, 0, 1);
        Receiver receiver;
        receiver.path.set(everywhere(f), 0);
        std::vector<Nanos> due;
        for (std::uint32_t i = 0; i < 500; ++i) {
            receiver.receive(i, i / 10);
            due.push_back(i / 10 + link.next().delay);
        }
        receiver.release(receiver.path.next_release_at() - 1);
        CHECK_EQUAL(receiver.got.size(), 0U);
        receiver.release_all();
        CHECK_EQUAL(receiver.got.size(), 500U);
        for (std::size_t i = 0; i < 500; ++i) CHECK_EQUAL(receiver.got_at[i], due[receiver.got[i]]);
        CHECK_EQUAL(std::is_sorted(receiver.got.begin(), receiver.got.end()), jitter == 0);
        CHECK_EQUAL(receiver.path.held_bytes(), 0U);
    }
}

TEST(one_bit_of_the_first_copy_is_flipped_and_the_second_copy_is_clean) {
    for (const Nanos delay : {Nanos{0}, millisecond}) {
        FaultPath path(1);
        path.set(everywhere({.duplicate = 1, .corrupt = 1, .delay = delay}), 0);
        std::set<std::size_t> bits;
        for (int i = 0; i < 1000; ++i) {
            std::array<std::byte, 4> buffer{};
            std::vector<unsigned> values;
            const auto deliver = [&values](std::span<std::byte> datagram) {
                CHECK_EQUAL(datagram.size(), 4U);
                unsigned value{};
                std::memcpy(&value, datagram.data(), 4);
                values.push_back(value);
                std::memset(datagram.data(), 0xee, 4);  // as a core does that decrypts in place
            };
            path.receive(0, buffer, 0, deliver);
            path.release(delay, deliver);
            CHECK_EQUAL(values.size(), 2U);
            CHECK_EQUAL(std::popcount(values[0]), 1);
            CHECK_EQUAL(values[1], 0U);
            bits.insert(static_cast<std::size_t>(std::countr_zero(values[0])));
        }
        CHECK_EQUAL(bits.size(), 32U);
        CHECK_EQUAL(path.counters().corrupted, 1000U);
        CHECK_EQUAL(path.counters().duplicated, 1000U);
        path.receive(0, {}, 0, [](std::span<std::byte> datagram) { CHECK(datagram.empty()); });
        CHECK_EQUAL(path.counters().corrupted, 1000U);  // nothing to flip
    }
}

TEST(turning_off_or_changing_the_settings_loses_nothing_and_restores_the_order) {
    for (const auto& next : {std::shared_ptr<const FaultSettings>(), everywhere({.delay = 1}, 8)}) {
        const LinkFaults f{.loss = .1, .duplicate = .3, .reorder = .4, .delay = millisecond, .jitter = second};
        Receiver receiver;
        receiver.path.set(everywhere(f), 0);
        for (std::uint32_t i = 0; i < 600; ++i) receiver.receive(i, 10, static_cast<std::uint16_t>(i % 5));
        CHECK_EQUAL(receiver.got.size(), 0U);
        receiver.path.set(next, 20);
        CHECK_EQUAL(receiver.path.next_release_at(), 20);
        const FaultCounters& c = receiver.path.counters();
        CHECK(c.lost > 0 && c.duplicated > 0 && c.reordered > 0);
        receiver.release(20);
        CHECK_EQUAL(receiver.got.size(), c.seen + c.duplicated - c.lost);
        CHECK(std::is_sorted(receiver.got.begin(), receiver.got.end()));
        CHECK_EQUAL(receiver.path.next_release_at(), never);
        CHECK_EQUAL(receiver.path.held_datagrams(), 0U);
        CHECK(receiver.balanced());
        receiver.receive(600, 21);
        receiver.release(22);
        CHECK_EQUAL(receiver.got.back(), 600U);
    }
}

TEST(the_same_settings_again_change_nothing_and_others_start_the_fates_anew) {
    const auto settings = everywhere({.loss = .5}), equal = everywhere({.loss = .5});
    Receiver once, again, anew;
    for (Receiver* receiver : {&once, &again, &anew}) receiver->path.set(settings, 0);
    for (std::uint32_t i = 0; i < 200; ++i) {
        if (i == 100) again.path.set(settings, 0), anew.path.set(equal, 0);
        for (Receiver* receiver : {&once, &again, &anew}) receiver->receive(i, 0);
    }
    CHECK(again.got == once.got);
    CHECK(anew.got != once.got);
    const auto half = anew.got.size() / 2;
    CHECK_EQUAL(anew.got.size() % 2, 0U);
    for (std::size_t i = 0; i < half; ++i) CHECK_EQUAL(anew.got[i] + 100, anew.got[i + half]);
    CHECK_EQUAL(anew.path.counters().seen, 200U);
}

TEST(a_link_of_its_own_replaces_the_default_in_its_direction_only) {
    auto settings = std::make_shared<FaultSettings>(FaultSettings{.default_link = {.loss = 1}});
    settings->links[{2, 1}] = {};
    settings->links[{1, 3}] = {};
    Receiver receiver;
    receiver.path.set(settings, 0);
    for (std::uint16_t source = 0; source < 4; ++source) receiver.receive(source, 0, source);
    CHECK((receiver.got == std::vector<std::uint32_t>{2}));
    CHECK_EQUAL(receiver.path.counters().lost, 3U);
}

TEST(what_is_held_is_bounded_in_datagrams_and_in_bytes) {
    for (const auto& [bytes, fits] : {std::pair{std::size_t{16}, FaultPath::max_held_datagrams},
                                      std::pair{std::size_t{65'507}, FaultPath::max_held_bytes / 65'507}}) {
        for (const LinkFaults& f :
             {LinkFaults{.delay = second}, LinkFaults{.duplicate = 1, .reorder = 1, .delay = second}}) {
            Receiver receiver;
            receiver.path.set(everywhere(f), 0);
            for (std::uint32_t i = 0; i < 5000; ++i) receiver.receive(i, 0, static_cast<std::uint16_t>(i % 700), bytes);
            const FaultCounters& c = receiver.path.counters();
            CHECK_EQUAL(receiver.path.held_datagrams(), fits);
            CHECK_EQUAL(receiver.path.held_bytes(), fits * bytes);
            CHECK_EQUAL(c.held, fits);
            CHECK_EQUAL(c.dropped, 5000 + c.duplicated - fits);
            CHECK(receiver.balanced());
            receiver.release_all();
            CHECK_EQUAL(receiver.got.size(), fits);
            receiver.receive(0, 3 * second, 0, bytes);  // there is room again
            CHECK(c.held > fits);
        }
    }
}

TEST(settings_that_make_no_sense_are_refused_by_the_name_of_the_knob) {
    const auto names = [](const LinkFaults& f, const std::string& knob) {
        return complaint({.default_link = f}).starts_with(knob) &&
               complaint({.links = {{{2, 5}, f}}}).starts_with("link 2 -> 5: " + knob);
    };
    const double nan = std::nan("");
    for (const double bad : {-0.1, 1.1, nan}) {
        CHECK(names({.loss = bad}, "loss "));
        CHECK(names({.shared = bad}, "shared "));
        CHECK(names({.duplicate = bad}, "duplicate "));
        CHECK(names({.reorder = bad}, "reorder "));
        CHECK(names({.corrupt = bad}, "corrupt "));
    }
    for (const double bad : {0.5, nan, HUGE_VAL}) CHECK(names({.burst = bad}, "burst "));
    CHECK(names({.delay = -1}, "delay "));
    CHECK(names({.jitter = -1}, "jitter "));
    CHECK(names({.delay = max_fault_delay + 1}, "delay "));
    CHECK(names({.jitter = max_fault_delay + 1}, "jitter "));
    CHECK(names({.trace = {0, 1, 2}}, "trace "));
    CHECK(names({.loss = 0.9, .burst = 8.9}, "burst "));
    CHECK(names({.loss = 1, .burst = 2}, "burst "));
    CHECK(complaint({.default_link = {.loss = 0.9, .burst = 9}}).empty());
    CHECK(complaint({.default_link = {.loss = 1, .duplicate = 1, .reorder = 1, .corrupt = 1}}).empty());

    const auto refused = [](const auto& action) {
        try {
            action();
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(refused([] { FaultyLink({.loss = 2}, 0, 0, 1); }));
    Receiver receiver;
    receiver.path.set(everywhere({.loss = 1}), 0);
    CHECK(refused([&receiver] { receiver.path.set(everywhere({.loss = 2}), 0); }));
    receiver.receive(0, 0);  // under the settings from before
    CHECK_EQUAL(receiver.got.size(), 0U);
}
