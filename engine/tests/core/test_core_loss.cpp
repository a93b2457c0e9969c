// Lossy exchanges (partial reliability) in Core: what a budget skips, what a deadline cuts off, and ends that arrive
// although datagrams are lost.
#include "jobs.hpp"
#include "sim/sim.hpp"
#include "tapped.hpp"

using namespace storm;
using namespace storm::check;

namespace {

CoreConfig core_config(std::uint16_t world) {
    CoreConfig config;
    config.world = world;
    config.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
    return config;
}

SimConfig lossy_links(std::uint16_t world, double loss, std::uint64_t seed) {
    SimConfig config;
    config.core = core_config(world);
    config.faults.seed = seed;
    config.faults.default_link.loss = loss;
    return config;
}

bool arrived(const Arrival& arrival, std::size_t chunk) { return (arrival.mask[chunk / 64] >> (chunk % 64) & 1) != 0; }

constexpr auto old_value = std::byte{0x55};

// The mask is exact: chunks in it hold new bytes, all others are unchanged.
void check_mask(const Arrival& arrival, const Buffer& got, const Buffer& sent, std::size_t chunk_bytes) {
    std::uint32_t count = 0;
    std::uint64_t missing = 0;
    for (std::size_t chunk = 0; chunk < arrival.chunks; ++chunk) {
        const std::size_t at = chunk * chunk_bytes, size = std::min(chunk_bytes, sent.size() - at);
        const auto begin = got.begin() + static_cast<std::ptrdiff_t>(at),
                   end = begin + static_cast<std::ptrdiff_t>(size);
        if (arrived(arrival, chunk)) {
            ++count;
            CHECK(std::equal(begin, end, sent.begin() + static_cast<std::ptrdiff_t>(at)));
        } else {
            missing += size;
            CHECK(std::all_of(begin, end, [](std::byte b) { return b == old_value; }));
        }
    }
    CHECK_EQUAL(count, arrival.arrived);
    CHECK_EQUAL(missing, arrival.missing_bytes);
}

struct Transfer {
    explicit Transfer(std::size_t bytes) : sent(random_buffer(bytes, 1)), got(bytes, old_value) {}
    ExchangeSpec send(std::uint32_t seq, StageSpec stage) {
        ExchangeSpec spec = exchange_on(0, seq, stage);
        spec.sends.push_back({.peer = 1, .data = sent.data(), .bytes = sent.size()});
        return spec;
    }
    ExchangeSpec receive(std::uint32_t seq, StageSpec stage) {
        ExchangeSpec spec = exchange_on(0, seq, stage);
        spec.receives.push_back({.peer = 0, .into = got.data(), .bytes = got.size()});
        return spec;
    }
    Buffer sent, got;
};

}  // namespace

TEST(message_ends_with_no_more_missing_than_its_budget_and_the_mask_tells_what) {
    for (const double budget : {0.0, 0.02, 0.1, 0.3, 0.9, 1.0}) {
        Sim sim(lossy_links(3, 0.2, 42));
        Watch watch(sim, 3);
        AllToAll job(3, 7, [](auto, auto) { return std::size_t{200 * 1440 + 77}; });
        for (auto& buffers : job.got) {
            for (Buffer& buffer : buffers) std::fill(buffer.begin(), buffer.end(), old_value);
        }
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < 3; ++rank)
            ids.push_back(sim.post(rank, job.spec(rank, 0, {.budget = budget})));
        watch.wait_all(ids);
        std::uint64_t repaired = 0;
        double missing = 0;
        for (std::uint16_t rank = 0; rank < 3; ++rank) {
            const Outcome& outcome = *watch.outcome(rank, ids[rank]);
            repaired += outcome.repaired;
            for (const Arrival& arrival : outcome.arrivals) {
                CHECK_EQUAL(arrival.chunks, 201U);
                CHECK(static_cast<double>(arrival.chunks - arrival.arrived) <= budget * arrival.chunks);
                missing += static_cast<double>(arrival.chunks - arrival.arrived) / arrival.chunks / 6;
                check_mask(arrival, job.got[rank][arrival.peer], job.sent[arrival.peer][rank],
                           sim.core(rank).chunk_bytes());
            }
        }
        // The network loses 20 %: a smaller budget is used up before any retransmission, a larger one never.
        CHECK_EQUAL(repaired > 0, budget < 0.2);
        CHECK(std::abs(missing - std::min(budget, 0.2)) < 0.03);
    }
}

TEST(budget_of_one_never_sends_anything_again_and_does_not_wait_for_answers) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    Transfer job(100 * 1440);
    net.tap = [](Datagram& d) { return d.header.kind != Kind::data || d.header.chunk % 3 != 0; };
    const std::uint64_t sender = net.post(0, job.send(0, {.budget = 1.0}));
    CHECK(watch.outcome(0, sender) != nullptr);  // what is lost stays lost: nothing is left to wait for
    const std::uint64_t receiver = net.post(1, job.receive(0, {.budget = 1.0}));
    const Outcome& outcome = watch.wait(1, receiver, 100 * millisecond);
    CHECK_EQUAL(outcome.arrivals[0].arrived, 66U);
    CHECK_EQUAL(net.core(0).counters().repaired, 0U);
}

TEST(lossy_all_reduce_is_the_scaled_sum_of_what_arrived_and_all_ranks_hold_the_same_where_the_second_stage_is_exact) {
    for (const double budget : {0.25, 1.0}) {
        SimConfig config = lossy_links(4, 0.15, 3);
        config.faults.default_link.reorder = 0.05;
        Sim sim(config);
        Watch watch(sim, 4);
        AllReduce job(4, 60'003, 8);
        for (std::uint16_t rank = 0; rank < 4; ++rank)
            std::fill(job.in[rank].begin(), job.in[rank].end(), static_cast<float>(rank + 1));
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < 4; ++rank)
            ids.push_back(sim.post(rank, job.spec(rank, 0, Reduce::arrived, {.budget = budget}, {})));
        watch.wait_all(ids);
        const std::size_t per_chunk = sim.core(0).chunk_bytes() / 4;
        for (std::uint16_t rank = 0; rank < 4; ++rank) {
            const Outcome& outcome = *watch.outcome(rank, ids[rank]);
            for (std::size_t chunk = 0; chunk < outcome.counts.size(); ++chunk) {
                float sum = static_cast<float>(rank + 1), count = 1;
                for (const Arrival& arrival : outcome.arrivals) {
                    if (arrival.second_stage || !arrived(arrival, chunk)) continue;
                    sum += static_cast<float>(arrival.peer + 1);
                    ++count;
                }
                CHECK_EQUAL(count, static_cast<float>(outcome.counts[chunk]));
                const float expected = count == 4 ? sum : 4 / count * sum;
                const std::size_t first = job.begin(rank) + chunk * per_chunk;
                CHECK(std::abs(job.out[rank][first] - expected) < 1e-4F);
            }
            CHECK(job.out[rank] == job.out[0]);
        }
    }
}

TEST(deadline_ends_an_exchange_with_what_has_arrived) {
    for (const double budget : {0.0, 0.1, 1.0}) {
        Tapped net(core_config(2));
        Watch watch(net, 2);
        Transfer job(50 * 1440);
        // Chunks of the second half never arrive, nor does the end.
        net.tap = [](Datagram& d) {
            return d.header.kind == Kind::report || (d.header.kind == Kind::data && d.header.chunk < 25);
        };
        const StageSpec stage{.budget = budget, .deadline = 30 * millisecond};
        const Nanos start = net.now();
        const std::uint64_t sender = net.post(0, job.send(0, stage)), receiver = net.post(1, job.receive(0, stage));
        const Outcome& outcome = watch.wait(1, receiver);
        CHECK(outcome.status == Status::ok);
        CHECK_EQUAL(outcome.ended, start + 30 * millisecond);
        CHECK_EQUAL(outcome.arrivals[0].arrived, 25U);
        check_mask(outcome.arrivals[0], job.got, job.sent, net.core(1).chunk_bytes());
        CHECK(watch.wait(0, sender).status == Status::ok);
        CHECK(watch.wait(0, sender).ended <= start + 30 * millisecond);
    }
}

TEST(credit_returns_when_messages_are_closed_early) {
    Tapped net(core_config(3));
    Watch watch(net, 3);
    Transfer job(20 * 1440);
    std::vector<std::uint32_t> credits;
    net.tap = [&](Datagram& d) {
        if (d.header.kind == Kind::report) {
            const auto report = parse_report(std::span(d.bytes).subspan(header_bytes));
            credits.push_back(report->credit_bytes);
        }
        return d.header.kind != Kind::data || d.header.chunk != 3;
    };
    for (std::uint32_t seq = 0; seq < 20; ++seq) {
        const StageSpec stage{.budget = seq % 2 == 0 ? 0.5 : 0.0, .deadline = 5 * millisecond};
        const std::uint64_t receiver = net.post(1, job.receive(seq, stage));
        net.post(0, job.send(seq, stage));
        watch.wait(1, receiver);
        net.run(20 * millisecond);
    }
    // The credit follows whether the sender is awaited or not, and does not drift from exchange to exchange.
    const std::uint32_t most = *std::max_element(credits.begin(), credits.end());
    const std::uint32_t least = *std::min_element(credits.begin(), credits.end());
    CHECK(credits.size() > 40);
    CHECK_EQUAL(least, (1U << 20) / 4 + (1U << 20) / 8);
    CHECK_EQUAL(most, (1U << 20) / 4 + (1U << 20) / 4);
    CHECK_EQUAL(credits.back(), least);
}

TEST(deadline_of_the_first_stage_opens_the_second) {
    Tapped net(core_config(3));
    Watch watch(net, 3);
    AllReduce job(3, 10'000, 9);
    net.tap = [](Datagram& d) {
        return d.header.kind != Kind::data || (d.header.flags & flag_second_stage) != 0 || d.source != 2;
    };
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < 3; ++rank)
        ids.push_back(net.post(rank, job.spec(rank, 0, Reduce::arrived, {.deadline = 20 * millisecond}, {})));
    watch.wait_all(ids);
    CHECK(job.out[0] == job.out[1] && job.out[1] == job.out[2]);
    for (const std::uint16_t count : watch.outcome(0, ids[0])->counts) CHECK_EQUAL(count, 2U);
    for (const std::uint16_t count : watch.outcome(2, ids[2])->counts) CHECK_EQUAL(count, 3U);
    // The mean of two, times three.
    CHECK(std::abs(job.out[0][0] - 1.5F * (job.in[0][0] + job.in[1][0])) < 1.0F);
}

TEST(end_that_is_lost_is_told_again) {
    for (const double budget : {0.5, 1.0}) {
        for (int lost = 1; lost <= 4; ++lost) {
            Tapped net(core_config(2));
            Watch watch(net, 2);
            Transfer job(30 * 1440);
            int dropped = 0;
            net.tap = [&](Datagram& d) {
                if (d.header.kind == Kind::data && (d.header.flags & flag_last) != 0) return false;
                return d.header.kind != Kind::end || ++dropped > lost;
            };
            const std::uint64_t receiver = net.post(1, job.receive(0, {.budget = budget}));
            const std::uint64_t sender = net.post(0, job.send(0, {.budget = budget}));
            const Outcome& outcome = watch.wait(1, receiver, second);
            CHECK_EQUAL(outcome.arrivals[0].arrived, 29U);
            // A probe repairs it before the receiver sends `ready` again.
            CHECK(outcome.ended < second + 60 * millisecond);
            CHECK(watch.wait(0, sender).status == Status::ok);
            CHECK(dropped > lost);
        }
    }
}

TEST(ready_that_is_lost_is_told_again_and_the_rest_follows) {
    for (int lost = 0; lost <= 3; ++lost) {
        Tapped net(core_config(2));
        Watch watch(net, 2);
        Transfer job(1'000'000);
        int dropped = 0;
        std::uint64_t before_ready = 0;
        net.tap = [&](Datagram& d) {
            if (d.header.kind == Kind::data && dropped <= lost) before_ready += d.bytes.size();
            return d.header.kind != Kind::ready || ++dropped > lost;
        };
        const std::uint64_t sender = net.post(0, job.send(0, {}));
        net.run(10 * millisecond);
        const std::uint64_t receiver = net.post(1, job.receive(0, {}));
        const Outcome& outcome = watch.wait(1, receiver, 2 * second);
        CHECK(outcome.status == Status::ok);
        if (lost <= 1) CHECK(outcome.ended - outcome.started < 60 * millisecond);  // sooner than its next `ready`
        CHECK(watch.wait(0, sender).status == Status::ok);
        CHECK(job.got == job.sent);
        // Only the eager bytes, with their headers, are sent before `ready`.
        CHECK(before_ready >= 256 << 10);
        CHECK(before_ready < (256 << 10) * 13 / 10);
    }
}

TEST(done_that_is_lost_costs_only_what_was_on_its_way) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    Transfer job(200 * 1440);
    net.tap = [](Datagram& d) {
        return d.header.kind != Kind::done &&
               (d.header.kind != Kind::data || (d.header.flags & flag_repair) == 0 || d.header.chunk % 2 == 0);
    };
    const StageSpec stage{.budget = 0.0, .deadline = 20 * millisecond};
    const std::uint64_t receiver = net.post(1, job.receive(0, stage));
    const std::uint64_t sender = net.post(0, job.send(0, {}));
    CHECK(watch.wait(1, receiver).status == Status::ok);
    CHECK(watch.wait(0, sender, 5 * second).status == Status::ok);
}

TEST(receiver_that_has_ended_tells_a_sender_that_goes_on) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    Transfer job(200 * 1440);
    net.tap = [](Datagram& d) { return d.header.kind != Kind::data || d.header.chunk % 2 == 0; };
    // The receiver's deadline passes. The sender has none and would retransmit for ever.
    const std::uint64_t receiver = net.post(1, job.receive(0, {.deadline = 20 * millisecond}));
    const std::uint64_t sender = net.post(0, job.send(0, {}));
    CHECK_EQUAL(watch.wait(1, receiver).arrivals[0].arrived, 100U);
    CHECK(watch.wait(0, sender, second).ended < second + 100 * millisecond);
}

TEST(chunks_overtaken_by_the_end_are_waited_for_a_moment) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    Transfer warm_up(1440), job(40 * 1440);
    const std::uint64_t first = net.post(1, warm_up.receive(0, {}));
    net.post(0, warm_up.send(0, {}));
    watch.wait(1, first);
    net.tap = [&](Datagram& d) {
        if (d.header.kind == Kind::data && (d.header.flags & flag_last) == 0) d.at += 15 * microsecond;
        return true;
    };
    const std::uint64_t receiver = net.post(1, job.receive(1, {.budget = 1.0}));
    net.post(0, job.send(1, {.budget = 1.0}));
    CHECK_EQUAL(watch.wait(1, receiver).arrivals[0].arrived, 40U);
}

TEST(empty_lossy_message_that_is_lost_still_ends) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    Transfer job(0);
    net.tap = [](Datagram& d) { return d.header.kind != Kind::data; };
    const std::uint64_t receiver = net.post(1, job.receive(0, {.budget = 1.0}));
    net.post(0, job.send(0, {.budget = 1.0}));
    const Outcome& outcome = watch.wait(1, receiver, second);
    CHECK_EQUAL(outcome.arrivals[0].chunks, 1U);
    CHECK_EQUAL(outcome.arrivals[0].arrived, 0U);
    CHECK_EQUAL(outcome.arrivals[0].missing_bytes, 0U);
}

TEST(empty_shard_that_was_lost_in_the_first_stage_is_passed_on_in_the_second) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    AllReduce job(2, 1, 1);
    net.tap = [](Datagram& d) { return d.header.kind != Kind::data || (d.header.flags & flag_second_stage) != 0; };
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < 2; ++rank)
        ids.push_back(net.post(rank, job.spec(rank, 0, Reduce::arrived, {.budget = 1.0}, {})));
    watch.wait_all(ids, Status::ok, 5 * second);
    CHECK(job.out[0] == job.out[1]);
}

TEST(relay_passes_on_what_it_got_and_its_receivers_miss_no_more_than_their_budget) {
    for (const double budget : {0.1, 0.12, 0.2, 0.5, 1.0}) {
        Sim sim(lossy_links(3, 0.1, 12));
        Watch watch(sim, 3);
        const Buffer message = random_buffer(300 * 1440, 1);
        Buffer middle(message.size(), old_value), far(message.size(), old_value);
        const StageSpec stage{.budget = budget};
        ExchangeSpec root = exchange_on(0, 0, stage, stage), relay = root, leaf = root;
        root.sends.push_back({.peer = 1, .data = message.data(), .bytes = message.size()});
        relay.receives.push_back({.peer = 0, .reduce = true, .bytes = message.size()});
        relay.reduction = ReductionSpec{.mode = Reduce::copy,
                                        .wire = Dtype::bytes,
                                        .out_dtype = Dtype::bytes,
                                        .out = middle.data(),
                                        .bytes = message.size()};
        relay.sends.push_back({.peer = 2, .second_stage = true, .data = middle.data(), .bytes = message.size()});
        leaf.receives.push_back({.peer = 1, .second_stage = true, .into = far.data(), .bytes = message.size()});
        const std::vector<std::uint64_t> ids{sim.post(0, root), sim.post(1, relay), sim.post(2, leaf)};
        watch.wait_all(ids, Status::ok, 5 * second);
        const Arrival& near = watch.outcome(1, ids[1])->arrivals[0];
        const Arrival& last = watch.outcome(2, ids[2])->arrivals[0];
        CHECK(static_cast<double>(last.chunks - last.arrived) <= budget * last.chunks);
        check_mask(near, middle, message, 1440);
        check_mask(last, far, message, 1440);
        for (std::size_t chunk = 0; chunk < last.chunks; ++chunk) CHECK(!arrived(last, chunk) || arrived(near, chunk));
    }
}
