// int8 and int4 quantisation: unbiased, within half a step, each chunk on its own, NaN for blocks that are not finite.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.hpp"
#include "exchange/lanes.hpp"
#include "math/grid.hpp"
#include "math/kernels.hpp"
#include "math/reduction.hpp"

using namespace storm;

namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

constexpr std::array both{Dtype::int8, Dtype::int4};

// Steps between the least and the largest value of a block, and its elements and bytes.
constexpr float steps(Dtype dtype) { return dtype == Dtype::int8 ? 255.0F : 15.0F; }
constexpr std::size_t block(Dtype dtype) { return dtype == Dtype::int8 ? 1024 : 128; }
constexpr std::size_t block_bytes(Dtype dtype) { return dtype == Dtype::int8 ? 1032 : 72; }

Floats normal(std::size_t elements, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> draw(0.1F, 2.0F);
    Floats values(elements);
    for (float& value : values) value = draw(random);
    return values;
}

Bytes encoded(Dtype dtype, const Floats& values, std::size_t chunk_bytes, std::uint64_t seed) {
    Bytes out(grid_bytes(dtype, values.size(), chunk_bytes));
    grid_encode_message(dtype, values.data(), values.size(), chunk_bytes, seed, out.data());
    return out;
}

Floats decoded(Dtype dtype, const Bytes& from, std::size_t elements, std::size_t chunk_bytes) {
    Floats out(elements);
    grid_decode_message(dtype, from.data(), elements, chunk_bytes, out.data());
    return out;
}

float span_of(const Floats& values) {
    if (values.empty()) return 0.0F;
    return *std::max_element(values.begin(), values.end()) - *std::min_element(values.begin(), values.end());
}

}  // namespace

TEST(grids_of_any_length_and_chunk_come_back_within_half_a_step) {
    for (const Dtype dtype : both) {
        for (const std::size_t chunk_bytes : {9U, 72U, 80U, 100U, 1032U, 1440U, 4000U, 65000U}) {
            for (const std::size_t elements :
                 {0U, 1U, 2U, 3U, 91U, 92U, 93U, 127U, 129U, 1024U, 1025U, 5000U, 70001U}) {
                const Floats values = normal(elements, 1);
                const Bytes message = encoded(dtype, values, chunk_bytes, 7);
                // Every chunk but the last is full, and what a chunk holds follows from its length but for half a byte.
                const std::size_t full = message.size() / chunk_bytes, rest = message.size() % chunk_bytes;
                const std::size_t held = full * grid_elements(dtype, chunk_bytes) + grid_elements(dtype, rest);
                CHECK(held == elements || (dtype == Dtype::int4 && held == elements + 1));
                const Floats back = decoded(dtype, message, elements, chunk_bytes);
                const float most = 0.5F * span_of(values) / steps(dtype) * 1.005F;
                for (std::size_t i = 0; i < elements; ++i) CHECK(std::abs(back[i] - values[i]) <= most);
            }
        }
    }
}

TEST(grids_give_the_same_values_as_a_plain_loop_over_their_bytes) {
    // The layout on the wire, written down a second time.
    constexpr std::size_t elements = 333;
    const Floats values = normal(elements, 12);
    const Bytes message = encoded(Dtype::int4, values, 1440, 3);
    CHECK_EQUAL(message.size(), 72U + 72U + 8U + 39U);
    const Floats back = decoded(Dtype::int4, message, elements, 1440);
    for (std::size_t i = 0; i < elements; ++i) {
        const std::size_t first = i / 128 * 128, n = std::min<std::size_t>(128, elements - first), half = (n + 1) / 2;
        const std::byte* at = message.data() + i / 128 * 72;
        float low = 0, step = 0;
        std::memcpy(&low, at, 4);
        std::memcpy(&step, at + 4, 4);
        const std::size_t k = i - first;
        const auto both_codes = static_cast<unsigned>(at[8 + k % half]);
        CHECK_EQUAL(back[i], low + step * static_cast<float>(k < half ? both_codes & 15U : both_codes >> 4U));
    }
}

TEST(grids_are_right_in_expectation_for_every_element) {
    constexpr std::size_t elements = 300, chunk_bytes = 1440, draws = 4000;
    const Floats values = normal(elements, 2);
    for (const Dtype dtype : both) {
        std::vector<double> sum(elements), square(elements);
        for (std::size_t draw = 0; draw < draws; ++draw) {
            const Floats back = decoded(dtype, encoded(dtype, values, chunk_bytes, draw), elements, chunk_bytes);
            for (std::size_t i = 0; i < elements; ++i) {
                sum[i] += back[i];
                square[i] += (back[i] - values[i]) * (back[i] - values[i]);
            }
        }
        for (std::size_t first = 0; first < elements; first += block(dtype)) {
            const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first);
            const Floats mine(begin, begin + static_cast<std::ptrdiff_t>(std::min(block(dtype), elements - first)));
            const float step = span_of(mine) / steps(dtype);
            // The error of one draw is uniform over a step; six standard deviations of the mean of all draws.
            const double most = 6.0 * step / std::sqrt(12.0 * draws);
            for (std::size_t i = first; i < first + mine.size(); ++i) {
                CHECK(std::abs(sum[i] / draws - values[i]) < most);
                CHECK(std::abs(square[i] / draws / (step * step / 12.0) - 1.0) < 0.1);
            }
        }
    }
}

TEST(grids_lie_elsewhere_in_every_block_and_with_every_seed) {
    for (const Dtype dtype : both) {
        const std::size_t n = block(dtype), bytes = block_bytes(dtype), chunk_bytes = 4 * bytes;
        const Floats values = normal(n, 3);
        Floats twice = values;
        twice.insert(twice.end(), values.begin(), values.end());  // the same block, twice
        const Bytes one = encoded(dtype, twice, chunk_bytes, 1), other = encoded(dtype, twice, chunk_bytes, 2);
        CHECK_EQUAL(one.size(), 2 * bytes);
        CHECK(std::memcmp(one.data(), one.data() + bytes, bytes) != 0);
        CHECK(std::memcmp(one.data(), other.data(), bytes) != 0);
        CHECK(encoded(dtype, twice, chunk_bytes, 1) == one);
    }
}

TEST(grids_have_the_same_bits_with_every_instruction_set) {
    const Floats values = normal(5001, 4);
    for (const Dtype dtype : both) {
        std::vector<Bytes> messages;
        std::vector<Floats> sums;
        for (std::size_t set = 0; set < instruction_sets().size(); ++set) {
            use_instruction_set(set);
            messages.push_back(encoded(dtype, values, 1440, 9));
            sums.push_back(decoded(dtype, messages.back(), values.size(), 1440));
            grid_add(dtype, messages.back().data(), grid_elements(dtype, 1440), sums.back().data());
        }
        use_instruction_set(0);
        for (std::size_t set = 1; set < messages.size(); ++set) {
            CHECK(messages[set] == messages[0]);
            CHECK(std::memcmp(sums[set].data(), sums[0].data(), 4 * values.size()) == 0);
        }
    }
}

TEST(grids_keep_constants_and_tell_what_is_not_a_number) {
    for (const Dtype dtype : both) {
        const auto there_and_back = [&](const Floats& values, std::uint64_t seed) {
            return decoded(dtype, encoded(dtype, values, 65000, seed), values.size(), 65000);
        };
        const Floats constant(100, 0.3F);
        CHECK(there_and_back(constant, 1) == constant);
        const Floats tiny{0.0F, std::numeric_limits<float>::denorm_min()};
        for (const float value : there_and_back(tiny, 1)) CHECK(std::abs(value) < 1e-37F);
        // Differences that are no numbers: nothing that looks like one may come out.
        const float most = std::numeric_limits<float>::max(), near = 1.02F / steps(dtype) * most;
        for (const Floats& wide : {Floats{-most, most}, Floats{-0.6F * most, 0.6F * most, 0.0F}, Floats{-most, 0.0F}}) {
            for (std::uint64_t seed = 0; seed < 20; ++seed) {
                const Floats back = there_and_back(wide, seed);
                for (std::size_t i = 0; i < wide.size(); ++i) {
                    CHECK(std::isnan(back[i]) || std::abs(back[i] - wide[i]) <= near);
                }
            }
        }
        CHECK(std::isnan(there_and_back({-most, most}, 1)[0]));
        for (const float value : there_and_back({-0.4F * most, 0.4F * most}, 1)) CHECK(std::isfinite(value));
        for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN()}) {
            Floats values = normal(2 * block(dtype), 5);
            values[3] = bad;
            const Floats back = there_and_back(values, 1);
            CHECK(std::isnan(back[0]) && std::isnan(back[block(dtype) - 1]));
            CHECK(!std::isnan(back[block(dtype)]));  // only that block
        }
    }
}

TEST(grids_that_make_no_sense_are_read_as_numbers_or_none_and_harm_nobody_else) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN(), most = std::numeric_limits<float>::max();
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (const Dtype dtype : both) {
        const Floats values = normal(2 * block(dtype), 13);
        const Bytes honest = encoded(dtype, values, 65000, 1);
        const Floats expected = decoded(dtype, honest, values.size(), 65000);
        for (const auto& [low, step] :
             {std::pair{nan, 1.0F}, {1.0F, nan}, {-infinity, infinity}, {most, most}, {0.0F, -1e30F}}) {
            Bytes forged = honest;
            std::memcpy(forged.data(), &low, 4);
            std::memcpy(forged.data() + 4, &step, 4);
            const Floats back = decoded(dtype, forged, values.size(), 65000);
            if (std::isnan(low) || std::isnan(step)) CHECK(std::isnan(back[0]) && std::isnan(back[block(dtype) - 1]));
            CHECK(std::equal(back.begin() + static_cast<std::ptrdiff_t>(block(dtype)), back.end(),
                             expected.begin() + static_cast<std::ptrdiff_t>(block(dtype))));
        }
    }
}

TEST(contributions_on_grids_make_the_mean_of_what_arrived) {
    for (const Dtype dtype : both) {
        // 100, 100 and 51 elements: an odd number, which fills only half of int4's last byte.
        const std::size_t chunk_bytes = dtype == Dtype::int8 ? 108 : 58, elements = 251;
        for (const Dtype out_dtype : {dtype, Dtype::float32}) {
            const Floats a = normal(elements, 6), b = normal(elements, 7), c = normal(elements, 8);
            Bytes own = encoded(dtype, a, chunk_bytes, 1);
            const Bytes second = encoded(dtype, b, chunk_bytes, 2), third = encoded(dtype, c, chunk_bytes, 3);
            Floats wide(elements + 1, -1.0F);
            BlockPool blocks(chunk_bytes, 1 << 20);
            Reduction reduction({.mode = Reduce::arrived,
                                 .wire = dtype,
                                 .out_dtype = out_dtype,
                                 .own = own.data(),
                                 .out = out_dtype == dtype ? own.data() : reinterpret_cast<std::byte*>(wide.data()),
                                 .bytes = own.size(),
                                 .average = true,
                                 .seed = 5,
                                 .elements = elements},
                                2, chunk_bytes, blocks);
            const auto chunk = [&](const Bytes& of, std::size_t i) {
                return std::span(of).subspan(i * chunk_bytes, std::min(chunk_bytes, of.size() - i * chunk_bytes));
            };
            reduction.contribute(0, 0, chunk(second, 0));  // all of the first
            reduction.contribute(1, 0, chunk(third, 0));
            reduction.mark_missing(0, 1);  // two of the second
            reduction.contribute(1, 1, chunk(third, 1));
            reduction.mark_missing(0, 2);  // ours alone of the last
            reduction.mark_missing(1, 2);
            CHECK_EQUAL(reduction.final_chunks().size(), 3U);
            const Floats result = out_dtype == dtype ? decoded(dtype, own, elements, chunk_bytes) : wide;
            for (std::size_t i = 0; i < elements; ++i) {
                const float expected = i < 100 ? (a[i] + b[i] + c[i]) / 3 : i < 200 ? (a[i] + c[i]) / 2 : a[i];
                CHECK(std::abs(result[i] - expected) < 13.0F / steps(dtype));  // two roundings of half a step
            }
            CHECK_EQUAL(wide.back(), -1.0F);  // nothing behind the last element
        }
    }
}

TEST(an_odd_number_of_four_bit_elements_stays_odd_in_the_lane_that_has_the_last) {
    const Lanes lanes{.lanes = 2, .chunk_bytes = 1440};  // 20 blocks, 2,560 elements
    const std::size_t elements = 400 * 2560 + 7, bytes = grid_bytes(Dtype::int4, elements, 1440);
    ExchangeSpec spec;
    spec.reduction = ReductionSpec{.mode = Reduce::arrived,
                                   .wire = Dtype::int4,
                                   .out_dtype = Dtype::float32,
                                   .bytes = bytes,
                                   .elements = elements};
    const auto first = lanes.part_of(spec, 0).reduction, last = lanes.part_of(spec, 1).reduction;
    CHECK_EQUAL(first->bytes % 1440, 0U);
    CHECK_EQUAL(first->bytes / 1440 * 2560 + last->elements, elements);
}

TEST(grids_leave_nothing_of_what_lay_in_the_buffer_and_refuse_chunks_that_hold_nothing) {
    for (const Dtype dtype : both) {
        const std::size_t chunk_bytes = block_bytes(dtype) + 8, elements = 3001;  // 8 bytes that hold nothing
        const Floats values = normal(elements, 9);
        std::vector<Bytes> messages;
        for (const std::byte before : {std::byte{0}, std::byte{0xee}}) {
            Bytes& out = messages.emplace_back(grid_bytes(dtype, elements, chunk_bytes), before);
            grid_encode_message(dtype, values.data(), elements, chunk_bytes, 1, out.data());
        }
        CHECK(messages[0] == messages[1]);
        Bytes out(100);
        Floats back(4);
        int refused = 0;
        for (const bool encodes : {true, false}) {
            try {
                if (encodes) {
                    grid_encode_message(dtype, values.data(), 4, 8, 1, out.data());
                } else {
                    grid_decode_message(dtype, out.data(), 4, 8, back.data());
                }
            } catch (const std::invalid_argument&) {
                ++refused;
            }
        }
        CHECK_EQUAL(refused, 2);
    }
}
