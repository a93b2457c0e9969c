// Fragmentation and reassembly: every layout covers its chunk, and a receiver restores the chunk from pieces in any
// order.
#include <algorithm>
#include <numeric>
#include <random>

#include "check.hpp"
#include "wire/pieces.hpp"

using namespace storm;

namespace {

using Bytes = std::vector<std::byte>;

Header chunk_header(std::uint32_t chunk, std::uint8_t flags = flag_piece) {
    return {.kind = Kind::data, .flags = flags, .channel = 3, .seq = 4, .chunk = chunk, .message_bytes = 100'000};
}

Bytes chunk_of(std::size_t bytes, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Bytes chunk(bytes);
    for (std::byte& each : chunk) each = static_cast<std::byte>(random());
    return chunk;
}

Bytes piece_of(const Bytes& chunk, const PieceLayout& layout, std::size_t index) {
    Bytes body(PiecePrefix::wire_bytes);
    write_piece({.index = static_cast<std::uint16_t>(index),
                 .count = static_cast<std::uint16_t>(layout.count),
                 .chunk_bytes = static_cast<std::uint32_t>(chunk.size())},
                std::span(body).first<PiecePrefix::wire_bytes>());
    const auto from = chunk.begin() + static_cast<std::ptrdiff_t>(layout.begin(index));
    body.insert(body.end(), from, from + static_cast<std::ptrdiff_t>(layout.size(index)));
    return body;
}

}  // namespace

TEST(cut_within_a_datagram_covers_the_chunk_with_pieces_that_fit) {
    for (std::size_t chunk = 96; chunk <= 65'456; chunk += chunk < 2000 ? 1 : 997) {
        for (const std::size_t datagram : {88U, 120U, 512U, 1152U, 1444U, 8952U}) {
            for (const std::size_t overhead : {32U, 48U}) {
                if (chunk + overhead <= datagram || datagram < PieceLayout::least_datagram(chunk, overhead)) continue;
                const PieceLayout layout = PieceLayout::for_datagram(chunk, datagram, overhead);
                CHECK(layout.valid());
                std::size_t covered = 0;
                for (std::size_t piece = 0; piece < layout.count; ++piece) {
                    CHECK_EQUAL(layout.begin(piece), covered);
                    CHECK(layout.size(piece) > 0);
                    CHECK(layout.size(piece) + overhead + PiecePrefix::wire_bytes <= datagram);
                    covered += layout.size(piece);
                }
                CHECK_EQUAL(covered, chunk);
                // The receiver, which gets only the number of pieces, computes the same layout.
                CHECK_EQUAL(PieceLayout(chunk, layout.count).bytes, layout.bytes);
            }
        }
    }
}

TEST(pieces_make_the_chunk_in_any_order_and_name_all_their_numbers) {
    std::mt19937 random(5);
    for (const std::size_t size : {465U, 1424U, 8912U, 65'456U}) {
        const Bytes chunk = chunk_of(size, size);
        const PieceLayout layout = PieceLayout::for_datagram(size, std::max<std::size_t>(size / 9, 300), 32);
        std::vector<std::size_t> order(layout.count);
        std::iota(order.begin(), order.end(), 0U);
        std::shuffle(order.begin(), order.end(), random);
        Pieces pieces(size);
        for (std::size_t k = 0; k < order.size(); ++k) {
            const auto taken = pieces.take(chunk_header(7), 100 + order[k], piece_of(chunk, layout, order[k]));
            CHECK(taken == (k + 1 < order.size() ? Pieces::Taken::kept : Pieces::Taken::complete));
        }
        CHECK(std::equal(chunk.begin(), chunk.end(), pieces.whole().begin(), pieces.whole().end()));
        std::vector<std::uint64_t> numbers(pieces.numbers().begin(), pieces.numbers().end());
        std::sort(numbers.begin(), numbers.end());
        CHECK_EQUAL(numbers.size(), layout.count);
        CHECK_EQUAL(numbers.front(), 100U);
        CHECK_EQUAL(numbers.back(), 99U + layout.count);
    }
}

TEST(pieces_of_different_chunks_stages_and_exchanges_are_kept_apart) {
    const Bytes one = chunk_of(1424, 1), other = chunk_of(1424, 2);
    const PieceLayout layout = PieceLayout::for_datagram(1424, 1152, 32);
    CHECK_EQUAL(layout.count, 2U);
    Pieces pieces(1424);
    const Header first = chunk_header(7);
    std::vector<Header> others{chunk_header(8), chunk_header(7, flag_piece | flag_second_stage), first, first};
    others[2].channel = 9;
    others[3].seq = 9;
    std::uint64_t number = 0;
    CHECK(pieces.take(first, ++number, piece_of(one, layout, 0)) == Pieces::Taken::kept);
    for (const Header& header : others)
        CHECK(pieces.take(header, ++number, piece_of(other, layout, 1)) == Pieces::Taken::kept);
    CHECK(pieces.take(first, ++number, piece_of(one, layout, 1)) == Pieces::Taken::complete);
    CHECK(std::equal(one.begin(), one.end(), pieces.whole().begin()));
}

TEST(chunk_that_comes_again_in_another_cut_begins_anew) {
    const Bytes chunk = chunk_of(1424, 3);
    const PieceLayout two = PieceLayout::for_datagram(1424, 1152, 32), three = PieceLayout::for_datagram(1424, 600, 32);
    CHECK_EQUAL(three.count, 3U);
    Pieces pieces(1424);
    CHECK(pieces.take(chunk_header(1), 1, piece_of(chunk, two, 0)) == Pieces::Taken::kept);
    for (std::size_t k = 0; k < 3; ++k) {
        const auto taken = pieces.take(chunk_header(1), 2 + k, piece_of(chunk, three, k));
        CHECK(taken == (k < 2 ? Pieces::Taken::kept : Pieces::Taken::complete));
    }
    CHECK(std::equal(chunk.begin(), chunk.end(), pieces.whole().begin()));
    CHECK_EQUAL(pieces.numbers().size(), 3U);
}

TEST(pieces_that_are_never_complete_make_room_for_new_ones) {
    Pieces pieces(1424);
    const Bytes chunk = chunk_of(1424, 4);
    const PieceLayout layout = PieceLayout::for_datagram(1424, 1152, 32);
    for (std::uint32_t k = 0; k < 10'000; ++k)
        CHECK(pieces.take(chunk_header(k), k + 1, piece_of(chunk, layout, 0)) == Pieces::Taken::kept);
    // The oldest is forgotten, the newest is not.
    CHECK(pieces.take(chunk_header(0), 20'000, piece_of(chunk, layout, 1)) == Pieces::Taken::kept);
    CHECK(pieces.take(chunk_header(9999), 20'001, piece_of(chunk, layout, 1)) == Pieces::Taken::complete);
}

TEST(pieces_that_nobody_would_cut_are_refused) {
    Pieces pieces(1424);
    const Bytes chunk = chunk_of(1424, 4);
    const PieceLayout layout = PieceLayout::for_datagram(1424, 1152, 32);
    Bytes good = piece_of(chunk, layout, 0);
    const auto refused = [&](const PiecePrefix& prefix, std::size_t bytes) {
        Bytes body = good;
        body.resize(bytes);
        if (bytes >= PiecePrefix::wire_bytes) write_piece(prefix, std::span(body).first<PiecePrefix::wire_bytes>());
        return pieces.take(chunk_header(1), 1, body) == Pieces::Taken::malformed;
    };
    CHECK(refused({}, 0));
    CHECK(refused({}, 7));
    CHECK(refused({.index = 0, .count = 0, .chunk_bytes = 1424}, good.size()));
    CHECK(refused({.index = 0, .count = 1, .chunk_bytes = 720}, good.size()));
    CHECK(refused({.index = 2, .count = 2, .chunk_bytes = 1424}, good.size()));
    CHECK(refused({.index = 0, .count = 2, .chunk_bytes = 1440}, good.size()));
    CHECK(refused({.index = 0, .count = 2, .chunk_bytes = 0xffff'ffff}, good.size()));
    CHECK(refused({.index = 0, .count = 65, .chunk_bytes = 1424}, good.size()));
    CHECK(refused({.index = 0, .count = 64, .chunk_bytes = 10}, PiecePrefix::wire_bytes + 16));  // most would be empty
    CHECK(refused({.index = 0, .count = 2, .chunk_bytes = 1424}, good.size() - 1));
    CHECK(!refused({.index = 0, .count = 2, .chunk_bytes = 1424}, good.size()));
}
