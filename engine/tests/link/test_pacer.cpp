// Pacing: the token bucket keeps its rate, its burst and its rest.
#include <cmath>
#include <cstdint>

#include "check.hpp"
#include "congestion/pacer.hpp"
#include "congestion/rate_control.hpp"

using namespace storm;

namespace {

// Sends batches as soon as the pacer lets them go, waking `late` after it said so; returns bytes per second.
double drive(Pacer& pacer, std::size_t batch, Nanos from, Nanos duration, Nanos late = 0) {
    std::uint64_t sent = 0;
    for (Nanos now = from; now < from + duration; now = pacer.next_send_at(now) + late)
        while (pacer.try_send(batch, now)) sent += batch;
    return static_cast<double>(sent) / (static_cast<double>(duration) / 1e9);
}

}  // namespace

TEST(a_pacer_keeps_its_rate_within_a_thousandth) {
    for (const double rate : {12.5e3, 12.5e6, 1.25e9}) {
        for (const std::size_t batch : {std::size_t{1472}, std::size_t{65'536}}) {
            Pacer pacer(rate, 0, 0);
            const Nanos duration = static_cast<Nanos>(5000.0 * static_cast<double>(batch) / rate * 1e9);
            CHECK(std::abs(drive(pacer, batch, 0, duration) / rate - 1) < 1e-3);
        }
    }
}

TEST(a_pacer_makes_up_for_late_wakes_within_its_burst) {
    Pacer pacer(125e6, 2 * 31'250, 0);
    CHECK(std::abs(drive(pacer, 31'250, 0, second, 200 * microsecond) / 125e6 - 1) < 2e-3);
}

TEST(a_pacer_that_may_send_less_after_a_pause_still_makes_up_for_late_wakes) {
    Pacer pacer(1e6, 10'000, 0);
    pacer.set_rest(2'000);
    const auto at_once = [&](Nanos now) {
        std::size_t sent = 0;
        while (pacer.try_send(1'000, now)) sent += 1'000;
        return sent;
    };
    CHECK_EQUAL(at_once(0), 3'000U);
    // Refused just now, so what waits may make up for eight milliseconds; the debt was 1,000.
    CHECK_EQUAL(at_once(8 * millisecond), 8'000U);
    CHECK(pacer.try_send(1'000, pacer.next_send_at(8 * millisecond)));  // nothing waits after it
    CHECK_EQUAL(at_once(3600 * second), 3'000U);
}

TEST(a_pacer_sends_no_more_than_its_burst_and_one_batch_after_a_pause) {
    Pacer pacer(1e6, 10'000, 0);
    std::size_t sent = 0;
    while (pacer.try_send(4'000, 3600 * second)) sent += 4'000;
    CHECK_EQUAL(sent, std::size_t{12'000});
}

TEST(a_pacer_says_exactly_when_it_will_send_again) {
    Pacer pacer(3e6, 0, 5);
    CHECK(pacer.try_send(10'000, 5));
    const Nanos next = pacer.next_send_at(5);
    CHECK(!pacer.try_send(1, next - 2));
    CHECK_EQUAL(pacer.next_send_at(next - 2), next);
    CHECK(pacer.try_send(1, next));
}

TEST(a_new_rate_applies_to_the_debt_that_is_left) {
    Pacer pacer(1e6, 0, 0);
    CHECK(pacer.try_send(10'000, 0));
    pacer.set_rate(2e6, 5 * millisecond);
    CHECK_EQUAL(pacer.next_send_at(5 * millisecond), 7'500 * microsecond);
}

TEST(a_pacer_without_a_rate_waits_for_one) {
    Pacer pacer(0, 0, 0);
    CHECK(pacer.try_send(1, 0));
    CHECK_EQUAL(pacer.next_send_at(second), never);
}

TEST(a_clock_that_steps_back_gives_no_credit) {
    Pacer pacer(1e6, 0, second);
    CHECK(pacer.try_send(1'000, second));
    CHECK(!pacer.try_send(1'000, 0));
    CHECK(!pacer.try_send(1'000, second));
}

TEST(unlimited_and_fixed_links_never_refuse) {
    for (const RateMode mode : {RateMode::unlimited, RateMode::fixed}) {
        RateControl control(mode, 1472, 0);
        for (int i = 0; i < 1000; ++i) CHECK(control.try_send(65'536, 1ULL << 40, i));
        control.on_delivery(
            {.now = second, .rtt = millisecond, .bytes_per_s = 10, .delivered_bytes = 10, .lost_bytes = 1000});
        CHECK(control.try_send(65'536, 1ULL << 40, second));
        CHECK_EQUAL(control.next_send_at(second), second);
        CHECK(std::isinf(control.bytes_per_s()));
        CHECK_EQUAL(control.batch_bytes(), std::size_t{65'536});
    }
}
