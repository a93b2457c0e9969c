// FaultPath: faults on the receive path of an endpoint, the datagrams that it holds, and its settings.
// Every random test has a fixed seed, so a failure is a fault of the code.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "wire/faults.hpp"

using namespace storm;

namespace {

std::shared_ptr<const FaultSettings> everywhere(const LinkFaults& faults, std::uint64_t seed = 7) {
    return std::make_shared<const FaultSettings>(FaultSettings{.seed = seed, .default_link = faults});
}

// An endpoint of rank 1 behind a FaultPath. Datagrams are numbered; buffers are overwritten after use, by the core as
// by the kernel, so code that keeps a reference instead of a copy fails.
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
            const Fate fate = link.next(0);
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
    CHECK_EQUAL(receiver.path.next_release_at(), 10 + reorder_timeout);
    receiver.release_all();
    CHECK((receiver.got == std::vector<std::uint32_t>{1}));
    CHECK_EQUAL(receiver.got_at[0], 10 + reorder_timeout + millisecond);
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
            due.push_back(i / 10 + link.next(0).delay);
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
            receiver.receive(0, 3 * second, 0, bytes);  // there is space again
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
