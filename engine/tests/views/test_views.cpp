// Membership under virtual time: heartbeats, joins, leaves, network partitions, crashes and agreement on views.
#include "check.hpp"
#include "views_world.hpp"

using namespace storm;

namespace {

constexpr Nanos silence = World::silence;

Ranks ranks(std::initializer_list<std::uint16_t> all) {
    Ranks set;
    for (const std::uint16_t rank : all) set.add(rank);
    return set;
}

// All ranks in the set have the same view, whose members are exactly the set.
void check_agreed(World& world, const Ranks& set) {
    std::optional<View> first;
    for (const std::uint16_t rank : set) {
        CHECK(world.at(rank).views->inside());
        CHECK(!world.at(rank).views->frozen());
        if (!first) first = world.view(rank);
        CHECK(world.view(rank) == *first);
    }
    CHECK(first->ranks() == set);
}

}  // namespace

TEST(nobody_proposes_where_no_change_is_wanted) {
    World world(5, 8, 1);
    world.network.loss_percent = 20;
    world.run_for(100 * silence);
    CHECK_EQUAL(world.decided().size(), 1U);
    CHECK_EQUAL(world.view(3).number, 1U);
    // Ten beats per silence to each of four peers, and little more.
    CHECK(world.notes() < 5 * 4 * 10 * 100 * 12 / 10);
}

TEST(dead_member_is_left_out_within_a_silence_and_three_beats) {
    for (std::uint16_t dead = 0; dead < 5; ++dead) {
        World world(5, 8, dead);
        world.run_for(3 * silence + silence / 30);
        world.kill(dead);
        world.run_for(silence + 5 * silence / 20);
        Ranks rest = ranks({0, 1, 2, 3, 4});
        rest.remove(dead);
        check_agreed(world, rest);
        CHECK_EQUAL(world.decided().size(), 2U);
    }
}

TEST(goodbye_is_agreed_on_at_once) {
    World world(4, 4, 1);
    world.run_for(silence);
    world.close(0);
    world.run_for(10 * world.network.delay);
    check_agreed(world, ranks({1, 2, 3}));
}

TEST(minority_waits_and_comes_in_again) {
    World world(5, 8, 2);
    world.run_for(silence);
    world.part(ranks({0, 1}));
    world.run_for(3 * silence);
    check_agreed(world, ranks({2, 3, 4}));
    CHECK_EQUAL(world.view(0).number, 1U);
    CHECK(!world.at(0).views->connectivity(world.now()).quorum);
    world.heal();
    world.run_for(silence);
    check_agreed(world, ranks({0, 1, 2, 3, 4}));
    CHECK(world.violation().empty());
}

TEST(half_with_the_lowest_rank_goes_on) {
    World world(4, 4, 3);
    world.run_for(silence);
    world.part(ranks({0, 1}));
    world.run_for(3 * silence);
    check_agreed(world, ranks({0, 1}));
    CHECK_EQUAL(world.view(2).number, 1U);
}

TEST(dead_link_costs_the_higher_rank_its_place_for_all_alike) {
    World world(5, 8, 4);
    world.run_for(silence);
    world.cut(0, 4);
    world.run_for(2 * silence);
    check_agreed(world, ranks({0, 1, 2, 3}));
    world.run_for(20 * silence);
    CHECK_EQUAL(world.decided().size(), 2U);
    world.heal();
    world.run_for(silence);
    check_agreed(world, ranks({0, 1, 2, 3, 4}));
}

TEST(newcomer_is_taken_in_with_its_card) {
    World world(3, 8, 5);
    world.run_for(silence);
    world.join(6, 2);
    world.run_for(silence / 2);
    check_agreed(world, ranks({0, 1, 2, 6}));
    CHECK((world.view(0).joined == std::vector<Member>{{6, 1}}));
    CHECK_EQUAL(world.at(0).views->card({6, 1})->size(), 4U);
}

TEST(wish_for_a_view_anew_gives_one_more_with_the_same_members) {
    for (std::uint16_t asker = 0; asker < 4; ++asker) {
        World world(4, 4, asker);
        world.run_for(silence);
        world.anew(asker);
        world.run_for(silence / 2);
        check_agreed(world, ranks({0, 1, 2, 3}));
        CHECK_EQUAL(world.view(asker).number, 2U);
        CHECK(world.view(asker).joined.empty());
        world.run_for(20 * silence);
        CHECK_EQUAL(world.decided().size(), 2U);
        CHECK(world.violation().empty());
    }
}

TEST(wish_for_a_view_anew_is_fulfilled_by_the_view_without_a_dead_member) {
    World world(4, 4, 7);
    world.run_for(silence);
    world.kill(0);
    world.anew(3);
    world.run_for(3 * silence);
    check_agreed(world, ranks({1, 2, 3}));
    CHECK(world.decided().size() <= 3U);
    const std::size_t settled = world.decided().size();
    world.run_for(20 * silence);
    CHECK_EQUAL(world.decided().size(), settled);
    CHECK(world.violation().empty());
}

TEST(member_that_wants_out_is_listed_as_leaving_and_then_forgotten) {
    World world(3, 4, 6);
    world.run_for(silence);
    world.leave(0);
    world.run_for(silence / 2);
    CHECK((world.view(1).ranks() == ranks({1, 2})));
    CHECK((world.view(1).leaving == std::vector<Member>{{0, 0}}));
    CHECK(world.at(0).views->inside());
    for (int turn = 0; turn < 3; ++turn) {
        for (const std::uint16_t rank : ranks({0, 1, 2})) (void)world.act(rank);
    }
    world.close(0);
    world.run_for(3 * silence);
    CHECK_EQUAL(world.view(1).number, 2U);
    world.close(2);
    world.run_for(silence);
    check_agreed(world, ranks({1}));
    CHECK(world.view(1).leaving.empty());
}

TEST(leaver_that_dies_before_it_has_handed_over_is_given_up) {
    World world(3, 4, 6);
    world.run_for(silence);
    world.leave(0);
    world.run_for(silence / 2);
    world.kill(0);
    world.run_for(2 * silence);
    check_agreed(world, ranks({1, 2}));
    CHECK_EQUAL(world.view(1).number, 3U);
    CHECK(world.view(1).leaving.empty());
}

TEST(restarted_process_takes_the_place_of_the_dead_one) {
    World world(3, 4, 7);
    world.run_for(silence);
    world.kill(1);
    world.run_for(silence / 5);
    world.join(1, 2);
    world.run_for(silence / 2);
    check_agreed(world, ranks({0, 1, 2}));
    CHECK((world.view(0).members[1] == Member{1, 1}));
}

TEST(pair_survives_the_crash_of_either_once_it_is_restarted) {
    for (std::uint16_t dead = 0; dead < 2; ++dead) {
        World world(2, 4, 8);
        world.run_for(silence);
        world.kill(dead);
        world.run_for(3 * silence);
        CHECK_EQUAL(world.view(1 - dead).number, dead == 0 ? 1U : 2U);
        world.join(dead, 1 - dead);
        world.run_for(3 * silence);
        check_agreed(world, ranks({0, 1}));
        CHECK_EQUAL(world.view(0).number, dead == 0 ? 0x10000U : 3U);
    }
}

TEST(frozen_process_makes_no_step_until_the_view_is_known) {
    World world(3, 4, 9);
    world.run_for(silence);
    Views& views = *world.at(1).views;
    CHECK(views.advance({World::session, 1, 1}));
    ViewMessage prepare{.kind = ViewMessageKind::prepare, .number = 1, .ballot = {5, 0, 0}};
    views.receive(0, write_view_message(prepare), world.now());
    CHECK(views.frozen());
    CHECK(!views.advance({World::session, 2, 1}));
    CHECK(views.advance({World::session, 1, 1}));
    // A process that promised and receives nothing more proposes itself.
    world.run_for(silence);
    check_agreed(world, ranks({0, 1, 2}));
    CHECK_EQUAL(world.view(1).number, 2U);
}

TEST(step_that_was_made_in_an_older_view_does_not_count_beyond_the_start_of_the_new_one) {
    World world(3, 4, 10);
    world.run_for(silence);
    Views& views = *world.at(1).views;
    CHECK(views.advance({World::session, 4, 1}));
    world.close(2);
    world.run_for(silence / 10);
    CHECK_EQUAL(views.view()->start(World::session)->steps, 4U);
    CHECK_EQUAL(views.view()->start(World::session)->base, 1U);
    CHECK(!views.advance({World::session, 5, 1}));
    CHECK(views.advance({World::session, 4, 2}));
    CHECK(views.advance({World::session, 5, 2}));
    // The other process was behind, and may advance up to the start.
    CHECK(world.at(0).views->advance({World::session, 4, 1}));
    CHECK(!world.at(0).views->advance({World::session, 5, 1}));
}

TEST(outsider_knocks_ever_less_often_when_it_is_thrown_out_again) {
    World world(3, 4, 11);
    world.run_for(silence);
    std::vector<Nanos> waits;
    for (int round = 0; round < 3; ++round) {
        world.at(0).views->blocked(2, world.now());
        world.at(1).views->blocked(2, world.now());
        while (world.at(2).views->inside()) world.run_for(silence / 100);
        const Nanos out = world.now();
        while (!world.at(2).views->connectivity(world.now()).requesting_join) world.run_for(silence / 100);
        waits.push_back(world.now() - out);
        while (!world.at(2).views->inside()) world.run_for(silence / 10);
    }
    CHECK(waits[1] > waits[0] + second / 2);
    CHECK(waits[2] > waits[1] + second / 2);
}

TEST(newcomer_that_hears_of_the_next_view_first_settles_in_the_one_from_which_all_go_on) {
    World world(3, 5, 13);
    world.run_for(silence);
    world.join(3, 0);
    world.run_for(silence);
    check_agreed(world, ranks({0, 1, 2, 3}));
    // The newcomer has settled, as all others know, but has not learned that of the process that leaves now.
    for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{1}})
        CHECK(world.at(rank).views->advance({World::session, 5, 2}));
    Views& views = *world.at(3).views;
    world.close(2);
    world.run_for(silence);
    CHECK_EQUAL(views.view()->number, 3U);
    CHECK_EQUAL(views.view()->start(World::session)->base, 2U);
    CHECK(views.blank(World::session));
    CHECK(views.advance({World::session, 4, 2}));
    CHECK(!views.blank(World::session));
    CHECK(views.advance({World::session, 5, 2}));
    CHECK(!views.advance({World::session, 6, 2}));
}

TEST(process_that_holds_nothing_does_not_go_on_without_those_who_do) {
    World world(2, 4, 12);
    world.run_for(silence);
    CHECK(world.at(0).views->advance({World::session, 3, 1}));
    world.kill(1);
    world.run_for(2 * silence);
    CHECK(world.at(0).views->advance({World::session, 3, 2}));
    world.join(1, 0);
    world.run_for(silence);
    check_agreed(world, ranks({0, 1}));
    CHECK(world.at(1).views->blank(World::session));
    CHECK(!world.at(0).views->blank(World::session));
    // Now the process with state leaves without a goodbye. The other is no quorum; if it were, it would still wait.
    world.close(0);
    world.run_for(3 * silence);
    CHECK_EQUAL(world.view(1).number, 3U);
}

TEST(processes_that_hold_nothing_learn_that_all_who_did_are_gone_for_good) {
    for (const bool returns : {true, false}) {
        World world(3, 4, 17);
        world.run_for(silence);
        CHECK(world.at(0).views->advance({World::session, 3, 1}));
        world.kill(1);
        world.kill(2);
        world.join(1, 0);
        world.join(2, 0);
        world.run_for(3 * silence);
        check_agreed(world, ranks({0, 1, 2}));
        const std::uint64_t before = world.view(1).number;
        world.kill(0);
        world.run_for(3 * silence);
        CHECK_EQUAL(world.view(1).number, before);
        if (!returns) continue;
        // Its successor shows that it is gone: the others have no process to wait for, and their new view has no state.
        world.join(0, 1);
        world.run_for(3 * silence);
        check_agreed(world, ranks({0, 1, 2}));
        CHECK(world.view(1).number > before);
        CHECK(world.view(1).blank == ranks({0, 1, 2}));
    }
}

TEST(paused_process_learns_that_it_is_out_and_comes_back) {
    World world(3, 4, 13);
    world.run_for(silence);
    world.pause(0);
    world.run_for(2 * silence);
    check_agreed(world, ranks({1, 2}));
    world.resume(0);
    CHECK(!world.at(0).views->frozen());
    world.run_for(silence);
    check_agreed(world, ranks({0, 1, 2}));
    CHECK(world.at(0).views->blank(World::session));
}

TEST(newcomers_that_die_at_once_do_not_come_in_again_and_again) {
    World world(4, 6, 14);
    world.run_for(silence);
    world.join(4, 0);
    world.join(5, 1);
    world.run_for(silence / 3);
    check_agreed(world, ranks({0, 1, 2, 3, 4, 5}));
    world.kill(4);
    world.kill(5);
    world.run_for(5 * silence);
    check_agreed(world, ranks({0, 1, 2, 3}));
    CHECK(world.view(0).number <= 4);
}

TEST(newcomer_of_a_lower_rank_that_dies_at_once_does_not_stop_a_single_process) {
    World world(3, 4, 16);
    world.run_for(silence);
    world.close(0);
    world.run_for(silence / 2);
    world.close(2);
    world.run_for(silence / 2);
    check_agreed(world, ranks({1}));
    world.join(0, 1);
    world.run_for(silence / 2);
    check_agreed(world, ranks({0, 1}));
    world.kill(0);
    world.run_for(2 * silence);
    check_agreed(world, ranks({1}));
}
