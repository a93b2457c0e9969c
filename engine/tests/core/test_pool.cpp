// The pool of unexpected messages: chunks come out once and in order, and no peer can use more than its share.
#include <random>

#include "check.hpp"
#include "core/pool.hpp"

using namespace storm;

namespace {

constexpr std::size_t overhead = Pool::entry_overhead;

Header chunk_of(std::uint16_t source, std::uint32_t channel, std::uint32_t seq, std::uint32_t chunk) {
    return {.kind = Kind::data, .source = source, .channel = channel, .seq = seq, .chunk = chunk};
}

std::vector<std::byte> filled(std::size_t bytes, int value) {
    return std::vector<std::byte>(bytes, static_cast<std::byte>(value));
}

}  // namespace

TEST(pool_gives_back_what_it_was_given_in_order_and_once) {
    Pool pool(1 << 20, 3);
    for (std::uint32_t i = 0; i < 50; ++i) {
        std::vector<std::byte> payload = filled(i, static_cast<int>(i));
        CHECK(pool.keep(chunk_of(static_cast<std::uint16_t>(i % 3), 7, 8, i), payload));
        std::fill(payload.begin(), payload.end(), std::byte{0xee});  // the pool keeps copies
    }
    const auto entries = pool.take(7, 8);
    CHECK_EQUAL(entries.size(), 50U);
    for (std::uint32_t i = 0; i < 50; ++i) {
        CHECK(entries[i].header == chunk_of(static_cast<std::uint16_t>(i % 3), 7, 8, i));
        CHECK_EQUAL(entries[i].bytes, i);
        for (std::size_t b = 0; b < i; ++b) CHECK_EQUAL(std::to_integer<std::uint32_t>(entries[i].payload[b]), i);
    }
    CHECK(pool.take(7, 8).empty());
    CHECK_EQUAL(pool.bytes(), 0U);
}

TEST(pool_shows_who_has_begun_an_exchange_and_keeps_it) {
    Pool pool(1 << 20, 3);
    Header ready = chunk_of(0, 7, 8, 0);
    ready.kind = Kind::ready;
    CHECK(pool.keep(ready, {}));
    CHECK(pool.peek(7, 8).empty());
    CHECK(pool.keep(chunk_of(2, 7, 8, 1), filled(4, 9)));
    CHECK(pool.keep(chunk_of(2, 7, 8, 0), filled(3, 5)));
    CHECK(pool.keep(chunk_of(1, 7, 9, 0), filled(3, 6)));
    for (int again = 0; again < 2; ++again) {
        const auto firsts = pool.peek(7, 8);
        CHECK_EQUAL(firsts.size(), 1U);
        CHECK_EQUAL(firsts[0].source, 2U);
        CHECK(firsts[0].payload == filled(3, 5));
    }
    CHECK_EQUAL(pool.take(7, 8).size(), 3U);
    CHECK(pool.peek(7, 8).empty());
}

TEST(pool_keeps_exchanges_apart) {
    Pool pool(1 << 20, 1);
    CHECK(pool.keep(chunk_of(0, 1, 2, 10), {}));
    CHECK(pool.keep(chunk_of(0, 2, 1, 20), {}));
    CHECK(pool.keep(chunk_of(0, 1, 3, 30), {}));
    CHECK(pool.take(2, 2).empty());
    CHECK_EQUAL(pool.take(2, 1).at(0).header.chunk, 20U);
    CHECK_EQUAL(pool.take(1, 3).at(0).header.chunk, 30U);
    CHECK_EQUAL(pool.take(1, 2).at(0).header.chunk, 10U);
}

TEST(pool_refuses_what_exceeds_the_share_of_its_source_and_no_other) {
    Pool pool(3 * 10 * (100 + overhead), 3);
    for (std::uint32_t i = 0; i < 10; ++i) CHECK(pool.keep(chunk_of(0, 1, i, 0), filled(100, 1)));
    CHECK(!pool.keep(chunk_of(0, 1, 99, 0), filled(1, 1)));
    CHECK(!pool.keep(chunk_of(0, 1, 99, 0), {}));
    for (std::uint32_t i = 0; i < 10; ++i) CHECK(pool.keep(chunk_of(1, 1, i, 0), filled(100, 1)));
    CHECK_EQUAL(pool.bytes(), 20 * (100 + overhead));
    // What was refused left no trace.
    CHECK(pool.take(1, 99).empty());
    CHECK_EQUAL(pool.take(1, 3).size(), 2U);
    CHECK(pool.keep(chunk_of(0, 1, 50, 0), filled(100, 1)));
    CHECK(!pool.keep(chunk_of(0, 1, 51, 0), filled(100, 1)));
}

TEST(flood_of_empty_chunks_is_bounded_too) {
    Pool pool(64 << 10, 1);
    std::uint32_t kept = 0;
    for (std::uint32_t i = 0; i < 100'000; ++i) kept += pool.keep(chunk_of(0, i, i, 0), {}) ? 1 : 0;
    CHECK_EQUAL(kept, (64U << 10) / overhead);
    CHECK(pool.bytes() <= 64U << 10);
}

TEST(pool_accounts_exactly_for_a_long_random_life) {
    std::mt19937 random(11);
    Pool pool(40'000, 4);
    std::size_t held[4] = {};
    std::vector<std::pair<std::uint16_t, std::size_t>> waiting[8];
    for (int step = 0; step < 20'000; ++step) {
        const auto seq = static_cast<std::uint32_t>(random() % 8);
        if (random() % 12 == 0) {
            const auto entries = pool.take(0, seq);
            CHECK_EQUAL(entries.size(), waiting[seq].size());
            for (std::size_t i = 0; i < entries.size(); ++i) {
                CHECK_EQUAL(entries[i].header.source, waiting[seq][i].first);
                CHECK_EQUAL(entries[i].bytes, waiting[seq][i].second);
                held[waiting[seq][i].first] -= waiting[seq][i].second + overhead;
            }
            waiting[seq].clear();
        } else {
            const auto source = static_cast<std::uint16_t>(random() % 4);
            const std::size_t bytes = random() % 1500;
            const bool fits = held[source] + bytes + overhead <= 10'000;
            CHECK_EQUAL(pool.keep(chunk_of(source, 0, seq, 0), filled(bytes, 0)), fits);
            if (!fits) continue;
            held[source] += bytes + overhead;
            waiting[seq].emplace_back(source, bytes);
        }
        CHECK_EQUAL(pool.bytes(), held[0] + held[1] + held[2] + held[3]);
    }
}

TEST(pool_forgets_one_source_and_gives_its_share_back) {
    Pool pool(2 * 10 * (100 + overhead), 2);
    for (std::uint32_t i = 0; i < 10; ++i) CHECK(pool.keep(chunk_of(0, 1, i, 0), filled(100, 1)));
    for (std::uint32_t i = 5; i < 8; ++i) CHECK(pool.keep(chunk_of(1, 1, i, 7), filled(100, 2)));
    pool.forget(0);
    pool.forget(0);
    CHECK_EQUAL(pool.bytes(), 3 * (100 + overhead));
    CHECK(pool.take(1, 4).empty());
    CHECK_EQUAL(pool.take(1, 5).at(0).header.chunk, 7U);
    for (std::uint32_t i = 0; i < 10; ++i) CHECK(pool.keep(chunk_of(0, 2, i, 0), filled(100, 1)));
    CHECK(!pool.keep(chunk_of(0, 2, 10, 0), {}));
}
