// Sums, copies and conversions: every instruction set gives the same bits as plain loops.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "math/kernels.hpp"

using namespace storm;

namespace {

using Buffer = std::vector<std::byte>;

// The layout of a small float, and rounding by arithmetic in double instead of on bits: shares nothing with the engine.
struct Format {
    Dtype dtype;
    int mantissa_bits, smallest_exponent;
    double largest;
};
constexpr Format bfloat16{Dtype::bfloat16, 7, -126, 0x1.FEp127};
constexpr Format float16{Dtype::float16, 10, -14, 65504.0};

double value_of(const Format& format, std::uint16_t bits) {
    const int fraction = bits & ((1 << format.mantissa_bits) - 1), top = (1 << (15 - format.mantissa_bits)) - 1;
    const int exponent = (bits & 0x7fff) >> format.mantissa_bits,
              unit = format.smallest_exponent - format.mantissa_bits;
    double magnitude = std::ldexp(fraction, unit);
    if (exponent > 0) magnitude = std::ldexp(fraction + (1 << format.mantissa_bits), unit + exponent - 1);
    if (exponent == top) magnitude = fraction != 0 ? std::nan("") : HUGE_VAL;
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// The value that `value` is rounded to; std::nearbyint takes ties to even.
double rounded(const Format& format, float value) {
    if (std::isnan(value) || std::isinf(value) || value == 0) return value;
    const int exponent = std::max(std::ilogb(value), format.smallest_exponent) - format.mantissa_bits;
    const double nearest = std::ldexp(std::nearbyint(std::ldexp(double{value}, -exponent)), exponent);
    return std::abs(nearest) > format.largest ? std::copysign(HUGE_VAL, nearest) : nearest;
}

bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); }

std::uint16_t bits16(const Buffer& from, std::size_t i, std::size_t offset = 0) {
    std::uint16_t bits;
    std::memcpy(&bits, from.data() + offset + 2 * i, 2);
    return bits;
}

void check_rounding(const Format& format, const std::vector<float>& values) {
    Buffer out(2 * values.size());
    divide_into(values.data(), 1.0F, values.size(), format.dtype, out.data());
    for (std::size_t i = 0; i < values.size(); ++i)
        if (!same(value_of(format, bits16(out, i)), rounded(format, values[i]))) CHECK_EQUAL(values[i], bits16(out, i));
}

template <class Body>
void for_each_set(Body body) {
    for (std::size_t set = 0; set < instruction_sets().size(); ++set) {
        use_instruction_set(set);
        body();
    }
    use_instruction_set(0);
}

std::vector<std::uint16_t> all_words() {
    std::vector<std::uint16_t> words(65'536);
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<std::uint16_t>(i);
    return words;
}

}  // namespace

TEST(all_65536_small_floats_widen_exactly_and_round_back_to_themselves) {
    const auto words = all_words();
    const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
    for_each_set([&] {
        for (const Format& format : {bfloat16, float16}) {
            std::vector<float> wide(words.size());
            widen(format.dtype, bytes, words.size(), wide.data());
            Buffer back(2 * words.size());
            divide_into(wide.data(), 1.0F, words.size(), format.dtype, back.data());
            for (std::size_t i = 0; i < words.size(); ++i) {
                CHECK(same(double{wide[i]}, value_of(format, words[i])));
                const int quiet = std::isnan(wide[i]) ? 1 << (format.mantissa_bits - 1) : 0;
                CHECK_EQUAL(bits16(back, i), words[i] | quiet);
            }
        }
    });
}

TEST(all_instruction_sets_widen_to_the_same_bits_even_for_nan) {
    const auto words = all_words();
    const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
    for (Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
        std::vector<float> first(words.size());
        widen(dtype, bytes, words.size(), first.data());
        for_each_set([&] {
            std::vector<float> wide(words.size());
            widen(dtype, bytes, words.size(), wide.data());
            CHECK(std::memcmp(first.data(), wide.data(), 4 * words.size()) == 0);
        });
    }
}

TEST(rounding_is_right_on_and_beside_every_midpoint) {
    for (const Format& format : {bfloat16, float16}) {
        std::vector<float> values;
        for (std::uint16_t word : all_words()) {
            const auto next = static_cast<std::uint16_t>(word + 1);
            const double low = value_of(format, word);
            double high = value_of(format, next);
            if (std::isnan(low) || std::isinf(low) || (word & 0x7fff) == 0x7fff) continue;
            if (std::isinf(high)) high = low + (low - value_of(format, static_cast<std::uint16_t>(word - 1)));
            const auto middle = static_cast<float>(low / 2 + high / 2);  // exact: float32 has bits to spare
            values.insert(values.end(), {static_cast<float>(low), std::nextafter(middle, -HUGE_VALF), middle,
                                         std::nextafter(middle, HUGE_VALF)});
        }
        CHECK(values.size() > 4 * 60'000);
        for_each_set([&] { check_rounding(format, values); });
    }
}

TEST(rounding_is_right_for_floats_of_every_size) {
    std::mt19937 random(11);
    std::vector<float> values(1 << 18);
    for (float& value : values) value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    constexpr float infinity = std::numeric_limits<float>::infinity();
    values.insert(values.end(), {0.0F, -0.0F, infinity, -infinity, 65'519.996F, 65'520.0F, 0x1p-25F, 0x1.000002p-25F,
                                 0x1p-149F, std::bit_cast<float>(0x7f800001U), std::bit_cast<float>(0xffffffffU)});
    for_each_set([&] {
        check_rounding(bfloat16, values);
        check_rounding(float16, values);
    });
}

namespace {

// One case of a sum: random inputs, misaligned, and what a plain loop makes of them.
struct Case {
    Dtype wire;
    Dtype out_dtype;
    std::size_t count, elements;
    float divisor;
    std::size_t offset;
    std::vector<Buffer> inputs{};
    Buffer expected{};

    void make(unsigned seed) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        const unsigned octaves = wire == Dtype::float16 ? 12 : 24;  // so wide that order shows, yet finite
        inputs.assign(count, Buffer(offset + elements * 4));        // room to be overwritten by float32
        std::vector<float> sums(elements), wide(elements);
        for (std::size_t k = 0; k < count; ++k) {
            for (float& value : wide) value = normal(random) * std::ldexp(1.0F, static_cast<int>(random() % octaves));
            divide_into(wide.data(), 1.0F, elements, wire, inputs[k].data() + offset);
            widen(wire, inputs[k].data() + offset, elements, wide.data());
            for (std::size_t i = 0; i < elements; ++i) sums[i] = k == 0 ? wide[i] : sums[i] + wide[i];
        }
        for (float& sum : sums) sum = sum / divisor;
        expected.resize(elements * element_bytes(out_dtype));
        divide_into(sums.data(), 1.0F, elements, out_dtype, expected.data());
    }

    [[nodiscard]] std::vector<const std::byte*> pointers() const {
        std::vector<const std::byte*> at;
        for (const Buffer& input : inputs) at.push_back(input.data() + offset);
        return at;
    }

    void check_into_fresh_memory() const {
        constexpr std::byte mark{0xa5};
        Buffer out(offset + expected.size() + 64, mark);
        sum_in_order(wire, pointers(), elements, divisor, out_dtype, out.data() + offset);
        CHECK(std::equal(expected.begin(), expected.end(), out.begin() + static_cast<std::ptrdiff_t>(offset)));
        for (std::size_t i = 0; i < out.size(); ++i)
            if (i < offset || i >= offset + expected.size()) CHECK(out[i] == mark);
    }

    void check_over_input(std::size_t k) const {
        Case copy = *this;
        std::byte* out = copy.inputs[k].data() + offset;
        sum_in_order(wire, copy.pointers(), elements, divisor, out_dtype, out);
        CHECK(std::equal(expected.begin(), expected.end(), out));
        for (std::size_t other = 0; other < count; ++other) CHECK(other == k || copy.inputs[other] == inputs[other]);
    }
};

constexpr Dtype summable[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};

}  // namespace

TEST(sums_of_any_count_size_and_alignment_equal_the_plain_loop_in_fresh_memory_and_in_place) {
    unsigned seed = 100;
    for (Dtype wire : summable)
        for (Dtype out_dtype : {wire, Dtype::float32})
            for (std::size_t count = 1; count <= 9; ++count)
                for (std::size_t elements : {0UL, 1UL, 7UL, 8UL, 17UL, 360UL, 511UL, 512UL, 513UL, 1027UL, 1600UL}) {
                    ++seed;
                    Case c{wire, out_dtype, count, elements, seed % 2 == 0 ? 1.0F : 3.0F, seed % 5};
                    c.make(seed);
                    for_each_set([&] {
                        c.check_into_fresh_memory();
                        for (std::size_t k = 0; k < count; ++k) c.check_over_input(k);
                    });
                }
}

TEST(the_order_of_the_inputs_is_the_order_of_the_sum) {
    const auto sum = [](Dtype dtype, std::initializer_list<float> values) {
        std::vector<Buffer> inputs;
        std::vector<const std::byte*> at;
        for (float value : values) {
            const std::vector<float> repeated(40, value);
            divide_into(repeated.data(), 1.0F, 40, dtype, inputs.emplace_back(160).data());
        }
        for (const Buffer& input : inputs) at.push_back(input.data());
        std::vector<float> out(40);
        sum_in_order(dtype, at, 40, 1.0F, Dtype::float32, reinterpret_cast<std::byte*>(out.data()));
        for (float value : out) CHECK_EQUAL(value, out[0]);
        return out[0];
    };
    for_each_set([&] {
        CHECK_EQUAL(sum(Dtype::float32, {0x1p24F, 1, 1}), 0x1p24F);
        CHECK_EQUAL(sum(Dtype::float32, {1, 1, 0x1p24F}), 0x1p24F + 2);
        CHECK_EQUAL(sum(Dtype::float32, {0x1p24F, 1, 1, -0x1p24F}), 0.0F);
        CHECK_EQUAL(sum(Dtype::float32, {0x1p24F, 1, 1, 1, 1, 1, 1}), 0x1p24F);
        CHECK_EQUAL(sum(Dtype::float32, {1, 1, 1, 1, 1, 1, 0x1p24F}), 0x1p24F + 6);
        CHECK_EQUAL(sum(Dtype::bfloat16, {0x1p24F, 1, 1, 1, 1}), 0x1p24F);
        CHECK_EQUAL(sum(Dtype::bfloat16, {1, 1, 1, 1, 0x1p24F}), 0x1p24F + 4);
        CHECK_EQUAL(sum(Dtype::float16, {0x1p15F, 0x1p-10F, 0x1p-10F, 0x1p-9F}), 0x1p15F);
        CHECK_EQUAL(sum(Dtype::float16, {0x1p-10F, 0x1p-10F, 0x1p-9F, 0x1p15F}), 0x1p15F + 0x1p-8F);
    });
}

TEST(small_floats_are_summed_in_float32_and_rounded_once) {
    // 256 + 1 is a tie that bfloat16 would round back to 256 at every step.
    const std::vector<std::uint16_t> large(33, 0x4380), one(33, 0x3f80);
    std::vector<const std::byte*> at{reinterpret_cast<const std::byte*>(large.data())};
    for (int i = 0; i < 4; ++i) at.push_back(reinterpret_cast<const std::byte*>(one.data()));
    for_each_set([&] {
        Buffer out(66);
        sum_in_order(Dtype::bfloat16, at, 33, 1.0F, Dtype::bfloat16, out.data());
        for (std::size_t i = 0; i < 33; ++i) CHECK_EQUAL(value_of(bfloat16, bits16(out, i)), 260.0);
    });
}

TEST(running_sums_equal_the_sum_in_order) {
    for (Dtype wire : summable)
        for (std::size_t elements : {0UL, 1UL, 9UL, 360UL, 1021UL}) {
            Case c{wire, wire, 4, elements, 5.0F, 1};
            c.make(static_cast<unsigned>(elements) + 7);
            const auto at = c.pointers();
            for_each_set([&] {
                std::vector<float> sum(elements + 1, -7.0F), restarted(elements + 1, -7.0F);
                add_first(wire, at[0], at[1], elements, sum.data());
                widen(wire, at[0], elements, restarted.data());
                add(wire, at[1], elements, restarted.data());
                CHECK(sum == restarted);
                add(wire, at[2], elements, sum.data());
                add(wire, at[3], elements, sum.data());
                CHECK_EQUAL(sum[elements], -7.0F);
                Buffer out(c.expected.size());
                divide_into(sum.data(), c.divisor, elements, wire, out.data());
                CHECK(out == c.expected);
            });
        }
}

TEST(float32_sums_may_lie_on_their_first_input_and_be_divided_in_place) {
    for_each_set([] {
        std::vector<float> a(77), b(77);
        for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i), b[i] = 100.0F;
        auto* bytes = reinterpret_cast<std::byte*>(a.data());
        add_first(Dtype::float32, bytes, reinterpret_cast<const std::byte*>(b.data()), a.size(), a.data());
        divide_into(a.data(), 2.0F, a.size(), Dtype::float32, bytes);
        for (std::size_t i = 0; i < a.size(); ++i) CHECK_EQUAL(a[i], static_cast<float>(i) / 2 + 50);
        divide_into(a.data(), 1.0F, a.size(), Dtype::float32, bytes);
        CHECK_EQUAL(a[76], 88.0F);
    });
}

TEST(no_inputs_sum_to_zero_and_a_lone_float32_input_keeps_its_bits) {
    std::vector<std::uint32_t> out(20, 0xffffffffU);
    auto* bytes = reinterpret_cast<std::byte*>(out.data());
    sum_in_order(Dtype::float32, {}, 19, 1.0F, Dtype::float32, bytes);
    CHECK_EQUAL(out[18], 0U);
    CHECK_EQUAL(out[19], 0xffffffffU);
    const std::vector<std::uint32_t> odd(20, 0xff800001U);  // a signalling NaN, which arithmetic would change
    const std::byte* const at[] = {reinterpret_cast<const std::byte*>(odd.data())};
    sum_in_order(Dtype::float32, at, 20, 1.0F, Dtype::float32, bytes);
    CHECK(out == odd);
}

TEST(placing_copies_every_byte_and_no_other_at_any_alignment) {
    std::vector<std::byte> from(400), to(600);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 31 + 7);
    for (const bool large : {false, true}) {
        for (std::size_t offset = 0; offset < 70; ++offset) {
            for (const std::size_t bytes : {0, 1, 63, 64, 65, 127, 200, 330}) {
                std::fill(to.begin(), to.end(), std::byte{0xaa});
                copy_streaming(to.data() + 100 + offset, from.data() + offset % 5, bytes, large);
                for (std::size_t i = 0; i < to.size(); ++i) {
                    const bool inside = i >= 100 + offset && i < 100 + offset + bytes;
                    CHECK(to[i] == (inside ? from[offset % 5 + i - 100 - offset] : std::byte{0xaa}));
                }
            }
        }
    }
}

TEST(dtypes_that_cannot_be_summed_are_misuse) {
    Buffer memory(64);
    std::vector<float> sum(8);
    const std::byte* const at[] = {memory.data(), memory.data()};
    const auto refused = [](auto call) {
        try {
            call();
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(refused([&] { sum_in_order(Dtype::bytes, at, 4, 1.0F, Dtype::bytes, memory.data()); }));
    CHECK(refused([&] { sum_in_order(Dtype::bfloat16, at, 4, 1.0F, Dtype::float16, memory.data()); }));
    CHECK(refused([&] { sum_in_order(Dtype::float32, at, 4, 1.0F, Dtype::bfloat16, memory.data()); }));
    CHECK(refused([&] { widen(Dtype::bytes, memory.data(), 4, sum.data()); }));
    CHECK(refused([&] { add(Dtype::bytes, memory.data(), 4, sum.data()); }));
    CHECK(refused([&] { divide_into(sum.data(), 1.0F, 4, Dtype::bytes, memory.data()); }));
    CHECK_EQUAL(element_bytes(Dtype::bytes), 1U);
    CHECK_EQUAL(element_bytes(Dtype::bfloat16), 2U);
    CHECK_EQUAL(element_bytes(Dtype::float16), 2U);
    CHECK_EQUAL(element_bytes(Dtype::float32), 4U);
}

TEST(copying_finds_the_one_element_that_is_not_finite_wherever_it_is) {
    for_each_set([] {
        for (const std::size_t elements : {1UL, 63UL, 20'001UL}) {
            std::vector<float> from(elements, std::numeric_limits<float>::max()), to(elements);
            const auto copied = [&] {
                return copy_finite(Dtype::float32, reinterpret_cast<const std::byte*>(from.data()), elements,
                                   reinterpret_cast<std::byte*>(to.data()));
            };
            CHECK(copied());
            CHECK(to == from);
            for (const std::size_t at : {std::size_t{0}, elements / 2, elements - 1}) {
                for (const float odd : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
                    from[at] = odd;
                    CHECK(!copied());
                    CHECK_EQUAL(std::memcmp(from.data(), to.data(), elements * sizeof(float)), 0);
                    auto* const same = reinterpret_cast<std::byte*>(from.data());
                    CHECK(!copy_finite(Dtype::float32, same, elements, same));
                }
                from[at] = -1.0F;
            }
        }
    });
}

TEST(copying_tells_for_all_65536_small_floats_whether_they_are_finite) {
    const auto words = all_words();
    for_each_set([&] {
        for (const Format& format : {bfloat16, float16}) {
            for (const std::uint16_t& word : words) {
                std::uint16_t copy = 0;
                const bool finite = copy_finite(format.dtype, reinterpret_cast<const std::byte*>(&word), 1,
                                                reinterpret_cast<std::byte*>(&copy));
                if (finite != std::isfinite(value_of(format, word)) || copy != word) CHECK_EQUAL(word, copy);
            }
        }
    });
}
