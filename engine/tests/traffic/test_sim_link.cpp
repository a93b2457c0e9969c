// Links with two classes: what each class gets, what waits, and what is dropped.
#include <vector>

#include "check.hpp"
#include "traffic/sim_link.hpp"

using namespace storm;

namespace {

constexpr std::size_t packet = 1000;
constexpr SimLinkSettings megabyte_per_s{.bytes_per_s = 1e6};  // a packet takes a millisecond

// Keeps both classes waiting for `span`, and returns the bytes of low priority among those that left in it.
double low_part(const SimLinkSettings& settings, Nanos span) {
    SimLink line(settings);
    const Nanos end = second + span;
    Nanos now = second;
    while (now < end) {
        for (const Priority each : {Priority::normal, Priority::low}) {
            while (line.waiting_bytes(each) < 10 * packet) CHECK(line.offer(0, packet, each, now));
        }
        CHECK(line.next_at() <= now);
        now = line.take(now).at;
    }
    const auto normal = static_cast<double>(line.counts(Priority::normal).bytes);
    const auto low = static_cast<double>(line.counts(Priority::low).bytes);
    // Neither faster than the link nor ever idle.
    const double whole = settings.bytes_per_s * static_cast<double>(span) * 1e-9 + settings.burst_bytes;
    CHECK(normal + low > whole - 2 * packet && normal + low < whole + 2 * packet);
    return low / (normal + low);
}

}  // namespace

TEST(packets_of_one_class_leave_one_after_another_at_the_rate_of_the_line) {
    for (const Priority each : {Priority::normal, Priority::low}) {
        SimLink line(megabyte_per_s);
        for (std::uint32_t i = 0; i < 3; ++i) CHECK(line.offer(i, packet, each, second));
        Nanos now = second;
        for (std::uint32_t i = 0; i < 3; ++i) {
            const auto departure = line.take(now);
            CHECK_EQUAL(departure.packet, i);
            now = departure.at;
            CHECK_EQUAL(now, second + (i + 1) * millisecond);
        }
        CHECK_EQUAL(line.next_at(), never);
        // A pause is not made up for.
        CHECK(line.offer(3, packet, each, 2 * second));
        CHECK_EQUAL(line.take(2 * second).at, 2 * second + millisecond);
    }
}

TEST(a_class_alone_has_the_whole_line_whatever_its_share) {
    for (const Priority only : {Priority::normal, Priority::low}) {
        SimLinkSettings settings = megabyte_per_s;
        settings.low_share = 0.1;
        SimLink line(settings);
        Nanos now = second;
        for (int i = 0; i < 1000; ++i) {
            CHECK(line.offer(0, packet, only, now));
            now = line.take(now).at;
        }
        CHECK_EQUAL(now, 2 * second);
    }
}

TEST(classes_that_both_want_the_line_get_their_shares_and_waste_nothing) {
    for (const double share : {0.01, 0.1, 0.5, 0.8}) {
        for (const double burst : {0.0, 10'000.0}) {
            SimLinkSettings settings = megabyte_per_s;
            settings.low_share = share;
            settings.burst_bytes = burst;
            const double got = low_part(settings, 100 * second);
            CHECK(got > 0.98 * share - 0.001 && got < 1.02 * share + 0.001);
        }
    }
}

TEST(without_a_share_the_low_class_waits_until_nobody_else_does) {
    CHECK_EQUAL(low_part(megabyte_per_s, second), 0.0);
    SimLink line(megabyte_per_s);
    CHECK(line.offer(0, packet, Priority::low, second));
    Nanos now = line.take(second).at;
    for (const std::uint32_t low : {1U, 2U}) CHECK(line.offer(low, packet, Priority::low, second));
    for (const std::uint32_t normal : {3U, 4U}) CHECK(line.offer(normal, packet, Priority::normal, second));
    std::vector<std::uint32_t> order;
    while (line.next_at() != never) {
        const auto departure = line.take(now);
        order.push_back(departure.packet);
        now = departure.at;
    }
    CHECK(order == (std::vector<std::uint32_t>{3, 4, 1, 2}));
}

TEST(the_normal_class_goes_first_while_both_are_within_their_shares) {
    SimLinkSettings settings = megabyte_per_s;
    settings.low_share = 0.5;
    SimLink line(settings);
    CHECK(line.offer(0, packet, Priority::low, second));
    const Nanos now = line.take(second).at;
    CHECK(line.offer(1, packet, Priority::low, second));
    CHECK(line.offer(2, packet, Priority::normal, second));
    CHECK_EQUAL(line.take(now).packet, 2U);
}

TEST(a_class_that_had_the_line_for_itself_still_gets_its_share_when_the_other_comes) {
    SimLinkSettings settings = megabyte_per_s;
    settings.low_share = 0.5;
    SimLink line(settings);
    Nanos now = second;
    while (now < 11 * second) {
        CHECK(line.offer(0, packet, Priority::low, now));
        now = line.take(now).at;
    }
    const std::uint64_t before = line.counts(Priority::low).packets;
    while (now < 12 * second) {
        for (const Priority each : {Priority::normal, Priority::low}) {
            while (line.waiting_bytes(each) < 10 * packet) CHECK(line.offer(0, packet, each, now));
        }
        now = line.take(now).at;
    }
    const std::uint64_t got = line.counts(Priority::low).packets - before;
    CHECK(got > 490 && got < 510);  // of a thousand
}

TEST(each_class_drops_and_counts_what_its_own_queue_cannot_hold) {
    SimLinkSettings settings = megabyte_per_s;
    settings.queue_bytes = 5 * packet;
    settings.low_queue_bytes = 2 * packet;
    SimLink line(settings);
    CHECK(line.offer(0, packet, Priority::normal, second));
    (void)line.take(second);  // on the link: waits no more
    for (std::uint32_t i = 0; i < 10; ++i) {
        CHECK_EQUAL(line.offer(i, packet, Priority::normal, second), i < 5);
        CHECK_EQUAL(line.offer(i, packet, Priority::low, second), i < 2);
    }
    CHECK_EQUAL(line.counts(Priority::normal).drops, 5U);
    CHECK_EQUAL(line.counts(Priority::low).drops, 8U);
    for (Nanos now = line.next_at(); line.next_at() != never;) now = line.take(now).at;
    CHECK_EQUAL(line.counts(Priority::normal).packets, 6U);
    CHECK_EQUAL(line.counts(Priority::low).packets, 2U);
}

TEST(a_line_with_a_burst_passes_it_at_once_after_a_pause_and_then_keeps_its_rate) {
    SimLinkSettings settings = megabyte_per_s;
    settings.burst_bytes = 3 * packet;
    SimLink line(settings);
    for (std::uint32_t i = 0; i < 5; ++i) CHECK(line.offer(i, packet, Priority::normal, second));
    std::vector<Nanos> left;
    for (Nanos now = second; line.next_at() != never;) left.push_back(now = line.take(now).at);
    CHECK(left == (std::vector<Nanos>{second, second, second, second + millisecond, second + 2 * millisecond}));
}

TEST(lines_refuse_shares_that_are_none) {
    for (const double share : {-0.1, 1.0, 2.0}) {
        bool refused = false;
        try {
            const SimLink line({.bytes_per_s = 1e6, .low_share = share});
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        CHECK(refused);
    }
}
