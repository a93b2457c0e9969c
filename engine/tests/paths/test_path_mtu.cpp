// Path MTU discovery: found when large datagrams vanish, never lowered by loss alone, raised again when possible.
#include <random>

#include "check.hpp"
#include "paths/path_mtu.hpp"

using namespace storm;

namespace {

// A path under virtual time: carries datagrams up to `carries`, and loses others by chance.
struct Path {
    explicit Path(std::size_t most, double loss_rate = 0.0, std::uint64_t seed = 1)
        : path(512, most), carries(most), loss(loss_rate), random(seed) {}

    void send(std::size_t bytes) {
        const bool lost = bytes > carries || std::uniform_real_distribution<>(0, 1)(random) < loss;
        if (lost) {
            path.on_lost(bytes, now, now);
        } else {
            path.on_acked(bytes, now);
        }
    }
    // Sends data of full size and the search's probes, for some time.
    void run(Nanos duration, Nanos every = millisecond) {
        for (const Nanos until = now + duration; now < until; now += every) {
            if (path.tick(now)) ++changes;
            send(path.bytes());
            while (const std::size_t size = path.take_probe(true, 2 * millisecond, now)) {
                ++probes;
                send(size);
            }
        }
    }

    PathMtu path;
    std::size_t carries;
    double loss;
    std::mt19937_64 random;
    Nanos now{second};
    int changes{}, probes{};
};

}  // namespace

TEST(path_that_carries_everything_is_left_alone) {
    Path path(1472);
    path.run(10 * second);
    CHECK_EQUAL(path.path.bytes(), 1472U);
    CHECK_EQUAL(path.probes, 0);
    CHECK_EQUAL(path.path.timer(true), never);
}

TEST(narrow_path_is_found_within_a_tenth_of_a_second_and_gets_the_largest_usual_size_that_fits) {
    for (const auto& [carries, found] : std::vector<std::pair<std::size_t, std::size_t>>{
             {1172, 1152}, {1252, 1232}, {1392, 1372}, {1464, 1444}, {548, 512}, {512, 512}}) {
        Path path(1472);
        path.run(100 * millisecond);
        path.carries = carries;
        path.run(100 * millisecond);
        CHECK_EQUAL(path.path.bytes(), found);
        CHECK_EQUAL(path.changes, 1);
    }
}

TEST(narrow_path_is_found_by_few_datagrams_a_second_too) {
    Path path(1472);
    path.carries = 1172;
    path.run(3 * second, 200 * millisecond);
    CHECK_EQUAL(path.path.bytes(), 1152U);
}

TEST(narrow_path_is_found_under_loss) {
    for (const double loss : {0.1, 0.4, 0.7}) {
        for (std::uint64_t seed = 0; seed < 12; ++seed) {
            Path path(1472, loss, seed);
            path.carries = 1172;
            path.run(2 * second);
            CHECK(path.path.bytes() <= 1152U);
        }
    }
}

TEST(loss_alone_hardly_ever_narrows_a_path_and_never_for_long) {
    for (const double loss : {0.1, 0.4, 0.7, 0.9}) {
        int narrowed = 0;
        for (std::uint64_t seed = 0; seed < 12; ++seed) {
            Path path(1472, loss, seed);
            path.run(10 * second);
            narrowed += path.changes;
            path.loss = 0.0;
            path.run(120 * second, 10 * millisecond);
            CHECK_EQUAL(path.path.bytes(), 1472U);
        }
        CHECK(narrowed <= 4);  // twice in 120 s, and twice back
    }
}

TEST(outage_does_not_narrow_a_path) {
    Path path(1472);
    path.carries = 0;
    path.run(5 * second);
    CHECK_EQUAL(path.path.bytes(), 1472U);
    path.carries = 1472;
    path.run(second);
    CHECK_EQUAL(path.path.bytes(), 1472U);
    CHECK_EQUAL(path.changes, 0);
}

TEST(path_that_becomes_wider_again_is_used_within_seconds) {
    Path path(1472);
    path.carries = 1172;
    path.run(second);
    path.carries = 1472;
    path.run(3 * second);
    CHECK_EQUAL(path.path.bytes(), 1472U);
    CHECK_EQUAL(path.changes, 2);
}

TEST(path_that_stays_narrow_is_asked_less_and_less_often) {
    Path path(1472);
    path.carries = 1172;
    path.run(10 * second, 5 * millisecond);
    const int early = path.probes;
    path.run(300 * second, 5 * millisecond);
    CHECK_EQUAL(path.path.bytes(), 1152U);
    CHECK(path.probes - early < 60);
}

TEST(path_that_narrows_twice_is_followed_both_times) {
    Path path(8972);
    path.carries = 1472;
    path.run(second);
    CHECK_EQUAL(path.path.bytes(), 1444U);
    path.carries = 1172;
    path.run(second);
    CHECK_EQUAL(path.path.bytes(), 1152U);
}

TEST(refusal_by_the_own_interface_starts_the_search_at_once) {
    Path path(1472);
    path.carries = 1172;
    path.path.on_refused(1472, path.now);
    CHECK_EQUAL(path.path.timer(true), path.now);
    path.run(20 * millisecond);
    CHECK_EQUAL(path.path.bytes(), 1152U);
}

TEST(small_datagrams_that_arrive_do_not_hide_that_large_ones_do_not) {
    Path path(1472);
    path.carries = 1172;
    for (int k = 0; k < 15; ++k) {
        path.send(1472);
        path.send(400);
        path.send(1000);
    }
    CHECK_EQUAL(path.path.timer(true), never);
    path.send(1472);
    CHECK_EQUAL(path.path.timer(true), path.now);
}

TEST(jobs_with_small_datagrams_have_nothing_to_find) {
    Path path(300);
    path.carries = 0;
    path.run(second);
    CHECK_EQUAL(path.path.bytes(), 300U);
    CHECK_EQUAL(path.probes, 0);
}

TEST(losses_that_are_told_of_after_later_arrivals_are_chance) {
    Path path(1472);
    for (int report = 0; report < 100; ++report) {
        path.now += millisecond;
        // A report: all that arrived first, then what was lost before the last of them.
        for (Nanos k = 0; k < 80; ++k) path.path.on_acked(1472, path.now + 2 * k);
        for (Nanos k = 0; k < 20; ++k) path.path.on_lost(1472, path.now + k, path.now + millisecond);
        CHECK_EQUAL(path.path.timer(true), never);
    }
}
