// Path MTU and fragmentation in Core: on paths that carry less than the job's datagrams, from the start or from the
// middle of an exchange on, every exchange still ends with the right bytes. Where no usable size arrives, the error
// names the peer although it answers.
#include "jobs.hpp"
#include "tapped.hpp"

using namespace storm;
using namespace storm::check;

namespace {

CoreConfig core_config(std::uint16_t world, std::size_t datagram_bytes = 1472) {
    CoreConfig config;
    config.world = world;
    config.datagram_bytes = datagram_bytes;
    config.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
    return config;
}

CoreConfig sealed(CoreConfig config) {
    config.secrets.sealed = true;
    for (std::uint16_t rank = 0; rank < config.world; ++rank) {
        config.secrets.links.emplace_back().opening.fill(static_cast<std::byte>(rank + 1));
    }
    return config;
}

AllToAll job_of(std::uint16_t world, std::size_t bytes = 500'000) {
    return {world, 7, [=](auto, auto) { return bytes; }};
}

// From `since` on, datagrams above this size are lost on the way to or from rank 1.
auto narrow(std::size_t bytes, Nanos since = 0) {
    return [=](Datagram& datagram) {
        return datagram.at < since || datagram.bytes.size() <= bytes || (datagram.source != 1 && datagram.target != 1);
    };
}

std::vector<std::uint64_t> post_all(Tapped& net, AllToAll& job, std::uint32_t seq, StageSpec stage = {}) {
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < job.world; ++rank) ids.push_back(net.post(rank, job.spec(rank, seq, stage)));
    return ids;
}

}  // namespace

TEST(exact_exchanges_end_on_a_path_that_is_narrow_from_the_start_or_becomes_so) {
    for (const bool seals : {false, true}) {
        for (const Nanos later : {Nanos{0}, 300 * microsecond}) {
            for (const std::size_t carries : {1464U, 1172U, 700U, 520U}) {
                Tapped net(seals ? sealed(core_config(3)) : core_config(3));
                net.tap = narrow(carries, later == 0 ? 0 : net.now() + later);
                Watch watch(net, 3);
                AllToAll job = job_of(3);
                const Nanos begun = net.now();
                watch.wait_all(post_all(net, job, 0));
                CHECK(net.now() - begun < second);
                for (std::uint16_t rank = 0; rank < 3; ++rank) CHECK(job.complete(rank));
                CHECK(net.core(0).path_bytes(1) <= carries);
                CHECK(net.core(1).path_bytes(2) <= carries);
                CHECK_EQUAL(net.core(0).path_bytes(2), 1472U);
                CHECK(net.core(0).counters().pieces > 0);
            }
        }
    }
}

TEST(large_datagrams_of_any_size_find_their_way_in_pieces) {
    for (const std::size_t datagram : {4096U, 8972U, 65'507U}) {
        Tapped net(core_config(2, datagram));
        net.tap = narrow(1452);
        Watch watch(net, 2);
        AllToAll job = job_of(2, 3'000'000);
        watch.wait_all(post_all(net, job, 0));
        for (std::uint16_t rank = 0; rank < 2; ++rank) CHECK(job.complete(rank));
        CHECK_EQUAL(net.core(0).path_bytes(1), 1444U);
    }
}

TEST(lossy_exchanges_lose_nothing_more_once_the_path_is_known) {
    Tapped net(core_config(2));
    net.tap = narrow(1172);
    Watch watch(net, 2);
    AllToAll job = job_of(2);
    double arrived = 0.0;
    for (std::uint32_t seq = 0; seq < 20; ++seq) {
        const auto ids = post_all(net, job, seq, {.budget = 1.0});
        watch.wait_all(ids);
        const Arrival& arrival = watch.outcome(0, ids[0])->arrivals.at(0);
        arrived = static_cast<double>(arrival.arrived) / arrival.chunks;
        net.run(5 * millisecond);
    }
    CHECK_EQUAL(arrived, 1.0);
}

TEST(chunks_in_pieces_are_lost_and_repaired_as_wholes) {
    Tapped net(core_config(2));
    std::mt19937 random(3);
    net.tap = [&, path = narrow(1172)](Datagram& datagram) { return path(datagram) && random() % 10 != 0; };
    Watch watch(net, 2);
    for (std::uint32_t seq = 0; seq < 5; ++seq) {
        AllToAll job = job_of(2, 200'000);
        watch.wait_all(post_all(net, job, seq));
        for (std::uint16_t rank = 0; rank < 2; ++rank) CHECK(job.complete(rank));
    }
    CHECK(net.core(0).counters().repaired > 0);
}

TEST(pieces_wait_in_the_pool_as_whole_chunks) {
    Tapped net(core_config(2));
    net.tap = narrow(1172);
    Watch watch(net, 2);
    AllToAll first = job_of(2), late = job_of(2, 100'000);
    watch.wait_all(post_all(net, first, 0));
    const std::uint64_t early = net.post(0, late.spec(0, 1));
    net.run(100 * millisecond);
    CHECK(net.core(1).counters().pooled > 0);
    const std::uint64_t other = net.post(1, late.spec(1, 1));
    watch.wait_all({early, other});
    CHECK(late.complete(0));
    CHECK(late.complete(1));
}

TEST(path_that_becomes_wide_again_carries_whole_chunks_again) {
    Tapped net(core_config(2));
    net.tap = narrow(1172);
    Watch watch(net, 2);
    AllToAll job = job_of(2);
    watch.wait_all(post_all(net, job, 0));
    net.tap = [](Datagram&) { return true; };
    std::uint32_t seq = 1;
    for (; net.now() < 10 * second && net.core(0).path_bytes(1) < 1472; ++seq) {
        watch.wait_all(post_all(net, job, seq));
        net.run(50 * millisecond);
    }
    CHECK_EQUAL(net.core(0).path_bytes(1), 1472U);
    const std::uint64_t pieces = net.core(0).counters().pieces;
    watch.wait_all(post_all(net, job, seq));
    CHECK_EQUAL(net.core(0).counters().pieces, pieces);
}

TEST(peer_that_answers_but_gets_no_data_is_named_after_the_silence) {
    CoreConfig config = core_config(2);
    config.silence = 3 * second;
    Tapped net(config);
    net.tap = narrow(300);
    Watch watch(net, 2);
    AllToAll job = job_of(2);
    const auto ids = post_all(net, job, 0);
    const Nanos begun = net.now();
    const Outcome& outcome = watch.wait(0, ids[0]);
    CHECK(outcome.status == Status::path_blocked || outcome.status == Status::peer_failed);
    CHECK(outcome.failure_cause.cause == Status::path_blocked);
    CHECK(net.now() - begun < 5 * second);
    CHECK(watch.wait(1, ids[1]).failure_cause.cause == Status::path_blocked);
}

TEST(receiver_that_is_late_and_has_no_room_is_not_taken_for_a_blocked_path) {
    CoreConfig config = core_config(2);
    config.silence = 2 * second;
    config.pool_bytes = 4096;
    Tapped net(config);
    Watch watch(net, 2);
    AllToAll job = job_of(2);
    const std::uint64_t early = net.post(0, job.spec(0, 0));
    net.run(20 * second);
    CHECK(watch.outcome(0, early) == nullptr);
    const std::uint64_t late = net.post(1, job.spec(1, 0));
    watch.wait_all({early, late});
    CHECK(job.complete(0));
    CHECK(job.complete(1));
}

TEST(peers_that_had_nothing_to_send_for_long_are_not_taken_for_blocked) {
    // Under loss, the last event on a link is often a loss, for example of a copy that was not needed.
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        CoreConfig config = core_config(3);
        config.silence = 2 * second;
        Tapped net(config);
        std::mt19937_64 random(seed);
        net.tap = [&](Datagram&) { return random() % 10 != 0; };
        Watch watch(net, 3);
        AllReduce job(3, 30'000, seed);
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < 2; ++rank)
            ids.push_back(net.post(rank, job.spec(rank, 0, Reduce::in_order)));
        net.run(6 * second);
        ids.push_back(net.post(2, job.spec(2, 0, Reduce::in_order)));
        watch.wait_all(ids);
        job.check_exact();
    }
}

TEST(loss_does_not_narrow_a_path_that_carries_pieces) {
    // A chunk in seven pieces hardly ever arrives here, so runs of lost chunks are long. They say nothing about the
    // size of datagrams: only probes do, which are lost half the time, small ones and large ones alike.
    for (const unsigned seed : {5U, 6U, 7U}) {
        Tapped net(core_config(2, 8972));
        std::mt19937 random(seed);
        net.tap = [&, path = narrow(1452)](Datagram& datagram) { return path(datagram) && random() % 100 >= 50; };
        Watch watch(net, 2);
        for (std::uint32_t seq = 0; seq < 60; ++seq) {
            AllToAll job = job_of(2, 200'000);
            watch.wait_all(post_all(net, job, seq, {.budget = 1.0}));
            net.run(20 * millisecond);
        }
        CHECK_EQUAL(net.core(0).path_bytes(1), 1444U);
        CHECK_EQUAL(net.core(0).counters().path_changes, 1U);  // from 8972, and no further change
    }
}

TEST(piece_that_waits_for_others_cannot_be_replayed_to_feign_life) {
    CoreConfig config = sealed(core_config(2));
    config.silence = 2 * second;
    Tapped net(config);
    bool dark = false;
    Buffer piece;
    net.tap = [&, path = narrow(1172)](Datagram& datagram) {
        if (dark || !path(datagram)) return false;
        // The first half of a chunk is the last that arrives from rank 0.
        if (datagram.source == 0 && (datagram.header.flags & flag_piece) != 0) {
            piece = datagram.bytes;
            dark = true;
        }
        return true;
    };
    Watch watch(net, 2);
    AllToAll job = job_of(2);
    const auto ids = post_all(net, job, 0);
    for (int k = 0; k < 100 && watch.outcome(1, ids[1]) == nullptr; ++k) {
        net.run(100 * millisecond);
        if (!piece.empty()) net.inject(1, piece);
    }
    CHECK(!piece.empty());
    const Outcome* outcome = watch.outcome(1, ids[1]);
    CHECK(outcome != nullptr && outcome->status == Status::peer_silent);
}
