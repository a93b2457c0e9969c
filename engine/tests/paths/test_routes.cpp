// NAT traversal and connection migration: which address replaces another, and which does not.
#include "check.hpp"
#include "paths/routes.hpp"

using namespace storm;

namespace {

const Address card("192.0.2.1", 1000), elsewhere("198.51.100.7", 4000), third("203.0.113.9", 5000);
constexpr Nanos trip = 20 * millisecond;

// One rank's routes to rank 1, with addresses that answer or do not, in virtual time.
struct World {
    Routes routes;
    Nanos now{second};
    std::vector<Address> alive;
    std::vector<Routes::Challenge> sent;
    unsigned pings{}, moves{};

    World() { routes.assign({Address("192.0.2.9", 1), card}); }

    bool lives(const Address& address) const { return std::find(alive.begin(), alive.end(), address) != alive.end(); }

    // Lets time pass; whatever is alive answers at once.
    void run(Nanos span) {
        for (const Nanos end = now + span; now < end; now += millisecond) {
            if (now < routes.next_timer()) continue;
            Replies replies;
            routes.tick(
                now,
                [&](const Routes::Challenge& each) {
                    sent.push_back(each);
                    if (lives(each.to)) replies.add(now, each.id);
                },
                [&](std::uint16_t rank) {
                    ++pings;
                    if (lives(routes.present()[rank])) replies.add(now, 0);
                },
                [&](std::uint16_t) { ++moves; });
            routes.answered(1, replies, trip, now);
        }
    }
    // Something sent to the present address a moment ago was answered.
    void prove() {
        Replies replies;
        replies.add(now - millisecond, 0);
        routes.answered(1, replies, trip, now);
    }
};

}  // namespace

TEST(peer_whose_card_never_answered_moves_to_the_first_address_that_does) {
    World world;
    world.alive = {elsewhere};
    (void)world.routes.heard(1, elsewhere, true, world.now);
    CHECK(world.routes.present()[1] == card);
    world.run(50 * millisecond);
    CHECK(world.routes.present()[1] == elsewhere);
    CHECK(world.routes.look(1).learned && world.routes.look(1).answers);
    CHECK_EQUAL(world.moves, 1U);
    world.run(10 * second);
    CHECK(world.routes.next_timer() > world.now);
}

TEST(address_that_does_not_answer_changes_nothing_and_is_forgotten) {
    World world;
    (void)world.routes.heard(1, elsewhere, true, world.now);
    world.run(20 * second);
    CHECK(world.routes.present()[1] == card);
    CHECK(world.sent.size() >= 4 && world.sent.size() < 20);
    CHECK_EQUAL(world.routes.next_timer(), never);
}

TEST(address_that_answers_is_not_left_for_another_that_answers_too) {
    World world;
    world.alive = {card, elsewhere};
    world.prove();
    for (int turn = 0; turn < 5'000; ++turn) {
        (void)world.routes.heard(1, elsewhere, true, world.now);
        world.run(millisecond);
    }
    CHECK(world.routes.present()[1] == card);
    CHECK_EQUAL(world.moves, 0U);
    CHECK(world.sent.size() <= 20);  // however often it is seen: about two pings per second
}

TEST(rebound_peer_moves_once_its_former_address_has_had_time_to_answer) {
    World world;
    world.alive = {elsewhere};
    world.prove();
    world.run(second);
    (void)world.routes.heard(1, elsewhere, true, world.now);
    world.run(50 * millisecond);
    CHECK(world.routes.present()[1] == card);  // its answer may be under way
    world.run(200 * millisecond);
    CHECK(world.routes.present()[1] == elsewhere);
    // And once more: a learned address is replaced, too.
    world.alive = {third};
    world.run(second);
    (void)world.routes.heard(1, third, true, world.now);
    world.run(300 * millisecond);
    CHECK(world.routes.present()[1] == third);
}

TEST(only_a_datagram_with_the_highest_number_names_an_address) {
    World world;
    world.alive = {elsewhere};
    (void)world.routes.heard(1, elsewhere, false, world.now);
    world.run(second);
    CHECK(world.sent.empty());
    CHECK(world.routes.present()[1] == card);
}

TEST(peer_that_asks_from_another_address_is_answered_there_but_not_without_end) {
    World world;
    CHECK(!world.routes.heard(1, card, true, world.now));
    int replies = 0;
    for (int turn = 0; turn < 1'000; ++turn) {
        if (world.routes.heard(1, elsewhere, true, world.now)) ++replies;
        world.now += millisecond;
    }
    CHECK(replies >= 50 && replies <= 110);
}

TEST(forged_addresses_without_end_cost_few_pings) {
    World world;
    for (std::uint16_t port = 1; port < 10'000; ++port)
        (void)world.routes.heard(1, Address("203.0.113.1", port), true, world.now);
    world.run(60 * second);
    CHECK(world.sent.size() <= 20 * Routes::most_candidates);
    CHECK_EQUAL(world.routes.next_timer(), never);
}

TEST(offered_addresses_are_asked_until_one_of_them_answers) {
    World world;
    world.routes.offer(1, card, world.now);
    world.routes.offer(1, elsewhere, world.now);
    world.run(5 * second);
    CHECK(world.routes.present()[1] == card && !world.routes.look(1).answers);
    world.alive = {elsewhere};
    world.run(2 * second);
    CHECK(world.routes.present()[1] == elsewhere);
}

TEST(offer_of_the_present_address_shows_whether_it_answers) {
    World world;
    world.alive = {card};
    world.routes.offer(1, card, world.now);
    world.run(100 * millisecond);
    CHECK(world.routes.look(1).answers && !world.routes.look(1).learned);
    CHECK_EQUAL(world.moves, 0U);
    CHECK_EQUAL(world.routes.next_timer(), never);
}

TEST(learned_addresses_are_kept_open_and_others_only_if_asked_for) {
    World world;
    world.alive = {card};
    world.prove();
    world.run(60 * second);
    CHECK_EQUAL(world.pings, 0U);
    world.alive = {elsewhere};
    (void)world.routes.heard(1, elsewhere, true, world.now);
    world.run(second);
    CHECK(world.routes.look(1).learned);
    world.pings = 0;
    world.run(60 * second);
    CHECK(world.pings >= 11 && world.pings <= 12);

    World asked;
    asked.routes.enable_keepalive(asked.now);
    asked.run(11 * second);
    CHECK_EQUAL(asked.pings, 4U);  // two ranks, of which the core skips its own
}

TEST(new_process_of_a_rank_is_where_its_card_says) {
    World world;
    world.alive = {elsewhere};
    (void)world.routes.heard(1, elsewhere, true, world.now);
    world.run(second);
    world.routes.assign(1, third);
    CHECK(world.routes.present()[1] == third && !world.routes.look(1).learned && !world.routes.look(1).answers);
}

TEST(addresses_are_equal_if_host_and_port_are) {
    CHECK(Address("10.0.0.1", 5) == Address("10.0.0.1", 5));
    CHECK(Address("10.0.0.1", 5) != Address("10.0.0.1", 6));
    CHECK(Address("10.0.0.1", 5) != Address("10.0.0.2", 5));
    CHECK(Address("::1", 5) == Address("::1", 5));
    CHECK(Address("::1", 5) != Address("::2", 5));
    CHECK(Address("::1", 5) != Address("0.0.0.1", 5));
    CHECK(Address("10.0.0.1", 5).host() == "10.0.0.1");
    CHECK(Address("fe80::1", 5).host() == "fe80::1");
}
