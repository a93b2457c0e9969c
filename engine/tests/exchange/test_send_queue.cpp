// SendQueue: oldest exchange first, eager limit, retransmissions.
#include <memory>
#include <vector>

#include "check.hpp"
#include "exchange/exchange.hpp"
#include "exchange/send_queue.hpp"

using namespace storm;

namespace {

constexpr std::size_t chunk_bytes = 16;

// Exchanges with one message of ten chunks each, their ids rising.
struct Messages {
    explicit Messages(std::size_t count) {
        for (std::size_t id = 1; id <= count; ++id) {
            ExchangeSpec spec;
            spec.seq = static_cast<std::uint32_t>(id);
            spec.sends.push_back({.peer = 1, .data = data.data(), .bytes = data.size()});
            exchanges.push_back(std::make_unique<Exchange>(spec, chunk_bytes, blocks, 0));
            exchanges.back()->id = id;
        }
    }
    Outgoing& operator[](std::size_t id) { return exchanges[id - 1]->sends[0]; }

    std::vector<std::byte> data = std::vector<std::byte>(10 * chunk_bytes);
    BlockPool blocks{chunk_bytes, 0};
    std::vector<std::unique_ptr<Exchange>> exchanges;
};

}  // namespace

TEST(message_of_the_oldest_exchange_is_sent_first_whenever_it_came) {
    Messages messages(3);
    SendQueue queue;
    for (const std::size_t id : {2U, 3U, 1U, 3U}) queue.push(messages[id]);
    CHECK_EQUAL(queue.size(), 3U);
    for (const std::size_t id : {1U, 2U, 3U}) {
        CHECK(queue.next(1000) == &messages[id]);
        messages[id].release();
    }
    CHECK(queue.next(1000) == nullptr);
    CHECK(queue.empty());
    for (const std::size_t id : {1U, 2U, 3U}) CHECK(!messages[id].queued);
}

TEST(message_that_is_not_wanted_is_not_queued) {
    Messages messages(1);
    SendQueue queue;
    messages[1].release();
    queue.push(messages[1]);
    CHECK(queue.empty());
}

TEST(message_waits_at_its_eager_limit_until_its_receiver_is_ready_or_needs_a_repair) {
    Messages messages(2);
    SendQueue queue;
    queue.push(messages[1]);
    queue.push(messages[2]);
    messages[1].eager_bytes = 100;
    CHECK(queue.next(100) == &messages[2]);
    messages[1].repairs.push_back(0);
    CHECK(queue.next(100) == &messages[1]);
    messages[1].repairs.clear();
    messages[1].ready = true;
    CHECK(queue.next(100) == &messages[1]);
}

TEST(parked_message_stays_in_the_queue_and_holds_up_nobody) {
    Messages messages(2);
    SendQueue queue;
    queue.push(messages[1]);
    queue.push(messages[2]);
    messages[1].parked = true;
    CHECK(queue.next(1000) == &messages[2]);
    CHECK(messages[1].queued);
    messages[1].parked = false;
    CHECK(queue.next(1000) == &messages[1]);
}

TEST(queue_knows_when_only_repairs_are_left) {
    Messages messages(2);
    SendQueue queue;
    queue.push(messages[1]);
    CHECK(!queue.only_repairs());
    messages[1].cursor = messages[1].layout.chunks;
    messages[1].repairs.push_back(3);
    CHECK(queue.only_repairs());
    queue.push(messages[2]);
    CHECK(!queue.only_repairs());
    queue.remove(messages[2]);
    CHECK(queue.only_repairs());
    queue.clear();
    CHECK(queue.empty() && !messages[1].queued && !messages[2].queued);
}
