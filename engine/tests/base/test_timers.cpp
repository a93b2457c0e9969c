// Timers: the tournament tree gives the same answers as a scan.
#include <random>
#include <vector>

#include "base/timers.hpp"
#include "check.hpp"

using namespace storm;

namespace {

Nanos scan(const std::vector<Nanos>& times) {
    Nanos earliest = never;
    for (const Nanos each : times) earliest = std::min(earliest, each);
    return earliest;
}

}  // namespace

TEST(timers_answer_as_a_scan_does_whatever_happens) {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
        std::mt19937_64 random(seed);
        std::vector<Nanos> truth(1 + random() % 70, never);
        Timers timers(truth.size());
        const auto true_time = [&](Timers::Owner owner) { return truth[owner]; };
        Nanos now = 0;
        for (int step = 0; step < 2000; ++step) {
            const auto owner = static_cast<Timers::Owner>(random() % truth.size());
            switch (random() % 6) {
                case 0:  // a timer moves later, without a call
                    if (truth[owner] != never) truth[owner] += static_cast<Nanos>(random() % 1000);
                    break;
                case 1:  // a timer is no longer needed, without a call
                    truth[owner] = never;
                    break;
                case 2:  // one becomes earlier
                    truth[owner] = std::min(truth[owner], now + static_cast<Nanos>(random() % 1000));
                    timers.set_earlier(owner, truth[owner]);
                    break;
                case 3: timers.set(owner, truth[owner] = now + static_cast<Nanos>(random() % 1000)); break;
                case 4:
                    truth.push_back(never);
                    timers.resize(truth.size());
                    break;
                default: {
                    now += static_cast<Nanos>(random() % 500);
                    std::vector<Timers::Owner> expected;
                    for (Timers::Owner each = 0; each < truth.size(); ++each) {
                        if (truth[each] <= now) expected.push_back(each);
                    }
                    CHECK(timers.take_due(now, true_time) == expected);
                    for (const Timers::Owner each : expected) {
                        truth[each] = random() % 2 == 0 ? never : now + 1 + static_cast<Nanos>(random() % 1000);
                        timers.set(each, truth[each]);
                    }
                }
            }
            CHECK(timers.earliest() <= scan(truth));
            if (random() % 3 == 0) CHECK_EQUAL(timers.next(true_time), scan(truth));
        }
    }
}

TEST(timers_of_nobody_are_never_due) {
    Timers timers;
    const auto none = [](Timers::Owner) { return Nanos{0}; };
    CHECK_EQUAL(timers.next(none), never);
    CHECK(timers.take_due(never - 1, none).empty());
}

TEST(timers_set_all_at_once_are_the_same_as_one_by_one) {
    std::mt19937_64 random(3);
    for (std::size_t owners = 1; owners < 40; ++owners) {
        std::vector<Nanos> truth(owners);
        for (Nanos& each : truth) each = static_cast<Nanos>(random() % 100);
        Timers timers(owners);
        timers.set_all([&](Timers::Owner owner) { return truth[owner]; });
        CHECK_EQUAL(timers.earliest(), scan(truth));
        for (Timers::Owner owner = 0; owner < owners; ++owner) CHECK_EQUAL(timers.at(owner), truth[owner]);
    }
}

TEST(timer_that_is_taken_stays_out_until_it_is_set_again) {
    Timers timers(3);
    timers.set(1, 10);
    const auto true_time = [](Timers::Owner) { return Nanos{10}; };
    CHECK_EQUAL(timers.take_due(10, true_time).size(), 1U);
    CHECK(timers.take_due(10, true_time).empty());
    timers.set(1, 10);
    CHECK_EQUAL(timers.take_due(10, true_time).size(), 1U);
}
