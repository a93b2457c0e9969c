// ChunkLayout, Incoming and Exchange: how messages are divided into chunks, and what an incoming message does with
// them. No core, no links, no time.
#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <set>

#include "check.hpp"
#include "exchange/exchange.hpp"

using namespace storm;

namespace {

std::vector<std::byte> pattern(std::size_t bytes, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<std::byte> out(bytes);
    for (std::byte& b : out) b = static_cast<std::byte>(random());
    return out;
}

std::span<const std::byte> piece(const std::vector<std::byte>& message, const ChunkLayout& layout,
                                 std::uint32_t chunk) {
    return std::span(message).subspan(std::size_t{chunk} * layout.chunk_bytes, layout.size(chunk));
}

}  // namespace

TEST(cut_pieces_are_whole_but_for_the_last_and_add_up) {
    for (const std::size_t chunk_bytes : {16U, 48U, 1440U}) {
        for (std::uint64_t bytes = 0; bytes < 5 * chunk_bytes + 3; bytes += 1 + bytes / 64) {
            const ChunkLayout layout(bytes, chunk_bytes, 3, 4);
            CHECK(layout.chunks >= 1);
            std::uint64_t sum = 0;
            for (std::uint32_t chunk = 0; chunk < layout.chunks; ++chunk) {
                if (chunk + 1 < layout.chunks) CHECK_EQUAL(layout.size(chunk), chunk_bytes);
                if (bytes > 0) CHECK(layout.size(chunk) > 0 && layout.size(chunk) <= chunk_bytes);
                sum += layout.size(chunk);
            }
            CHECK_EQUAL(sum, bytes);
        }
    }
    CHECK_EQUAL(ChunkLayout(0, 1440, 0, 0).chunks, 1U);
    CHECK_EQUAL(ChunkLayout(0, 1440, 0, 0).size(0), 0U);
    // The largest message of all.
    const ChunkLayout largest(std::numeric_limits<std::uint32_t>::max(), 16, 9, 9);
    CHECK_EQUAL(largest.chunks, 1U << 28);
    CHECK_EQUAL(largest.size(largest.chunks - 1), 15U);
    CHECK_EQUAL(largest.at(largest.ordinal(largest.chunks - 1)), largest.chunks - 1);
}

TEST(rotation_sends_every_chunk_once_and_ordinal_is_its_inverse) {
    for (std::uint32_t seq = 0; seq < 200; ++seq) {
        const ChunkLayout layout(16 * (1 + seq * 7 % 97) - seq % 3, 16, seq % 5, seq);
        std::set<std::uint32_t> sent;
        for (std::uint32_t ordinal = 0; ordinal < layout.chunks; ++ordinal) {
            sent.insert(layout.at(ordinal));
            CHECK_EQUAL(layout.ordinal(layout.at(ordinal)), ordinal);
        }
        CHECK_EQUAL(sent.size(), layout.chunks);
        CHECK_EQUAL(*sent.rbegin(), layout.chunks - 1);
    }
}

TEST(rotation_begins_everywhere_equally_often) {
    constexpr std::uint32_t chunks = 16, exchanges = 16'000;
    std::array<int, chunks> begun{};
    for (std::uint32_t seq = 0; seq < exchanges; ++seq) ++begun.at(ChunkLayout(16 * chunks, 16, 2, seq).start);
    // 1000 expected of each; the standard deviation is 31.
    for (const int count : begun) CHECK(count > 850 && count < 1150);
    // Both ends of a link compute the same, and channels differ from one another.
    CHECK_EQUAL(ChunkLayout(1 << 20, 16, 5, 6).start, ChunkLayout(1 << 20, 16, 5, 6).start);
    CHECK(ChunkLayout(1 << 20, 16, 5, 6).start != ChunkLayout(1 << 20, 16, 6, 5).start);
}

TEST(budget_allows_its_fraction_rounded_down) {
    const ChunkLayout layout(16 * 10, 16, 0, 0);
    CHECK_EQUAL(layout.allowed(0.0), 0U);
    CHECK_EQUAL(layout.allowed(0.05), 0U);
    CHECK_EQUAL(layout.allowed(0.1), 1U);
    CHECK_EQUAL(layout.allowed(0.19), 1U);
    CHECK_EQUAL(layout.allowed(0.5), 5U);
    CHECK_EQUAL(layout.allowed(0.999), 9U);
    CHECK_EQUAL(layout.allowed(1.0), 10U);
    CHECK_EQUAL(ChunkLayout(0, 16, 0, 0).allowed(1.0), 1U);
    CHECK_EQUAL(ChunkLayout(0, 16, 0, 0).allowed(0.5), 0U);
    const ChunkLayout largest(std::numeric_limits<std::uint32_t>::max(), 16, 0, 0);
    CHECK_EQUAL(largest.allowed(1.0), largest.chunks);
}

TEST(incoming_places_chunks_where_they_belong_and_takes_each_once) {
    const ChunkLayout layout(16 * 9 + 5, 16, 1, 1);
    const auto message = pattern(layout.bytes, 1);
    std::vector<std::byte> into(layout.bytes);
    Incoming incoming(layout);
    incoming.into = into.data();
    std::vector<std::uint32_t> order(layout.chunks);
    for (std::uint32_t i = 0; i < layout.chunks; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(2));
    for (const std::uint32_t chunk : order) {
        CHECK(!incoming.closed);
        CHECK(incoming.accept(chunk, piece(message, layout, chunk)));
        const auto wrong = pattern(layout.size(chunk), 77);
        CHECK(!incoming.accept(chunk, wrong));
    }
    CHECK(incoming.closed);
    CHECK_EQUAL(incoming.missing(), 0U);
    CHECK_EQUAL(incoming.arrived_bytes, layout.bytes);
    CHECK(into == message);
}

TEST(incoming_keeps_the_old_value_of_what_is_missing_and_takes_nothing_after_it_closed) {
    const ChunkLayout layout(64, 16, 1, 1);
    const auto message = pattern(64, 3);
    std::vector<std::byte> into(64, std::byte{0x55});
    Incoming incoming(layout);
    incoming.into = into.data();
    CHECK(incoming.accept(1, piece(message, layout, 1)));
    incoming.close();
    CHECK(incoming.closed);
    CHECK(!incoming.accept(2, piece(message, layout, 2)));
    CHECK_EQUAL(incoming.missing(), 3U);
    for (std::size_t i = 0; i < 64; ++i) CHECK(into[i] == (i / 16 == 1 ? message[i] : std::byte{0x55}));
}

TEST(message_that_is_never_repaired_stops_waiting_for_chunks_that_were_overtaken) {
    constexpr std::uint32_t chunks = 100;
    BlockPool blocks(16, 1 << 20);
    std::vector<float> own(4 * chunks, 1.0F), out(4 * chunks);
    ExchangeSpec spec;
    spec.channel = 1;
    spec.stages[0].budget = 1.0;
    spec.reduction = ReductionSpec{.mode = Reduce::arrived,
                                   .wire = Dtype::float32,
                                   .out_dtype = Dtype::float32,
                                   .own = reinterpret_cast<const std::byte*>(own.data()),
                                   .out = reinterpret_cast<std::byte*>(out.data()),
                                   .bytes = 16 * chunks};
    spec.receives.push_back({.peer = 1, .reduce = true, .bytes = 16 * chunks});
    Exchange exchange(spec, 16, blocks, 0);
    Incoming& incoming = exchange.receives[0];
    const std::array<float, 4> two{2, 2, 2, 2};
    const auto payload = std::as_bytes(std::span(two));
    // The first ordinal never arrives. The sender goes through the chunks in a known order, so a chunk far behind the
    // newest is lost, not late.
    std::uint32_t ordinal = 1;
    for (; exchange.reduction->final_chunks().size() == ordinal - 1; ++ordinal) {
        CHECK(ordinal < chunks);
        CHECK(incoming.accept(incoming.layout.at(ordinal), payload));
    }
    CHECK(ordinal > 30 && ordinal < 40);
    const std::uint32_t lost = incoming.layout.at(0);
    CHECK(std::ranges::count(exchange.reduction->final_chunks(), lost) == 1);
    CHECK_EQUAL(exchange.reduction->counts()[lost], 1U);
    // It arrives after all, too late: the sum does not change.
    CHECK(!incoming.accept(lost, payload));
    CHECK_EQUAL(exchange.reduction->counts()[lost], 1U);
    CHECK_EQUAL(incoming.arrived_count, ordinal - 1);
}

TEST(exchange_tells_once_of_new_final_chunks) {
    BlockPool blocks(16, 1 << 20);
    std::array<float, 8> own{}, out{};
    ExchangeSpec spec;
    spec.reduction = ReductionSpec{.mode = Reduce::in_order,
                                   .wire = Dtype::float32,
                                   .out_dtype = Dtype::float32,
                                   .own = reinterpret_cast<const std::byte*>(own.data()),
                                   .out = reinterpret_cast<std::byte*>(out.data()),
                                   .bytes = 32};
    spec.receives.push_back({.peer = 1, .reduce = true, .bytes = 32});
    spec.sends.push_back(
        {.peer = 1, .second_stage = true, .data = reinterpret_cast<std::byte*>(out.data()), .bytes = 32});
    Exchange exchange(spec, 16, blocks, 0);
    CHECK(!exchange.take_new_final_chunks());
    CHECK(!exchange.sends[0].sendable());
    CHECK(exchange.receives[0].accept(1, std::as_bytes(std::span(own)).first(16)));
    CHECK(exchange.take_new_final_chunks());
    CHECK(!exchange.take_new_final_chunks());
    CHECK(exchange.sends[0].sendable());
    CHECK_EQUAL(exchange.sends[0].chunk_at(0), 1U);
}

TEST(copies_at_the_end_weigh_the_line_against_another_round_trip) {
    CHECK_EQUAL(tail_loss_copies(10, 0.1, 0.001, 0.0001), 1U);  // a round trip costs less than a copy
    CHECK_EQUAL(tail_loss_copies(1, 0.1, 0.0001, 0.1), 3U);     // 0.3 ms and a thousandth of a trip
    CHECK_EQUAL(tail_loss_copies(1, 0.001, 0.0001, 0.1), 1U);
    CHECK_EQUAL(tail_loss_copies(1, 0.001, 0.00001, 0.1), 2U);
    CHECK(tail_loss_copies(100, 0.4, 0.0, 0.1) >= 6);  // nothing limits the rate
    CHECK_EQUAL(tail_loss_copies(1000, 0.1, 0.001, 0.1), 1U);
}
