// FailureCauses: which error a goodbye names, and when an error is healed.
#include "check.hpp"
#include "peers/failure_causes.hpp"

using namespace storm;

namespace {

constexpr Nanos silence = 10 * second;
constexpr FailureCause third{3, Status::peer_silent}, fourth{4, Status::peer_left};

}  // namespace

TEST(first_error_of_a_cascade_is_the_one_that_a_goodbye_names) {
    FailureCauses causes(0, silence);
    CHECK(!causes.last());
    causes.on_failed(1, Status::peer_silent, third, second);
    causes.on_failed(2, Status::peer_left, fourth, 2 * second);
    CHECK(causes.last() == third);
    causes.on_failed(3, Status::peer_left, fourth, second + 2 * silence);
    CHECK(causes.last() == third);
    causes.on_failed(4, Status::peer_left, fourth, second + 2 * silence + 1);
    CHECK(causes.last() == fourth);
}

TEST(peers_that_ask_hear_why_each_exchange_failed) {
    FailureCauses causes(0, silence);
    causes.on_failed(1, Status::peer_silent, third, second);
    causes.on_failed(2, Status::peer_left, fourth, second);
    CHECK(causes.of(1) == third);
    CHECK(causes.of(2) == fourth);
    CHECK(!causes.of(3));
    for (std::uint64_t key = 10; key < 10 + FailureCauses::most; ++key)
        causes.on_failed(key, Status::timed_out, third, second);
    CHECK(!causes.of(1));
    CHECK(causes.of(10) == third);
}

TEST(exchange_that_its_own_caller_closed_is_remembered_but_is_no_error) {
    FailureCauses causes(0, silence);
    causes.on_failed(1, Status::closed, {0, Status::closed}, second);
    CHECK(causes.of(1) == (FailureCause{0, Status::closed}));
    CHECK(!causes.last());
}

TEST(error_heals_when_the_culprit_takes_part_again_and_not_before) {
    FailureCauses causes(0, silence);
    causes.on_failed(1, Status::peer_silent, third, 5 * second);
    causes.on_success(4 * second, 6 * second);  // began before the error
    CHECK(causes.last() == third);
    causes.on_success(6 * second, std::nullopt);  // without the culprit
    CHECK(causes.last() == third);
    causes.on_success(6 * second, 5 * second);  // nothing has arrived from the culprit since
    CHECK(causes.last() == third);
    causes.on_success(6 * second, 6 * second);
    CHECK(!causes.last());
}

TEST(error_heals_when_it_was_ours_or_long_ago) {
    FailureCauses causes(3, silence);
    causes.on_failed(1, Status::timed_out, {3, Status::timed_out}, 5 * second);
    causes.on_success(6 * second, std::nullopt);
    CHECK(!causes.last());
    causes.on_failed(2, Status::peer_left, fourth, 10 * second);
    causes.on_success(10 * second + 2 * silence, std::nullopt);
    CHECK(causes.last() == fourth);
    causes.on_success(10 * second + 2 * silence + 1, std::nullopt);
    CHECK(!causes.last());
}

TEST(peer_that_others_call_silent_is_not_waited_for_unless_it_has_spoken) {
    FailureCauses causes(0, silence);
    causes.on_failed(1, Status::peer_failed, third, 5 * second);
    CHECK(causes.silenced(3, 5 * second));
    CHECK(!causes.silenced(3, 5 * second + 1));
    CHECK(!causes.silenced(4, 0));
}
