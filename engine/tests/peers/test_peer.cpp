// Peer and Peers: liveness, blocked paths, and which peers must be looked at.
#include <memory>

#include "check.hpp"
#include "exchange/exchange.hpp"
#include "peers/credit.hpp"
#include "peers/peer.hpp"
#include "peers/peers.hpp"

using namespace storm;

namespace {

constexpr Nanos silence = 8 * second, start = second;

std::unique_ptr<Peer> make_peer(std::uint16_t rank = 1, Nanos now = start) {
    return std::make_unique<Peer>(rank, 1 << 20, RateControl(RateMode::unlimited, 1472, now), PathMtu(512, 1472), 1440,
                                  now);
}

}  // namespace

TEST(peer_is_silent_from_its_last_word_or_from_the_start_of_an_exchange) {
    const auto peer = make_peer();
    CHECK_EQUAL(peer->silent_at(0, silence), start + silence);
    CHECK_EQUAL(peer->silent_at(5 * second, silence), 5 * second + silence);
    peer->on_received(7 * second);
    CHECK_EQUAL(peer->silent_at(5 * second, silence), 7 * second + silence);
    peer->fall_silent();
    CHECK(peer->silent() && !peer->explores_path());
    CHECK_EQUAL(peer->path_timer(), never);
    peer->on_received(8 * second);
    CHECK(!peer->silent());
}

TEST(peer_that_we_only_wait_for_is_pinged_four_times_in_its_silence) {
    const auto peer = make_peer();
    CHECK_EQUAL(peer->ping_at(0, silence), start + silence / 4);
    peer->ping(3 * second, silence);
    CHECK(peer->controls.pop().kind == Kind::ping);
    CHECK_EQUAL(peer->ping_at(0, silence), 3 * second + silence / 4);
    peer->on_received(4 * second);
    CHECK_EQUAL(peer->ping_at(0, silence), 4 * second + silence / 4);
}

TEST(peer_that_left_is_told_only_that_messages_are_done) {
    const auto peer = make_peer();
    peer->leave({3, Status::timed_out});
    CHECK(peer->left() && peer->leave_cause() == (FailureCause{3, Status::timed_out}));
    peer->queue_control({.kind = Kind::ready});
    CHECK(peer->controls.empty());
    peer->queue_control({.kind = Kind::done});
    CHECK(!peer->controls.empty());
}

TEST(path_is_blocked_only_when_losses_themselves_span_the_silence) {
    const auto peer = make_peer();
    peer->on_data_lost(2 * second);
    CHECK_EQUAL(peer->blocked_at(0, silence), never);  // however late it is now
    peer->on_data_lost(2 * second + silence - 1);
    CHECK(!peer->may_be_blocked(silence));
    peer->on_data_lost(2 * second + silence);
    CHECK_EQUAL(peer->blocked_at(0, silence), 2 * second + silence);
    CHECK_EQUAL(peer->blocked_at(2 * second + 1, silence), never);  // an exchange that began later
    CHECK(peer->may_be_blocked(silence));
    peer->on_data_arrived();
    CHECK_EQUAL(peer->blocked_at(0, silence), never);
}

TEST(peers_that_nothing_happened_to_are_not_looked_at) {
    const Credit credit(1 << 20, 3);
    Peers peers(3, credit);
    peers.put(make_peer(1));
    peers.put(make_peer(2));
    CHECK(peers.find(0) == nullptr);
    CHECK(peers.take_due(start).empty());
    peers.refresh([](std::uint16_t) {});
    CHECK(!peers.may_send_control(1, start) && !peers.may_send_control(2, start));
    CHECK_EQUAL(peers.may_have_control().next(0), 64U);  // none
    peers[2].queue_control({.kind = Kind::ping});
    CHECK_EQUAL(peers.may_have_control().next(0), 2U);
    CHECK(peers.may_send_control(2, start));
    int refreshed = 0;
    peers.refresh([&](std::uint16_t rank) { refreshed += rank; });
    CHECK_EQUAL(refreshed, 2);
}

TEST(peer_with_a_report_for_later_is_found_when_it_is_due) {
    const Credit credit(1 << 20, 3);
    Peers peers(3, credit);
    peers.put(make_peer(1));
    peers.put(make_peer(2));
    peers[1].links[0].in.arrive(1, 100, true, start);
    peers.refresh([](std::uint16_t) {});
    const Nanos due = peers.timer(1, PeerTimer::report);
    CHECK(due > start && due < start + second);
    CHECK_EQUAL(peers.next(), due);
    CHECK(!peers.may_send_control(1, start));
    CHECK(peers.may_have_control().test(1));  // later
    CHECK(!peers.awake().test(1));
    peers.wake(due - 1);
    CHECK(!peers.awake().test(1));
    peers.wake(due);
    CHECK(peers.awake().test(1));
    CHECK(peers.may_send_control(1, due));
    CHECK(peers.awake().test(1));
}

TEST(peer_whose_report_falls_due_earlier_is_looked_at_again) {
    const Credit credit(1 << 20, 3);
    Peers peers(3, credit);
    peers.put(make_peer(1));
    peers.put(make_peer(2));
    peers[1].links[0].in.arrive(1, 100, true, start);
    CHECK(!peers.may_send_control(1, start) && !peers.may_send_control(2, start));
    peers.credit_shrank();
    CHECK(peers.awake().test(1));
    CHECK(!peers.awake().test(2));  // nothing to report
}

TEST(peer_with_datagrams_in_flight_is_due_when_it_should_be_probed_and_not_before) {
    const Credit credit(1 << 20, 3);
    Peers peers(3, credit);
    peers.put(make_peer(1));
    peers.put(make_peer(2));
    (void)peers[1].links[0].out.depart({.bytes = 100, .kind = Kind::data}, start);
    peers.refresh([](std::uint16_t) {});
    const Nanos due = peers.next();
    CHECK_EQUAL(due, peers.look(1).links[0].out.probe_at());
    CHECK(peers.take_due(due - 1).empty());
    CHECK(peers.take_due(due) == std::vector<std::uint16_t>{1});
    peers[1].links[0].out.probed(due);
    peers.refresh([](std::uint16_t) {});
    CHECK_EQUAL(peers.next(), peers.look(1).links[0].out.probe_at());
}

TEST(peer_whose_queue_was_emptied_is_no_longer_asked_for_data) {
    const Credit credit(1 << 20, 2);
    Peers peers(2, credit);
    peers.put(make_peer(1));
    BlockPool blocks(16, 0);
    ExchangeSpec spec;
    const std::byte data{};
    spec.sends.push_back({.peer = 1, .data = &data, .bytes = 1});
    Exchange exchange(spec, 16, blocks, start);
    peers.queue(exchange.sends[0]);
    CHECK(!peers.idle(1));
    peers[1].queue.remove(exchange.sends[0]);
    CHECK(peers.queued().test(1));
    CHECK(peers.idle(1));
    CHECK(!peers.queued().test(1));
}

TEST(peer_that_was_refused_is_tried_again_when_its_time_has_come_or_it_changes) {
    const Credit credit(1 << 20, 3);
    Peers peers(3, credit);
    peers.put(make_peer(1));
    peers.put(make_peer(2));
    CHECK(peers.may_send_data().test(1) && peers.may_send_data().test(2));
    peers.defer_sending(1, start + 10);
    peers.defer_sending(2, start + 20);
    CHECK_EQUAL(peers.deferred_until(), start + 10);
    peers.wake(start + 9);
    CHECK_EQUAL(peers.may_send_data().next(0), 64U);  // none
    peers.wake(start + 10);
    CHECK(peers.may_send_data().test(1) && !peers.may_send_data().test(2));
    CHECK_EQUAL(peers.deferred_until(), start + 20);
    peers.mark(2);
    CHECK(peers.may_send_data().test(2));
    CHECK(peers.idle(2));  // its queue is empty: nothing to wait for
    CHECK_EQUAL(peers.deferred_until(), never);
}
