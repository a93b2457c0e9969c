// Exchanges: lookup by number and id, outcomes that wait for pinned buffers, and timers of all exchanges.
#include <memory>
#include <vector>

#include "check.hpp"
#include "exchange/exchanges.hpp"

using namespace storm;

namespace {

struct World {
    Exchange& post(std::uint32_t seq) {
        ExchangeSpec spec;
        spec.channel = 5;
        spec.seq = seq;
        spec.sends.push_back({.peer = 1, .data = &byte, .bytes = 1});
        spec.receives.push_back({.peer = 2, .bytes = 1});
        return exchanges.add(std::make_unique<Exchange>(spec, 16, blocks, 0));
    }

    std::byte byte{};
    BlockPool blocks{16, 0};
    Exchanges exchanges;
};

}  // namespace

TEST(exchange_is_found_by_its_number_and_by_its_id_until_it_ends) {
    World world;
    Exchange& first = world.post(0);
    Exchange& second_one = world.post(1);
    const std::uint64_t id = second_one.id;
    CHECK(id > first.id);
    CHECK(world.exchanges.find(5, 1) == &second_one && world.exchanges.find(id) == &second_one);
    CHECK(!world.exchanges.take_finished().has_value());
    second_one.conclude(Status::ok, 7);
    world.exchanges.end(second_one);
    CHECK(world.exchanges.find(5, 1) == nullptr && world.exchanges.find(id) == nullptr);
    CHECK(world.exchanges.find(5, 0) == &first);
    const auto finished = world.exchanges.take_finished();
    CHECK(finished && finished->id == id && finished->outcome.ended == 7);
    CHECK(!world.exchanges.take_finished().has_value());
}

TEST(outcome_waits_until_no_batch_points_into_the_buffers) {
    World world;
    Exchange& exchange = world.post(0);
    exchange.sends[0].pins = 1;
    exchange.conclude(Status::ok, 7);
    world.exchanges.end(exchange);
    CHECK(world.exchanges.find(5, 0) == nullptr);
    CHECK(!world.exchanges.take_finished().has_value());
    exchange.sends[0].pins = 0;
    world.exchanges.unpinned(exchange);
    CHECK(world.exchanges.take_finished().has_value());
}

TEST(every_exchange_is_visited_although_visits_end_some) {
    World world;
    for (std::uint32_t seq = 0; seq < 20; ++seq) world.post(seq);
    int visits = 0;
    world.exchanges.each([&](Exchange& exchange) {
        ++visits;
        if (exchange.seq % 2 == 0) world.exchanges.end(exchange);
    });
    CHECK_EQUAL(visits, 20);
    CHECK_EQUAL(world.exchanges.active().size(), 10U);
}

TEST(earliest_timer_of_all_messages_of_all_exchanges_is_found) {
    World world;
    std::vector<Exchange*> all;
    for (std::uint32_t seq = 0; seq < 5; ++seq) all.push_back(&world.post(seq));
    std::vector<std::vector<Nanos>> truth(5, std::vector<Nanos>(3, never));
    const auto true_time = [&](const Exchange& exchange, Timers::Owner timer) { return truth[exchange.seq][timer]; };
    CHECK_EQUAL(world.exchanges.next_timer(true_time), never);
    const auto set_earlier = [&](std::uint32_t seq, Timers::Owner timer, Nanos at) {
        truth[seq][timer] = at;
        world.exchanges.set_earlier(*all[seq], timer, at);
    };
    set_earlier(3, all[3]->timer_of(all[3]->receives[0]), 30);
    set_earlier(1, all[1]->timer_of(all[1]->sends[0]), 20);
    set_earlier(4, Exchange::timeout_timer, 40);
    CHECK_EQUAL(world.exchanges.next_timer(true_time), 20);
    truth[1][2] = 35;  // moved later, without a call
    CHECK_EQUAL(world.exchanges.next_timer(true_time), 30);
    CHECK(world.exchanges.take_due(29, true_time).empty());
    CHECK(world.exchanges.take_due(35, true_time) == (std::vector<std::uint64_t>{all[1]->id, all[3]->id}));
    world.exchanges.end(*all[4]);
    CHECK_EQUAL(world.exchanges.next_timer(true_time), never);  // taken, or ended
    world.exchanges.timers_changed(*all[1]);
    CHECK_EQUAL(world.exchanges.next_timer(true_time), 35);
}

TEST(timer_belongs_to_one_message) {
    World world;
    Exchange& exchange = world.post(0);
    const Timers::Owner receive = exchange.timer_of(exchange.receives[0]), send = exchange.timer_of(exchange.sends[0]);
    CHECK(exchange.received_by(receive) == &exchange.receives[0] && exchange.sent_by(receive) == nullptr);
    CHECK(exchange.sent_by(send) == &exchange.sends[0] && exchange.received_by(send) == nullptr);
    CHECK(exchange.received_by(Exchange::timeout_timer) == nullptr);
    CHECK(exchange.sent_by(Exchange::timeout_timer) == nullptr);
}
