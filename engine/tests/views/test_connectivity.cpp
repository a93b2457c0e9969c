// Failure detector: silence, goodbyes, dead links, and the choice of members that can all reach each other.
#include "check.hpp"
#include "views/connectivity.hpp"

using namespace storm;

namespace {

constexpr Nanos silence = 10 * second;

Ranks first(std::size_t count) {
    Ranks all;
    for (std::size_t rank = 0; rank < count; ++rank) all.add(rank);
    return all;
}

Ranks without(Ranks all, std::size_t rank) {
    all.remove(rank);
    return all;
}

// Rank 0 of five ranks that can all reach each other.
Connectivity whole() {
    Connectivity net(0, 8, silence);
    for (std::uint16_t rank = 1; rank < 5; ++rank) {
        net.on_received(rank, 0);
        net.report(rank, first(5), 0);
    }
    return net;
}

}  // namespace

TEST(peer_is_heard_for_a_silence_after_its_last_datagram) {
    Connectivity net = whole();
    net.on_received(3, second);
    net.refresh(silence - 1);
    CHECK(net.reachable() == first(5));
    CHECK_EQUAL(net.next_silence(), silence);
    net.refresh(silence);
    CHECK((net.reachable() - first(1)).count() == 1 && net.reachable().has(3));
}

TEST(goodbye_holds_against_what_comes_late_and_ends_with_the_next_process) {
    Connectivity net = whole();
    net.on_goodbye(2);
    net.on_received(2, second);
    CHECK(!net.reachable().has(2));
    net.reset(2);
    net.on_received(2, second);
    CHECK(net.reachable().has(2));
}

TEST(blocked_path_is_a_dead_link_for_a_while) {
    Connectivity net = whole();
    net.blocked(2, 0);
    net.on_received(2, second);
    CHECK(!net.good(0, 2));
    net.on_received(2, 11 * silence);
    CHECK(net.good(0, 2));
}

TEST(whoever_has_most_bad_links_goes_and_of_equals_the_highest_rank) {
    Connectivity net = whole();
    CHECK(net.choose(first(5), {}) == first(5));
    net.report(1, without(first(5), 4), second);  // the link is dead even if only one end reports it
    CHECK(net.choose(first(5), {}) == first(4));
    net.report(3, without(first(5), 1), second);
    CHECK(net.choose(first(5), {}) == without(first(5), 1));
}

TEST(of_two_ends_of_a_dead_link_the_one_that_leaves_anyway_goes) {
    Connectivity net = whole();
    net.report(1, without(first(5), 4), second);
    Ranks leaves;
    leaves.add(1);
    CHECK(net.choose(first(5), leaves) == without(first(5), 1));
}

TEST(process_that_did_not_run_gives_the_others_time) {
    Connectivity net = whole();
    net.slept(100 * silence);
    net.refresh(100 * silence);
    CHECK(net.reachable() == first(5));
    net.refresh(101 * silence);
    CHECK(net.reachable() == first(1));
}
