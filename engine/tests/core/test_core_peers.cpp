// Peers in Core that fall silent, recover, leave, disagree or cancel: lossy exchanges go on, exact ones name the error.
#include <array>

#include "jobs.hpp"
#include "tapped.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr StageSpec lossy{.budget = 0.5};

CoreConfig core_config(std::uint16_t world) {
    CoreConfig config;
    config.world = world;
    config.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
    config.silence = second;
    return config;
}

// A network from which some ranks can be partitioned.
struct Cuttable {
    explicit Cuttable(std::uint16_t world) : net(core_config(world)), watch(net, world) {
        net.tap = [this](Datagram& d) { return d.source != dark && d.target != dark; };
    }
    std::vector<std::uint64_t> post(AllToAll& job, std::uint32_t seq, StageSpec stage = {}) {
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < job.world; ++rank)
            ids.push_back(net.post(rank, job.spec(rank, seq, stage)));
        return ids;
    }
    // Whether `rank` received every message in full.
    bool complete(std::uint16_t rank, std::uint64_t id) {
        const auto& arrivals = watch.wait(rank, id).arrivals;
        return std::all_of(arrivals.begin(), arrivals.end(), [](const Arrival& a) { return a.arrived == a.chunks; });
    }

    Tapped net;
    Watch<Tapped> watch;
    std::uint32_t dark{0xffff'ffff};
};

AllToAll small_job(std::uint16_t world, std::uint64_t seed = 1) {
    return {world, seed, [](auto, auto) { return std::size_t{20 * 1440}; }};
}

}  // namespace

TEST(exact_exchange_with_a_silent_peer_fails_and_names_it_and_what_is_missing) {
    Cuttable job(3);
    AllToAll first = small_job(3), next = small_job(3, 2);
    job.watch.wait_all(job.post(first, 0));
    job.dark = 2;
    const Nanos start = job.net.now();
    const auto ids = job.post(next, 1);
    for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{1}}) {
        const Outcome& outcome = job.watch.wait(rank, ids[rank]);
        CHECK(outcome.status == Status::peer_silent || outcome.status == Status::peer_failed);
        CHECK(outcome.ended >= start + second && outcome.ended < start + 2 * second);
        CHECK(outcome.status != Status::peer_silent || outcome.peer == 2);
        CHECK(outcome.missing_bytes > 0 && outcome.missing_bytes <= 20 * 1440);
    }
}

TEST(lossy_exchange_goes_on_without_a_silent_peer_and_the_next_does_not_wait_for_it) {
    Cuttable job(3);
    AllToAll first = small_job(3), next = small_job(3, 2);
    job.dark = 2;
    const auto ids = job.post(first, 0, lossy);
    for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{1}}) {
        const Outcome& outcome = job.watch.wait(rank, ids[rank], 2 * second);
        CHECK(outcome.status == Status::ok);
        for (const Arrival& arrival : outcome.arrivals) CHECK_EQUAL(arrival.arrived, arrival.peer == 2 ? 0U : 20U);
    }
    const Nanos start = job.net.now();
    const auto again = job.post(next, 1, lossy);
    for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{1}}) {
        CHECK(job.watch.wait(rank, again[rank]).ended < start + 50 * millisecond);
    }
}

TEST(peers_that_were_cut_off_from_one_another_heal_by_themselves_although_all_they_do_is_lossy) {
    Cuttable job(2);
    AllToAll first = small_job(2);
    job.dark = 1;
    job.watch.wait_all(job.post(first, 0, lossy));
    job.dark = 0xffff'ffff;
    for (std::uint32_t seq = 1;; ++seq) {
        CHECK(seq < 5);
        AllToAll next = small_job(2, seq);
        const auto ids = job.post(next, seq, lossy);
        job.watch.wait_all(ids);
        if (job.complete(0, ids[0]) && job.complete(1, ids[1])) break;
        job.net.run(10 * millisecond);
    }
}

TEST(younger_exact_exchange_survives_the_silence_that_an_older_one_ran_into) {
    Cuttable job(2);
    AllToAll first = small_job(2), next = small_job(2, 2);
    job.dark = 1;
    const std::uint64_t old = job.net.post(0, first.spec(0, 0, lossy));
    job.net.run(950 * millisecond);
    const auto ids = job.post(next, 1);
    job.net.run(100 * millisecond);
    CHECK(job.watch.outcome(0, old) != nullptr);
    CHECK(job.watch.outcome(0, ids[0]) == nullptr);
    job.dark = 0xffff'ffff;
    job.watch.wait_all(ids, Status::ok, 5 * second);
    CHECK(next.complete(0) && next.complete(1));
}

TEST(exact_exchange_survives_an_outage_shorter_than_the_silence_and_resumes_soon) {
    for (const Nanos outage : {10 * millisecond, 300 * millisecond, 900 * millisecond}) {
        Cuttable job(3);
        AllToAll exchange(3, 3, [](auto, auto) { return std::size_t{2'000'000}; });
        const auto ids = job.post(exchange, 0);
        job.net.run(500 * microsecond);
        job.dark = 1;
        job.net.run(outage);
        job.dark = 0xffff'ffff;
        const Nanos lit_at = job.net.now();
        job.watch.wait_all(ids);
        for (std::uint16_t rank = 0; rank < 3; ++rank) CHECK(exchange.complete(rank));
        // Probes back off: after an outage, recovery may take as long again, and hardly more.
        CHECK(job.net.now() < lit_at + outage + 200 * millisecond);
    }
}

TEST(receiver_that_was_given_up_is_told_so_when_it_comes_late) {
    for (const StageSpec stage : {lossy, StageSpec{}}) {
        Cuttable job(2);
        AllToAll exchange = small_job(2);
        job.dark = 1;
        const std::uint64_t id0 = job.net.post(0, exchange.spec(0, 0, stage));
        job.watch.wait(0, id0);
        job.dark = 0xffff'ffff;
        // The rank had not posted, so it noticed nothing. Now it waits for messages that no rank will send.
        const std::uint64_t id1 = job.net.post(1, exchange.spec(1, 0, stage));
        const Outcome& outcome = job.watch.wait(1, id1, 5 * second);
        CHECK(outcome.status == (stage.budget > 0 ? Status::ok : Status::peer_failed));
    }
}

TEST(receiver_of_what_failed_elsewhere_is_told_when_it_asks_or_knows_before_it_posts) {
    for (const bool in_the_dark : {true, false}) {
        Cuttable job(2);
        AllToAll exchange(2, 1, [](auto, auto) { return std::size_t{1'000'000}; });
        ExchangeSpec send = exchange.spec(0, 0), receive = exchange.spec(1, 0);
        send.receives.clear();
        receive.sends.clear();  // it sends nothing but `ready`
        const std::uint64_t id0 = [&] {
            if (in_the_dark) job.dark = 1;
            const std::uint64_t id = job.net.post(0, send);
            if (!in_the_dark) job.net.cancel(0, id);
            return id;
        }();
        CHECK(job.watch.wait(0, id0).status != Status::ok);
        job.net.run(10 * millisecond);
        job.dark = 0xffff'ffff;
        const std::uint64_t id1 = job.net.post(1, receive);
        if (!in_the_dark) CHECK(job.watch.outcome(1, id1) != nullptr);
        CHECK(job.watch.wait(1, id1, second).status == Status::peer_failed);
        CHECK_EQUAL(job.watch.wait(1, id1).peer, 0U);
    }
}

TEST(ask_comes_soon_even_after_a_stall) {
    Cuttable job(2);
    AllToAll stalled = small_job(2), next = small_job(2, 2);
    job.net.tap = [&](Datagram& d) {
        d.at += 900 * millisecond;
        return true;
    };
    job.watch.wait_all(job.post(stalled, 0));
    CHECK(job.net.core(0).round_trip(1) > second);
    job.net.tap = [](Datagram&) { return true; };
    const std::uint64_t asked = job.net.core(1).counters().asks;
    job.net.post(1, next.spec(1, 1));
    job.net.run(600 * millisecond);
    CHECK(job.net.core(1).counters().asks > asked);
}

TEST(ping_is_answered_at_once) {
    Cuttable job(2);
    AllToAll exchange = small_job(2);
    std::vector<Nanos> pinged, answered;
    job.net.tap = [&](Datagram& d) {
        if (d.header.kind == Kind::ping) pinged.push_back(d.at);
        if (d.header.kind == Kind::report && d.source == 1 && !pinged.empty()) answered.push_back(job.net.now());
        return d.header.kind != Kind::data;
    };
    job.net.post(0, exchange.spec(0, 0));
    job.net.run(100 * millisecond);
    CHECK(!pinged.empty());
    CHECK_EQUAL(answered.at(0), pinged.at(0));
}

TEST(sender_that_was_thought_silent_learns_that_its_message_is_not_waited_for) {
    // Rank 0 takes rank 1 for silent and closes its message as it posts. More than the eager bytes remain to be sent,
    // and no `ready` will ever arrive for them.
    Cuttable job(3);
    AllToAll first = small_job(3), next(3, 2, [](auto, auto) { return std::size_t{1'000'000}; });
    job.dark = 1;
    const std::uint64_t old0 = job.net.post(0, first.spec(0, 0, lossy)),
                        old2 = job.net.post(2, first.spec(2, 0, lossy));
    job.watch.wait(0, old0);
    job.watch.wait(2, old2);
    job.dark = 0xffff'ffff;
    const std::uint64_t id0 = job.net.post(0, next.spec(0, 1, lossy)), id1 = job.net.post(1, next.spec(1, 1, lossy));
    job.net.run(100 * millisecond);
    const std::uint64_t id2 = job.net.post(2, next.spec(2, 1, lossy));
    job.watch.wait_all({id0, id1, id2}, Status::ok, 5 * second);
}

TEST(all_reduce_with_an_exact_second_stage_goes_on_where_the_first_gave_a_peer_up) {
    // Rank 0 takes the others for silent and sends them nothing in the lossy first stage. They wait for it, and rank 0
    // waits for their second stage.
    for (const StageSpec second_stage : {StageSpec{}, lossy}) {
        Cuttable job(3);
        AllToAll first = small_job(3);
        AllReduce next(3, 30'000, 2);
        job.dark = 0;
        job.watch.wait(0, job.net.post(0, first.spec(0, 0, lossy)));
        job.dark = 0xffff'ffff;
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < 3; ++rank) {
            ids.push_back(job.net.post(rank, next.spec(rank, 1, Reduce::arrived, {.budget = 1.0}, second_stage)));
        }
        job.watch.wait_all(ids, Status::ok, 5 * second);
        if (second_stage.budget > 0) continue;
        CHECK(next.out[1] == next.out[2]);
        CHECK(next.out[0] == next.out[1]);
    }
}

TEST(leaving_is_heard_under_loss_and_ends_what_others_wait_for) {
    Cuttable job(3);
    std::mt19937 random(4);
    AllToAll exact = small_job(3), soft = small_job(3, 2), hard = small_job(3, 3), later = small_job(3, 4);
    job.watch.wait_all(job.post(exact, 0));
    std::array<int, 3> goodbyes{};
    // Of its goodbyes, the first two to each are lost for certain.
    job.net.tap = [&](Datagram& d) {
        return random() % 10 >= 4 && (d.header.kind != Kind::bye || ++goodbyes.at(d.target) > 2);
    };
    const std::uint64_t hard0 = job.net.post(0, hard.spec(0, 1));
    const std::uint64_t soft1 = job.net.post(1, soft.spec(1, 2, lossy)),
                        soft0 = job.net.post(0, soft.spec(0, 2, lossy));
    job.net.run(5 * millisecond);
    job.net.leave(2);
    for (const Nanos until = job.net.now() + second; !job.net.core(2).goodbye_acknowledged();)
        CHECK(job.net.advance(until));
    const Outcome& failed = job.watch.wait(0, hard0, second);
    CHECK(failed.status == Status::peer_left);
    CHECK_EQUAL(failed.peer, 2U);
    CHECK(job.watch.wait(0, soft0, second).status == Status::ok);
    CHECK(job.watch.wait(1, soft1, second).status == Status::ok);
    // From now on, exchanges with it fail at once.
    const Nanos now = job.net.now();
    CHECK(job.watch.wait(0, job.net.post(0, later.spec(0, 3))).ended == now);
}

TEST(what_a_leaving_peer_sent_before_is_still_taken) {
    Cuttable job(2);
    AllToAll exchange(2, 1, [](auto from, auto) { return from == 0 ? std::size_t{30'000} : std::size_t{0}; });
    ExchangeSpec send = exchange.spec(0, 0), receive = exchange.spec(1, 0);
    send.receives.clear();
    receive.sends.clear();
    CHECK(job.watch.wait(0, job.net.post(0, send)).status == Status::ok);
    job.net.leave(0);
    job.net.run(100 * millisecond);
    CHECK(job.watch.wait(1, job.net.post(1, receive)).status == Status::ok);
    CHECK(exchange.complete(1));
}

TEST(messages_of_different_sizes_are_a_mismatch_that_names_both) {
    for (const bool posted_late : {false, true}) {
        Cuttable job(2);
        const Buffer sent = random_buffer(5'000, 1);
        Buffer got(6'000, std::byte{0x55});
        ExchangeSpec send = exchange_on(0, 0), receive = exchange_on(0, 0);
        send.sends.push_back({.peer = 1, .data = sent.data(), .bytes = sent.size()});
        receive.receives.push_back({.peer = 0, .into = got.data(), .bytes = got.size()});
        std::uint64_t id = 0;
        if (!posted_late) id = job.net.post(1, receive);
        job.net.post(0, send);
        job.net.run(10 * millisecond);
        if (posted_late) id = job.net.post(1, receive);
        const Outcome& outcome = job.watch.wait(1, id);
        CHECK(outcome.status == Status::size_mismatch);
        CHECK_EQUAL(outcome.peer, 0U);
        CHECK_EQUAL(outcome.expected_bytes, 6'000U);
        CHECK_EQUAL(outcome.announced_bytes, 5'000U);
        CHECK(std::all_of(got.begin(), got.end(), [](std::byte b) { return b == std::byte{0x55}; }));
    }
}

TEST(cancelled_exchange_ends_at_once_and_the_channel_goes_on) {
    Cuttable job(2);
    AllToAll given_up = small_job(2), next = small_job(2, 2);
    const auto ids = job.post(given_up, 0);
    job.net.cancel(0, ids[0]);
    CHECK(job.watch.wait(0, ids[0]).status == Status::closed);
    // The other rank is notified instead of waiting for ever.
    const Status other = job.watch.wait(1, ids[1], second).status;
    CHECK(other == Status::peer_failed || other == Status::ok);
    job.net.cancel(0, ids[0]);  // cancelling twice is allowed
    job.net.cancel(0, 12'345);
    job.watch.wait_all(job.post(next, 1));
    CHECK(next.complete(0) && next.complete(1));
}

TEST(timeout_is_an_error_that_names_the_first_missing_peer) {
    Cuttable job(2);
    AllToAll exchange = small_job(2);
    ExchangeSpec spec = exchange.spec(0, 0);
    spec.timeout_at = 200 * millisecond;
    const Outcome& outcome = job.watch.wait(0, job.net.post(0, spec));
    CHECK(outcome.status == Status::timed_out);
    CHECK_EQUAL(outcome.peer, 1U);
    CHECK_EQUAL(outcome.ended, second + 200 * millisecond);
    CHECK_EQUAL(outcome.missing_bytes, 20 * 1440U);
}

TEST(misuse_is_refused_and_changes_nothing) {
    Cuttable job(2);
    AllToAll exchange = small_job(2);
    const auto refused = [&](const ExchangeSpec& spec) {
        try {
            job.net.post(0, spec);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    ExchangeSpec spec = exchange.spec(0, 0);
    spec.sends[0].peer = 0;
    CHECK(refused(spec));
    spec.sends[0].peer = 2;
    CHECK(refused(spec));
    spec = exchange.spec(0, 0);
    spec.receives[0].peer = 7;
    CHECK(refused(spec));
    spec = exchange.spec(0, 0);
    spec.sends[0].bytes = 1ULL << 32;
    CHECK(refused(spec));
    CHECK(refused(exchange.spec(0, 1'000'000)));
    const auto ids = job.post(exchange, 0);
    CHECK(refused(exchange.spec(0, 0)));
    job.watch.wait_all(ids);
    CHECK(refused(exchange.spec(0, 0)));
}

TEST(nothing_is_left_to_happen_once_all_has_been_said) {
    // An idle engine sets no timers: it would wake the processor for nothing.
    Cuttable job(3);
    std::mt19937 random(6);
    job.net.tap = [&](Datagram&) { return random() % 10 >= 2; };
    for (std::uint32_t seq = 0; seq < 5; ++seq) {
        AllToAll exchange = small_job(3, seq);
        job.watch.wait_all(job.post(exchange, seq, seq % 2 == 0 ? lossy : StageSpec{}));
    }
    job.net.leave(0);
    const Nanos limit = job.net.now() + 10 * second;
    while (job.net.advance(limit)) {
    }
    CHECK(!job.net.advance());
}
