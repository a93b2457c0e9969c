// The wire format: parsing returns what was written, and refuses everything else.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "wire/wire.hpp"

using namespace storm;

namespace {

constexpr auto most_words = static_cast<std::uint32_t>(Report::max_words);

using HeaderBytes = std::array<std::byte, header_bytes>;

HeaderBytes written(const Header& header) {
    HeaderBytes bytes{};
    write_header(header, bytes);
    return bytes;
}

Header some_header(std::mt19937& random) {
    const auto word = [&] { return static_cast<std::uint32_t>(random()); };
    return {.kind = static_cast<Kind>(1 + random() % 9),
            .flags = static_cast<std::uint8_t>(random() & known_flags),
            .source = static_cast<std::uint16_t>(random()),
            .check = word(),
            .cookie = word(),
            .number = word(),
            .channel = word(),
            .seq = word(),
            .chunk = word(),
            .message_bytes = word()};
}

Report some_report(std::uint32_t words, std::uint32_t seed) {
    std::mt19937_64 random(seed);
    Report report{.largest = random(),
                  .credit_bytes = static_cast<std::uint32_t>(random()),
                  .overflow = static_cast<std::uint32_t>(random()),
                  .timed_back = static_cast<std::uint32_t>(random()),
                  .timed_us = static_cast<std::uint32_t>(random()),
                  .held_us = static_cast<std::uint32_t>(random()),
                  .words = words};
    for (std::uint32_t i = 0; i < words; ++i) report.arrived[i] = random();
    return report;
}

std::vector<std::byte> written(const Report& report) {
    std::vector<std::byte> bytes(Report::fixed_bytes + 8 * std::size_t{report.words});
    CHECK_EQUAL(write_report(report, bytes), bytes.size());
    return bytes;
}

}  // namespace

TEST(header_comes_back_as_it_was_written) {
    std::mt19937 random(1);
    for (int i = 0; i < 10'000; ++i) {
        const Header header = some_header(random);
        const auto parsed = parse_header(written(header));
        CHECK(parsed.has_value());
        CHECK(*parsed == header);
    }
}

TEST(header_lies_on_the_wire_as_the_protocol_draws_it) {
    const HeaderBytes bytes = written({.kind = Kind::end,
                                       .flags = flag_second_stage | flag_repair,
                                       .source = 0x0201,
                                       .check = 0x06050403,
                                       .cookie = 0x0a090807,
                                       .number = 0x0e0d0c0b,
                                       .channel = 0x1211100f,
                                       .seq = 0x16151413,
                                       .chunk = 0x1a191817,
                                       .message_bytes = 0x1e1d1c1b});
    CHECK_EQUAL(std::to_integer<int>(bytes[0]), 0x25);
    CHECK_EQUAL(std::to_integer<int>(bytes[1]), 0x05);
    for (std::size_t i = 2; i < header_bytes; ++i) CHECK_EQUAL(std::to_integer<std::size_t>(bytes[i]), i - 1);
    // The seal writes the check by its offset alone.
    CHECK_EQUAL(std::to_integer<int>(bytes[check_offset]), 0x03);
}

TEST(truncated_header_is_refused_at_every_length) {
    const HeaderBytes whole = written({.kind = Kind::data});
    for (std::size_t size = 0; size < header_bytes; ++size) {
        // A copy of exactly this size: reading past its end is seen by the address sanitizer.
        const std::vector<std::byte> part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
        CHECK(!parse_header(part));
    }
    CHECK(!parse_header({}));
    CHECK(parse_header(whole).has_value());
}

TEST(every_first_byte_but_the_ten_kinds_of_this_version_is_refused) {
    HeaderBytes bytes = written({.kind = Kind::data});
    for (int first = 0; first < 256; ++first) {
        bytes[0] = static_cast<std::byte>(first);
        const bool known = first >> 4 == wire_version && (first & 15) >= 1 && (first & 15) <= 10;
        CHECK_EQUAL(parse_header(bytes).has_value(), known);
    }
}

TEST(unknown_flags_are_refused) {
    HeaderBytes bytes = written({.kind = Kind::data});
    for (int flags = 0; flags < 256; ++flags) {
        bytes[1] = static_cast<std::byte>(flags);
        CHECK_EQUAL(parse_header(bytes).has_value(), (flags & ~127) == 0);
    }
}

TEST(report_comes_back_as_it_was_written) {
    for (std::uint32_t words = 1; words <= most_words; ++words) {
        const Report report = some_report(words, words);
        const auto parsed = parse_report(written(report));
        CHECK(parsed.has_value());
        CHECK_EQUAL(parsed->largest, report.largest);
        CHECK_EQUAL(parsed->credit_bytes, report.credit_bytes);
        CHECK_EQUAL(parsed->timed_back, report.timed_back);
        CHECK_EQUAL(parsed->timed_us, report.timed_us);
        CHECK_EQUAL(parsed->held_us, report.held_us);
        CHECK_EQUAL(parsed->overflow, report.overflow);
        CHECK_EQUAL(parsed->words, words);
        CHECK(parsed->arrived == report.arrived);
    }
}

TEST(report_whose_length_and_word_count_disagree_is_refused) {
    for (const std::uint32_t words : {1U, 2U, 64U, most_words}) {
        const std::vector<std::byte> whole = written(some_report(words, 3));
        for (std::size_t size = 0; size < whole.size(); ++size) {
            const std::vector<std::byte> part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
            CHECK(!parse_report(part));
        }
        std::vector<std::byte> longer = whole;
        longer.push_back(std::byte{});
        CHECK(!parse_report(longer));
    }
}

TEST(report_of_no_words_or_of_too_many_is_refused) {
    for (const std::uint32_t words : {0U, most_words + 1U, 1000U, 0x2000'0001U, 0xffff'ffffU}) {
        // Long enough for what it claims, where that can be, and of the length of a wrapped 32-bit product.
        for (const std::uint32_t claimed : {words % 4096U, words * 8U / 8U % 4096U, 1U}) {
            std::vector<std::byte> body(Report::fixed_bytes + 8 * std::size_t{claimed});
            std::memcpy(body.data() + Report::fixed_bytes - sizeof words, &words, sizeof words);
            CHECK(!parse_report(body));
        }
    }
}

TEST(report_fits_the_smallest_path_that_ethernet_offers) {
    CHECK(header_bytes + Report::fixed_bytes + 8 * Report::max_words + tag_bytes <= 1280 - 48);
}

TEST(number_is_widened_to_the_nearest) {
    constexpr std::uint64_t whole = 1ULL << 32, half = 1ULL << 31;
    CHECK_EQUAL(widen_number(5, 1), 5U);
    CHECK_EQUAL(widen_number(0xffff'ffff, whole), whole - 1);
    CHECK_EQUAL(widen_number(0, whole - 1), whole);
    CHECK_EQUAL(widen_number(7, whole - 3), whole + 7);
    CHECK_EQUAL(widen_number(0xffff'fff0, whole + 7), whole - 16);
    CHECK_EQUAL(widen_number(0xffff'fff0, 7 * whole + 7), 7 * whole - 16);
    // Below the first wrap there is nothing older to mean.
    CHECK_EQUAL(widen_number(0xffff'fff0, 1), 0xffff'fff0U);
    // At exactly half a turn either neighbour is nearest; one step further only one is.
    CHECK_EQUAL(widen_number(0, 3 * whole + half + 1), 4 * whole);
    CHECK_EQUAL(widen_number(0, 3 * whole + half - 1), 3 * whole);
}

TEST(number_survives_its_low_half_wherever_it_is_within_half_a_turn) {
    std::mt19937_64 random(5);
    for (int i = 0; i < 100'000; ++i) {
        const std::uint64_t expected = random() >> (1 + random() % 40);
        const auto distance = static_cast<std::int64_t>(random() % (1ULL << 31)) - (1LL << 30);
        if (distance < 0 && static_cast<std::uint64_t>(-distance) > expected) continue;
        const std::uint64_t number = expected + static_cast<std::uint64_t>(distance);
        CHECK_EQUAL(widen_number(static_cast<std::uint32_t>(number), expected), number);
    }
    for (std::uint64_t turn = 1; turn < 5; ++turn) {
        for (std::uint64_t number = (turn << 32) - 300; number < (turn << 32) + 300; ++number) {
            for (const std::uint64_t expected : {number - 250, number - 1, number, number + 1, number + 250}) {
                CHECK_EQUAL(widen_number(static_cast<std::uint32_t>(number), expected), number);
            }
        }
    }
}

TEST(blame_comes_back_as_it_was_written_and_others_are_refused) {
    constexpr std::uint16_t world = 300;
    for (const Kind kind : {Kind::failed, Kind::bye}) {
        std::size_t accepted = 0;
        for (std::uint32_t culprit = 0; culprit < 2 * world; ++culprit) {
            for (std::uint32_t cause = 0; cause < 600; ++cause) {
                const Header header{.kind = kind, .chunk = culprit, .message_bytes = cause};
                const auto failure_cause = parse_failure_cause(header, world);
                if (!failure_cause) continue;
                ++accepted;
                Header same{.kind = kind};
                write_failure_cause(*failure_cause, same);
                CHECK(same == header);
            }
        }
        // Seven causes, and a goodbye may name none.
        CHECK_EQUAL(accepted, 7U * world + (kind == Kind::bye ? 1U : 0U));
    }
}
