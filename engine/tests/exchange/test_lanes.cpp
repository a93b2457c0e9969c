// Lanes: how an exchange is divided between several sockets, and how the outcomes of its parts are merged.
#include <numeric>

#include "check.hpp"
#include "exchange/lanes.hpp"

using namespace storm;

namespace {

constexpr std::size_t chunk = 1'408;

std::byte* at(std::size_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

TEST(runs_of_all_lanes_are_the_whole_message_in_order_and_begin_at_chunks) {
    for (const std::size_t lanes : std::initializer_list<std::size_t>{1, 2, 3, 8}) {
        const Lanes division{.lanes = lanes, .chunk_bytes = chunk};
        for (const std::uint64_t bytes : std::initializer_list<std::uint64_t>{
                 0, 1, chunk, Lanes::least_part, 2 * Lanes::least_part, 2 * Lanes::least_part + 1, 30'000'001}) {
            std::uint64_t end = 0;
            for (std::size_t lane = 0; lane < lanes; ++lane) {
                const Lanes::Run run = division.run_of(bytes, lane);
                CHECK_EQUAL(run.empty, lane >= division.lanes_of(bytes));
                if (run.empty) continue;
                CHECK_EQUAL(run.first, end);
                CHECK_EQUAL(run.first % chunk, 0U);
                CHECK(lane == 0 || run.bytes > 0);
                end = run.first + run.bytes;
            }
            CHECK_EQUAL(end, bytes);
        }
    }
}

TEST(messages_below_two_parts_stay_in_lane_0) {
    const Lanes division{.lanes = 8, .chunk_bytes = chunk};
    CHECK_EQUAL(division.lanes_of(2 * Lanes::least_part - 1), 1U);
    CHECK_EQUAL(division.lanes_of(2 * Lanes::least_part), 2U);
    CHECK_EQUAL(division.lanes_of(1'000 * Lanes::least_part), 8U);
    // Never more lanes than chunks.
    CHECK_EQUAL((Lanes{.lanes = 8, .chunk_bytes = 1 << 20}).lanes_of(3 << 20), 3U);
}

TEST(a_part_points_at_its_run_in_every_buffer) {
    const Lanes division{.lanes = 2, .chunk_bytes = chunk};
    const std::uint64_t large = 1'000 * chunk, small = 100;
    ExchangeSpec spec;
    spec.channel = 7;
    spec.seq = 9;
    spec.view = 3;
    spec.timeout_at = 12;
    spec.stages[0].budget = 0.25;
    spec.sends = {{.peer = 1, .data = at(1'000'000), .bytes = large},
                  {.peer = 2, .data = at(2'000'000), .bytes = small}};
    spec.receives = {{.peer = 1, .into = at(3'000'000), .bytes = small}, {.peer = 2, .reduce = true, .bytes = large}};
    // 16-bit values that are written as float32: the result is twice as long as what was sent.
    spec.reduction = ReductionSpec{.wire = Dtype::bfloat16,
                                   .out_dtype = Dtype::float32,
                                   .own = at(4'000'000),
                                   .out = at(8'000'000),
                                   .bytes = large,
                                   .own_position = 1,
                                   .seed = 5};
    CHECK_EQUAL(division.lanes_of(spec), 2U);
    const ExchangeSpec first = division.part_of(spec, 0), second = division.part_of(spec, 1);
    const std::uint64_t half = 500 * chunk;
    CHECK_EQUAL(first.sends.size(), 2U);
    CHECK_EQUAL(first.sends[0].bytes, half);
    CHECK_EQUAL(first.receives.size(), 2U);
    CHECK_EQUAL(second.sends.size(), 1U);
    CHECK(second.sends[0].data == at(1'000'000 + half) && second.sends[0].bytes == half);
    CHECK_EQUAL(second.receives.size(), 1U);
    CHECK_EQUAL(second.receives[0].peer, 2U);
    CHECK(second.sends[0].whole == large && second.receives[0].whole == large && first.sends[1].whole == small);
    CHECK(second.reduction->own == at(4'000'000 + half));
    CHECK(second.reduction->out == at(8'000'000 + 2 * half));
    CHECK_EQUAL(second.reduction->seed, 5 + half / 2);
    CHECK_EQUAL(second.reduction->own_position, 1U);
    CHECK(second.channel == 7 && second.seq == 9 && second.view == 3 && second.timeout_at == 12);
    CHECK(second.stages[0].budget == 0.25);
}

TEST(masks_and_counts_of_parts_are_joined_bit_by_bit) {
    Outcome whole{.status = Status::ok, .repaired = 1, .started = 10, .ended = 20};
    whole.arrivals = {{.peer = 4, .chunks = 3, .arrived = 2, .bytes = 300, .missing_bytes = 100, .mask = {0b101}}};
    whole.counts = {1, 2, 1};
    Outcome part{.status = Status::ok, .repaired = 2, .started = 9, .ended = 30};
    part.arrivals = {
        {.peer = 4, .chunks = 63, .arrived = 2, .bytes = 6'300, .missing_bytes = 6'100, .mask = {1ULL | 1ULL << 62}}};
    part.counts = {2, 2};
    merge_outcome(whole, std::move(part));
    CHECK(whole.status == Status::ok);
    CHECK_EQUAL(whole.arrivals.size(), 1U);
    const Arrival& arrival = whole.arrivals[0];
    CHECK_EQUAL(arrival.chunks, 66U);
    CHECK_EQUAL(arrival.arrived, 4U);
    CHECK_EQUAL(arrival.bytes, 6'600U);
    CHECK_EQUAL(arrival.missing_bytes, 6'200U);
    CHECK(arrival.mask == (std::vector<std::uint64_t>{0b1101, 0b10}));
    CHECK(whole.counts == (std::vector<std::uint16_t>{1, 2, 1, 2, 2}));
    CHECK(whole.repaired == 3 && whole.started == 9 && whole.ended == 30);
}

TEST(the_error_of_one_part_is_that_of_the_whole) {
    Outcome cancelled{.status = Status::closed};
    merge_outcome(cancelled, Outcome{.status = Status::peer_silent, .peer = 3, .missing_bytes = 17});
    CHECK(cancelled.status == Status::peer_silent && cancelled.peer == 3 && cancelled.missing_bytes == 17);
    merge_outcome(cancelled, Outcome{.status = Status::peer_left, .peer = 5});
    CHECK(cancelled.status == Status::peer_silent);
    Outcome well{.status = Status::ok};
    merge_outcome(well, Outcome{.status = Status::closed});
    CHECK(well.status == Status::closed);
}
