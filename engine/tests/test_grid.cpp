// Eight bits per element: unbiased, within a step, each chunk on its own, and NaN for blocks that are not finite.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "grid.hpp"
#include "kernels.hpp"
#include "reduction.hpp"

using namespace storm;

namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

Floats normal(std::size_t elements, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> draw(0.1F, 2.0F);
    Floats values(elements);
    for (float& value : values) value = draw(random);
    return values;
}

Bytes encoded(const Floats& values, std::size_t chunk_bytes, std::uint64_t seed) {
    Bytes out(int8_bytes(values.size(), chunk_bytes));
    int8_encode_message(values.data(), values.size(), chunk_bytes, seed, out.data());
    return out;
}

Floats decoded(const Bytes& from, std::size_t elements, std::size_t chunk_bytes) {
    Floats out(elements);
    int8_decode_message(from.data(), elements, chunk_bytes, out.data());
    return out;
}

}  // namespace

TEST(int8_of_any_length_and_chunk_comes_back_within_half_a_step) {
    for (const std::size_t chunk_bytes : {9U, 100U, 1032U, 1440U, 4000U, 65000U}) {
        for (const std::size_t elements : {0U, 1U, 2U, 91U, 92U, 93U, 1024U, 1025U, 5000U, 70000U}) {
            const Floats values = normal(elements, 1);
            const Bytes message = encoded(values, chunk_bytes, 7);
            // Every chunk but the last is full, and what a chunk holds follows from its length alone.
            const std::size_t full = message.size() / chunk_bytes, rest = message.size() % chunk_bytes;
            CHECK_EQUAL(full * int8_elements(chunk_bytes) + int8_elements(rest), elements);
            const Floats back = decoded(message, elements, chunk_bytes);
            const float span = elements == 0 ? 0.0F
                                             : *std::max_element(values.begin(), values.end()) -
                                                   *std::min_element(values.begin(), values.end());
            for (std::size_t i = 0; i < elements; ++i) CHECK(std::abs(back[i] - values[i]) <= 0.502F * span / 254.0F);
        }
    }
}

TEST(int8_is_right_in_expectation_for_every_element) {
    constexpr std::size_t elements = 300, chunk_bytes = 1440, draws = 4000;
    const Floats values = normal(elements, 2);
    std::vector<double> sum(elements);
    for (std::size_t draw = 0; draw < draws; ++draw) {
        const Floats back = decoded(encoded(values, chunk_bytes, draw), elements, chunk_bytes);
        for (std::size_t i = 0; i < elements; ++i) sum[i] += back[i];
    }
    const float step =
        (*std::max_element(values.begin(), values.end()) - *std::min_element(values.begin(), values.end())) / 254.0F;
    // The error of one draw is uniform over a step; six standard deviations of the mean of all draws.
    const double most = 6.0 * step / std::sqrt(12.0 * draws);
    for (std::size_t i = 0; i < elements; ++i) CHECK(std::abs(sum[i] / draws - values[i]) < most);
}

TEST(int8_grids_lie_elsewhere_in_every_block_and_with_every_seed) {
    const Floats values = normal(2048, 3);
    Floats twice = values;
    std::copy(values.begin(), values.begin() + 1024, twice.begin() + 1024);  // the same block, twice
    const Bytes one = encoded(twice, 4128, 1), other = encoded(twice, 4128, 2);
    CHECK(std::memcmp(one.data(), one.data() + 1032, 1032) != 0);
    CHECK(std::memcmp(one.data(), other.data(), 1032) != 0);
    CHECK(encoded(twice, 4128, 1) == one);
}

TEST(int8_has_the_same_bits_with_every_instruction_set) {
    const Floats values = normal(5000, 4);
    std::vector<Bytes> messages;
    std::vector<Floats> sums;
    for (std::size_t set = 0; set < instruction_sets().size(); ++set) {
        use_instruction_set(set);
        messages.push_back(encoded(values, 1440, 9));
        sums.push_back(decoded(messages.back(), values.size(), 1440));
        int8_add(messages.back().data(), int8_elements(1440), sums.back().data());
    }
    use_instruction_set(0);
    for (std::size_t set = 1; set < messages.size(); ++set) {
        CHECK(messages[set] == messages[0]);
        CHECK(std::memcmp(sums[set].data(), sums[0].data(), 4 * values.size()) == 0);
    }
}

TEST(int8_keeps_constants_and_tells_what_is_not_a_number) {
    const Floats constant(100, 0.3F);
    CHECK(decoded(encoded(constant, 1440, 1), 100, 1440) == constant);
    const Floats tiny{0.0F, std::numeric_limits<float>::denorm_min()};
    for (const float value : decoded(encoded(tiny, 1440, 1), 2, 1440)) CHECK(std::abs(value) < 1e-37F);
    // Differences that are no numbers: nothing that looks like one may come out.
    const float most = std::numeric_limits<float>::max();
    for (const Floats& wide : {Floats{-most, most}, Floats{-0.6F * most, 0.6F * most, 0.0F}, Floats{-most, 0.0F}}) {
        for (std::uint64_t seed = 0; seed < 20; ++seed) {
            const Floats back = decoded(encoded(wide, 1440, seed), wide.size(), 1440);
            for (std::size_t i = 0; i < wide.size(); ++i) {
                CHECK(std::isnan(back[i]) || std::abs(back[i] - wide[i]) <= 0.01F * most);
            }
        }
    }
    CHECK(std::isnan(decoded(encoded({-most, most}, 1440, 1), 2, 1440)[0]));
    const Floats large{-0.4F * most, 0.4F * most};
    for (const float value : decoded(encoded(large, 1440, 1), 2, 1440)) CHECK(std::isfinite(value));
    for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
        Floats values = normal(2048, 5);
        values[3] = bad;
        const Floats back = decoded(encoded(values, 65000, 1), 2048, 65000);
        CHECK(std::isnan(back[0]) && std::isnan(back[1023]));
        CHECK(!std::isnan(back[1024]));  // only that block
    }
}

TEST(int8_contributions_make_the_mean_of_what_arrived) {
    constexpr std::size_t chunk_bytes = 108, elements = 250;  // 100, 100 and 50
    for (const Dtype out_dtype : {Dtype::int8, Dtype::float32}) {
        const Floats a = normal(elements, 6), b = normal(elements, 7), c = normal(elements, 8);
        Bytes own = encoded(a, chunk_bytes, 1);
        const Bytes second = encoded(b, chunk_bytes, 2), third = encoded(c, chunk_bytes, 3);
        Floats wide(elements, -1.0F);
        Blocks blocks(chunk_bytes, 1 << 20);
        Reduction reduction({.mode = Reduce::arrived,
                             .wire = Dtype::int8,
                             .out_dtype = out_dtype,
                             .own = own.data(),
                             .out = out_dtype == Dtype::int8 ? own.data() : reinterpret_cast<std::byte*>(wide.data()),
                             .bytes = own.size(),
                             .average = true,
                             .seed = 5},
                            2, chunk_bytes, blocks);
        const auto chunk = [&](const Bytes& of, std::size_t i) {
            return std::span(of).subspan(i * chunk_bytes, std::min(chunk_bytes, of.size() - i * chunk_bytes));
        };
        reduction.contribute(0, 0, chunk(second, 0));  // all of the first
        reduction.contribute(1, 0, chunk(third, 0));
        reduction.give_up(0, 1);  // two of the second
        reduction.contribute(1, 1, chunk(third, 1));
        reduction.give_up(0, 2);  // ours alone of the last
        reduction.give_up(1, 2);
        CHECK_EQUAL(reduction.final_chunks().size(), 3U);
        const Floats result = out_dtype == Dtype::int8 ? decoded(own, elements, chunk_bytes) : wide;
        for (std::size_t i = 0; i < elements; ++i) {
            const float expected = i < 100 ? (a[i] + b[i] + c[i]) / 3 : i < 200 ? (a[i] + c[i]) / 2 : a[i];
            CHECK(std::abs(result[i] - expected) < 0.1F);  // two roundings of half a step, 12 / 254
        }
    }
}

TEST(int8_leaves_nothing_of_what_lay_in_the_buffer_and_refuses_chunks_that_hold_nothing) {
    constexpr std::size_t chunk_bytes = 1040, elements = 3000;  // 1,032 and 8 that hold nothing
    const Floats values = normal(elements, 9);
    std::vector<Bytes> messages;
    for (const std::byte before : {std::byte{0}, std::byte{0xee}}) {
        Bytes& out = messages.emplace_back(int8_bytes(elements, chunk_bytes), before);
        int8_encode_message(values.data(), elements, chunk_bytes, 1, out.data());
    }
    CHECK(messages[0] == messages[1]);
    Bytes out(100);
    Floats back(4);
    int refused = 0;
    for (const bool encodes : {true, false}) {
        try {
            if (encodes) {
                int8_encode_message(values.data(), 4, 8, 1, out.data());
            } else {
                int8_decode_message(out.data(), 4, 8, back.data());
            }
        } catch (const std::invalid_argument&) {
            ++refused;
        }
    }
    CHECK_EQUAL(refused, 2);
}
