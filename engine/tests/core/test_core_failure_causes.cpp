// Failure causes in Core: a rank that learns of an error from another names the rank that caused it.
#include "jobs.hpp"
#include "tapped.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr std::uint64_t cookie = 0x5eed'c0de'1234'5678ULL;

CoreConfig core_config(std::uint16_t world) {
    CoreConfig config;
    config.world = world;
    config.secrets.cookie = cookie;
    config.silence = second;
    return config;
}

// Rank 1 dies when `dead` is set: nothing from it or to it arrives any more.
struct Mortal {
    explicit Mortal(std::uint16_t world) : net(core_config(world)), watch(net, world) {
        net.tap = [this](Datagram& d) { return alive(d); };
    }
    [[nodiscard]] bool alive(const Datagram& d) const { return !dead || (d.source != 1 && d.target != 1); }

    Tapped net;
    Watch<Tapped> watch;
    bool dead{};
};

// One message, from one rank to another, each of which posts its half.
struct OneMessage {
    explicit OneMessage(std::uint32_t on_channel, std::size_t bytes = 20'000)
        : channel(on_channel), sent(random_buffer(bytes, on_channel)), got(bytes) {}
    [[nodiscard]] ExchangeSpec to(std::uint16_t peer) const {
        ExchangeSpec spec = exchange_on(channel, 0);
        spec.sends.push_back({.peer = peer, .data = sent.data(), .bytes = sent.size()});
        return spec;
    }
    [[nodiscard]] ExchangeSpec from(std::uint16_t peer) {
        ExchangeSpec spec = exchange_on(channel, 0);
        spec.receives.push_back({.peer = peer, .into = got.data(), .bytes = got.size()});
        return spec;
    }
    std::uint32_t channel;
    Buffer sent, got;
};

AllToAll small_job(std::uint16_t world, std::uint64_t seed = 1) {
    return {world, seed, [](auto, auto) { return std::size_t{20 * 1440}; }};
}

void check_blame(const Outcome& outcome, std::uint16_t culprit, Status cause) {
    CHECK_EQUAL(outcome.failure_cause.culprit, culprit);
    CHECK_EQUAL(static_cast<int>(outcome.failure_cause.cause), static_cast<int>(cause));
}

Buffer forged(Header header, std::span<const std::byte> payload = {}) {
    const Seal seal({.cookie = cookie, .sealed = false, .links = {}}, header.source);
    header.cookie = seal.visible_cookie();
    Buffer bytes(header_bytes + payload.size());
    const std::span<std::byte, header_bytes> wire(bytes.data(), header_bytes);
    write_header(header, wire);
    std::copy(payload.begin(), payload.end(), bytes.begin() + header_bytes);
    seal.protect(wire, 0, seal.payload_check(payload));
    return bytes;
}

}  // namespace

TEST(every_survivor_blames_the_dead_rank_whoever_noticed_first) {
    for (const std::uint16_t world : {std::uint16_t{3}, std::uint16_t{5}}) {
        for (const bool reducing : {false, true}) {
            Mortal job(world);
            AllToAll plain(world, 1, [](auto, auto) { return std::size_t{1'000'000}; });
            AllReduce reduced(world, 2'000'000, 1);
            std::vector<std::uint64_t> ids;
            int told = 0;
            for (std::uint16_t rank = 0; rank < world; ++rank) {
                // They start at different times, so that one is notified by another.
                ids.push_back(
                    job.net.post(rank, reducing ? reduced.spec(rank, 0, Reduce::in_order) : plain.spec(rank, 0)));
                if (rank == 1) job.dead = true;
                job.net.run(5 * millisecond);
            }
            for (std::uint16_t rank = 0; rank < world; ++rank) {
                if (rank == 1) continue;
                const Outcome& outcome = job.watch.wait(rank, ids[rank], 2 * second);
                CHECK(outcome.status == Status::peer_silent || outcome.status == Status::peer_failed);
                check_blame(outcome, 1, Status::peer_silent);
                told += outcome.status == Status::peer_failed ? 1 : 0;
            }
            // No rank waits for the dead rank to acknowledge a goodbye.
            for (std::uint16_t rank = 0; rank < world; ++rank) {
                if (rank != 1) job.net.leave(rank);
            }
            job.net.run(10 * millisecond);
            for (std::uint16_t rank = 0; rank < world; ++rank)
                CHECK(rank == 1 || job.net.core(rank).goodbye_acknowledged());
            // An all-reduce, in which every rank needs the result that another computes from all contributions.
            if (reducing) CHECK(told > 0);
        }
    }
}

TEST(blame_goes_down_a_chain_of_ranks_that_only_know_their_neighbours) {
    // Rank 2 forwards to 3 what it receives from 1, which is dead. Rank 3 sends to 4, which posts when all is over.
    Mortal job(5);
    job.dead = true;
    Buffer passed(20'000), got(20'000), last(1'000'000);
    const Buffer own = random_buffer(last.size(), 1);
    ExchangeSpec two = exchange_on(0, 0), three = two, four = two;
    two.receives.push_back({.peer = 1, .reduce = true, .bytes = passed.size()});
    two.sends.push_back({.peer = 3, .second_stage = true, .data = passed.data(), .bytes = passed.size()});
    two.reduction = ReductionSpec{.mode = Reduce::copy,
                                  .wire = Dtype::bytes,
                                  .out_dtype = Dtype::bytes,
                                  .own = nullptr,
                                  .out = passed.data(),
                                  .bytes = passed.size()};
    three.receives.push_back({.peer = 2, .second_stage = true, .into = got.data(), .bytes = got.size()});
    three.sends.push_back({.peer = 4, .data = own.data(), .bytes = own.size()});
    four.receives.push_back({.peer = 3, .into = last.data(), .bytes = last.size()});
    const std::uint64_t id3 = job.net.post(3, three), id2 = job.net.post(2, two);
    CHECK(job.watch.wait(2, id2, 2 * second).status == Status::peer_silent);
    const Outcome& third = job.watch.wait(3, id3, 10 * millisecond);
    CHECK(third.status == Status::peer_failed);
    CHECK_EQUAL(third.peer, 2U);
    check_blame(third, 1, Status::peer_silent);
    job.net.run(10 * millisecond);
    const Outcome& fourth = job.watch.wait(4, job.net.post(4, four), millisecond);
    CHECK_EQUAL(fourth.peer, 3U);
    check_blame(fourth, 1, Status::peer_silent);
}

TEST(goodbye_after_an_error_says_whose_fault_it_was) {
    // Rank 2 waits for rank 0 in another exchange than the one that rank 1's death ended there, so it receives no
    // `failed`. The same holds if the `failed` was lost or overtaken by the goodbye.
    for (const bool same_exchange : {false, true}) {
        Mortal job(3);
        job.net.tap = [&](Datagram& d) { return job.alive(d) && d.header.kind != Kind::failed; };
        AllReduce shared(3, 30'000, 1);
        OneMessage to_zero(7), to_two(8), later(9);
        job.dead = true;
        const std::uint64_t id0 =
            job.net.post(0, same_exchange ? shared.spec(0, 0, Reduce::in_order) : to_zero.from(1));
        job.net.run(10 * millisecond);
        const std::uint64_t id2 = job.net.post(2, same_exchange ? shared.spec(2, 0, Reduce::in_order) : to_two.from(0));
        check_blame(job.watch.wait(0, id0, 2 * second), 1, Status::peer_silent);
        job.net.leave(0);
        const Outcome& outcome = job.watch.wait(2, id2, 5 * millisecond);
        CHECK(outcome.status == Status::peer_left);
        CHECK_EQUAL(outcome.peer, 0U);
        check_blame(outcome, 1, Status::peer_silent);
        // Exchanges that are posted later name the culprit too.
        check_blame(job.watch.wait(2, job.net.post(2, later.from(0)), millisecond), 1, Status::peer_silent);
    }
}

TEST(goodbye_says_nothing_of_errors_that_have_healed_or_were_wished_for) {
    for (const bool cancelled : {false, true}) {
        Mortal job(3);
        OneMessage missed(7), arrived(8), waiting(9);
        job.dead = true;
        const std::uint64_t lost = job.net.post(0, missed.from(1));
        if (cancelled) job.net.cancel(0, lost);
        CHECK(job.watch.wait(0, lost).status == (cancelled ? Status::closed : Status::peer_silent));
        check_blame(job.watch.wait(0, lost), cancelled ? 0 : 1, cancelled ? Status::closed : Status::peer_silent);
        job.dead = false;
        if (!cancelled) {
            job.net.post(1, arrived.to(0));
            CHECK(job.watch.wait(0, job.net.post(0, arrived.from(1))).status == Status::ok);
        }
        const std::uint64_t id2 = job.net.post(2, waiting.from(0));
        job.net.leave(0);
        check_blame(job.watch.wait(2, id2, second), 0, Status::peer_left);
    }
}

TEST(goodbye_still_names_the_dead_after_what_had_begun_before_it_ends_well) {
    Mortal job(3);
    OneMessage missed(7), early(8), waiting(9);
    // Rank 1's part of an exchange has arrived. Then it dies, and another exchange fails because of it.
    job.net.post(1, early.to(0));
    CHECK(job.watch.wait(0, job.net.post(0, early.from(1))).status == Status::ok);
    ExchangeSpec begun = exchange_on(10, 0);
    Buffer got(20'000), sent(20'000);
    begun.receives.push_back({.peer = 2, .into = got.data(), .bytes = got.size()});
    const std::uint64_t open = job.net.post(0, begun);
    job.dead = true;
    CHECK(job.watch.wait(0, job.net.post(0, missed.from(1))).status == Status::peer_silent);
    ExchangeSpec other = exchange_on(10, 0);
    other.sends.push_back({.peer = 0, .data = sent.data(), .bytes = sent.size()});
    job.net.post(2, other);
    CHECK(job.watch.wait(0, open).status == Status::ok);
    const std::uint64_t id2 = job.net.post(2, waiting.from(0));
    job.net.leave(0);
    check_blame(job.watch.wait(2, id2, second), 1, Status::peer_silent);
}

TEST(goodbye_names_the_last_error_not_one_of_long_ago) {
    Mortal job(4);
    OneMessage never_sent(7), missed(8), waiting(9);
    ExchangeSpec late = never_sent.from(3);
    late.timeout_at = 50 * millisecond;
    CHECK(job.watch.wait(0, job.net.post(0, late)).status == Status::timed_out);
    std::vector<OneMessage> later;
    for (std::uint32_t i = 0; i < 4; ++i) later.emplace_back(20 + i);
    for (OneMessage& message : later) {
        const std::uint64_t id = job.net.post(0, message.from(2));
        job.net.run(second);
        job.net.post(2, message.to(0));
        CHECK(job.watch.wait(0, id).status == Status::ok);
    }
    job.dead = true;
    CHECK(job.watch.wait(0, job.net.post(0, missed.from(1))).status == Status::peer_silent);
    const std::uint64_t id2 = job.net.post(2, waiting.from(0));
    job.net.leave(0);
    check_blame(job.watch.wait(2, id2, second), 1, Status::peer_silent);
}

TEST(blame_survives_loss_and_is_told_to_late_askers) {
    Mortal job(3);
    AllToAll exchange = small_job(3);
    int lost = 0;
    job.net.tap = [&](Datagram& d) {
        if (d.header.kind == Kind::failed)
            CHECK(parse_failure_cause(d.header, 3) == (FailureCause{1, Status::peer_silent}));
        return job.alive(d) && (d.header.kind != Kind::failed || d.source != 0 || ++lost > 3);
    };
    const std::uint64_t id0 = job.net.post(0, exchange.spec(0, 0));
    job.dead = true;
    check_blame(job.watch.wait(0, id0, 2 * second), 1, Status::peer_silent);
    const std::uint64_t id2 = job.net.post(2, exchange.spec(2, 0));
    const Outcome& outcome = job.watch.wait(2, id2, second / 2);
    CHECK(lost > 3);
    CHECK(outcome.status == Status::peer_failed);
    check_blame(outcome, 1, Status::peer_silent);
    // Also long after: rank 2 answers rank 0's peers from its own memory.
    const std::uint64_t id1 = [&] {
        job.net.run(5 * second);
        job.dead = false;
        return job.net.post(1, exchange.spec(1, 0));
    }();
    check_blame(job.watch.wait(1, id1, second), 1, Status::peer_silent);
}

TEST(ranks_that_blame_each_other_end_with_the_first_blame) {
    // Ranks 0 and 2 cannot reach each other; rank 1 reaches both. Rank 0 notices first.
    Mortal job(3);
    AllReduce exchange(3, 30'000, 1);
    job.net.tap = [](Datagram& d) { return d.source + d.target != 2 || d.source == d.target; };
    std::vector<std::uint64_t> ids;
    for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{1}, std::uint16_t{2}}) {
        ids.push_back(job.net.post(rank, exchange.spec(rank, 0, Reduce::in_order)));
        job.net.run(5 * millisecond);
    }
    CHECK(job.watch.wait(0, ids[0], 2 * second).status == Status::peer_silent);
    check_blame(job.watch.wait(0, ids[0]), 2, Status::peer_silent);
    check_blame(job.watch.wait(1, ids[1], 10 * millisecond), 2, Status::peer_silent);
    // Rank 1 notifies rank 2 that rank 2 itself is the cause, before rank 2 could name rank 0.
    const Outcome& blamed = job.watch.wait(2, ids[2], 10 * millisecond);
    CHECK_EQUAL(blamed.peer, 1U);
    check_blame(blamed, 2, Status::peer_silent);
}

TEST(blame_of_other_causes_names_who_began) {
    {
        Mortal job(3);
        AllToAll exchange = small_job(3);
        ExchangeSpec spec = exchange.spec(0, 0);
        const Buffer longer = random_buffer(30'000, 3);
        spec.sends[0].data = longer.data();
        spec.sends[0].bytes = longer.size();  // to rank 1
        const std::uint64_t id0 = job.net.post(0, spec), id1 = job.net.post(1, exchange.spec(1, 0)),
                            id2 = job.net.post(2, exchange.spec(2, 0));
        CHECK(job.watch.wait(1, id1).status == Status::size_mismatch);
        check_blame(job.watch.wait(1, id1), 0, Status::size_mismatch);
        if (job.watch.wait(2, id2).status != Status::ok) check_blame(job.watch.wait(2, id2), 0, Status::size_mismatch);
        check_blame(job.watch.wait(0, id0), 0, Status::size_mismatch);
    }
    Mortal job(3);
    AllReduce exchange(3, 30'000, 1);
    const std::uint64_t id0 = job.net.post(0, exchange.spec(0, 0, Reduce::in_order));
    const std::uint64_t id2 = job.net.post(2, exchange.spec(2, 0, Reduce::in_order));
    job.net.run(10 * millisecond);
    job.net.cancel(2, id2);
    check_blame(job.watch.wait(0, id0, 10 * millisecond), 2, Status::closed);
}

TEST(timeout_names_the_rank_that_holds_up_the_others) {
    // Rank 1 is dead, or alive but never posts. Both others also miss the second stage of each other.
    for (const bool dead : {true, false}) {
        for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{2}}) {
            Mortal job(3);
            job.dead = dead;
            AllReduce exchange(3, 30'000, 1);
            ExchangeSpec spec = exchange.spec(rank, 0, Reduce::in_order);
            spec.timeout_at = 700 * millisecond;
            const auto other = static_cast<std::uint16_t>(2 - rank);
            job.net.post(other, exchange.spec(other, 0, Reduce::in_order));
            const Outcome& outcome = job.watch.wait(rank, job.net.post(rank, spec), second);
            CHECK(outcome.status == Status::timed_out);
            check_blame(outcome, 1, Status::timed_out);
        }
    }
}

TEST(timeout_names_the_dead_among_those_that_contribute) {
    // Rank 0 comes first in every order, but is only slow: datagrams arrive from it, and none from rank 1.
    Mortal job(3);
    job.dead = true;
    AllToAll exchange = small_job(3);
    ExchangeSpec spec = exchange.spec(2, 0);
    spec.timeout_at = 700 * millisecond;
    CHECK_EQUAL(spec.receives[0].peer, 0U);
    check_blame(job.watch.wait(2, job.net.post(2, spec), second), 1, Status::timed_out);
}

TEST(failed_and_bye_with_an_impossible_blame_are_ignored_and_counted) {
    const auto number_of = [](Status status) { return static_cast<std::uint32_t>(status); };
    for (const Kind kind : {Kind::failed, Kind::bye}) {
        for (const auto& [culprit, cause] :
             std::vector<std::pair<std::uint32_t, std::uint32_t>>{{3, number_of(Status::peer_silent)},
                                                                  {0x1'0001, number_of(Status::peer_silent)},
                                                                  {0xffff'ffff, number_of(Status::closed)},
                                                                  {1, number_of(Status::ok)},
                                                                  {1, number_of(Status::peer_failed)},
                                                                  {1, 10},
                                                                  {1, 256 + number_of(Status::peer_silent)},
                                                                  {1, 0xffff'ffff},
                                                                  {1, 0}}) {
            Mortal job(3);
            AllToAll exchange = small_job(3);
            const auto forge = [&](std::uint32_t seq, std::uint32_t number) {
                return forged({.kind = kind,
                               .source = 1,
                               .number = number,
                               .seq = seq,
                               .chunk = culprit,
                               .message_bytes = cause});
            };
            // For an exchange that is posted, and for one that is not yet.
            const std::uint64_t id = job.net.post(0, exchange.spec(0, 0));
            job.net.inject(0, forge(0, 100));
            job.net.inject(0, forge(1, 101));
            CHECK(job.watch.outcome(0, id) == nullptr);
            CHECK_EQUAL(job.net.core(0).counters().malformed, 2U);
            AllToAll next = small_job(3, 2);
            CHECK(job.watch.outcome(0, job.net.post(0, next.spec(0, 1))) == nullptr);
        }
    }
}
