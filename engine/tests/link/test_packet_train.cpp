// Packet-train estimates: what the spacing of the first datagrams shows.
#include "check.hpp"
#include "link/packet_train.hpp"

using namespace storm;

namespace {

constexpr std::uint32_t datagram = 1'000;

// Sends `count` datagrams every `sending`, which arrive every `arriving_us`, but for those of which `lost` says so.
// Each is timed by a report of its own. Returns the last estimate.
template <class Lost>
Dispersion run(int count, Nanos sending, std::uint32_t arriving_us, Lost&& lost, std::uint32_t clock_us = 0xffff'fff0) {
    PacketTrain train;
    for (int i = 1; i <= count; ++i) train.on_send(static_cast<std::uint64_t>(i), i == 1);
    Dispersion last;
    for (int i = 1; i <= count; ++i) {
        if (lost(i)) continue;
        const auto number = static_cast<std::uint64_t>(i);
        train.on_arrived(number, datagram);
        train.on_timed(number, i * sending, clock_us + static_cast<std::uint32_t>(i) * arriving_us);
        const Dispersion now = train.take();
        if (now.bytes_per_s > 0) last = now;
    }
    return last;
}

const auto none = [](int) { return false; };

}  // namespace

TEST(datagrams_that_arrive_more_slowly_than_they_were_sent_show_the_speed_of_the_path) {
    const Dispersion seen = run(32, 50 * microsecond, 400, none);
    CHECK(seen.spread);
    CHECK(seen.bytes_per_s > 0.99 * 2.5e6 && seen.bytes_per_s < 1.01 * 2.5e6);
}

TEST(datagrams_that_arrive_as_they_were_sent_show_only_that_the_path_is_fast) {
    const Dispersion seen = run(32, 50 * microsecond, 50, none);
    CHECK(!seen.spread);
    CHECK(seen.bytes_per_s <= 1.01 * 20e6);
}

TEST(what_was_lost_of_a_train_does_not_count) {
    const Dispersion seen = run(32, 50 * microsecond, 400, [](int i) { return i % 4 == 2; });
    CHECK(seen.spread);
    CHECK(seen.bytes_per_s > 0.7 * 2.5e6 && seen.bytes_per_s < 0.8 * 2.5e6);
}

TEST(few_datagrams_tell_nothing) {
    CHECK_EQUAL(run(PacketTrain::least_datagrams, 50 * microsecond, 400, none).bytes_per_s, 0);
}

TEST(arrival_times_that_nobody_can_have_seen_never_make_a_path_faster_than_what_was_sent) {
    for (const std::uint32_t arriving_us : {0U, 1U, 0x8000'0000U, 0xffff'ffffU, 0x7fff'ffffU}) {
        const Dispersion seen = run(64, 50 * microsecond, arriving_us, none);
        CHECK(seen.bytes_per_s >= 0 && seen.bytes_per_s <= 1.01 * 20e6);
    }
}

TEST(a_train_ends_with_the_first_answer_and_another_begins_after_a_silence) {
    PacketTrain train;
    for (std::uint64_t i = 1; i <= 4; ++i) train.on_send(i, i == 1);
    train.on_arrived(1, datagram);
    train.on_timed(1, microsecond, 1'000);
    for (std::uint64_t i = 5; i <= 40; ++i) train.on_send(i, false);
    for (std::uint64_t i = 2; i <= 40; ++i) {
        train.on_arrived(i, datagram);
        train.on_timed(i, static_cast<Nanos>(i) * microsecond, static_cast<std::uint32_t>(1'000 * i));
    }
    CHECK_EQUAL(train.take().bytes_per_s, 0);  // datagrams that left later were clocked by answers
    for (std::uint64_t i = 41; i <= 80; ++i) train.on_send(i, i == 41);
    for (std::uint64_t i = 41; i <= 80; ++i) {
        train.on_arrived(i, datagram);
        train.on_timed(i, static_cast<Nanos>(i) * microsecond, static_cast<std::uint32_t>(1'000 * i));
    }
    CHECK(train.take().spread);
    CHECK_EQUAL(train.take().bytes_per_s, 0);  // nothing new since
}
