// Forward error correction of messages: the shape of blocks, what a sender retransmits and what it leaves to parity,
// what a receiver restores.
#include <map>
#include <random>
#include <set>

#include "check.hpp"
#include "coding/coding.hpp"
#include "coding/coding_model.hpp"

using namespace storm;

namespace {

constexpr std::size_t chunk_bytes = 64;

struct Message {
    ChunkLayout layout;
    std::vector<std::byte> bytes;

    explicit Message(std::uint64_t size, std::uint32_t seq = 5) : layout(size, chunk_bytes, 3, seq), bytes(size) {
        std::mt19937 random(seq);
        for (std::byte& each : bytes) each = static_cast<std::byte>(random());
    }
    [[nodiscard]] std::span<const std::byte> payload(std::uint32_t chunk) const {
        return {bytes.data() + std::size_t{chunk} * chunk_bytes, layout.size(chunk)};
    }
    // Sends the whole first pass; the parity of every stretch, by name.
    std::map<std::uint32_t, std::vector<std::byte>> send_all(Encoding& encoding, std::size_t parity) const {
        std::map<std::uint32_t, std::vector<std::byte>> sent;
        for (std::uint32_t ordinal = 0; ordinal < layout.chunks; ++ordinal) {
            const std::uint32_t chunk = layout.at(ordinal);
            if (encoding.undecided(chunk)) encoding.decide(chunk, parity);
            encoding.on_sent(chunk, payload(chunk));
            while (encoding.due() > 0) {
                const auto ready = encoding.take([&](std::uint32_t c) { return payload(c); });
                sent.emplace(ready.name, std::vector<std::byte>(ready.payload.begin(), ready.payload.end()));
            }
        }
        return sent;
    }
};

}  // namespace

TEST(code_shape_gives_every_chunk_one_place_and_spreads_neighbours_over_blocks) {
    for (const std::uint32_t chunks : {1U, 2U, 127U, 128U, 129U, 511U, 512U, 513U, 1025U, 5000U}) {
        const ChunkLayout layout(std::uint64_t{chunks} * chunk_bytes, chunk_bytes, 1, 2);
        const CodeShape shape(layout);
        std::set<std::uint64_t> places;
        for (std::uint32_t ordinal = 0; ordinal < chunks; ++ordinal) {
            const CodeShape::BlockPosition at = shape.locate(ordinal);
            CHECK(at.stretch < shape.stretches && at.block < shape.blocks(at.stretch));
            CHECK(at.position < shape.block_size(at.stretch, at.block));
            CHECK(shape.block_size(at.stretch, at.block) <= CodeShape::block_chunks);
            CHECK_EQUAL(shape.ordinal(at), ordinal);
            places.insert((std::uint64_t{at.stretch} << 32) + (at.block << 16) + at.position);
            if (ordinal + 1 < chunks && shape.blocks(at.stretch) > 1 && shape.stretch_of(ordinal + 1) == at.stretch) {
                CHECK(shape.locate(ordinal + 1).block != at.block);
            }
        }
        CHECK_EQUAL(places.size(), chunks);
        std::uint32_t total = 0;
        for (std::uint32_t stretch = 0; stretch < shape.stretches; ++stretch) {
            for (std::uint32_t block = 0; block < shape.blocks(stretch); ++block) {
                total += shape.block_size(stretch, block);
            }
        }
        CHECK_EQUAL(total, chunks);
    }
    const ParityName name{7, 3, 200};
    const ParityName same = ParityName::unpack(name.pack());
    CHECK(same.stretch == 7 && same.block == 3 && same.index == 200);
}

TEST(sender_repairs_nothing_that_parity_makes_up_for_and_tops_up_what_it_does_not) {
    const Message message(20 * chunk_bytes);
    Encoding encoding(message.layout, 0, true, false);
    const auto parity = message.send_all(encoding, 3);
    CHECK_EQUAL(parity.size(), 3U);
    for (std::uint32_t chunk = 0; chunk < 16; ++chunk) encoding.on_acked(chunk);
    // Three losses: the parity in flight may suffice.
    for (std::uint32_t chunk = 16; chunk < 19; ++chunk) CHECK(encoding.on_lost(chunk).empty());
    // The fourth is one too many.
    const auto again = encoding.on_lost(19);
    CHECK_EQUAL(again.size(), 1U);
    encoding.on_sent(again[0], message.payload(again[0]));
    CHECK(!encoding.relied_upon());
    encoding.on_acked(again[0]);
    for (const auto& [name, payload] : parity) encoding.on_parity_acked(name);
    CHECK_EQUAL(encoding.presumed(), 3U);
    const Encoding::BlockCounts news = encoding.take_block_counts();
    CHECK(news.saved == 1 && news.topped_up == 1);
    // If the receiver waits nevertheless, the three are retransmitted after all.
    CHECK_EQUAL(encoding.stop().size(), 3U);
    CHECK(!encoding.relied_upon() && encoding.due() == 0);
}

TEST(sender_of_lost_parity_repairs_as_many_chunks_as_it_stood_for) {
    const Message message(20 * chunk_bytes);
    Encoding encoding(message.layout, 0, true, false);
    const auto parity = message.send_all(encoding, 2);
    for (std::uint32_t chunk = 0; chunk < 18; ++chunk) encoding.on_acked(chunk);
    CHECK(encoding.on_lost(18).empty());
    CHECK(encoding.on_lost(19).empty());
    CHECK_EQUAL(encoding.on_parity_lost(parity.begin()->first).size(), 1U);
    CHECK_EQUAL(encoding.on_parity_lost(parity.rbegin()->first).size(), 1U);
    CHECK_EQUAL(encoding.take_block_counts().saved, 0U);
}

TEST(sender_of_a_message_with_a_budget_leaves_a_block_that_failed_to_the_budget) {
    const Message message(20 * chunk_bytes);
    Encoding encoding(message.layout, 0, false, false);
    (void)message.send_all(encoding, 1);
    CHECK(encoding.on_lost(3).empty());
    CHECK_EQUAL(encoding.on_lost(4).size(), 2U);
    CHECK_EQUAL(encoding.on_lost(5).size(), 1U);
}

TEST(stretches_that_were_begun_before_go_without_parity) {
    const Message message(2000 * chunk_bytes);
    Encoding encoding(message.layout, 1, true, false);
    CHECK(!encoding.undecided(message.layout.at(0)));
    CHECK(!encoding.coded(message.layout.at(0)));
    CHECK(encoding.undecided(message.layout.at(1000)));
    CHECK_EQUAL(encoding.on_lost(message.layout.at(5)).size(), 1U);
}

TEST(receiver_gives_back_what_is_missing_whether_chunks_are_placed_or_summed_up) {
    std::mt19937 random(8);
    for (const bool placed : {true, false}) {
        for (const std::uint64_t size : {std::uint64_t{1}, std::uint64_t{63}, std::uint64_t{64}, std::uint64_t{65},
                                         std::uint64_t{300 * 64 + 7}, std::uint64_t{1300 * 64}}) {
            const Message message(size, static_cast<std::uint32_t>(size));
            Encoding encoding(message.layout, 0, true, false);
            const auto parity = message.send_all(encoding, 40);
            BlockPool blocks(chunk_bytes, 1 << 20);
            CodingMemory coding_memory(blocks, 1 << 20, 2);
            std::vector<std::byte> into(size);
            {
                Decoding decoding(message.layout, placed ? into.data() : nullptr, 1, coding_memory);
                Bitmap arrived(message.layout.chunks);
                std::uint32_t restored = 0, lost = 0;
                const auto take = [&](std::uint32_t chunk, std::span<const std::byte> payload) {
                    CHECK(arrived.set(chunk));
                    const auto sent = message.payload(chunk);
                    CHECK(std::equal(payload.begin(), payload.end(), sent.begin(), sent.end()));
                    std::copy(payload.begin(), payload.end(), into.begin() + std::size_t{chunk} * chunk_bytes);
                    ++restored;
                };
                for (std::uint32_t chunk = 0; chunk < message.layout.chunks; ++chunk) {
                    if (random() % 7 == 0 || message.layout.chunks == 1) {
                        ++lost;
                        continue;
                    }
                    decoding.keep(chunk, message.payload(chunk));
                    arrived.set(chunk);
                    const auto payload = message.payload(chunk);
                    std::copy(payload.begin(), payload.end(), into.begin() + std::size_t{chunk} * chunk_bytes);
                    decoding.restore_block_of(chunk, arrived, take);
                }
                CHECK_EQUAL(restored, 0U);
                for (const auto& [name, payload] : parity) {
                    CHECK(decoding.take_parity(name, payload, arrived, arrived) == Decoding::Taken::yes);
                    decoding.restore_block_named(name, arrived, take);
                }
                CHECK_EQUAL(restored, lost);
                CHECK(into == message.bytes);
                CHECK_EQUAL(coding_memory.used(1), 0U);
            }
        }
    }
}

TEST(parity_of_chunks_that_are_overwritten_once_they_left_is_that_of_what_was_sent) {
    for (const std::uint32_t chunks : {1U, 7U, 8U, 9U, 130U, 700U}) {
        for (const std::size_t parity : {1U, 9U}) {
            const Message message(std::uint64_t{chunks} * chunk_bytes - 5);
            Encoding late(message.layout, 0, true, false);
            const auto expected = message.send_all(late, parity);
            Message changing(std::uint64_t{chunks} * chunk_bytes - 5);
            Encoding encoding(message.layout, 0, true, true);
            std::map<std::uint32_t, std::vector<std::byte>> sent;
            for (std::uint32_t ordinal = 0; ordinal < chunks; ++ordinal) {
                const std::uint32_t chunk = message.layout.at(ordinal);
                if (encoding.undecided(chunk)) encoding.decide(chunk, parity);
                encoding.on_sent(chunk, changing.payload(chunk));
                // Never more than one stretch: its sums, and the few chunks that wait to be added.
                CHECK(encoding.memory_bytes() <=
                      CodeShape::stretch_blocks * (parity + ParitySums::together) * chunk_bytes);
                const auto from = changing.bytes.begin() + static_cast<std::ptrdiff_t>(chunk * chunk_bytes);
                std::fill_n(from, message.layout.size(chunk), std::byte{0xee});
                while (encoding.due() > 0) {
                    const auto ready = encoding.take([&](std::uint32_t c) { return changing.payload(c); });
                    sent.emplace(ready.name, std::vector<std::byte>(ready.payload.begin(), ready.payload.end()));
                }
            }
            CHECK(sent == expected);
            (void)encoding.stop();
            CHECK_EQUAL(encoding.memory_bytes(), 0U);
        }
    }
}

TEST(receiver_refuses_parity_that_belongs_nowhere_and_parity_for_which_it_has_no_room) {
    const Message message(300 * chunk_bytes);
    Encoding encoding(message.layout, 0, true, false);
    const auto parity = message.send_all(encoding, 4);
    BlockPool blocks(chunk_bytes, 1 << 20);
    CodingMemory coding_memory(blocks, 150 * chunk_bytes, 2);
    Bitmap arrived(300);
    std::vector<std::byte> into(message.bytes.size());
    const auto& [name, payload] = *parity.begin();
    {
        Decoding decoding(message.layout, into.data(), 1, coding_memory);
        const auto takes = [&](std::uint32_t as, std::span<const std::byte> what) {
            return decoding.take_parity(as, what, arrived, arrived);
        };
        CHECK(takes(name, std::span(payload).first(63)) == Decoding::Taken::malformed);
        CHECK(takes(name, {}) == Decoding::Taken::malformed);
        CHECK(takes(ParityName{1, 0, 0}.pack(), payload) == Decoding::Taken::malformed);
        CHECK(takes(ParityName{0, 3, 0}.pack(), payload) == Decoding::Taken::malformed);
        CHECK(takes(ParityName{0, 0, 155}.pack(), payload) == Decoding::Taken::malformed);
        CHECK(takes(~0U, payload) == Decoding::Taken::malformed);
        CHECK_EQUAL(coding_memory.used(1), 0U);
        for (std::uint32_t index = 0; index < 150; ++index) {
            // A flood stops at what a block can use, or at the memory limit.
            const auto how = takes(ParityName{0, index % 3, index / 3}.pack(), payload);
            CHECK(how == Decoding::Taken::yes);
        }
        CHECK(takes(ParityName{0, 0, 60}.pack(), payload) == Decoding::Taken::no_space);
        CHECK(takes(ParityName{0, 0, 3}.pack(), payload) == Decoding::Taken::yes);  // it was received already
    }
    CHECK_EQUAL(coding_memory.used(1), 0U);
    // Copies of a whole block are kept, or none: then its parity is refused.
    Decoding sums(message.layout, nullptr, 1, coding_memory);
    const std::uint32_t first = message.layout.at(0), second = message.layout.at(1);
    sums.keep(first, message.payload(first));
    sums.keep(second, message.payload(second));
    arrived.set(first);
    arrived.set(second);
    CHECK(coding_memory.used(1) <= 150 * chunk_bytes);
    CHECK(sums.take_parity(ParityName{0, 0, 0}.pack(), payload, arrived, arrived) == Decoding::Taken::yes);
    CHECK(sums.take_parity(ParityName{0, 1, 0}.pack(), payload, arrived, arrived) == Decoding::Taken::no_space);
}

TEST(model_codes_the_ends_of_messages_on_long_lossy_links_and_nothing_else) {
    const CodedLink far{.loss = 0.1, .burst = 1.1, .round_trip_s = 0.04, .chunk_s = 1.2e-4};
    CHECK(parity_that_pays(far, {.chunks = 256, .blocks = 2}) > 12);  // more than the mean loss
    CHECK_EQUAL(parity_that_pays(far, {.chunks = 512, .blocks = 4, .after = 20000}),
                0U);  // retransmissions of these are hidden by what follows
    CodedLink clean = far, near = far, bursty = far, thin = far;
    clean.loss = 0.0;
    near.round_trip_s = 1e-4;
    bursty.burst = 20.0;
    thin.chunk_s = 0.02;
    CHECK_EQUAL(parity_that_pays(clean, {.chunks = 256, .blocks = 2}), 0U);
    CHECK_EQUAL(parity_that_pays(near, {.chunks = 256, .blocks = 2}), 0U);
    CHECK(parity_that_pays(bursty, {.chunks = 256, .blocks = 2}) >=
          parity_that_pays(far, {.chunks = 256, .blocks = 2}));
    CHECK(parity_that_pays(thin, {.chunks = 256, .blocks = 2}) < parity_that_pays(far, {.chunks = 256, .blocks = 2}));
}
