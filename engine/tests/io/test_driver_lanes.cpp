// Endpoints with several lanes, several in one process. The thread sanitizer runs this file, too.
#include <future>
#include <optional>
#include <thread>

#include "io/endpoint.hpp"
#include "jobs.hpp"
#include "team.hpp"

using namespace storm;
using namespace storm::check;

namespace {

// Large enough for three lanes in the shards of three ranks.
constexpr std::size_t large = 700'001;

struct Crew {
    // `cut`: this lane between ranks 0 and 1 leads nowhere.
    explicit Crew(std::uint16_t world, std::size_t lanes, bool views = false, std::optional<std::size_t> cut = {}) {
        std::vector<std::vector<Address>> addresses(lanes);
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            all.push_back(std::make_unique<Endpoint>("127.0.0.1", std::uint16_t{0}, lanes + rank, SocketConfig{}));
            for (std::size_t lane = 0; lane < lanes; ++lane)
                addresses[lane].emplace_back("127.0.0.1", all.back()->ports()[lane]);
        }
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            std::vector<CoreConfig> configs(lanes);
            for (std::size_t lane = 0; lane < lanes; ++lane) {
                configs[lane].rank = rank;
                configs[lane].world = world;
                configs[lane].silence = views ? second / 2 : 10 * second;
                configs[lane].secrets.cookie = 0x5eed'c0de'1234'5678ULL + lane;
                configs[lane].receive_buffer = all[rank]->receive_buffer();
            }
            std::vector<std::vector<Address>> reached = addresses;
            if (cut && rank < 2) reached[*cut][1U - rank] = Address("127.0.0.1", nowhere.socket().port());
            all[rank]->start(configs, reached);
            CHECK_EQUAL(all[rank]->lanes(), lanes);
            if (views) all[rank]->with_views([](Views& mine, Nanos now) { mine.watch(now); });
        }
    }
    ~Crew() { Driver::set_faults(nullptr); }
    Endpoint& operator[](std::uint16_t rank) { return *all.at(rank); }

    Driver nowhere{"127.0.0.1", std::uint16_t{0}, SocketConfig{}};  // a socket that is never read
    std::vector<std::unique_ptr<Endpoint>> all;
};

void share_memory(Crew& crew) {
    for (std::uint16_t one = 0; one < crew.all.size(); ++one) {
        for (std::uint16_t other = 0; other < one; ++other) {
            auto from_one = crew[one].offer_shared_memory(other, 1),
                 from_other = crew[other].offer_shared_memory(one, 1);
            crew[one].accept_shared_memory(other, std::move(from_other));
            crew[other].accept_shared_memory(one, std::move(from_one));
            crew[one].use_shared_memory(other, 0);
            crew[other].use_shared_memory(one, 0);
        }
    }
}

Outcome wait_for(Endpoint& endpoint, std::uint64_t id) {
    Outcome outcome;
    CHECK(endpoint.wait(id, plenty, outcome));
    return outcome;
}

void train(Crew& crew, std::uint32_t rounds, std::uint32_t first_seq = 0) {
    const auto world = static_cast<std::uint16_t>(crew.all.size());
    std::vector<AllReduce> jobs;
    for (std::uint32_t round = 0; round < rounds; ++round)
        jobs.emplace_back(world, round % 2 == 0 ? large : 100, round);
    std::vector<std::future<void>> ranks;
    for (std::uint16_t rank = 0; rank < world; ++rank) {
        ranks.push_back(on_thread([&, rank] {
            std::vector<std::uint64_t> ids;
            for (std::uint32_t round = 0; round < rounds; ++round)
                ids.push_back(crew[rank].post(jobs[round].spec(rank, first_seq + round, Reduce::in_order, {}, {})));
            for (const std::uint64_t id : ids) CHECK(wait_for(crew[rank], id).status == Status::ok);
        }));
    }
    for (auto& rank : ranks) rank.get();
    for (const AllReduce& job : jobs) job.check_exact();
}

}  // namespace

TEST(endpoints_with_lanes_all_reduce_exactly_by_datagram_and_through_memory) {
    Crew crew(3, 3);
    train(crew, 6);
    share_memory(crew);
    train(crew, 6, 6);
    for (const auto& endpoint : crew.all) {
        const Driver::Health health = endpoint->health();
        CHECK_EQUAL(health.lane_bytes_sent.size(), 3U);
        for (const std::uint64_t bytes : health.lane_bytes_sent) CHECK(bytes > 3 * large);
        CHECK(health.counters.shared_bytes_sent > 0);
    }
}

TEST(faults_strike_all_lanes_and_exact_sums_stay_exact) {
    Crew crew(2, 3);
    Driver::set_faults(std::make_shared<FaultSettings>(FaultSettings{.seed = 1, .default_link = {.loss = 0.1}}));
    train(crew, 2);
    CHECK(crew[0].health().faults.lost > 0);
}

TEST(a_cancelled_exchange_ends_in_all_lanes) {
    Crew crew(2, 2);
    AllReduce job(2, large, 1);
    const std::uint64_t id = crew[0].post(job.spec(0, 0, Reduce::in_order, {}, {}));
    CHECK(!crew[0].ended(id));
    Outcome outcome;
    CHECK(!crew[0].wait(id, 10 * millisecond, outcome));
    crew[0].cancel(id);
    CHECK(wait_for(crew[0], id).status == Status::closed);
}

TEST(an_exchange_may_be_asked_about_and_cancelled_while_another_thread_waits_for_it) {
    Crew crew(2, 3);
    AllReduce job(2, large, 1);
    const std::uint64_t id = crew[0].post(job.spec(0, 0, Reduce::in_order, {}, {}));
    std::future<void> waits = on_thread([&] { CHECK(wait_for(crew[0], id).status == Status::closed); });
    for (int i = 0; i < 50; ++i) CHECK(!crew[0].ended(id));
    crew[0].cancel(id);
    waits.get();
}

TEST(an_exchange_for_a_view_goes_on_in_all_lanes_without_a_rank_that_died) {
    std::vector<AllReduce> jobs;
    jobs.emplace_back(3, large, 1);
    Crew crew(3, 2, true);
    for (std::uint16_t rank = 0; rank < 3; ++rank) CHECK(crew[rank].wait_view(0, plenty));
    crew.all[2]->close(0);
    std::vector<std::future<void>> ranks;
    for (std::uint16_t rank = 0; rank < 2; ++rank) {
        ranks.push_back(on_thread([&, rank] {
            ExchangeSpec spec = jobs[0].spec(rank, 0, Reduce::in_order, {}, {});
            spec.view = 1;
            const Outcome outcome = wait_for(crew[rank], crew[rank].post(spec));
            CHECK(outcome.status == Status::ok);
            // From the rank that died nothing arrived in any lane; from the other rank, everything did.
            for (const Arrival& arrival : outcome.arrivals)
                CHECK_EQUAL(arrival.missing_bytes, arrival.peer == 2 ? arrival.bytes : 0);
            for (const std::uint16_t count : outcome.counts) CHECK_EQUAL(count, 2);
        }));
    }
    for (auto& rank : ranks) rank.get();
}

TEST(a_lane_that_is_cut_while_others_live_does_not_hold_an_exchange_for_a_view_for_ever) {
    AllReduce job(3, large, 1);  // outlives the lanes that use its memory, also where this test fails
    Crew crew(3, 2, true, 1);
    for (std::uint16_t rank = 0; rank < 3; ++rank) CHECK(crew[rank].wait_view(0, plenty));
    std::vector<std::future<void>> ranks;
    for (std::uint16_t rank = 0; rank < 3; ++rank) {
        ranks.push_back(on_thread([&, rank] {
            ExchangeSpec spec = job.spec(rank, 0, Reduce::in_order, {}, {});
            spec.view = 1;
            CHECK(wait_for(crew[rank], crew[rank].post(spec)).status == Status::ok);
        }));
    }
    for (auto& rank : ranks) rank.get();
    // One of the two went on with the third, and the other one was left out.
    std::size_t members = 3;
    for (const auto& endpoint : crew.all)
        members =
            std::min(members, endpoint->with_views([](Views& views, Nanos) { return views.view()->members.size(); }));
    CHECK_EQUAL(members, 2U);
}

TEST(the_sizes_of_whole_messages_are_compared_and_told) {
    Crew crew(2, 2);
    // What the one rank receives is exactly the part of the other one's message in lane 0.
    const Lanes division{.lanes = 2, .chunk_bytes = Core::chunk_bytes_for(1472, false)};
    const std::uint64_t sent = 4'000'000, expected = division.run_of(sent, 0).bytes;
    Buffer from(sent), into(expected);
    ExchangeSpec sends = exchange_on(0, 0), receives = exchange_on(0, 0);
    sends.sends = {{.peer = 1, .data = from.data(), .bytes = sent}};
    receives.receives = {{.peer = 0, .into = into.data(), .bytes = expected}};
    std::future<void> sender =
        on_thread([&] { CHECK(wait_for(crew[0], crew[0].post(sends)).status == Status::peer_failed); });
    const Outcome outcome = wait_for(crew[1], crew[1].post(receives));
    CHECK(outcome.status == Status::size_mismatch);
    CHECK_EQUAL(outcome.announced_bytes, sent);
    CHECK_EQUAL(outcome.expected_bytes, expected);
    sender.get();
}

TEST(a_wait_that_a_close_ends_leaves_the_memory_alone) {
    Crew crew(2, 3);
    auto job = std::make_unique<AllReduce>(2, large, 1);
    const std::uint64_t id = crew[0].post(job->spec(0, 0, Reduce::in_order, {}, {}));
    std::future<void> waits = on_thread([&] {
        bool thrown = false;
        try {
            (void)wait_for(crew[0], id);
        } catch (const std::runtime_error&) {
            thrown = true;
        }
        CHECK(thrown);
        // No lane may touch it now: the address sanitizer watches.
        job.reset();
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    crew[0].close(second / 4);
    waits.get();
}

TEST(a_lane_says_goodbye_although_another_still_waits_for_an_answer) {
    AllReduce job(2, large, 1);
    Crew crew(2, 2, false, 0);
    const std::uint64_t id = crew[1].post(job.spec(1, 0, Reduce::in_order, {}, {}));
    const Nanos began = clock_now();
    auto closing = on_thread([&] { crew[0].close(3 * second); });
    CHECK(wait_for(crew[1], id).status == Status::peer_left);
    CHECK(clock_now() - began < second);
    closing.get();
    CHECK(clock_now() - began > 2 * second && clock_now() - began < 5 * second);
}

TEST(closing_with_lanes_leaves_neither_threads_nor_descriptors) {
    const std::size_t threads = threads_now(), descriptors = descriptors_now();
    {
        Crew crew(2, 4);
        share_memory(crew);
        train(crew, 2);
        CHECK_EQUAL(threads_now(), threads + 8);
        for (const auto& endpoint : crew.all) endpoint->close(second / 10);
    }
    CHECK(settles_at(threads));
    CHECK_EQUAL(descriptors_now(), descriptors);
}
