// Drivers on real sockets over loopback, several in one process: threads, descriptors, faults, and which thread drives.
// The thread sanitizer runs this file, too.
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "io/driver.hpp"
#include "jobs.hpp"
#include "team.hpp"

using namespace storm;
using namespace storm::check;

TEST(drivers_all_reduce_exactly_and_lossily_over_loopback) {
    Team team(4);
    train(team, 5, 100'003);
    train(team, 5, 100'003, {.budget = 1.0}, 5);
    for (std::uint16_t rank = 0; rank < 4; ++rank) {
        const Driver::Health health = team[rank].health();
        CHECK(health.counters.datagrams_received > 100);
        CHECK_EQUAL(health.counters.corrupt + health.counters.malformed + health.counters.foreign, 0U);
        CHECK(team[rank].links({static_cast<std::uint16_t>((rank + 1) % 4)}).at(0).round_trip > 0);
    }
}

TEST(drivers_work_without_segmentation_and_without_coalescing) {
    for (const bool segmentation : {false, true}) {
        for (const bool coalescing : {false, true}) {
            Team team(2, {.segmentation = segmentation, .coalescing = coalescing});
            train(team, 2, 50'001);
            if (!segmentation) CHECK(!team[0].health().segments);
            if (!coalescing) CHECK(!team[0].health().coalesces);
        }
    }
}

TEST(drivers_work_over_ipv6) {
    try {
        const Driver probe("::1", 0, {});
    } catch (const std::system_error&) {
        return;  // this machine has none
    }
    Team team(2, {}, "::1");
    train(team, 2, 50'001);
}

TEST(drivers_work_with_tiny_socket_buffers_and_large_datagrams) {
    Team team(3, {.receive_buffer = 64 << 10}, "127.0.0.1", [](CoreConfig& config) { config.datagram_bytes = 9'000; });
    train(team, 2, 100'000);
}

TEST(several_threads_wait_on_one_driver_and_take_turns_driving) {
    Team team(2);
    constexpr std::uint32_t waiters = 6;
    std::vector<AllToAll> jobs;
    for (std::uint32_t i = 0; i < waiters; ++i) jobs.emplace_back(2, i, [](auto, auto) { return std::size_t{40'000}; });
    std::vector<std::future<void>> threads;
    std::atomic<int> done{0};
    for (std::uint32_t i = 0; i < waiters; ++i) {
        threads.push_back(on_thread([&, i] {
            const Outcome outcome = wait_for(team[0], team[0].post(jobs[i].spec(0, 0, {}, i)));
            CHECK(outcome.status == Status::ok);
            ++done;
        }));
    }
    // Each exchange ends only when the other side posts it: the caller that drives leaves and another takes over.
    for (std::uint32_t i = 0; i < waiters; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        CHECK(wait_for(team[1], team[1].post(jobs[i].spec(1, 0, {}, i))).status == Status::ok);
    }
    for (auto& thread : threads) thread.get();
    CHECK_EQUAL(done.load(), static_cast<int>(waiters));
    for (const AllToAll& job : jobs) CHECK(job.complete(0) && job.complete(1));
}

TEST(exchange_ends_without_anyone_waiting) {
    Team team(2);
    AllToAll job(2, 1, [](auto, auto) { return std::size_t{2'000'000}; });
    const std::uint64_t id0 = team[0].post(job.spec(0, 0)), id1 = team[1].post(job.spec(1, 0));
    for (int i = 0; i < 2000 && !(team[0].ended(id0) && team[1].ended(id1)); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(team[0].ended(id0) && team[1].ended(id1));
    CHECK(job.complete(0) && job.complete(1));
    CHECK(wait_for(team[0], id0).status == Status::ok);
    CHECK(!team[0].ended(id0));  // the outcome is returned once
}

TEST(posts_from_many_threads_at_once_all_complete) {
    Team team(2);
    constexpr std::uint32_t threads = 4, each = 10;
    std::vector<AllToAll> jobs;
    for (std::uint32_t i = 0; i < threads * each; ++i)
        jobs.emplace_back(2, i, [&](auto, auto) { return std::size_t{1 + i * 997}; });
    std::vector<std::future<void>> running;
    for (std::uint32_t t = 0; t < threads; ++t) {
        for (std::uint16_t rank = 0; rank < 2; ++rank) {
            running.push_back(on_thread([&, t, rank] {
                std::vector<std::uint64_t> ids;
                for (std::uint32_t i = 0; i < each; ++i)
                    ids.push_back(team[rank].post(jobs[t * each + i].spec(rank, i, {}, t)));
                for (const std::uint64_t id : ids) CHECK(wait_for(team[rank], id).status == Status::ok);
            }));
        }
    }
    for (auto& one : running) one.get();
    for (const AllToAll& job : jobs) CHECK(job.complete(0) && job.complete(1));
}

TEST(wait_gives_up_after_its_time_and_the_exchange_goes_on) {
    Team team(2);
    AllToAll job(2, 1, [](auto, auto) { return std::size_t{10'000}; });
    const std::uint64_t id = team[0].post(job.spec(0, 0));
    Outcome outcome;
    const Nanos start = clock_now();
    CHECK(!team[0].wait(id, 30 * millisecond, outcome));
    const Nanos waited = clock_now() - start;
    CHECK(waited >= 30 * millisecond && waited < 500 * millisecond);
    team[1].post(job.spec(1, 0));
    CHECK(wait_for(team[0], id).status == Status::ok);
}

TEST(cancelling_wakes_whoever_waits) {
    Team team(2);
    AllToAll job(2, 1, [](auto, auto) { return std::size_t{10'000}; });
    const std::uint64_t id = team[0].post(job.spec(0, 0));
    auto waiter = on_thread([&] { CHECK(wait_for(team[0], id).status == Status::closed); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const Nanos start = clock_now();
    team[0].cancel(id);
    waiter.get();
    CHECK(clock_now() - start < second);
}

TEST(closing_wakes_everyone_who_waits_with_an_error) {
    Team team(2);
    AllToAll job(2, 1, [](auto, auto) { return std::size_t{10'000}; });
    std::vector<std::future<void>> waiters;
    for (std::uint32_t channel = 0; channel < 4; ++channel) {
        const std::uint64_t id = team[0].post(job.spec(0, 0, {}, channel));
        waiters.push_back(on_thread([&team, id] {
            Outcome outcome;
            (void)team[0].wait(id, plenty, outcome);
        }));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    team[0].close(0);
    for (auto& waiter : waiters) {
        bool thrown = false;
        try {
            waiter.get();
        } catch (const std::runtime_error&) {
            thrown = true;
        }
        CHECK(thrown);
    }
    bool refused = false;
    try {
        team[0].post(job.spec(0, 1));
    } catch (const std::runtime_error&) {
        refused = true;
    }
    CHECK(refused);
    team[0].close(second);  // closing twice is allowed
}

TEST(goodbye_ends_what_others_wait_for) {
    Team team(3);
    train(team, 1, 1'000);
    AllToAll job(3, 1, [](auto, auto) { return std::size_t{10'000}; });
    const std::uint64_t id0 = team[0].post(job.spec(0, 1)), id1 = team[1].post(job.spec(1, 1));
    const Nanos start = clock_now();
    team[2].close(5 * second);
    CHECK(wait_for(team[0], id0).status != Status::ok);
    CHECK(wait_for(team[1], id1).status != Status::ok);
    CHECK(clock_now() - start < 2 * second);
}

TEST(readmission_wakes_whoever_waits_and_the_new_process_takes_part_while_the_old_one_is_not_believed) {
    Team team(3);
    train(team, 3, 30'000);
    AllToAll lost(3, 1, [](auto, auto) { return std::size_t{100'000}; });
    const std::uint64_t id = team[0].post(lost.spec(0, 3));
    std::future<void> waiting = on_thread([&] { CHECK(wait_for(team[0], id).status == Status::peer_silent); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    auto fresh = std::make_unique<Driver>("127.0.0.1", std::uint16_t{0}, SocketConfig{});
    std::vector<Address> addresses;
    for (const auto& driver : team.drivers) addresses.emplace_back("127.0.0.1", driver->socket().port());
    CoreConfig config;
    config.rank = 2;
    config.world = 3;
    config.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
    config.secrets.incarnations = {0, 0, 1};
    config.receive_buffer = fresh->socket().receive_buffer();
    fresh->start(config, addresses);
    const Address at("127.0.0.1", fresh->socket().port());
    const auto start = std::chrono::steady_clock::now();
    for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{1}}) team[rank].readmit(2, at, 1, {});
    waiting.get();
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(500));
    std::swap(team.drivers[2], fresh);
    fresh->close(0);  // says goodbye, which no peer takes for the new one's
    fresh.reset();
    train(team, 5, 30'000, {}, 4);
    CHECK(team[0].health().counters.corrupt > 0);
}

TEST(nothing_is_left_of_a_closed_driver) {
    {
        Team warm_up(2);  // allocates what the runtime keeps after the first thread
        train(warm_up, 1, 100);
    }
    const std::size_t threads = threads_now(), descriptors = descriptors_now();
    for (int i = 0; i < 3; ++i) {
        Team team(3);
        CHECK_EQUAL(threads_now(), threads + 3);  // one each
        train(team, 1, 10'000);
        if (i == 1) {
            for (auto& driver : team.drivers) driver->close(10 * millisecond);
            CHECK_EQUAL(descriptors_now(), descriptors);
        }
    }
    CHECK(settles_at(threads));
    CHECK_EQUAL(descriptors_now(), descriptors);
    const Driver never_started("127.0.0.1", 0, {});
    CHECK_EQUAL(threads_now(), threads);
}

TEST(idle_drivers_use_no_processor) {
    const auto used = [] {
        rusage usage{};
        getrusage(RUSAGE_SELF, &usage);
        return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * second +
               (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * microsecond;
    };
    Team team(4);
    train(team, 2, 10'000);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the last reports
    rusage before{}, after{};
    getrusage(RUSAGE_SELF, &before);
    const Nanos start = used();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const Nanos spent = used() - start;
    getrusage(RUSAGE_SELF, &after);
    CHECK(spent < 5 * millisecond);
    CHECK(after.ru_nvcsw - before.ru_nvcsw < 20);  // no thread woke up to poll
    // A caller that waits for a late peer does not spin either.
    AllToAll job(4, 1, [](auto, auto) { return std::size_t{1'000}; });
    const std::uint64_t id = team[0].post(job.spec(0, 2));
    const Nanos waiting = used();
    Outcome outcome;
    CHECK(!team[0].wait(id, 300 * millisecond, outcome));
    CHECK(used() - waiting < 15 * millisecond);
}

TEST(faults_may_be_set_while_exchanges_run) {
    Team team(3);
    auto weather = std::make_shared<FaultSettings>();
    weather->seed = 3;
    weather->default_link = {.loss = 0.2, .duplicate = 0.05, .reorder = 0.05, .corrupt = 0.02};
    std::atomic<bool> over{false};
    auto changer = on_thread([&] {
        for (bool on = true; !over; on = !on) {
            Driver::set_faults(on ? weather : nullptr);
            for (std::uint16_t rank = 0; rank < 3; ++rank) (void)team[rank].health();
            std::this_thread::sleep_for(std::chrono::milliseconds(3));
        }
    });
    train(team, 10, 60'000);
    over = true;
    changer.get();
    CHECK(team[0].health().faults.lost > 0);
    CHECK(team[0].health().counters.repaired > 0);
    Driver::set_faults(nullptr);
    train(team, 1, 10'000, {}, 10);
}

TEST(faults_may_be_set_while_drivers_come_and_go) {
    std::atomic<bool> over{false};
    auto changer = on_thread([&] {
        const auto weather =
            std::make_shared<FaultSettings>(FaultSettings{.seed = 1, .default_link = {.loss = 0.1}, .links = {}});
        for (bool on = true; !over; on = !on) Driver::set_faults(on ? weather : nullptr);
    });
    for (int i = 0; i < 8; ++i) {
        Team team(2);
        train(team, 1, 1'000);
    }
    over = true;
    changer.get();
    Driver::set_faults(nullptr);
}

TEST(deadline_is_kept_by_the_clock_whoever_sleeps) {
    // Nothing but timers wakes a thread: no process listens at the peer's port.
    Driver driver("127.0.0.1", 0, {});
    std::uint16_t dead_port = 0;
    {
        const Driver gone("127.0.0.1", 0, {});
        dead_port = gone.socket().port();
    }
    CoreConfig config;
    config.world = 2;
    driver.start(config, {Address("127.0.0.1", driver.socket().port()), Address("127.0.0.1", dead_port)});
    Buffer got(1'000);
    std::uint32_t seq = 0;
    const auto receive = [&](Nanos deadline) {
        ExchangeSpec spec = exchange_on(0, seq++, {.deadline = deadline});
        spec.receives.push_back({.peer = 1, .into = got.data(), .bytes = got.size()});
        return driver.post(spec);
    };
    const auto ends_in_time = [&](std::uint64_t id, Nanos posted_at, Nanos deadline) {
        for (int i = 0; i < 400 && !driver.ended(id); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const Outcome outcome = wait_for(driver, id);
        CHECK(outcome.status == Status::ok);
        CHECK(outcome.ended - posted_at >= deadline);
        CHECK(outcome.ended - posted_at < deadline + 100 * millisecond);  // the next probe would wake it later
    };
    // The engine's own thread.
    Nanos now = clock_now();
    ends_in_time(receive(20 * millisecond), now, 20 * millisecond);
    // A caller that waits for it.
    now = clock_now();
    const Outcome waited = wait_for(driver, receive(20 * millisecond));
    CHECK(waited.ended - now < 120 * millisecond);
    // A caller that waits for something else, and sleeps already.
    const std::uint64_t other = receive(never);
    auto waiter = on_thread([&] {
        Outcome outcome;
        CHECK(!driver.wait(other, 60 * millisecond, outcome));
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    now = clock_now();
    ends_in_time(receive(15 * millisecond), now, 15 * millisecond);
    // And the engine's thread again, once that caller has left.
    now = clock_now();
    const std::uint64_t last = receive(80 * millisecond);
    waiter.get();
    ends_in_time(last, now, 80 * millisecond);
    // A sleeping caller does not hold up the end.
    bool thrown = false;
    auto sleeper = on_thread([&] {
        Outcome outcome;
        try {
            (void)driver.wait(other, plenty, outcome);
        } catch (const std::runtime_error&) {
            thrown = true;
        }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    now = clock_now();
    driver.close(0);
    sleeper.get();
    CHECK(thrown);
    CHECK(clock_now() - now < 100 * millisecond);
}

TEST(garbage_from_the_network_is_counted_and_dropped) {
    Team team(2);
    std::atomic<bool> over{false};
    auto vandal = on_thread([&] {
        const Address target("127.0.0.1", team[0].socket().port());
        const int fd = ::socket(AF_INET, SOCK_DGRAM, 0);
        std::mt19937 random(1);
        while (!over) {
            const Buffer noise = random_buffer(random() % 3000, random());
            (void)!::sendto(fd, noise.data(), noise.size(), 0, target.get(), target.size());
        }
        ::close(fd);
    });
    train(team, 10, 50'000);
    over = true;
    vandal.get();
    const Counters counters = team[0].health().counters;
    CHECK(counters.malformed + counters.foreign > 0);
}
