// A driver in a process that runs out of descriptors, threads or memory, or on a network that floods it. It may fail
// with an error that says why, but it may neither end the process nor block a caller.
#include <fcntl.h>
#include <netinet/udp.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <new>
#include <system_error>

#include "io/driver.hpp"
#include "jobs.hpp"
#include "memory.hpp"
#include "team.hpp"

using namespace storm;
using namespace storm::check;

namespace {

// While it lives, the process can open `room` descriptors more and then none.
class FewDescriptors {
public:
    explicit FewDescriptors(std::size_t room) {
        getrlimit(RLIMIT_NOFILE, &before_);
        int highest = 0;
        for (int fd = 0; fd < 1024; ++fd) {
            if (fcntl(fd, F_GETFD) >= 0) highest = fd;
        }
        rlimit few = before_;
        few.rlim_cur = static_cast<rlim_t>(highest) + 1 + room;
        taken_.reserve(few.rlim_cur);
        setrlimit(RLIMIT_NOFILE, &few);
        for (int fd = open("/dev/null", O_RDONLY); fd >= 0; fd = open("/dev/null", O_RDONLY)) taken_.push_back(fd);
        for (std::size_t i = 0; i < room; ++i) {
            ::close(taken_.back());
            taken_.pop_back();
        }
    }
    ~FewDescriptors() {
        for (const int fd : taken_) ::close(fd);
        setrlimit(RLIMIT_NOFILE, &before_);
    }
    FewDescriptors(const FewDescriptors&) = delete;
    FewDescriptors& operator=(const FewDescriptors&) = delete;

private:
    rlimit before_{};
    std::vector<int> taken_;
};

// While it lives, no thread can be made: a stack of this size fits into no address space.
class NoThreads {
public:
    NoThreads() {
        pthread_attr_t huge;
        pthread_getattr_default_np(&before_);
        pthread_attr_init(&huge);
        pthread_attr_setstacksize(&huge, std::size_t{1} << 50);
        CHECK_EQUAL(pthread_setattr_default_np(&huge), 0);
        pthread_attr_destroy(&huge);
    }
    ~NoThreads() {
        pthread_setattr_default_np(&before_);
        pthread_attr_destroy(&before_);
    }
    NoThreads(const NoThreads&) = delete;
    NoThreads& operator=(const NoThreads&) = delete;

private:
    pthread_attr_t before_{};
};

// Sends a driver more than it can read, from threads of its own, while it lives.
class Flood {
public:
    explicit Flood(const Driver& target) {
        const Address to("127.0.0.1", target.socket().port());
        for (int i = 0; i < 3; ++i) {
            threads_.emplace_back([this, to] {
                const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
                const int segment = 100;  // one call, many datagrams: to send them is cheaper than to read them
                setsockopt(fd, SOL_UDP, UDP_SEGMENT, &segment, sizeof segment);
                const Buffer noise(6'000);
                while (!over_) (void)!::sendto(fd, noise.data(), noise.size(), 0, to.get(), to.size());
                ::close(fd);
            });
        }
    }
    ~Flood() {
        over_ = true;
        for (auto& thread : threads_) thread.join();
    }
    Flood(const Flood&) = delete;
    Flood& operator=(const Flood&) = delete;

private:
    std::atomic<bool> over_{};
    std::vector<std::thread> threads_;
};

// The code of the system's refusal, or 0 where `work` succeeds; it must name what to do about it.
template <class Work>
int refusal(Work&& work, const std::string& remedy = "") {
    try {
        work();
    } catch (const std::system_error& error) {
        CHECK(std::string(error.what()).find(remedy) != std::string::npos);
        return error.code().value();
    }
    return 0;
}

template <class Work>
bool throws_runtime_error(Work&& work) {
    try {
        work();
    } catch (const std::runtime_error&) {
        return true;
    }
    return false;
}

// Two drivers that are yet to be started.
struct Unstarted {
    Unstarted() {
        for (int rank = 0; rank < 2; ++rank) {
            team.drivers.push_back(std::make_unique<Driver>("127.0.0.1", std::uint16_t{0}, SocketConfig{}));
            addresses.emplace_back("127.0.0.1", team.drivers.back()->socket().port());
        }
    }
    void start(std::uint16_t rank) {
        CoreConfig config;
        config.rank = rank;
        config.world = 2;
        config.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
        team[rank].start(config, addresses);
    }

    Team team{0};
    std::vector<Address> addresses;
};

}  // namespace

TEST(driver_that_finds_no_descriptor_says_so_and_can_be_started_later) {
    const std::size_t before = descriptors_now();
    std::size_t failures = 0;
    for (std::size_t room = 0; failures == room; ++room) {
        Unstarted pair;
        int code = 0;
        {
            const FewDescriptors few(room);
            code = refusal([&] { pair.start(0); }, "rank 0: the engine needs 6 more descriptors, see `ulimit -n`");
        }
        CHECK(code == 0 || code == EMFILE);
        if (code != 0) {
            ++failures;
            CHECK_EQUAL(descriptors_now(), before + 2);  // the two sockets
            pair.start(0);
        }
        pair.start(1);
        train(pair.team, 1, 10'000);
    }
    CHECK(failures >= 6);
    CHECK_EQUAL(descriptors_now(), before);
}

TEST(driver_that_finds_no_descriptor_can_be_closed_and_destroyed) {
    for (const bool closed : {false, true}) {
        Unstarted pair;
        {
            const FewDescriptors few(2);
            CHECK_EQUAL(refusal([&] { pair.start(0); }), EMFILE);
        }
        if (closed) {
            pair.team[0].close(second);
            CHECK(throws_runtime_error([&] { pair.start(0); }));
        }
    }
}

TEST(driver_that_cannot_have_a_thread_says_so_and_can_be_started_later) {
    const std::size_t before = descriptors_now();
    {
        Unstarted pair;
        {
            const NoThreads none;
            CHECK_EQUAL(refusal([&] { pair.start(0); }, "rank 0: the engine needs a thread, see `ulimit -u`"), EAGAIN);
        }
        CHECK_EQUAL(descriptors_now(), before + 2);
        Driver::set_faults(nullptr);  // reaches every driver that runs, and only those
        pair.start(0);
        pair.start(1);
        train(pair.team, 1, 10'000);
    }
    CHECK_EQUAL(descriptors_now(), before);
}

TEST(socket_that_cannot_be_opened_or_bound_leaves_no_descriptor) {
    const std::size_t before = descriptors_now();
    {
        const FewDescriptors few(0);
        CHECK_EQUAL(refusal([] { const Driver none("127.0.0.1", 0, {}); }), EMFILE);
    }
    {
        const Driver first("127.0.0.1", 0, {});
        const std::uint16_t taken = first.socket().port();
        CHECK_EQUAL(refusal([&] { const Driver other("127.0.0.1", taken, {}); }), EADDRINUSE);
    }
    bool opened = false;
    for (long allowed = 0; !opened; ++allowed) {
        try {
            const ScarceMemory scarce(allowed);
            const Driver one("127.0.0.1", 0, {});
            opened = true;
        } catch (const std::bad_alloc&) {
        }
    }
    CHECK_EQUAL(descriptors_now(), before);
}

TEST(caller_that_runs_out_of_memory_while_it_drives_leaves_nobody_waiting) {
    long allowed = 0;
    for (bool failed = true; failed; ++allowed) {
        Team team(2);
        AllToAll job(2, 1, [](auto, auto) { return std::size_t{100'000}; });
        const std::uint64_t id = team[0].post(job.spec(0, 0));
        const std::uint64_t other = team[0].post(job.spec(0, 0, {}, 1));
        failed = false;
        Outcome outcome;
        auto late = on_thread([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            (void)team[1].post(job.spec(1, 0));
        });
        try {
            const ScarceMemory scarce(allowed);
            (void)team[0].wait(id, plenty, outcome);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        late.get();
        if (failed) {
            const Nanos start = clock_now();
            CHECK(throws_runtime_error([&] { (void)team[0].wait(other, plenty, outcome); }));
            CHECK(throws_runtime_error([&] { (void)team[0].post(job.spec(0, 1)); }));
            team[0].close(second);
            CHECK(clock_now() - start < second / 2);
        }
    }
    CHECK(allowed > 1);
}

TEST(engine_that_runs_out_of_memory_tells_whoever_waits_and_spares_the_process) {
    long allowed = 0;
    for (bool failed = true; failed; ++allowed) {
        Team team(2);
        AllToAll job(2, 1, [](auto, auto) { return std::size_t{100'000}; });
        const ScarceMemoryElsewhere scarce(allowed);
        failed = false;
        std::array<std::uint64_t, 2> ids{};
        for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{1}}) {
            failed |= throws_runtime_error([&] { ids[rank] = team[rank].post(job.spec(rank, 0)); });
        }
        for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{1}}) {
            failed |= throws_runtime_error([&] {
                for (int i = 0; i < 50 && !team[rank].ended(ids[rank]); ++i)
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                Outcome outcome;
                (void)team[rank].wait(ids[rank], 0, outcome);
            });
        }
    }
    CHECK(allowed > 1);
}

TEST(flood_keeps_nobody_beyond_his_time_and_nobody_out) {
    // Read one by one from a long queue, the datagrams keep the reader busy all the time.
    Team team(2, {.receive_buffer = 64 << 20, .coalescing = false});
    AllToAll job(2, 1, [](auto, auto) { return std::size_t{10'000}; });
    const std::uint64_t id = team[0].post(job.spec(0, 0)), other = team[0].post(job.spec(0, 0, {}, 1));
    const Nanos limit = 600 * millisecond;
    const auto waits = [&](std::uint64_t what) {
        const Nanos start = clock_now();
        Outcome outcome;
        CHECK(!team[0].wait(what, 100 * millisecond, outcome));
        return clock_now() - start;
    };
    const auto took = [](auto&& work) {
        const Nanos start = clock_now();
        work();
        return clock_now() - start;
    };
    Nanos driving = 0, beside = 0, asking = 0;
    const Flood flood(team[0]);
    for (int i = 0; i < 5; ++i) {
        auto second_caller = std::async(std::launch::async, [&] { return waits(other); });
        auto third_caller = std::async(std::launch::async, [&] { return took([&] { (void)team[0].health(); }); });
        driving = std::max(driving, waits(id));
        beside = std::max(beside, second_caller.get());
        asking = std::max(asking, third_caller.get());
    }
    // While the caller waits elsewhere, the engine's own thread is just as busy.
    for (int i = 0; i < 5; ++i) asking = std::max(asking, took([&] { (void)team[0].health(); }));
    std::future<void> late;
    const Nanos closing = took([&] {
        late = on_thread([&] {
            Outcome outcome;
            CHECK(throws_runtime_error([&] { (void)team[0].wait(id, plenty, outcome); }));
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        team[0].close(50 * millisecond);
    });
    late.get();
    CHECK(driving < limit);
    CHECK(beside < limit);
    CHECK(asking < limit);
    CHECK(closing < limit);
}
