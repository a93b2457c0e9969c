// Packet numbers, acknowledgement, loss detection and reports: both halves of a link, alone and together.
#include <deque>
#include <map>
#include <random>
#include <set>

#include "check.hpp"
#include "link/link.hpp"

using namespace storm;

namespace {

constexpr std::uint64_t credit = 1 << 20;
constexpr Nanos start = second;

Report report_of(std::uint64_t largest, const std::set<std::uint64_t>& arrived, std::uint32_t words = 2) {
    Report report{.largest = largest, .credit_bytes = credit, .words = words};
    for (const std::uint64_t number : arrived) {
        if (number <= largest && largest - number < 64 * words) {
            report.arrived[(largest - number) / 64] |= 1ULL << ((largest - number) % 64);
        }
    }
    return report;
}

// A sender that records acknowledgements and losses; a flight's `chunk` is its number.
struct Sender {
    Outbound out{credit, start};
    std::vector<std::uint32_t> acked, lost;
    std::uint32_t last{};

    std::uint64_t send(Nanos now, std::uint32_t bytes = 1000, bool report = false) {
        return out.depart(
            {.bytes = bytes, .kind = report ? Kind::report : Kind::data, .settled = report, .chunk = ++last}, now);
    }
    void settle(const Report& report, Nanos now) {
        out.settle(
            report, now, [this](const Flight& f) { acked.push_back(f.chunk); },
            [this](const Flight& f) { lost.push_back(f.chunk); });
    }
    void mark_all_lost() {
        out.mark_all_lost([this](const Flight& f) { lost.push_back(f.chunk); });
    }
    void expire(Nanos now) {
        out.expire(now, [this](const Flight& f) { lost.push_back(f.chunk); });
    }
};

}  // namespace

TEST(numbers_rise_from_one_and_each_is_acknowledged_once) {
    Sender sender;
    for (std::uint64_t i = 1; i <= 5; ++i) CHECK_EQUAL(sender.send(start), i);
    CHECK_EQUAL(sender.out.in_flight_bytes(), 5000U);
    sender.settle(report_of(3, {1, 3}), start + millisecond);
    CHECK(sender.acked == (std::vector<std::uint32_t>{1, 3}));
    CHECK_EQUAL(sender.out.in_flight_bytes(), 3000U);
    CHECK_EQUAL(sender.out.last_delivery().delivered_bytes, 2000U);
    CHECK_EQUAL(sender.out.last_delivery().rtt, millisecond);
    sender.settle(report_of(3, {1, 3}), start + millisecond);
    CHECK_EQUAL(sender.acked.size(), 2U);
    CHECK_EQUAL(sender.out.last_delivery().delivered_bytes, 0U);
    sender.settle(report_of(5, {1, 2, 3, 4, 5}), start + millisecond);
    CHECK(sender.acked == (std::vector<std::uint32_t>{1, 3, 2, 4, 5}));
    CHECK_EQUAL(sender.out.in_flight_bytes(), 0U);
    CHECK_EQUAL(sender.out.flights_in_use(), 0U);
    CHECK(sender.lost.empty());
}

TEST(round_trip_leaves_out_the_time_that_the_receiver_held_the_report) {
    Sender sender;
    sender.send(start);
    Report report = report_of(1, {1});
    report.held_us = 400;
    sender.settle(report, start + millisecond);
    CHECK_EQUAL(sender.out.smooth_rtt(), 600 * microsecond);
    // A receiver that claims to have held it since before it was sent changes nothing but its own round trip.
    sender.send(start + second);
    report = report_of(2, {2});
    report.held_us = 0xffff'ffff;
    sender.settle(report, start + second + millisecond);
    CHECK(sender.out.smooth_rtt() > 0);
    CHECK(sender.out.probe_timeout() > 0);
}

TEST(only_the_way_forth_counts_as_a_queue) {
    // The receiver's clock is an hour ahead; reports take 3 ms more than at first, then the datagram does.
    Sender sender;
    const auto trip = [&](Nanos sent_at, Nanos forth, Nanos back) {
        const std::uint64_t number = sender.send(sent_at);
        Report report = report_of(number, {number});
        report.timed_us = static_cast<std::uint32_t>((sent_at + forth + 3600 * second) / microsecond);
        sender.settle(report, sent_at + forth + back);
        return sender.out.last_delivery().rtt;
    };
    CHECK_EQUAL(trip(start, 2 * millisecond, 2 * millisecond), 4 * millisecond);
    CHECK_EQUAL(trip(start + second, 2 * millisecond, 5 * millisecond), 4 * millisecond);
    CHECK_EQUAL(trip(start + 2 * second, 5 * millisecond, 2 * millisecond), 7 * millisecond);
    // A longer route does not count as a queue for ever.
    for (int i = 3; i < 30; ++i) trip(start + i * second, 5 * millisecond, 2 * millisecond);
    CHECK_EQUAL(trip(start + 30 * second, 5 * millisecond, 2 * millisecond), 7 * millisecond);
    CHECK_EQUAL(trip(start + 31 * second, 6 * millisecond, 2 * millisecond), 8 * millisecond);
    // The timers still follow the whole round trip.
    CHECK(sender.out.smooth_rtt() > 6 * millisecond);
}

TEST(round_trip_is_timed_by_the_newest_that_calls_for_a_report) {
    Sender sender;
    Inbound in;
    in.arrive(sender.send(start), 1000, true, start + millisecond);
    in.arrive(sender.send(start), 100, false, start + 2 * millisecond);  // a report of ours
    sender.settle(in.make_report(credit, 0, start + 3 * millisecond), start + 4 * millisecond);
    CHECK_EQUAL(sender.out.last_delivery().rtt, 2 * millisecond);
    CHECK_EQUAL(sender.out.smooth_rtt(), 2 * millisecond);
}

TEST(number_far_below_an_arrived_one_is_lost_and_a_near_one_is_given_time) {
    Sender sender;
    for (int i = 0; i < 9; ++i) sender.send(start);
    sender.settle(report_of(9, {9}), start + millisecond);
    CHECK(sender.lost == std::vector<std::uint32_t>{1});
    CHECK_EQUAL(sender.out.last_delivery().lost_bytes, 1000U);
    // The others are lost a round trip and a quarter after they left.
    const Nanos due = sender.out.loss_at();
    CHECK(due > start + millisecond && due < start + 2 * millisecond);
    sender.expire(due - 1);
    CHECK_EQUAL(sender.lost.size(), 1U);
    sender.expire(due);
    CHECK_EQUAL(sender.lost.size(), 8U);
    CHECK_EQUAL(sender.out.in_flight_bytes(), 0U);
    CHECK_EQUAL(sender.out.loss_at(), never);
}

TEST(number_that_was_given_up_may_turn_out_to_be_late_which_is_told_once_and_weighs_nothing) {
    Sender sender;
    for (int i = 0; i < 10; ++i) sender.send(start);
    sender.settle(report_of(10, {10}), start + millisecond);
    CHECK(sender.lost == (std::vector<std::uint32_t>{1, 2}));
    for (int i = 0; i < 2; ++i) {
        sender.settle(report_of(10, {1, 2, 10}), start + millisecond);
        CHECK(sender.acked == (std::vector<std::uint32_t>{10, 1, 2}));
        CHECK_EQUAL(sender.out.in_flight_bytes(), 7000U);
        CHECK_EQUAL(sender.out.last_delivery().delivered_bytes, 0U);
        CHECK_EQUAL(sender.out.last_delivery().lost_bytes, 0U);
    }
}

TEST(lost_numbers_are_forgotten_in_time) {
    Sender sender;
    sender.send(start);
    for (std::uint32_t i = 2; i < 2000; ++i) {
        sender.send(start);
        sender.settle(report_of(i, {i}), start + millisecond);
    }
    CHECK(sender.lost == std::vector<std::uint32_t>{1});
    CHECK_EQUAL(sender.out.flights_in_use(), 0U);
    sender.settle(report_of(1999, {1}, Report::max_words), start + millisecond);
    CHECK_EQUAL(sender.acked.size(), 1998U);
}

TEST(reports_are_numbered_but_weigh_nothing_and_are_never_lost) {
    Sender sender;
    for (int i = 0; i < 30; ++i) sender.send(start, 500, i != 29);
    CHECK_EQUAL(sender.out.in_flight_bytes(), 500U);
    sender.settle(report_of(30, {30}), start + millisecond);
    CHECK(sender.lost.empty());
    CHECK_EQUAL(sender.acked.size(), 1U);
    CHECK_EQUAL(sender.out.flights_in_use(), 0U);
    CHECK_EQUAL(sender.out.probe_at(), never);
}

TEST(report_of_what_was_never_sent_is_ignored) {
    Sender sender;
    for (int i = 0; i < 5; ++i) sender.send(start);
    Report report = report_of(6, {1, 2, 3, 4, 5, 6});
    report.credit_bytes = 1;
    for (const std::uint64_t largest : {std::uint64_t{6}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
        report.largest = largest;
        sender.settle(report, start + millisecond);
    }
    CHECK(sender.acked.empty());
    CHECK(sender.lost.empty());
    CHECK_EQUAL(sender.out.in_flight_bytes(), 5000U);
    CHECK(sender.out.window_open(10'000));
    sender.settle({.largest = 0, .credit_bytes = credit, .words = Report::max_words}, start + millisecond);
    CHECK(sender.acked.empty());
}

TEST(window_closes_at_the_credit_and_always_lets_one_datagram_through) {
    Sender sender;
    CHECK(sender.out.window_open(credit * 2));  // alone it may exceed the credit, or nothing could ever be sent
    while (sender.out.window_open(1000)) sender.send(start);
    CHECK(sender.out.in_flight_bytes() <= credit);
    CHECK(sender.out.in_flight_bytes() + 1000 > credit);
    Report report = report_of(1, {1});
    report.credit_bytes = 0;
    sender.settle(report, start + millisecond);
    CHECK(!sender.out.window_open(1));
    CHECK_EQUAL(sender.out.window_bytes(), 0U);
    sender.mark_all_lost();
    CHECK(sender.out.window_open(1000));
}

TEST(ring_grows_to_what_a_report_can_name_and_no_further_is_sent) {
    Sender sender;
    std::set<std::uint64_t> all;
    while (sender.out.window_open(1)) all.insert(sender.send(start, 1));
    CHECK_EQUAL(all.size(), Outbound::max_data_flights);
    while (sender.out.flights_in_use() < Outbound::max_flights) all.insert(sender.send(start, 1));
    sender.settle(report_of(Outbound::max_flights, all, Report::max_words), start + millisecond);
    CHECK_EQUAL(sender.acked.size(), Outbound::max_flights);
    for (std::uint32_t i = 0; i < sender.acked.size(); ++i) CHECK_EQUAL(sender.acked[i], i + 1);
    CHECK_EQUAL(sender.out.flights_in_use(), 0U);
    CHECK(sender.out.window_open(1));
}

TEST(peer_that_never_reports_cannot_make_the_ring_grow_for_ever) {
    Sender sender;
    for (std::uint64_t i = 0; i < 10 * Outbound::max_flights; ++i) {
        sender.send(start, 100, i % 3 == 0);
        CHECK(sender.out.flights_in_use() <= Outbound::max_flights);
        CHECK(sender.out.in_flight_bytes() <= 100 * sender.out.flights_in_use());
    }
    const std::uint64_t newest = 10 * Outbound::max_flights;
    std::set<std::uint64_t> all;
    for (std::uint64_t i = 0; i < Outbound::max_flights; ++i) all.insert(newest - i);
    sender.settle(report_of(newest, all, Report::max_words), start + millisecond);
    CHECK_EQUAL(sender.out.in_flight_bytes(), 0U);
}

TEST(probes_back_off_to_a_second_at_most_and_progress_calls_them_back) {
    for (const Nanos round_trip : {200 * microsecond, 800 * millisecond}) {
        Sender sender;
        Nanos now = start;
        CHECK_EQUAL(sender.out.probe_at(), never);
        if (round_trip > 0) {
            sender.settle(report_of(sender.send(now), {1}), now + round_trip);
            now += round_trip;
        }
        const std::uint64_t waiting = sender.send(now);
        const Nanos first = sender.out.probe_at() - now;
        CHECK(first >= round_trip && first <= second);
        Nanos wait = first;
        // A burst may have taken the first ones: they follow each other closely.
        for (int i = 0; i < 15; ++i) {
            sender.out.probed(now += wait);
            wait = sender.out.probe_at() - now;
            CHECK(wait < first);
        }
        sender.out.probed(now += wait);
        for (int i = 0; i < 12; ++i) {
            wait = sender.out.probe_at() - now;
            sender.out.probed(now += wait);
            const Nanos next = sender.out.probe_at() - now;
            CHECK(next >= wait && next <= 2 * wait && next <= second);
        }
        CHECK(wait >= std::min(4 * first, second));
        const std::uint64_t newest = sender.send(now);
        sender.settle(report_of(newest, {waiting}), now + millisecond);
        CHECK(sender.out.probe_at() - now <= 2 * first + 2 * millisecond);
    }
}

TEST(what_was_sent_when_nothing_more_was_left_marks_its_delivery_as_limited) {
    Sender sender;
    sender.send(start);
    sender.send(start);
    sender.settle(report_of(2, {1, 2}), start + millisecond);
    CHECK(!sender.out.last_delivery().app_limited);
    sender.send(start + 2 * millisecond);
    sender.out.on_app_limited();
    sender.send(start + 3 * millisecond);
    sender.settle(report_of(4, {3, 4}), start + 4 * millisecond);
    CHECK(sender.out.last_delivery().app_limited);
    // From here on there is always more to send.
    sender.send(start + 5 * millisecond);
    sender.settle(report_of(5, {5}), start + 6 * millisecond);
    sender.send(start + 6 * millisecond);
    sender.settle(report_of(6, {6}), start + 7 * millisecond);
    CHECK(!sender.out.last_delivery().app_limited);
}

TEST(abandoned_flights_are_lost_at_once_and_free_the_window) {
    Sender sender;
    for (int i = 0; i < 100; ++i) sender.send(start, 1000, i % 10 == 9);
    sender.mark_all_lost();
    CHECK_EQUAL(sender.lost.size(), 90U);
    CHECK_EQUAL(sender.out.in_flight_bytes(), 0U);
    CHECK_EQUAL(sender.out.probe_at(), never);
    CHECK_EQUAL(sender.out.loss_at(), never);
    sender.mark_all_lost();
    CHECK_EQUAL(sender.lost.size(), 90U);
    // The peer is reachable again: it had received one of them after all.
    CHECK_EQUAL(sender.send(start + second), 101U);
    sender.settle(report_of(101, {50, 51, 101}), start + second + millisecond);
    CHECK(sender.acked == (std::vector<std::uint32_t>{51, 101}));  // 50 was a report
    CHECK_EQUAL(sender.out.in_flight_bytes(), 0U);
}

TEST(replay_window_knows_the_last_numbers_and_calls_older_ones_seen) {
    constexpr std::uint64_t reach = Report::max_words * 64;
    Inbound in;
    CHECK(in.seen(0));
    CHECK(!in.seen(1));
    in.arrive(1, 10, true, start);
    CHECK(in.seen(1));
    CHECK(!in.seen(2));
    in.arrive(10, 10, true, start);
    for (const std::uint64_t number : {2ULL, 9ULL, 11ULL}) CHECK(!in.seen(number));
    in.arrive(reach + 5, 10, true, start);
    CHECK(in.seen(5));  // too old to tell
    CHECK(!in.seen(6));
    CHECK(in.seen(10));
    in.arrive(6, 10, true, start);
    CHECK(in.seen(6));
    CHECK_EQUAL(in.largest(), reach + 5);
    CHECK_EQUAL(in.arrived(), 4U);
    // A leap over the whole window forgets all of it.
    in.arrive(10 * reach + 7, 10, true, start);
    for (std::uint64_t number = 9 * reach + 8; number < 10 * reach + 7; ++number) CHECK(!in.seen(number));
    CHECK(in.seen(10 * reach + 7));
    CHECK(in.seen(9 * reach + 7));
}

TEST(replay_window_agrees_with_a_plain_set) {
    constexpr std::uint64_t reach = Report::max_words * 64;
    std::mt19937 random(3);
    Inbound in;
    std::set<std::uint64_t> plain;
    for (int i = 0; i < 30'000; ++i) {
        const std::uint64_t back = random() % (random() % 50 == 0 ? 2 * reach : 40);
        const std::uint64_t front = in.largest() + 1 + random() % (random() % 300 == 0 ? 3 * reach : 4);
        const std::uint64_t number = front > back ? front - back : 1;
        const bool expected = plain.contains(number) || (number <= in.largest() && in.largest() - number >= reach);
        CHECK_EQUAL(in.seen(number), expected);
        if (expected) continue;
        in.arrive(number, 1, true, start);
        plain.insert(number);
    }
}

TEST(report_is_due_at_a_quarter_of_the_credit_or_after_a_delay_or_when_asked_for) {
    Inbound in;
    constexpr Nanos delay = millisecond;
    CHECK_EQUAL(in.report_at(4000, delay), never);
    in.arrive(1, 999, true, start);
    CHECK_EQUAL(in.report_at(4000, delay), start + delay);
    in.arrive(2, 1, true, start + 10);
    CHECK(in.report_at(4000, delay) <= start);
    (void)in.make_report(4000, 0, start + 20);
    CHECK_EQUAL(in.report_at(4000, delay), never);
    in.arrive(3, 500, false, start + 30);  // a report is not answered by a report
    CHECK_EQUAL(in.report_at(4000, delay), never);
    in.report_now();
    CHECK(in.report_at(4000, delay) <= start);
    const Report report = in.make_report(1ULL << 40, 7, start + 30 + 5 * microsecond);
    CHECK_EQUAL(report.largest, 3U);
    CHECK_EQUAL(report.held_us, 5U);
    CHECK_EQUAL(report.overflow, 7U);
    CHECK_EQUAL(report.credit_bytes, 0xffff'ffffU);
    CHECK_EQUAL(report.arrived[0], 7U);
}

TEST(knowledge_of_three_lost_reports_comes_with_the_fourth) {
    Sender sender;
    Inbound in;
    Nanos now = start;
    for (int round = 0; round < 40; ++round) {
        for (int i = 0; i < 100; ++i) in.arrive(sender.send(now), 1000, true, now);
        now += millisecond;
        const Report report = in.make_report(credit, 0, now);
        CHECK(report.words <= Report::max_words);
        if (round % 4 == 3) sender.settle(report, now);
    }
    CHECK_EQUAL(sender.acked.size(), 4000U);
    CHECK(sender.lost.empty());
    CHECK_EQUAL(sender.out.in_flight_bytes(), 0U);
}

TEST(every_flight_gets_a_fate_and_the_window_adds_up_under_loss_both_ways) {
    std::mt19937 random(17);
    Sender sender;
    Inbound in;
    std::set<std::uint32_t> arrived;
    std::map<std::uint32_t, std::uint32_t> sizes;
    std::deque<std::pair<Nanos, Report>> reports;
    Nanos now = start;
    for (int i = 0; i < 60'000; ++i) {
        now += static_cast<Nanos>(random() % 3000);
        if (random() % 4 != 0 && sender.out.window_open(1500)) {
            const auto bytes = static_cast<std::uint32_t>(1 + random() % 1500);
            const bool report = random() % 10 == 0;
            const std::uint64_t number = sender.send(now, bytes, report);
            if (!report) sizes[sender.last] = bytes;
            if (random() % 10 >= 3) {
                in.arrive(number, bytes, !report, now);
                if (!report) arrived.insert(sender.last);
            }
        }
        if (in.report_at(credit, 100 * microsecond) <= now) {
            const Report report = in.make_report(credit, 0, now);
            if (random() % 10 >= 3) reports.emplace_back(now + 500 * microsecond, report);
        }
        while (!reports.empty() && reports.front().first <= now) {
            sender.settle(reports.front().second, now);
            reports.pop_front();
        }
        if (now >= sender.out.loss_at()) sender.expire(now);
        CHECK(sender.out.in_flight_bytes() <= credit);
    }
    // A last datagram, well after the rest, settles all that was sent before.
    now += second;
    in.arrive(sender.send(now, 1), 1, true, now);
    sender.settle(in.make_report(credit, 0, now), now + millisecond);
    sender.expire(now + 10 * second);
    CHECK_EQUAL(sender.out.in_flight_bytes(), 0U);
    std::set<std::uint32_t> settled(sender.acked.begin(), sender.acked.end());
    CHECK_EQUAL(settled.size(), sender.acked.size());
    const std::set<std::uint32_t> lost(sender.lost.begin(), sender.lost.end());
    CHECK_EQUAL(lost.size(), sender.lost.size());
    settled.insert(lost.begin(), lost.end());
    CHECK_EQUAL(settled.size(), sizes.size() + 1);
    for (const std::uint32_t one : sender.acked) CHECK(one == sender.last || arrived.contains(one));
    // Only four lost reports in a row can make an arrived datagram look lost: 0.8 %.
    std::size_t wrongly = 0;
    for (const std::uint32_t one : sender.lost) wrongly += arrived.contains(one) ? 1 : 0;
    CHECK(wrongly * 50 < arrived.size());
}

TEST(it_gets_dark_when_answers_are_overdue_until_one_comes_or_too_much_was_sent) {
    Sender sender;
    CHECK_EQUAL(sender.out.ack_overdue_at(), never);
    const std::uint64_t first = sender.send(start);
    CHECK_EQUAL(sender.out.ack_overdue_at(),
                never);  // nothing was ever answered: the round trip is unknown
    sender.settle(report_of(first, {first}), start + millisecond);
    CHECK_EQUAL(sender.out.ack_overdue_at(), never);  // nothing is in flight

    Nanos now = start + second;
    std::uint64_t last = sender.send(now);
    const Nanos due = sender.out.ack_overdue_at();
    CHECK(due > now + millisecond && due < now + 10 * millisecond);
    now = due;
    CHECK(sender.out.ack_overdue(now) && !sender.out.ack_overdue(now - 1));
    last = sender.send(now);
    CHECK(sender.out.ack_overdue(now));  // sending more does not end it
    sender.settle(report_of(last, {last}), now + millisecond);
    CHECK(!sender.out.ack_overdue(now + millisecond));

    now += second;
    for (int i = 0; i < 2000; ++i) sender.send(now);
    CHECK_EQUAL(sender.out.ack_overdue_at(), never);  // the peer may not exist at all
}

TEST(burst_is_the_mean_number_of_losses_in_a_row) {
    Sender sender;
    CHECK_EQUAL(sender.out.burst(), 1.0);
    Nanos now = start;
    std::set<std::uint64_t> arrived;
    std::uint64_t last = 0;
    for (int run = 0; run < 200; ++run) {
        for (int i = 0; i < 20; ++i) {
            last = sender.send(now);
            if (i >= 5) arrived.insert(last);
        }
        sender.settle(report_of(last, arrived, 8), now += millisecond);
    }
    CHECK(sender.out.burst() > 4.5 && sender.out.burst() < 5.5);
    CHECK(sender.out.lossy());
}

TEST(on_a_lossy_link_questions_follow_each_other_closely_at_first) {
    Sender sender;
    Nanos now = start;
    const auto lose_half = [&] {
        std::set<std::uint64_t> arrived;
        std::uint64_t last = 0;
        for (int i = 0; i < 40; ++i) {
            last = sender.send(now);
            if (i % 2 == 1) arrived.insert(last);
        }
        sender.settle(report_of(last, arrived), now += millisecond);
    };
    for (int i = 0; i < 20; ++i) lose_half();
    sender.send(now);
    const Nanos first = sender.out.probe_at() - now;
    Nanos total = 0;
    for (int i = 0; i < 16; ++i) {
        now = sender.out.probe_at();
        sender.out.probed(now);
        total += sender.out.probe_at() - now;
    }
    CHECK(total <= 16 * first);
    for (int i = 0; i < 1000; ++i) sender.out.probed(now = sender.out.probe_at());
    CHECK(sender.out.probe_at() - now >= second / 2);
}
