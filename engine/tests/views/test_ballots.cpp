// Paxos acceptor and proposal: promises, the value of the highest ballot, start positions of sessions.
#include "check.hpp"
#include "views/ballots.hpp"

using namespace storm;

namespace {

const View first_value{.number = 2, .members = {{0, 0}}};
const View second_value{.number = 2, .members = {{1, 0}}};

}  // namespace

TEST(promise_shuts_out_lower_ballots) {
    AcceptorState answers;
    CHECK(answers.promise({2, 1, 0}));
    CHECK(answers.promise({2, 1, 0}));  // a copy of the same
    CHECK(!answers.promise({2, 0, 0}));
    CHECK(!answers.accept({1, 7, 0}, first_value));
    CHECK(!answers.accepted);
    CHECK(answers.accept({2, 1, 0}, first_value));
    CHECK(answers.promise({3, 0, 0}));
    CHECK(answers.value == first_value);
}

TEST(proposal_waits_for_the_value_of_the_highest_ballot_that_was_accepted) {
    Proposal own{.ballot = {9, 0, 0}};
    own.on_promise(0, {}, {}, true);
    own.on_promise(1, {3, 1, 0}, {}, true);
    own.on_value({3, 1, 0}, first_value);
    CHECK(own.found == first_value);
    own.on_promise(2, {4, 2, 0}, {}, true);
    CHECK(!own.found);
    own.on_value({3, 1, 0}, first_value);
    CHECK(!own.found);
    own.on_value({4, 2, 0}, second_value);
    CHECK(own.found == second_value);
}

TEST(sessions_start_where_the_furthest_of_those_who_go_on_is) {
    Proposal own{.ballot = {1, 0, 0}};
    own.on_promise(0, {}, {{7, 10, 3}, {9, 1, 0}}, true);
    own.on_promise(1, {}, {{7, 11, 2}}, true);
    own.on_promise(2, {}, {{7, 99, 9}}, true);
    Ranks among;
    among.add(0);
    among.add(1);
    CHECK((own.starts(among) == std::vector<Start>{{7, 11, 3}, {9, 1, 0}}));
}
