// Drivers of one job in one process, over loopback, and what their tests need to know about the process.
#pragma once

#include <dirent.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "io/driver.hpp"
#include "jobs.hpp"

namespace storm::check {

inline constexpr Nanos plenty = 20 * second;

inline std::size_t entries_of(const char* directory) {
    DIR* dir = opendir(directory);
    std::size_t count = 0;
    while (readdir(dir) != nullptr) ++count;
    closedir(dir);
    return count;
}

inline std::size_t threads_now() { return entries_of("/proc/self/task"); }
inline std::size_t descriptors_now() { return entries_of("/proc/self/fd"); }

// A thread that has ended stays in /proc for a moment.
inline bool settles_at(std::size_t threads) {
    for (int i = 0; i < 200 && threads_now() != threads; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return threads_now() == threads;
}

struct Team {
    explicit Team(std::uint16_t world, const SocketConfig& socket = {}, const std::string& host = "127.0.0.1",
                  const std::function<void(CoreConfig&)>& adjust = {}) {
        std::vector<Address> addresses;
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            drivers.push_back(std::make_unique<Driver>(host, std::uint16_t{0}, socket));
            addresses.emplace_back(host, drivers.back()->socket().port());
        }
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            CoreConfig config;
            config.rank = rank;
            config.world = world;
            config.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
            config.receive_buffer = drivers[rank]->socket().receive_buffer();
            if (adjust) adjust(config);
            drivers[rank]->start(config, addresses);
        }
    }
    ~Team() { Driver::set_faults(nullptr); }
    Driver& operator[](std::uint16_t rank) { return *drivers.at(rank); }

    std::vector<std::unique_ptr<Driver>> drivers;
};

inline Outcome wait_for(Driver& driver, std::uint64_t id) {
    Outcome outcome;
    CHECK(driver.wait(id, plenty, outcome));
    return outcome;
}

// Runs `work` in a thread; if it fails, the test fails.
template <class Work>
std::future<void> on_thread(Work work) {
    return std::async(std::launch::async, std::move(work));
}

// Every rank runs `rounds` all-reduces in a thread of its own, as a training job does.
inline void train(Team& team, std::uint32_t rounds, std::size_t elements, StageSpec first = {},
                  std::uint32_t first_seq = 0) {
    const auto world = static_cast<std::uint16_t>(team.drivers.size());
    std::vector<AllReduce> jobs;
    for (std::uint32_t round = 0; round < rounds; ++round) jobs.emplace_back(world, elements, round);
    std::vector<std::future<void>> ranks;
    for (std::uint16_t rank = 0; rank < world; ++rank) {
        ranks.push_back(on_thread([&, rank] {
            for (std::uint32_t round = 0; round < rounds; ++round) {
                const Reduce mode = first.budget > 0 ? Reduce::arrived : Reduce::in_order;
                const Outcome outcome =
                    wait_for(team[rank], team[rank].post(jobs[round].spec(rank, first_seq + round, mode, first, {})));
                CHECK(outcome.status == Status::ok);
            }
        }));
    }
    for (auto& rank : ranks) rank.get();
    for (const AllReduce& job : jobs) {
        if (first.budget > 0) {
            for (std::uint16_t rank = 1; rank < world; ++rank) CHECK(job.out[rank] == job.out[0]);
        } else {
            job.check_exact();
        }
    }
}

}  // namespace storm::check
