// The erasure code: what is missing is restored from any sufficient parity, and from nothing less.
#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "math/erasure.hpp"

using namespace storm;

namespace {

using Buffer = std::vector<std::byte>;

// A block whose chunk `short_one` has `short_bytes`, with all its parity.
struct Block {
    std::size_t bytes;
    std::vector<Buffer> data, parity;

    Block(std::size_t k, std::size_t m, std::size_t chunk_bytes, std::size_t short_one, std::size_t short_bytes,
          std::mt19937& random)
        : bytes(chunk_bytes), parity(m, Buffer(chunk_bytes)) {
        for (std::size_t c = 0; c < k; ++c) {
            data.emplace_back(c == short_one ? short_bytes : chunk_bytes);
            for (std::byte& each : data.back()) each = static_cast<std::byte>(random());
        }
        const std::vector<std::span<const std::byte>> chunks(data.begin(), data.end());
        std::vector<std::byte*> outs;
        for (Buffer& each : parity) outs.push_back(each.data());
        encode_parity(chunks, 0, outs, bytes);
    }

    // Decodes from what is present; true if all data was restored.
    [[nodiscard]] bool survives(const std::vector<bool>& has_data, std::vector<std::size_t> parities) const {
        std::vector<ErasureDecoder::Chunk> chunks;
        std::vector<Buffer> restored(data.size());
        for (std::size_t c = 0; c < data.size(); ++c) {
            restored[c].resize(data[c].size(), std::byte{0xee});
            if (has_data[c]) {
                chunks.push_back({.present = data[c], .missing = {}, .arrived = true});
            } else {
                chunks.push_back({.present = {}, .missing = restored[c], .arrived = false});
            }
        }
        std::vector<Parity> found;
        for (const std::size_t index : parities) found.push_back({index, parity[index]});
        ErasureDecoder decoder;
        if (!decoder.decode(chunks, found, bytes)) return false;
        for (std::size_t c = 0; c < data.size(); ++c) {
            if (!has_data[c] && restored[c] != data[c]) return false;
        }
        return true;
    }
};

}  // namespace

TEST(erasure_code_survives_every_pattern_that_leaves_as_many_chunks_as_there_are_data) {
    std::mt19937 random(11);
    for (std::size_t k = 1; k <= 6; ++k) {
        for (std::size_t m = 1; m <= 4; ++m) {
            const Block block(k, m, 48, random() % (k + 1), random() % 48, random);
            for (unsigned pattern = 0; pattern < 1U << (k + m); ++pattern) {
                std::vector<bool> has_data(k);
                std::vector<std::size_t> parities;
                for (std::size_t c = 0; c < k; ++c) has_data[c] = (pattern >> c & 1) != 0;
                for (std::size_t i = 0; i < m; ++i) {
                    if ((pattern >> (k + i) & 1) != 0) parities.push_back(i);
                }
                const auto missing = static_cast<std::size_t>(std::count(has_data.begin(), has_data.end(), false));
                CHECK_EQUAL(block.survives(has_data, parities), missing <= parities.size());
            }
        }
    }
}

TEST(erasure_code_survives_random_losses_in_large_blocks) {
    std::mt19937 random(12);
    for (const auto& [k, m] : std::vector<std::pair<std::size_t, std::size_t>>{
             {32, 8}, {128, 16}, {200, 55}, {127, 128}, {1, 254}, {254, 1}}) {
        const Block block(k, m, 1440, random() % k, random() % 1441, random);
        for (int turn = 0; turn < 4; ++turn) {
            std::vector<std::size_t> order(k), parities(m);
            std::iota(order.begin(), order.end(), 0);
            std::iota(parities.begin(), parities.end(), 0);
            std::shuffle(order.begin(), order.end(), random);
            std::shuffle(parities.begin(), parities.end(), random);
            const std::size_t lost = turn == 0 ? std::min(k, m) : random() % (std::min(k, m) + 1);
            std::vector<bool> has_data(k, true);
            for (std::size_t i = 0; i < lost; ++i) has_data[order[i]] = false;
            parities.resize(lost);
            CHECK(block.survives(has_data, parities));
            if (lost == 0) continue;
            parities.pop_back();
            CHECK(!block.survives(has_data, parities));
        }
    }
}

TEST(erasure_code_gives_the_same_parity_whether_it_is_asked_at_once_or_later) {
    std::mt19937 random(13);
    const Block block(20, 12, 100, 3, 7, random);
    const std::vector<std::span<const std::byte>> chunks(block.data.begin(), block.data.end());
    Buffer later(100);
    for (std::size_t index = 0; index < 12; ++index) {
        std::byte* out = later.data();
        encode_parity(chunks, index, std::span(&out, 1), 100);
        CHECK(later == block.parity[index]);
    }
}

TEST(erasure_decoder_refuses_what_cannot_be_decoded) {
    std::mt19937 random(14);
    const Block block(5, 3, 32, 9, 0, random);
    const std::vector<bool> two_missing{true, false, true, false, true};
    CHECK(block.survives(two_missing, {0, 2}));
    CHECK(!block.survives(two_missing, {2, 2}));
    Buffer into(32, std::byte{0xee}), longer(33), parity = block.parity[0], shorter(31);
    std::vector<ErasureDecoder::Chunk> chunks;
    for (std::size_t c = 0; c < 5; ++c) chunks.push_back({.present = block.data[c], .missing = {}, .arrived = true});
    chunks[1] = {.present = {}, .missing = into, .arrived = false};
    ErasureDecoder decoder;
    const auto refuses = [&](Parity with, std::size_t bytes) {
        const bool refused = !decoder.decode(chunks, std::span(&with, 1), bytes);
        return refused && into == Buffer(32, std::byte{0xee});
    };
    CHECK(refuses({0, shorter}, 32));
    CHECK(refuses({0, longer}, 32));
    CHECK(refuses({250, parity}, 32));
    CHECK(refuses({~std::size_t{0}, parity}, 32));
    CHECK(refuses({0, shorter}, 31));
    CHECK(!decoder.decode({}, {}, 32));
    const Parity right{0, parity};
    CHECK(decoder.decode(chunks, std::span(&right, 1), 32));
    CHECK(into == block.data[1]);
}

TEST(erasure_encoder_names_its_misuse) {
    const Buffer chunk(8);
    const std::vector<std::span<const std::byte>> many(250, chunk);
    Buffer out(8);
    std::vector<std::byte*> outs(6, out.data());
    const auto throws = [](auto&& work) {
        try {
            work();
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(throws([&] { encode_parity(many, 0, outs, 8); }));
    CHECK(throws([&] { encode_parity(many, 250, std::span(outs).first(1), 8); }));
    CHECK(throws([&] { encode_parity(std::span(many).first(2), 0, std::span(outs).first(1), 7); }));
    CHECK(throws([&] { encode_parity({}, 0, std::span(outs).first(1), 8); }));
}
