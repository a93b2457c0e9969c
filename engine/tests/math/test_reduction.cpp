// Reduction of one rank's shard, chunk by chunk: what the sum is, when it is final, and which ranks counted.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>

#include "check.hpp"
#include "math/reduction.hpp"

using namespace storm;

namespace {

constexpr std::size_t chunk_bytes = 64;
using Floats = std::vector<float>;

std::span<const std::byte> bytes_of(const Floats& values) { return std::as_bytes(std::span(values)); }

// Values whose sums depend on the order: a reduction that adds in another order is found out.
Floats uneven(std::size_t elements, std::uint32_t seed) {
    std::mt19937 random(seed);
    Floats values(elements);
    for (float& value : values)
        value = std::ldexp(static_cast<float>(random()) - 2e9F, static_cast<int>(random() % 40) - 20);
    return values;
}

struct Shard {
    Shard(Reduce mode, std::size_t elements, std::uint32_t contributors, bool average = false,
          std::uint32_t own_position = 0, bool in_place = false)
        : own(uneven(elements, 100)), out(elements, -1.0F) {
        for (std::uint32_t i = 0; i < contributors; ++i) inputs.push_back(uneven(elements, i));
        reduction.emplace(
            ReductionSpec{.mode = mode,
                          .wire = Dtype::float32,
                          .out_dtype = Dtype::float32,
                          .own = mode == Reduce::copy ? nullptr : reinterpret_cast<std::byte*>(own.data()),
                          .out = reinterpret_cast<std::byte*>(in_place ? own.data() : out.data()),
                          .bytes = 4 * elements,
                          .own_position = own_position,
                          .average = average},
            contributors, chunk_bytes, blocks);
    }
    std::span<const std::byte> payload(std::uint32_t contributor, std::uint32_t chunk) const {
        const auto all = bytes_of(inputs[contributor]);
        const std::size_t at = chunk * chunk_bytes;
        return all.subspan(at, std::min(chunk_bytes, all.size() - at));
    }
    void contribute(std::uint32_t contributor, std::uint32_t chunk) {
        // A copy that dies at once, as the kernel's buffer does.
        const auto from = payload(contributor, chunk);
        std::vector<std::byte> passing(from.begin(), from.end());
        reduction->contribute(contributor, chunk, passing);
        std::fill(passing.begin(), passing.end(), std::byte{0xee});
    }

    BlockPool blocks{chunk_bytes, 1 << 20};
    Floats own, out;
    std::vector<Floats> inputs;
    std::optional<Reduction> reduction;
};

bool same_bits(const Floats& a, const Floats& b) { return std::memcmp(a.data(), b.data(), 4 * a.size()) == 0; }

}  // namespace

TEST(exact_sum_has_the_order_of_ranks_whatever_arrives_first) {
    constexpr std::uint32_t contributors = 4, chunks = 5;
    constexpr std::size_t elements = 16 * chunks - 3;
    for (std::uint32_t position = 0; position <= contributors; ++position) {
        Shard shard(Reduce::in_order, elements, contributors, false, position);
        std::vector<std::pair<std::uint32_t, std::uint32_t>> order;
        for (std::uint32_t i = 0; i < contributors; ++i)
            for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) order.emplace_back(i, chunk);
        std::shuffle(order.begin(), order.end(), std::mt19937(position));
        for (const auto& [contributor, chunk] : order) shard.contribute(contributor, chunk);
        CHECK_EQUAL(shard.reduction->final_chunks().size(), chunks);
        Floats expected(elements);
        for (std::size_t e = 0; e < elements; ++e) {
            std::vector<float> terms;
            for (const Floats& input : shard.inputs) terms.push_back(input[e]);
            terms.insert(terms.begin() + position, shard.own[e]);
            float sum = terms[0];
            for (std::size_t t = 1; t < terms.size(); ++t) sum += terms[t];
            expected[e] = sum;
        }
        CHECK(same_bits(shard.out, expected));
    }
}

TEST(chunk_is_final_when_the_last_of_its_contributors_is_settled_and_the_list_keeps_that_order) {
    Shard shard(Reduce::in_order, 48, 2);
    shard.contribute(0, 2);
    shard.contribute(0, 0);
    shard.contribute(1, 1);
    CHECK(shard.reduction->final_chunks().empty());
    shard.contribute(1, 2);
    shard.contribute(0, 1);
    CHECK(shard.reduction->final_chunks() == (std::vector<std::uint32_t>{2, 1}));
    shard.reduction->mark_missing(1, 0);
    CHECK(shard.reduction->final_chunks() == (std::vector<std::uint32_t>{2, 1, 0}));
    CHECK(shard.reduction->counts() == (std::vector<std::uint16_t>{2, 3, 3}));
}

TEST(lossy_mean_is_over_what_arrived) {
    Shard shard(Reduce::arrived, 48, 3, true);
    const Floats own(48, 1.0F);
    shard.own = own;
    for (std::uint32_t i = 0; i < 3; ++i) shard.inputs[i].assign(48, static_cast<float>(i + 2));
    for (std::uint32_t i = 0; i < 3; ++i) shard.contribute(i, 0);  // 1 + 2 + 3 + 4
    shard.contribute(1, 1);                                        // 1 + 3
    shard.reduction->mark_missing(0, 1);
    shard.reduction->mark_missing(2, 1);
    for (std::uint32_t i = 0; i < 3; ++i) shard.reduction->mark_missing(i, 2);  // ours alone
    CHECK_EQUAL(shard.out[0], 2.5F);
    CHECK_EQUAL(shard.out[16], 2.0F);
    CHECK_EQUAL(shard.out[47], 1.0F);
    CHECK(shard.reduction->counts() == (std::vector<std::uint16_t>{4, 2, 1}));
}

TEST(lossy_sum_is_the_mean_times_the_world) {
    Shard shard(Reduce::arrived, 32, 3);
    shard.own.assign(32, 1.0F);
    for (std::uint32_t i = 0; i < 3; ++i) shard.inputs[i].assign(32, static_cast<float>(i + 2));
    for (std::uint32_t i = 0; i < 3; ++i) shard.contribute(i, 1);
    shard.contribute(1, 0);
    shard.reduction->mark_missing(0, 0);
    shard.reduction->mark_missing(2, 0);
    CHECK_EQUAL(shard.out[0], 8.0F);    // (1 + 3) / 2 * 4
    CHECK_EQUAL(shard.out[16], 10.0F);  // nothing missing: the plain sum
}

TEST(exact_reduction_that_gave_up_divides_as_the_lossy_one_does) {
    Shard shard(Reduce::in_order, 16, 2, true);
    shard.own.assign(16, 1.0F);
    shard.inputs[1].assign(16, 5.0F);
    shard.contribute(1, 0);
    shard.reduction->mark_missing(0, 0);
    CHECK_EQUAL(shard.out[3], 3.0F);
}

TEST(sum_may_be_written_over_our_own_contribution) {
    for (const Reduce mode : {Reduce::in_order, Reduce::arrived}) {
        BlockPool blocks(chunk_bytes, 1 << 20);
        Floats memory(32, 1.0F);
        const Floats other(32, 2.0F);
        auto* at = reinterpret_cast<std::byte*>(memory.data());
        Reduction reduction(
            {.mode = mode, .wire = Dtype::float32, .out_dtype = Dtype::float32, .own = at, .out = at, .bytes = 128}, 2,
            chunk_bytes, blocks);
        for (std::uint32_t chunk = 0; chunk < 2; ++chunk) {
            reduction.contribute(1, chunk, bytes_of(other).first(chunk_bytes));
            reduction.contribute(0, chunk, bytes_of(other).first(chunk_bytes));
        }
        for (const float value : memory) CHECK_EQUAL(value, 5.0F);
    }
}

TEST(narrow_sums_are_rounded_once) {
    // 256 + 1 + 1 in bfloat16, which has 8 bits of precision: rounded after each addition it would stay 256.
    constexpr std::uint16_t big = 0x4380, one = 0x3f80, rounded = 0x4381;
    for (const Reduce mode : {Reduce::in_order, Reduce::arrived}) {
        BlockPool blocks(chunk_bytes, 1 << 20);
        std::array<std::uint16_t, 32> own, out{}, input;
        own.fill(big);
        input.fill(one);
        Reduction reduction({.mode = mode,
                             .wire = Dtype::bfloat16,
                             .out_dtype = Dtype::bfloat16,
                             .own = reinterpret_cast<std::byte*>(own.data()),
                             .out = reinterpret_cast<std::byte*>(out.data()),
                             .bytes = 64},
                            2, chunk_bytes, blocks);
        reduction.contribute(0, 0, std::as_bytes(std::span(input)));
        reduction.contribute(1, 0, std::as_bytes(std::span(input)));
        for (const std::uint16_t value : out) CHECK_EQUAL(value, rounded);
    }
}

TEST(wide_result_of_a_narrow_wire_lies_at_its_own_offsets) {
    for (const Reduce mode : {Reduce::in_order, Reduce::arrived}) {
        BlockPool blocks(chunk_bytes, 1 << 20);
        std::vector<std::uint16_t> own(80, 0x3f80), input(80, 0x4000);
        Floats out(80, -1.0F);
        Reduction reduction({.mode = mode,
                             .wire = Dtype::bfloat16,
                             .out_dtype = Dtype::float32,
                             .own = reinterpret_cast<std::byte*>(own.data()),
                             .out = reinterpret_cast<std::byte*>(out.data()),
                             .bytes = 160},
                            1, chunk_bytes, blocks);
        const auto payload = std::as_bytes(std::span(input));
        reduction.contribute(0, 2, payload.subspan(128));
        reduction.contribute(0, 0, payload.first(64));
        for (std::size_t e = 0; e < 80; ++e) CHECK_EQUAL(out[e], e >= 32 && e < 64 ? -1.0F : 3.0F);
    }
}

TEST(copy_takes_the_bytes_of_its_one_contributor) {
    Shard shard(Reduce::copy, 40, 1);
    shard.contribute(0, 1);
    shard.reduction->mark_missing(0, 0);
    shard.contribute(0, 2);
    CHECK(std::equal(shard.out.begin() + 16, shard.out.end(), shard.inputs[0].begin() + 16));
    CHECK_EQUAL(shard.out[0], -1.0F);
    CHECK(shard.reduction->counts() == (std::vector<std::uint16_t>{0, 1, 1}));
    CHECK(shard.reduction->final_chunks() == (std::vector<std::uint32_t>{1, 0, 2}));
}

TEST(reduction_without_contributors_is_final_at_once) {
    for (const Reduce mode : {Reduce::in_order, Reduce::arrived}) {
        Shard shard(mode, 40, 0, true);
        CHECK_EQUAL(shard.reduction->final_chunks().size(), 3U);
        CHECK(same_bits(shard.out, shard.own));
    }
}

TEST(empty_shard_is_one_empty_chunk) {
    for (const Reduce mode : {Reduce::in_order, Reduce::arrived}) {
        Shard shard(mode, 0, 3);
        CHECK_EQUAL(shard.reduction->chunks(), 1U);
        // As from the pool, which keeps nothing of an empty payload.
        for (std::uint32_t i = 0; i < 3; ++i) shard.reduction->contribute(i, 0, {});
        CHECK_EQUAL(shard.reduction->final_chunks().size(), 1U);
        CHECK_EQUAL(shard.reduction->counts()[0], 4U);
    }
}

TEST(exact_sum_is_right_for_every_order_of_arrival_and_every_absence) {
    constexpr std::uint32_t contributors = 3;
    for (std::uint32_t position = 0; position <= contributors; ++position) {
        for (std::uint32_t absent = 0; absent < 1U << contributors; ++absent) {
            std::array<std::uint32_t, contributors> order{0, 1, 2};
            do {
                // In place, as all_reduce has it: the result goes where our own contribution lies.
                Shard shard(Reduce::in_order, 16, contributors, true, position, true);
                const Floats own = shard.own;
                for (const std::uint32_t i : order) {
                    if ((absent >> i & 1U) != 0) {
                        shard.reduction->mark_missing(i, 0);
                    } else {
                        shard.contribute(i, 0);
                    }
                }
                CHECK_EQUAL(shard.reduction->final_chunks().size(), 1U);
                for (std::size_t e = 0; e < 16; ++e) {
                    float sum = 0.0F;
                    unsigned count = 0;
                    for (std::uint32_t term = 0; term <= contributors; ++term) {
                        const std::uint32_t i = term < position ? term : term - 1;
                        if (term != position && (absent >> i & 1U) != 0) continue;
                        const float value = term == position ? own[e] : shard.inputs[i][e];
                        sum = count++ == 0 ? value : sum + value;
                    }
                    CHECK_EQUAL(shard.own[e], sum / static_cast<float>(count));
                }
            } while (std::next_permutation(order.begin(), order.end()));
        }
    }
}
