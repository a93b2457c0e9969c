// Core under virtual time: exact exchanges stay exact under loss, reordering, duplication and corruption.
#include <array>
#include <map>
#include <numeric>

#include "exchange/batch.hpp"
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

// All faults at once, each worse than on any usable network.
SimConfig storm_of(std::uint16_t world, std::uint64_t seed) {
    SimConfig config;
    config.core = core_config(world);
    config.core.silence = 60 * second;  // bursts last for datagrams, not for a time: a dozen probes may all be lost
    config.faults.seed = seed;
    config.faults.default_link = {
        .loss = 0.2, .burst = 3, .duplicate = 0.1, .reorder = 0.1, .corrupt = 0.05, .jitter = 200 * microsecond};
    return config;
}

// Empty, tiny, around the size of one chunk (1440), several, and more than may be sent before the receiver has posted.
std::size_t odd_size(std::uint16_t from, std::uint16_t to) {
    constexpr std::array<std::size_t, 9> sizes{0, 1, 1439, 1440, 1441, 7 * 1440 + 5, 40'000, 3, 300'001};
    return sizes[(from * 5U + to * 3U) % sizes.size()];
}

}  // namespace

TEST(exchanges_of_odd_sizes_are_exact_in_a_storm_for_worlds_of_two_to_eight) {
    FaultCounters all;
    std::uint64_t corrupt = 0;
    for (std::uint16_t world = 2; world <= 8; ++world) {
        Sim sim(storm_of(world, world));
        Watch watch(sim, world);
        AllToAll job(world, world, odd_size);
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < world; ++rank) ids.push_back(sim.post(rank, job.spec(rank, 0)));
        watch.wait_all(ids);
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            CHECK(job.complete(rank));
            for (const Arrival& arrival : watch.outcome(rank, ids[rank])->arrivals) {
                CHECK_EQUAL(arrival.missing_bytes, 0U);
                CHECK_EQUAL(arrival.arrived, arrival.chunks);
                CHECK_EQUAL(arrival.bytes, job.sent[arrival.peer][rank].size());
            }
            const FaultCounters& faults = sim.fault_counters(rank);
            all.lost += faults.lost;
            all.duplicated += faults.duplicated;
            all.reordered += faults.reordered;
            all.corrupted += faults.corrupted;
            corrupt += sim.core(rank).counters().corrupt;
        }
    }
    CHECK(all.lost > 1000 && all.duplicated > 500 && all.reordered > 500 && all.corrupted > 200);
    CHECK(corrupt > 100);
}

TEST(all_reduce_is_exact_to_the_bit_in_a_storm_for_worlds_of_two_to_eight) {
    for (std::uint16_t world = 2; world <= 8; ++world) {
        // Also fewer elements than ranks: some shards are empty.
        for (const std::size_t elements :
             {std::size_t{0}, std::size_t{1}, std::size_t{world} - 1, std::size_t{365}, std::size_t{30'011}}) {
            Sim sim(storm_of(world, world + elements));
            Watch watch(sim, world);
            AllReduce job(world, elements, world);
            std::vector<std::uint64_t> ids;
            for (std::uint16_t rank = 0; rank < world; ++rank)
                ids.push_back(sim.post(rank, job.spec(rank, 0, Reduce::in_order)));
            watch.wait_all(ids);
            job.check_exact();
            for (std::uint16_t rank = 0; rank < world; ++rank) {
                for (const std::uint16_t count : watch.outcome(rank, ids[rank])->counts) CHECK_EQUAL(count, world);
            }
        }
    }
}

TEST(worked_example_of_the_protocol_runs_as_it_is_drawn) {
    // docs/protocol.md: 7,000 bytes in five chunks, rotated to begin at chunk 3, of which chunk 0 is lost once.
    std::uint32_t seq = 0;
    while (ChunkLayout(7'000, 1440, 0, seq).start != 3) ++seq;
    Tapped net(core_config(2), 50 * microsecond);
    Watch watch(net, 2);
    std::vector<std::string> drawn;
    net.tap = [&](Datagram& d) {
        constexpr std::array<const char*, 10> kinds{"",    "data", "report", "ready", "wait",
                                                    "end", "done", "ping",   "bye",   "failed"};
        std::string line = std::to_string((net.now() - second) / microsecond) + " " +
                           kinds.at(static_cast<std::size_t>(d.header.kind)) + " " + std::to_string(d.header.number);
        if (d.header.kind == Kind::data) line += " chunk " + std::to_string(d.header.chunk);
        if ((d.header.flags & flag_repair) != 0) line += " repair";
        if ((d.header.flags & flag_last) != 0) line += " last";
        drawn.push_back(line);
        return d.header.number != 3 || d.header.kind != Kind::data;
    };
    const Buffer sent = random_buffer(7'000, 1);
    Buffer got(7'000);
    ExchangeSpec send = exchange_on(0, seq), receive = send;
    send.sends.push_back({.peer = 1, .data = sent.data(), .bytes = sent.size()});
    receive.receives.push_back({.peer = 0, .into = got.data(), .bytes = got.size()});
    const std::uint64_t receiver = net.post(1, receive), sender = net.post(0, send);
    watch.wait_all({sender, receiver});
    CHECK(got == sent);
    CHECK(drawn == (std::vector<std::string>{"0 data 1 chunk 3", "0 data 2 chunk 4", "0 data 3 chunk 0",
                                             "0 data 4 chunk 1", "0 data 5 chunk 2 last", "50 report 1",
                                             "175 data 6 chunk 0 repair last", "225 report 2"}));
    CHECK_EQUAL(watch.outcome(1, receiver)->ended, second + 225 * microsecond);
    CHECK_EQUAL(watch.outcome(0, sender)->ended, second + 275 * microsecond);
    CHECK_EQUAL(watch.outcome(0, sender)->repaired, 1U);
}

TEST(datagram_sizes_from_the_smallest_to_the_largest_carry_exact_exchanges) {
    for (const std::size_t datagram_bytes : {128U, 129U, 576U, 1472U, 8972U, 65'507U}) {
        SimConfig config = storm_of(3, datagram_bytes);
        config.core.datagram_bytes = datagram_bytes;
        Sim sim(config);
        Watch watch(sim, 3);
        AllReduce job(3, 20'011, 1);
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < 3; ++rank)
            ids.push_back(sim.post(rank, job.spec(rank, 0, Reduce::in_order)));
        watch.wait_all(ids);
        job.check_exact();
    }
    for (const std::size_t datagram_bytes : {0U, 32U, 127U, 65'508U}) {
        CoreConfig config = core_config(2);
        config.datagram_bytes = datagram_bytes;
        bool refused = false;
        try {
            const Core core(config, second);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        CHECK(refused);
    }
}

TEST(sealed_exchange_is_exact_in_a_storm) {
    std::string why;
    if (!Aead::open(why)) return;
    SimConfig config = storm_of(3, 9);
    config.core.secrets.sealed = true;
    config.core.secrets.links.resize(3);
    Sim sim(config);
    Watch watch(sim, 3);
    AllToAll job(3, 9, odd_size);
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < 3; ++rank) ids.push_back(sim.post(rank, job.spec(rank, 0)));
    watch.wait_all(ids);
    for (std::uint16_t rank = 0; rank < 3; ++rank) CHECK(job.complete(rank));
}

TEST(late_chunk_of_the_first_stage_holds_back_no_other_chunk_of_the_second) {
    Tapped net(core_config(4));
    Watch watch(net, 4);
    AllReduce job(4, 100'000, 3);
    const Nanos lit_at = net.now() + 50 * millisecond;
    std::vector<std::size_t> passed_on(4);
    net.tap = [&](Datagram& d) {
        if (d.header.kind != Kind::data) return true;
        if ((d.header.flags & flag_second_stage) != 0 && net.now() < lit_at) ++passed_on[d.source];
        // One contribution to one chunk of each shard arrives late.
        return (d.header.flags & flag_second_stage) != 0 || d.header.chunk != 5 || d.source != (d.target + 1) % 4 ||
               net.now() > lit_at;
    };
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < 4; ++rank) ids.push_back(net.post(rank, job.spec(rank, 0, Reduce::in_order)));
    watch.wait_all(ids);
    job.check_exact();
    const std::size_t chunks = (job.bytes(0) + net.core(0).chunk_bytes() - 1) / net.core(0).chunk_bytes();
    for (std::uint16_t rank = 0; rank < 4; ++rank) {
        CHECK(watch.outcome(rank, ids[rank])->ended > lit_at);
        CHECK_EQUAL(passed_on[rank], 3 * (chunks - 1));
    }
}

TEST(ranks_begin_every_exchange_with_the_one_after_them_so_that_nobody_is_sent_to_by_all_at_once) {
    constexpr std::uint16_t world = 6;
    Tapped net(core_config(world));
    Watch watch(net, world);
    AllToAll job(world, 5, [](auto, auto) { return std::size_t{1000}; });
    std::map<std::uint16_t, std::uint16_t> data, byes;  // by rank: the target of its first datagram of that kind
    bool repaired = false;
    net.tap = [&](Datagram& d) {
        if (d.header.kind == Kind::data) {
            data.emplace(d.source, d.target);
            // All end the first exchange with rank 3, to which they send again.
            const bool lost = d.header.seq == 0 && d.target == 3 && !repaired;
            return !lost;
        }
        if (d.header.kind == Kind::bye) byes.emplace(d.source, d.target);
        return true;
    };
    for (std::uint32_t seq = 0; seq < 2; ++seq) {
        data.clear();
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < world; ++rank) ids.push_back(net.post(rank, job.spec(rank, seq, {})));
        repaired = true;  // what is sent later arrives
        watch.wait_all(ids);
        net.run(second);
        for (std::uint16_t rank = 0; rank < world; ++rank) CHECK_EQUAL(data.at(rank), (rank + 1) % world);
    }
    for (std::uint16_t rank = 0; rank < world; ++rank) net.leave(rank);
    for (std::uint16_t rank = 0; rank < world; ++rank) CHECK_EQUAL(byes.at(rank), (rank + 1) % world);
}

TEST(everything_sent_twice_is_taken_once) {
    Tapped net(core_config(3));
    Watch watch(net, 3);
    AllReduce job(3, 10'000, 4);
    net.tap = [&](Datagram& d) {
        Buffer copy = d.bytes;
        net.core(d.target).receive(copy, net.now());
        return true;
    };
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < 3; ++rank) ids.push_back(net.post(rank, job.spec(rank, 0, Reduce::arrived)));
    watch.wait_all(ids);
    net.run(second);  // the last reports
    std::uint64_t received = 0, duplicates = 0;
    for (std::uint16_t rank = 0; rank < 3; ++rank) {
        received += net.core(rank).counters().datagrams_received;
        duplicates += net.core(rank).counters().duplicates;
        for (const std::uint16_t count : watch.outcome(rank, ids[rank])->counts) CHECK_EQUAL(count, 3U);
        // Contributions are added as they arrive, not in rank order, so sums are equal only within rounding.
        const std::vector<float> sum = job.expected();
        for (std::size_t e = 0; e < sum.size(); ++e) CHECK(std::abs(job.out[rank][e] - sum[e]) <= 1e-6F * 1e7F);
    }
    CHECK(received > 100);
    CHECK_EQUAL(duplicates * 2, received);
}

TEST(chunk_that_was_repaired_needlessly_is_not_added_twice) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    AllReduce job(2, 2'000, 5);
    // Reports from rank 1 are lost for a while: rank 0 retransmits what arrived long ago, under new packet numbers.
    net.tap = [&](Datagram& d) {
        return d.header.kind != Kind::report || d.source != 1 || net.now() > second + 300 * millisecond;
    };
    ExchangeSpec first = job.spec(1, 0, Reduce::arrived);
    std::erase_if(first.receives, [](const ReceiveSpec& r) { return r.second_stage; });
    std::erase_if(first.sends, [](const SendSpec& s) { return s.second_stage; });
    ExchangeSpec other = job.spec(0, 0, Reduce::arrived);
    std::erase_if(other.receives, [](const ReceiveSpec& r) { return r.second_stage; });
    std::erase_if(other.sends, [](const SendSpec& s) { return s.second_stage; });
    const std::uint64_t id1 = net.post(1, first), id0 = net.post(0, other);
    watch.wait_all({id0, id1});
    for (std::size_t e = job.begin(1); e < 2'000; ++e) CHECK_EQUAL(job.out[1][e], job.in[0][e] + job.in[1][e]);
}

TEST(many_exchanges_in_flight_on_many_channels_do_not_mix) {
    constexpr std::uint16_t world = 3;
    Sim sim(storm_of(world, 77));
    Watch watch(sim, world);
    std::vector<AllToAll> jobs;
    std::vector<std::vector<std::uint64_t>> ids;
    for (std::uint32_t i = 0; i < 40; ++i)
        jobs.emplace_back(world, 100 + i, [&](auto from, auto to) { return (i * 977 + from * 131 + to) % 9'000; });
    for (std::uint32_t i = 0; i < 40; ++i) {
        ids.emplace_back();
        for (std::uint16_t rank = 0; rank < world; ++rank)
            ids[i].push_back(sim.post(rank, jobs[i].spec(rank, i / 4, {}, i % 4)));
    }
    for (std::uint32_t i = 0; i < 40; ++i) {
        watch.wait_all(ids[i]);
        for (std::uint16_t rank = 0; rank < world; ++rank) CHECK(jobs[i].complete(rank));
    }
}

TEST(exchanges_of_a_channel_may_be_posted_in_another_order_on_every_rank) {
    constexpr std::uint16_t world = 3;
    constexpr std::uint32_t count = 30;
    Sim sim(storm_of(world, 78));
    Watch watch(sim, world);
    std::vector<AllToAll> jobs;
    for (std::uint32_t i = 0; i < count; ++i)
        jobs.emplace_back(world, 200 + i, [](auto, auto) { return std::size_t{5'000}; });
    std::vector<std::vector<std::uint64_t>> ids(count, std::vector<std::uint64_t>(world));
    std::vector<std::vector<std::uint32_t>> orders(world, std::vector<std::uint32_t>(count));
    for (std::uint16_t rank = 0; rank < world; ++rank) {
        std::iota(orders[rank].begin(), orders[rank].end(), 0U);
        std::shuffle(orders[rank].begin(), orders[rank].end(), std::mt19937(rank));
    }
    for (std::uint32_t step = 0; step < count; ++step) {
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            const std::uint32_t seq = orders[rank][step];
            ids[seq][rank] = sim.post(rank, jobs[seq].spec(rank, seq));
        }
        for (int i = 0; i < 20; ++i) (void)sim.advance();
    }
    for (std::uint32_t seq = 0; seq < count; ++seq) {
        watch.wait_all(ids[seq]);
        for (std::uint16_t rank = 0; rank < world; ++rank) CHECK(jobs[seq].complete(rank));
    }
    bool refused = false;
    try {
        sim.post(0, jobs[3].spec(0, 3));
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
}

TEST(same_seed_gives_the_same_run) {
    std::array<Nanos, 2> ended{};
    std::array<std::uint64_t, 2> sent{};
    for (int run = 0; run < 2; ++run) {
        Sim sim(storm_of(4, 5));
        Watch watch(sim, 4);
        AllReduce job(4, 20'000, 6);
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < 4; ++rank)
            ids.push_back(sim.post(rank, job.spec(rank, 0, Reduce::in_order)));
        watch.wait_all(ids);
        ended[run] = sim.now();
        for (std::uint16_t rank = 0; rank < 4; ++rank) sent[run] += sim.core(rank).counters().datagrams_sent;
    }
    CHECK_EQUAL(ended[0], ended[1]);
    CHECK_EQUAL(sent[0], sent[1]);
}

TEST(quiet_network_carries_each_byte_once) {
    SimConfig config;
    config.core = core_config(4);
    Sim sim(config);
    Watch watch(sim, 4);
    AllReduce job(4, 100'000, 7);
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < 4; ++rank) ids.push_back(sim.post(rank, job.spec(rank, 0, Reduce::in_order)));
    watch.wait_all(ids);
    job.check_exact();
    for (std::uint16_t rank = 0; rank < 4; ++rank) {
        const Counters& counters = sim.core(rank).counters();
        CHECK_EQUAL(counters.repaired, 0U);
        CHECK_EQUAL(counters.duplicates + counters.late + counters.corrupt + counters.malformed + counters.foreign +
                        counters.unexpected,
                    0U);
        // Six messages of 100 kB: the rest is headers and reports.
        CHECK(counters.bytes_sent < 600'000 * 105 / 100);
    }
}

TEST(a_datagram_that_waits_to_be_read_is_not_counted_as_slow) {
    CoreConfig config = core_config(2);
    Core sender(config, second);
    config.rank = 1;
    Core receiver(config, second);
    const Buffer sent = random_buffer(1000, 3);
    Buffer got(sent.size());
    ExchangeSpec sends = exchange_on(0, 0), receives = exchange_on(0, 0);
    sends.sends.push_back({.peer = 1, .data = sent.data(), .bytes = sent.size()});
    receives.receives.push_back({.peer = 0, .into = got.data(), .bytes = got.size()});
    sender.post(sends, second);
    receiver.post(receives, second);

    // Delivers what `from` sends at `now`: it arrived at `arrived_at` and is read at `read_at`.
    const auto carry = [](Core& from, Core& to, Nanos now, Nanos read_at, Nanos arrived_at) {
        Batch batch;
        while (from.transmit(batch, now)) {
            Buffer joined;
            for (const iovec& part : batch.parts()) {
                const auto* bytes = static_cast<const std::byte*>(part.iov_base);
                joined.insert(joined.end(), bytes, bytes + part.iov_len);
            }
            for (std::size_t at = 0; at < joined.size(); at += batch.segment_bytes()) {
                const std::size_t size = std::min(batch.segment_bytes(), joined.size() - at);
                to.receive(std::span(joined).subspan(at, size), read_at, arrived_at);
            }
            from.transmitted(batch, now);
        }
    };
    const Nanos way = 100 * microsecond, read_at = second + 5 * millisecond;
    carry(sender, receiver, second, read_at, second + way);
    carry(receiver, sender, read_at, read_at + way, read_at + way);
    CHECK(got == sent);
    CHECK(sender.round_trip(1) > 0);
    CHECK(sender.round_trip(1) < 3 * way);
}

TEST(what_waited_for_a_full_socket_leaves_when_it_has_room_again) {
    Core sender(core_config(2), second);
    const Buffer sent = random_buffer(1000, 3);
    ExchangeSpec sends = exchange_on(0, 0);
    sends.sends.push_back({.peer = 1, .data = sent.data(), .bytes = sent.size()});
    sender.hold(0, true);
    sender.post(sends, second);
    Batch batch;
    CHECK(!sender.transmit(batch, second));
    sender.hold(0, false);
    // Nothing else has happened that would make the core look at this peer again.
    bool data = false;
    while (sender.transmit(batch, second)) {
        data = data || batch.pinned().has_value();
        sender.transmitted(batch, second);
    }
    CHECK(data);
}
