// The owner's side of a broadcast buffer: where items are put, and how long they stay.
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>

#include "check.hpp"
#include "jobs.hpp"
#include "shm/broadcast_buffer.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr std::uint32_t chunk_bytes = 1'000;

// A message of data that another has, too.
struct Data {
    explicit Data(std::uint64_t seed) : buffer(random_buffer(100 * chunk_bytes, seed)) {
        message.data = buffer.data();
        message.checksums = std::make_shared<ChunkChecksums>(message.layout.chunks);
    }
    Buffer buffer;
    Outgoing message{ChunkLayout(100 * chunk_bytes, chunk_bytes, 0, 0)};
};

struct Fixture {
    BroadcastBuffer broadcast_buffer{std::make_unique<BroadcastMemory>()};
    std::map<std::uint16_t, std::uint64_t> read;

    BroadcastBuffer::Item* put(const Data& data, std::uint32_t first, std::uint32_t end) {
        return broadcast_buffer.put(data.message, first, end, (end - first) * chunk_bytes,
                                    [&](std::uint16_t rank) { return read[rank]; });
    }
    [[nodiscard]] bool holds(const BroadcastBuffer::Item& item, const Data& data, std::uint32_t chunk) const {
        return std::memcmp(broadcast_buffer.memory().bytes() + item.position(chunk), data.message.payload(chunk).data(),
                           chunk_bytes) == 0;
    }
};

}  // namespace

TEST(a_shelf_finds_chunks_of_the_same_data_only) {
    Fixture all;
    const Data one(1), other(2);
    CHECK(all.broadcast_buffer.find(one.message, 5) == nullptr);
    BroadcastBuffer::Item* item = all.put(one, 5, 20);
    CHECK(item != nullptr && item->end() == 20);
    CHECK(all.broadcast_buffer.find(one.message, 5) == item && all.broadcast_buffer.find(one.message, 19) == item);
    CHECK(all.broadcast_buffer.find(one.message, 4) == nullptr &&
          all.broadcast_buffer.find(one.message, 20) == nullptr);
    CHECK(all.broadcast_buffer.find(other.message, 5) == nullptr);
    CHECK(all.holds(*item, one, 5) && all.holds(*item, one, 19));
}

TEST(a_shelf_keeps_what_somebody_has_yet_to_read) {
    Fixture all;
    const Data data(1);
    BroadcastBuffer::Item* kept = all.put(data, 0, 100);
    kept->add_reader(3, 64);
    kept->add_reader(4, 64);
    std::size_t items = 1;
    while (all.put(data, 0, 100) != nullptr) ++items;
    CHECK(items >= BroadcastMemory::capacity / (101 * chunk_bytes));
    all.read[3] = 64;
    CHECK(all.put(data, 0, 100) == nullptr);
    CHECK(all.holds(*kept, data, 0) && all.holds(*kept, data, 99));
    all.read[4] = 64;
    CHECK(all.put(data, 0, 100) != nullptr);
}

TEST(a_shelf_goes_round_and_never_overwrites_what_is_lent) {
    Fixture all;
    std::mt19937 random(7);
    struct Lent {
        std::uint16_t rank;
        std::uint64_t until;
        const std::byte* position;
        Buffer bytes;
    };
    std::deque<Lent> lent;
    std::map<std::uint16_t, std::uint64_t> written;
    std::size_t full = 0;
    for (int i = 0; i < 2'000; ++i) {
        const Data data(static_cast<std::uint64_t>(i));
        const auto first = static_cast<std::uint32_t>(random() % 90);
        const auto end = static_cast<std::uint32_t>(first + 1 + random() % (100 - first));
        if (BroadcastBuffer::Item* item = all.put(data, first, end)) {
            const auto rank = static_cast<std::uint16_t>(random() % 3);
            item->add_reader(rank, written[rank] += 64);
            const std::byte* position = all.broadcast_buffer.memory().bytes() + item->position(first);
            const std::byte* begin = data.message.payload(first).data();
            lent.push_back({rank, written[rank], position, Buffer(begin, begin + (end - first) * chunk_bytes)});
        } else {
            ++full;
        }
        if (full > 0 && !lent.empty() && random() % 2 == 0) {
            const Lent& oldest = lent.front();
            CHECK(std::memcmp(oldest.position, oldest.bytes.data(), oldest.bytes.size()) == 0);
            all.read[oldest.rank] = oldest.until;
            lent.pop_front();
        }
    }
    CHECK(full > 0);
    for (const Lent& each : lent) CHECK(std::memcmp(each.position, each.bytes.data(), each.bytes.size()) == 0);
}

TEST(a_shelf_keeps_what_the_old_ring_of_a_rank_names_until_it_reads_its_new_one) {
    Fixture all;
    const Data data(1);
    all.put(data, 0, 100)->add_reader(3, 1'000);
    while (all.put(data, 0, 100) != nullptr) {
    }
    // Its new ring is empty and counts from zero.
    all.broadcast_buffer.renew(3);
    all.read[3] = 0;
    CHECK(all.put(data, 0, 100) == nullptr);
    all.read[3] = 64;
    CHECK(all.put(data, 0, 100) != nullptr);
}

TEST(a_shelf_does_not_wait_for_a_rank_that_is_gone) {
    Fixture all;
    const Data data(1);
    all.put(data, 0, 100)->add_reader(3, 64);
    while (all.put(data, 0, 100) != nullptr) {
    }
    all.broadcast_buffer.forget(3);
    CHECK(all.put(data, 0, 100) != nullptr);
}
