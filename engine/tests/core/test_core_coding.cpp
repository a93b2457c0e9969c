// Forward error correction in Core: exact exchanges stay exact, lossy ones lose less, clean links carry no parity.
#include "jobs.hpp"
#include "sim/sim.hpp"
#include "wire/seal.hpp"

using namespace storm;
using namespace storm::check;

namespace {

SimConfig links(std::uint16_t world, double loss, double burst, std::uint64_t seed) {
    SimConfig config;
    config.core.world = world;
    config.core.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
    config.faults.seed = seed;
    config.faults.default_link.loss = loss;
    config.faults.default_link.burst = burst;
    return config;
}

// Transfers messages of this size among all ranks and returns how long the slowest took.
Nanos transfer(Sim& sim, std::uint16_t world, std::size_t bytes, std::uint32_t seq, StageSpec stage) {
    Watch watch(sim, world);
    AllToAll job(world, 70 + seq, [&](auto, auto) { return bytes; });
    const Nanos from = sim.now();
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < world; ++rank) ids.push_back(sim.post(rank, job.spec(rank, seq, stage)));
    watch.wait_all(ids, Status::ok, 100 * second);
    for (std::uint16_t rank = 0; rank < world; ++rank) {
        if (stage.budget == 0.0) CHECK(job.complete(rank));
    }
    return sim.now() - from;
}

}  // namespace

TEST(coded_exact_messages_arrive_whole_whatever_the_network_does) {
    std::uint64_t recovered = 0, saved = 0, topped_up = 0;
    for (const double loss : {0.05, 0.3}) {
        for (const double burst : {1.0, 12.0}) {
            for (const double redundancy : {0.05, 0.4, StageSpec::automatic}) {
                SimConfig config = links(3, loss, burst, 5);
                config.faults.default_link.duplicate = 0.02;
                config.faults.default_link.reorder = 0.05;
                config.delay = 5 * millisecond;
                Sim sim(config);
                std::uint32_t seq = 0;
                for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{1440}, std::size_t{50'001},
                                                std::size_t{300'000}, std::size_t{1'500'000}}) {
                    transfer(sim, 3, bytes, seq++, {.redundancy = redundancy});
                }
                for (std::uint16_t rank = 0; rank < 3; ++rank) {
                    const Counters& counters = sim.core(rank).counters();
                    recovered += counters.recovered;
                    saved += counters.blocks_saved;
                    topped_up += counters.blocks_topped_up;
                    CHECK_EQUAL(counters.unexpected, 0U);
                }
            }
        }
    }
    CHECK(recovered > 1000);
    CHECK(saved > 20);
    CHECK(topped_up > 20);
}

TEST(coded_all_reduce_gives_the_same_bits_on_every_rank) {
    std::uint64_t recovered = 0;
    for (const double redundancy : {0.2, StageSpec::automatic}) {
        SimConfig config = links(4, 0.15, 4.0, 6);
        config.delay = 10 * millisecond;
        Sim sim(config);
        Watch watch(sim, 4);
        for (std::uint32_t seq = 0; seq < 3; ++seq) {
            AllReduce job(4, 400'003, 9 + seq);
            std::vector<std::uint64_t> ids;
            const StageSpec stage{.redundancy = redundancy};
            for (std::uint16_t rank = 0; rank < 4; ++rank)
                ids.push_back(sim.post(rank, job.spec(rank, seq, Reduce::in_order, stage, stage)));
            watch.wait_all(ids);
            job.check_exact();
        }
        for (std::uint16_t rank = 0; rank < 4; ++rank) recovered += sim.core(rank).counters().recovered;
    }
    CHECK(recovered > 100);
}

TEST(all_reduce_in_place_is_coded_and_exact_although_results_overwrite_what_was_sent) {
    std::string why;
    for (const bool sealed : {false, true}) {
        if (sealed && !Aead::open(why)) continue;
        for (const double redundancy : {0.25, StageSpec::automatic}) {
            SimConfig config = links(3, 0.15, 2.0, 21);
            config.faults.default_link.duplicate = 0.02;
            config.faults.default_link.reorder = 0.05;
            config.delay = 8 * millisecond;
            config.bytes_per_s = 12.5e6;  // results arrive long before the last chunks of a stretch are sent
            config.core.secrets.sealed = sealed;
            config.core.secrets.links.resize(3);
            Sim sim(config);
            Watch watch(sim, 3);
            std::uint64_t recovered = 0;
            std::uint32_t seq = 0;
            for (const std::size_t elements : {std::size_t{700'003}, std::size_t{4'000}, std::size_t{40'000}}) {
                AllReduce job(3, elements, 30 + seq);
                job.reduce_in_place();
                std::vector<std::uint64_t> ids;
                const StageSpec stage{.redundancy = redundancy};
                for (std::uint16_t rank = 0; rank < 3; ++rank)
                    ids.push_back(sim.post(rank, job.spec(rank, seq, Reduce::in_order, stage, stage)));
                watch.wait_all(ids);
                job.check_exact();
                for (std::uint16_t rank = 0; rank < 3; ++rank) {
                    for (const Arrival& arrival : watch.outcome(rank, ids[rank])->arrivals)
                        recovered += arrival.second_stage ? 0 : arrival.recovered;
                }
                ++seq;
            }
            CHECK(recovered > 20);  // of the first stage, whose memory is overwritten
        }
    }
}

TEST(coded_exchanges_end_although_long_bursts_take_reports_of_what_arrived) {
    // A sender that missed reports relies on parity for chunks that the receiver has, so nothing is ever decoded.
    SimConfig config = links(4, 0.1, 64.0, 1);
    config.core.rate_mode = RateMode::automatic;
    config.delay = 100 * microsecond;
    config.bytes_per_s = 12.5e6;
    Sim sim(config);
    Watch watch(sim, 4);
    for (std::uint32_t seq = 0; seq < 6; ++seq) {
        AllReduce job(4, 500'000, 7 + seq);
        std::vector<std::uint64_t> ids;
        const StageSpec stage{.redundancy = StageSpec::automatic};
        for (std::uint16_t rank = 0; rank < 4; ++rank)
            ids.push_back(sim.post(rank, job.spec(rank, seq, Reduce::in_order, stage, stage)));
        const Nanos from = sim.now();
        watch.wait_all(ids, Status::ok, 20 * second);
        job.check_exact();
        CHECK(sim.now() - from < second);
    }
}

TEST(lossy_all_reduce_in_place_adds_up_nothing_but_what_was_sent) {
    SimConfig config = links(3, 0.2, 2.0, 22);
    config.delay = 8 * millisecond;
    config.bytes_per_s = 12.5e6;
    Sim sim(config);
    Watch watch(sim, 3);
    AllReduce job(3, 700'003, 5);
    // All ranks send the same, so that sums do not depend on which contributions arrived.
    for (std::size_t e = 0; e < job.in[0].size(); ++e)
        job.in[0][e] = job.in[1][e] = job.in[2][e] = static_cast<float>(1 + e % 1000);
    job.reduce_in_place();
    const StageSpec stage{.budget = 1.0, .redundancy = 0.4};
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < 3; ++rank)
        ids.push_back(sim.post(rank, job.spec(rank, 0, Reduce::arrived, stage, stage)));
    watch.wait_all(ids);
    std::size_t wrong = 0, recovered = 0;
    for (std::uint16_t rank = 0; rank < 3; ++rank) {
        recovered += sim.core(rank).counters().recovered;
        for (std::size_t e = 0; e < job.in[0].size(); ++e) {
            const float own = job.in[0][e], now = job.out[rank][e];
            if (now != own && std::abs(now - 3.0F * own) > 1e-3F * own) ++wrong;
        }
    }
    CHECK_EQUAL(wrong, 0U);
    CHECK(recovered > 200);
}

TEST(parity_gives_back_what_a_message_that_is_never_repaired_lost) {
    for (const bool reduces : {false, true}) {
        std::vector<double> arrived;
        for (const double redundancy : {0.0, 0.45}) {
            Sim sim(links(2, 0.2, 3.0, 7));
            Watch watch(sim, 2);
            double all = 0, here = 0;
            for (std::uint32_t seq = 0; seq < 3; ++seq) {
                const StageSpec stage{.budget = 1.0, .redundancy = redundancy};
                AllReduce sums(2, 500'000, 8);
                AllToAll job(2, 9, [](auto, auto) { return std::size_t{1'000'000}; });
                std::vector<std::uint64_t> ids;
                for (std::uint16_t rank = 0; rank < 2; ++rank) {
                    ids.push_back(sim.post(rank, reduces ? sums.spec(rank, seq, Reduce::arrived, stage, stage)
                                                         : job.spec(rank, seq, stage)));
                }
                watch.wait_all(ids);
                for (std::uint16_t rank = 0; rank < 2; ++rank) {
                    for (const Arrival& arrival : watch.outcome(rank, ids[rank])->arrivals) {
                        all += arrival.chunks;
                        here += arrival.arrived;
                    }
                }
            }
            arrived.push_back(here / all);
            for (std::uint16_t rank = 0; rank < 2; ++rank) {
                const Counters& counters = sim.core(rank).counters();
                CHECK_EQUAL(counters.repaired, 0U);
                CHECK_EQUAL(counters.recovered > 0, redundancy > 0);
                CHECK_EQUAL(counters.parity_bytes > 0, redundancy > 0);
            }
        }
        CHECK(std::abs(arrived[0] - 0.8) < 0.04);
        CHECK(arrived[1] > 0.99);
    }
}

TEST(more_parity_than_data_gives_back_most_of_what_a_bad_link_lost) {
    // 300'000 bytes have blocks of about 110 chunks, 100'000 have one of 73: 255 chunks in all bound the first.
    for (const std::size_t bytes : {std::size_t{10'000}, std::size_t{100'000}, std::size_t{300'000}}) {
        Sim sim(links(2, 0.4, 1.0, 11));
        Watch watch(sim, 2);
        double all = 0, here = 0, came = 0;
        for (std::uint32_t seq = 0; seq < 20; ++seq) {
            const StageSpec stage{.budget = 1.0, .redundancy = 1.5};
            AllToAll job(2, 9, [&](auto, auto) { return bytes; });
            std::vector<std::uint64_t> ids;
            for (std::uint16_t rank = 0; rank < 2; ++rank) ids.push_back(sim.post(rank, job.spec(rank, seq, stage)));
            watch.wait_all(ids);
            for (std::uint16_t rank = 0; rank < 2; ++rank) {
                for (const Arrival& arrival : watch.outcome(rank, ids[rank])->arrivals) {
                    all += arrival.chunks;
                    here += arrival.arrived;
                    came += arrival.arrived - arrival.recovered;
                }
            }
        }
        CHECK(here / all > 0.93);
        CHECK(std::abs(came / all - 0.6) < 0.06);
    }
}

TEST(automatic_parity_shortens_exact_messages_on_a_long_lossy_link) {
    std::vector<double> took;
    for (const double redundancy : {0.0, StageSpec::automatic}) {
        SimConfig config = links(2, 0.1, 1.0, 11);
        config.delay = 20 * millisecond;
        config.bytes_per_s = 12.5e6;
        config.core.rate_mode = RateMode::fixed;
        config.core.bytes_per_s = 12e6;
        Sim sim(config);
        transfer(sim, 2, 2'000'000, 0, {.redundancy = redundancy});  // the link is measured
        double sum = 0;
        for (std::uint32_t seq = 1; seq <= 8; ++seq)
            sum += static_cast<double>(transfer(sim, 2, 200'000, seq, {.redundancy = redundancy})) * 1e-9;
        took.push_back(sum / 8);
    }
    CHECK(took[1] < took[0] - 0.02);
}

TEST(clean_links_carry_no_parity_unless_it_is_asked_for) {
    SimConfig config = links(2, 0.0, 1.0, 12);
    config.delay = 20 * millisecond;
    Sim sim(config);
    for (std::uint32_t seq = 0; seq < 3; ++seq) transfer(sim, 2, 500'000, seq, {.redundancy = StageSpec::automatic});
    CHECK_EQUAL(sim.core(0).counters().parity_bytes, 0U);
    transfer(sim, 2, 500'000, 3, {.redundancy = 0.1});
    CHECK(sim.core(0).counters().parity_bytes >= 35 * 1440U);
    CHECK_EQUAL(sim.core(1).counters().recovered, 0U);
}

TEST(receiver_without_room_for_parity_gets_everything_by_repair) {
    SimConfig config = links(2, 0.2, 1.0, 13);
    config.core.pool_bytes = 64;
    config.core.eager_bytes = 0;
    Sim sim(config);
    Watch watch(sim, 2);
    for (std::uint32_t seq = 0; seq < 3; ++seq) {
        AllReduce job(2, 300'000, 3 + seq);
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < 2; ++rank)
            ids.push_back(
                sim.post(rank, job.spec(rank, seq, Reduce::in_order, {.redundancy = 0.3}, {.redundancy = 0.3})));
        watch.wait_all(ids);
        job.check_exact();
    }
    CHECK_EQUAL(sim.core(0).counters().recovered, 0U);
    CHECK(sim.core(0).counters().repaired > 0);
}

// A rank that has not posted an exchange learns of it from pooled first chunks (Core::peek).
TEST(first_chunk_of_a_coded_message_comes_even_if_nobody_has_posted_its_exchange) {
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        Sim sim(links(2, 0.4, 1.0, seed));
        AllToAll job(2, 3, [](auto, auto) { return std::size_t{4}; });
        (void)sim.post(0, job.spec(0, 0, {.redundancy = 4.0}));
        const Nanos until = sim.now() + 2 * second;
        while (sim.now() < until && sim.advance()) {
        }
        CHECK(!sim.core(1).peek(job.spec(1, 0, {}).channel, 0).empty());
    }
}
