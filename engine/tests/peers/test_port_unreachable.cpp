// ICMP port unreachable: makes us ping the peer at once, and counts it as dead only if it stays silent.
#include <array>

#include "jobs.hpp"
#include "peers/port_unreachable.hpp"
#include "tapped.hpp"
#include "views_world.hpp"

using namespace storm;
using namespace storm::check;

namespace {

// Two cores of which one may be dead, and the last datagram that was sent to it.
struct Pair {
    Pair() : net(config()), watch(net, 2) {
        net.tap = [this](Datagram& datagram) {
            if (datagram.target == 1) last = datagram.bytes;
            return !dark || (datagram.source != 1 && datagram.target != 1);
        };
    }
    static CoreConfig config() {
        CoreConfig own;
        own.world = 2;
        own.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
        return own;
    }
    // Lets time pass while a kernel sends port unreachable every 50 ms, quoting what was sent last.
    void refuse_for(Nanos time, std::size_t quoted = 548) {
        for (const Nanos until = net.now() + time; net.now() < until; net.run(50 * millisecond)) {
            const std::span<const std::byte> bytes(last);
            net.core(0).refused(1, bytes.first(std::min(quoted, bytes.size())), net.now());
            net.inject(0, Buffer(1));  // a driver runs the core after that
        }
    }

    Tapped net;
    Watch<Tapped> watch;
    Buffer last;
    bool dark{};
};

AllToAll small_job(std::uint64_t seed) {
    return {2, seed, [](auto, auto) { return std::size_t{20 * 1440}; }};
}

}  // namespace

TEST(peer_is_dead_when_refusals_last_and_it_does_not_answer) {
    PortUnreachable unreachable(10 * second);
    CHECK(!unreachable.probe_due(0) && unreachable.timer() == never);
    unsigned asked = 0;
    Nanos now = second;
    while (!unreachable.on_unreachable(now)) {
        if (unreachable.probe_due(now)) ++asked;
        now += 10 * millisecond;
        CHECK(now < 3 * second);
    }
    CHECK(asked >= 5 && asked <= 11);
    CHECK(now >= second + 800 * millisecond && now <= 2 * second);
    CHECK(unreachable.dead() && unreachable.timer() == never);
    CHECK(unreachable.silent_at(0) == now && unreachable.silent_at(now) > now);
    unreachable.clear();
    CHECK(!unreachable.dead() && unreachable.silent_at(0) == never);
}

TEST(single_refusals_are_forgotten_and_a_sign_of_life_begins_anew) {
    PortUnreachable unreachable(10 * second);
    for (Nanos now = second; now < 100 * second; now += 5 * second) {
        CHECK(!unreachable.on_unreachable(now));
        for (Nanos later = now; later < now + 5 * second; later += 10 * millisecond) (void)unreachable.probe_due(later);
        CHECK(unreachable.timer() == never);  // pings do not go on for ever
    }
    for (Nanos now = 200 * second; now < 210 * second; now += 10 * millisecond) {
        CHECK(!unreachable.on_unreachable(now));
        (void)unreachable.probe_due(now);
        if (now % (800 * millisecond) == 0) unreachable.clear();
    }
}

// A kernel sends a few reports at once, and then one a second.
TEST(two_refusals_a_second_apart_are_enough) {
    PortUnreachable unreachable(10 * second);
    Nanos now = second;
    for (int i = 0; i < 6; ++i) CHECK(!unreachable.on_unreachable(now));
    for (; now < 2 * second; now += 10 * millisecond) (void)unreachable.probe_due(now);
    CHECK(unreachable.on_unreachable(now));
}

TEST(exact_exchange_ends_a_second_after_its_peer_is_refused) {
    Pair job;
    AllToAll first = small_job(1), next = small_job(2);
    job.net.post(1, first.spec(1, 0));
    job.watch.wait(0, job.net.post(0, first.spec(0, 0)));
    job.dark = true;
    const Nanos start = job.net.now();
    const std::uint64_t id = job.net.post(0, next.spec(0, 1));
    job.refuse_for(1500 * millisecond);
    const Outcome& outcome = job.watch.wait(0, id);
    CHECK(outcome.status == Status::peer_silent && outcome.peer == 1);
    CHECK(outcome.ended >= start + 800 * millisecond && outcome.ended < start + 1500 * millisecond);
}

TEST(refusals_end_nothing_while_the_peer_answers_or_where_they_quote_nothing_of_ours) {
    Pair job;
    AllToAll first = small_job(1);
    const std::uint64_t id = job.net.post(0, first.spec(0, 0));
    job.refuse_for(5 * second);  // the peer is alive, but late
    CHECK(job.net.take_finished(0).empty());
    job.dark = true;
    job.refuse_for(3 * second, 8);  // no more than ports and lengths, which can be guessed
    CHECK(job.net.take_finished(0).empty());
    job.last.assign(100, std::byte{0x11});
    job.dark = false;
    job.net.post(1, first.spec(1, 0));
    CHECK(job.watch.wait(0, id).status == Status::ok);
}

TEST(member_at_whose_port_nobody_listens_is_left_out_at_once) {
    for (std::uint16_t dead = 0; dead < 5; ++dead) {
        for (std::uint16_t knows = 0; knows < 5; ++knows) {
            if (knows == dead) continue;
            World world(5, 8, dead);
            world.run_for(3 * World::silence);
            world.kill(dead);
            // One rank that knows is enough: the others would wait for a silence.
            world.at(knows).views->refused(dead, world.now());
            world.run_for(World::silence / 10);
            Ranks rest;
            for (std::uint16_t rank = 0; rank < 5; ++rank) rest.set(rank, rank != dead);
            CHECK_EQUAL(world.decided().size(), 2U);
            for (const std::uint16_t rank : rest) CHECK(world.view(rank).ranks() == rest);
        }
    }
}

TEST(member_that_is_heard_after_a_refusal_stays) {
    World world(3, 4, 1);
    world.run_for(3 * World::silence);
    world.at(2).views->refused(1, world.now());
    world.at(2).views->on_received(1, world.now());
    world.run_for(2 * World::silence);
    CHECK_EQUAL(world.decided().size(), 1U);
}
