// Readmission in Core: the process of a rank died and another joins in its stead. Nothing of the old one is accepted
// any more (fencing by incarnation).
#include <array>
#include <stdexcept>

#include "jobs.hpp"
#include "tapped.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr StageSpec lossy{.budget = 0.5};
constexpr std::uint32_t nobody = 0xffff'ffff;

// A job whose ranks die and are restarted. In a sealed job, each process of a rank has a key of its own.
struct Mortal {
    explicit Mortal(std::uint16_t world_size, bool is_sealed = false)
        : world(world_size), sealed(is_sealed), incarnations(world_size), net(config()), watch(net, world_size) {
        net.tap = [this](Datagram& d) {
            if (d.source == dark || d.target == dark) return false;
            said.push_back(d);
            return true;
        };
    }
    [[nodiscard]] Key key_of(std::uint16_t rank) const {
        Key key;
        key.fill(static_cast<std::byte>(16 * incarnations[rank] + rank + 1));
        return key;
    }
    [[nodiscard]] CoreConfig config() const {
        CoreConfig core;
        core.world = world;
        core.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
        core.secrets.sealed = sealed;
        core.secrets.incarnations = incarnations;
        for (std::uint16_t rank = 0; sealed && rank < world; ++rank)
            core.secrets.links.push_back({.opening = key_of(rank)});
        core.silence = second;
        return core;
    }
    // Starts a new process of the rank; no other rank knows of it yet.
    void restart(std::uint16_t rank) {
        ++incarnations[rank];
        net.restart(rank, config());
        // The outcomes of the old process died with it.
        watch.forget(rank);
    }
    void readmit(std::uint16_t at, std::uint16_t peer) {
        net.readmit(at, peer, incarnations[peer],
                    sealed ? std::optional(LinkKeys{key_of(at), key_of(peer)}) : std::nullopt);
    }
    void readmit_everywhere(std::uint16_t peer) {
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            if (rank != peer) readmit(rank, peer);
        }
    }
    std::vector<std::uint64_t> post(AllToAll& job, std::uint32_t channel, std::uint32_t seq, StageSpec stage = {}) {
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < world; ++rank)
            ids.push_back(net.post(rank, job.spec(rank, seq, stage, channel)));
        return ids;
    }
    // An exchange among all ranks on a channel of its own: whether every rank receives everything, and soon.
    void check_whole(std::uint32_t channel, StageSpec stage = {}) {
        AllToAll job = small(channel);
        const Nanos start = net.now();
        const auto ids = post(job, channel, 0, stage);
        watch.wait_all(ids);
        CHECK(net.now() < start + 100 * millisecond);
        for (std::uint16_t rank = 0; rank < world; ++rank) CHECK(job.complete(rank));
    }
    [[nodiscard]] AllToAll small(std::uint64_t seed) const {
        return {world, seed, [](auto, auto) { return std::size_t{20 * 1440}; }};
    }

    std::uint16_t world;
    bool sealed;
    std::vector<std::uint32_t> incarnations;
    Tapped net;
    Watch<Tapped> watch;
    std::uint32_t dark{nobody};
    std::vector<Datagram> said;  // all that was delivered
};

bool refused(Mortal& job, std::uint16_t at, std::uint16_t peer, std::uint32_t incarnation,
             std::optional<LinkKeys> keys) {
    try {
        job.net.readmit(at, peer, incarnation, keys);
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

}  // namespace

TEST(readmission_heals_lossy_exchanges_both_ways) {
    for (const bool sealed : {false, true}) {
        Mortal job(3, sealed);
        job.check_whole(1);
        job.dark = 2;
        AllToAll without = job.small(2);
        for (std::uint32_t seq = 0; seq < 5; ++seq) {
            const auto id0 = job.net.post(0, without.spec(0, seq, lossy, 2)),
                       id1 = job.net.post(1, without.spec(1, seq, lossy, 2));
            CHECK(job.watch.wait(0, id0).status == Status::ok);
            CHECK(job.watch.wait(1, id1).status == Status::ok);
        }
        job.restart(2);
        job.dark = nobody;
        job.readmit_everywhere(2);
        job.check_whole(3, lossy);
        job.check_whole(4);
    }
}

TEST(new_process_is_not_heard_before_it_is_readmitted_and_heals_when_it_is) {
    for (const bool sealed : {false, true}) {
        Mortal job(3, sealed);
        job.check_whole(1);
        job.restart(2);
        const std::uint64_t corrupt = job.net.core(0).counters().corrupt;
        AllToAll alone = job.small(2);
        // The others remember packet numbers of the old process, so the first of the new one may look like duplicates.
        for (std::uint32_t seq = 0; seq < 3; ++seq) {
            const Outcome& outcome = job.watch.wait(2, job.net.post(2, alone.spec(2, seq, lossy, 2)), 3 * second);
            for (const Arrival& arrival : outcome.arrivals) CHECK_EQUAL(arrival.arrived, 0U);
        }
        CHECK(job.net.core(0).counters().corrupt > corrupt);
        job.readmit_everywhere(2);
        job.check_whole(3);
        job.check_whole(4, lossy);
    }
}

TEST(datagrams_of_the_old_process_are_refused_and_change_nothing) {
    for (const bool sealed : {false, true}) {
        Mortal job(3, sealed);
        job.check_whole(1);
        AllToAll under_way = job.small(2);
        job.net.post(2, under_way.spec(2, 0, {}, 2));
        job.net.leave(2);  // its goodbye is among the old datagrams
        std::vector<Datagram> old = std::move(job.said);
        job.restart(2);
        job.readmit_everywhere(2);
        // More than it ever sent: no packet number of the new link was seen yet.
        std::size_t forth = 0, back = 0;
        const std::array before{job.net.core(0).counters(), job.net.core(1).counters(), job.net.core(2).counters()};
        for (const Datagram& d : old) {
            if (d.source != 2 && d.target != 2) continue;
            job.net.inject(d.target, d.bytes);
            ++(d.source == 2 ? forth : back);
        }
        CHECK(forth > 40 && back > 40);
        std::uint64_t counted = 0;
        for (std::uint16_t rank = 0; rank < 3; ++rank) {
            const Counters& now = job.net.core(rank).counters();
            counted += now.corrupt - before[rank].corrupt;
            CHECK_EQUAL(now.datagrams_sent, before[rank].datagrams_sent);  // no rank answers
            CHECK_EQUAL(now.pooled, before[rank].pooled);
        }
        CHECK_EQUAL(counted, forth + back);
        job.check_whole(3);
    }
}

TEST(exact_exchange_under_way_fails_at_readmission_and_a_lossy_one_keeps_what_came) {
    Mortal job(3);
    job.check_whole(1);
    AllToAll exact = job.small(2), soft = job.small(3), others = job.small(4);
    // Rank 2 dies before more than a quarter of its messages has arrived.
    job.net.tap = [](Datagram& d) { return d.source != 2 || d.header.kind != Kind::data || d.header.chunk < 5; };
    const auto hard = job.post(exact, 2, 0), mild = job.post(soft, 3, 0, lossy);
    ExchangeSpec pair0 = others.spec(0, 0, {}, 4), pair1 = others.spec(1, 0, {}, 4);
    for (ExchangeSpec* spec : {&pair0, &pair1}) {
        std::erase_if(spec->sends, [](const SendSpec& s) { return s.peer == 2; });
        std::erase_if(spec->receives, [](const ReceiveSpec& r) { return r.peer == 2; });
    }
    const std::uint64_t id0 = job.net.post(0, pair0);
    job.net.run(5 * millisecond);
    job.net.tap = [](Datagram&) { return true; };
    job.restart(2);
    const Nanos at = job.net.now();
    job.readmit(0, 2);
    const Outcome& failed = job.watch.wait(0, hard[0]);
    CHECK(failed.status == Status::peer_silent && failed.ended == at);
    CHECK_EQUAL(failed.peer, 2U);
    CHECK_EQUAL(failed.failure_cause.culprit, 2U);
    CHECK(failed.missing_bytes > 0);
    const Outcome& kept = job.watch.wait(0, mild[0]);
    CHECK(kept.status == Status::ok && kept.ended == at);
    for (const Arrival& arrival : kept.arrivals) CHECK_EQUAL(arrival.arrived, arrival.peer == 2 ? 5U : 20U);
    // Rank 1 does not know of the new process yet, and waits for the old one.
    job.net.run(millisecond);
    CHECK(job.watch.outcome(1, hard[1]) == nullptr && job.watch.outcome(1, mild[1]) == nullptr);
    job.readmit(1, 2);
    CHECK(job.watch.wait(1, hard[1]).status == Status::peer_silent);
    CHECK_EQUAL(job.watch.wait(1, hard[1]).failure_cause.culprit, 2U);
    CHECK(job.watch.wait(1, mild[1]).status == Status::ok);
    // Exchanges that do not involve the rank go on.
    const std::uint64_t id1 = job.net.post(1, pair1);
    CHECK(job.watch.wait(0, id0).status == Status::ok && job.watch.wait(1, id1).status == Status::ok);
    job.check_whole(5);
}

TEST(two_stage_exchange_goes_on_without_the_readmitted_rank) {
    Mortal job(3);
    AllReduce reduced(3, 30'000, 5);
    job.dark = 2;
    const auto id0 = job.net.post(0, reduced.spec(0, 0, Reduce::arrived, {.budget = 1.0}, lossy)),
               id1 = job.net.post(1, reduced.spec(1, 0, Reduce::arrived, {.budget = 1.0}, lossy));
    job.net.run(10 * millisecond);
    CHECK(job.watch.outcome(0, id0) == nullptr);
    job.restart(2);
    job.dark = nobody;
    job.readmit_everywhere(2);
    const Nanos start = job.net.now();
    CHECK(job.watch.wait(0, id0).status == Status::ok && job.watch.wait(1, id1).status == Status::ok);
    CHECK(job.net.now() < start + 50 * millisecond);
    job.check_whole(6);
}

TEST(rank_that_nobody_missed_can_be_readmitted) {
    for (const bool sealed : {false, true}) {
        Mortal job(2, sealed);
        job.check_whole(1);
        job.restart(1);
        job.readmit(0, 1);
        job.check_whole(2);
    }
}

TEST(rank_that_left_can_be_readmitted) {
    Mortal job(3);
    job.check_whole(1);
    job.net.leave(2);
    job.net.run(10 * millisecond);
    job.restart(2);
    job.readmit_everywhere(2);
    job.check_whole(2);
}

TEST(ranks_return_again_and_again_and_two_at_once) {
    for (const bool sealed : {false, true}) {
        Mortal job(4, sealed);
        for (std::uint32_t round = 1; round <= 3; ++round) {
            job.restart(1);
            job.readmit_everywhere(1);
            job.check_whole(10 * round);
        }
        // Each starts before it knows of the other: both learn of it later, as the survivors do.
        job.incarnations[1] = 3;
        job.restart(2);
        const std::uint32_t other = job.incarnations[2];
        job.incarnations[2] = 0;
        job.restart(1);
        job.incarnations[2] = other;
        for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{3}}) {
            job.readmit(rank, 1);
            job.readmit(rank, 2);
        }
        job.readmit(1, 2);
        job.readmit(2, 1);
        job.check_whole(50);
        job.check_whole(51, lossy);
    }
}

TEST(pool_forgets_what_the_old_process_sent) {
    Mortal job(2);
    AllToAll old = job.small(1), fresh = job.small(2);
    job.net.post(1, old.spec(1, 0, {}, 7));
    job.net.run(10 * millisecond);
    CHECK(job.net.core(0).counters().pool_bytes > 0);
    job.restart(1);
    job.readmit(0, 1);
    CHECK_EQUAL(job.net.core(0).counters().pool_bytes, 0U);
    const auto ids = job.post(fresh, 7, 0);
    job.watch.wait_all(ids);
    CHECK(fresh.complete(0) && fresh.complete(1));
}

TEST(no_ciphertext_repeats_towards_a_new_process) {
    // The survivor's key stays, but its packet numbers start over: equal bytes under equal numbers must look different.
    Mortal job(2, true);
    AllToAll same = job.small(1);
    std::vector<std::pair<std::uint32_t, Buffer>> sent;
    job.net.tap = [&](Datagram& d) {
        if (d.source == 0 && d.header.kind == Kind::data) sent.emplace_back(d.header.number, d.bytes);
        return true;
    };
    ExchangeSpec send = same.spec(0, 0, {.budget = 1.0}, 1);
    send.receives.clear();
    job.net.post(0, send);
    const auto first = std::move(sent);
    job.restart(1);
    job.readmit(0, 1);
    sent.clear();
    send.seq = 1;
    job.net.post(0, send);
    CHECK(first.size() >= 20 && sent.size() == first.size());
    std::size_t alike = 0;
    for (const auto& [number, bytes] : first) {
        for (const auto& [again, other] : sent) {
            if (again != number) continue;
            ++alike;
            // Under one nonce the key stream would be the same: ciphertexts would differ exactly as plaintexts do.
            const Header then = parse_header(bytes).value(), now = parse_header(other).value();
            const auto plain = [&](const Header& h) { return same.sent[0][1].data() + std::size_t{h.chunk} * 1424; };
            bool stream_repeats = true;
            for (std::size_t i = 0; i < 16; ++i) {
                const std::byte one = bytes[header_bytes + i] ^ plain(then)[i],
                                two = other[header_bytes + i] ^ plain(now)[i];
                stream_repeats &= one == two;
            }
            CHECK(!stream_repeats);
        }
    }
    CHECK(alike >= 20);
}

TEST(readmission_leaves_alone_what_a_batch_still_points_into) {
    // Batches wait in the socket while their target rank is replaced. The address sanitizer checks it.
    Mortal job(3);
    job.net.socket_delay = 3 * millisecond;
    for (const StageSpec stage : {StageSpec{}, lossy}) {
        auto under_way = std::make_unique<AllToAll>(job.small(1));
        const auto ids = job.post(*under_way, stage.budget > 0 ? 3 : 2, 0, stage);
        job.net.run(millisecond);
        job.restart(2);
        job.readmit_everywhere(2);
        CHECK(job.watch.outcome(0, ids[0]) == nullptr);
        for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{1}}) {
            const Status status = job.watch.wait(rank, ids[rank]).status;
            CHECK(stage.budget > 0 ? status == Status::ok : status != Status::ok);
        }
        under_way.reset();
    }
    job.net.socket_delay = 0;
    job.check_whole(4);
}

TEST(misused_readmission_is_refused_and_changes_nothing) {
    Mortal job(3), secret(3, true);
    job.check_whole(1);
    secret.check_whole(1);
    CHECK(refused(job, 0, 0, 1, {}));
    CHECK(refused(job, 0, 3, 1, {}));
    CHECK(refused(job, 0, 1, 0, {}));
    CHECK(refused(job, 0, 1, 1, LinkKeys{}));
    CHECK(refused(secret, 0, 1, 1, {}));
    job.check_whole(2);
    secret.check_whole(2);
    job.restart(1);
    job.readmit_everywhere(1);
    CHECK(refused(job, 0, 1, 1, {}));
    job.check_whole(3);
}

TEST(nothing_is_left_to_happen_after_a_readmission) {
    Mortal job(3);
    job.check_whole(1);
    AllToAll cut = job.small(2);
    job.post(cut, 2, 0, lossy);
    job.restart(2);
    job.readmit_everywhere(2);
    job.check_whole(3);
    const Nanos limit = job.net.now() + 10 * second;
    while (job.net.advance(limit)) {
    }
    CHECK(!job.net.advance());
}
