// Exchanges that wait across views: they wait for absent peers, and go on without those that a later view drops.
#include <initializer_list>
#include <stdexcept>

#include "jobs.hpp"
#include "sim/sim.hpp"
#include "tapped.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr Nanos silence = 2 * second;
using Some = std::initializer_list<std::uint16_t>;

SimConfig network_of(std::uint16_t world, double bytes_per_s = 0) {
    SimConfig config;
    config.core.world = world;
    config.core.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
    config.core.silence = silence;
    config.core.rate_mode = bytes_per_s > 0 ? RateMode::automatic : RateMode::unlimited;
    config.bytes_per_s = bytes_per_s;
    return config;
}

// Ranks that watch one another.
struct Members {
    explicit Members(const SimConfig& config) : net(config), watch(net, config.core.world), world(config.core.world) {
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            const auto& vacant = config.core.vacant;
            if (std::find(vacant.begin(), vacant.end(), rank) != vacant.end()) continue;
            net.with_views(rank, [](Views& views, Nanos now) { views.watch(now); });
        }
    }
    void run(Nanos duration) {
        for (const Nanos until = net.now() + duration; net.now() < until && net.advance();) {
        }
    }
    void set_all_dark(bool dark) {
        for (std::uint16_t rank = 0; rank < world; ++rank) net.set_unreachable(rank, dark);
    }
    [[nodiscard]] std::uint32_t number(std::uint16_t rank) { return net.core(rank).view_number(); }
    [[nodiscard]] std::size_t members(std::uint16_t rank) {
        return net.with_views(rank, [](Views& views, Nanos) { return views.view()->members.size(); });
    }
    std::uint64_t post(std::uint16_t rank, ExchangeSpec spec, std::uint32_t view = 1) {
        spec.view = view;
        return net.post(rank, std::move(spec));
    }
    std::vector<std::uint64_t> post(AllReduce& job, std::uint32_t seq, Reduce mode = Reduce::in_order,
                                    StageSpec stage = {}) {
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < world; ++rank)
            ids.push_back(post(rank, job.spec(rank, seq, mode, stage, stage)));
        return ids;
    }

    Sim net;
    Watch<Sim> watch;
    std::uint16_t world;
};

// Shards of ranks other than `away` must hold the sum, in rank order, over all but `away`.
void check_without(const AllReduce& job, std::uint16_t away) {
    std::vector<float> sum(job.in[0].size());
    bool first = true;
    for (std::uint16_t rank = 0; rank < job.world; ++rank) {
        if (rank == away) continue;
        for (std::size_t e = 0; e < sum.size(); ++e) sum[e] = first ? job.in[rank][e] : sum[e] + job.in[rank][e];
        first = false;
    }
    for (std::uint16_t rank = 0; rank < job.world; ++rank) {
        for (std::uint16_t owner = 0; owner < job.world; ++owner) {
            if (rank == away || owner == away) continue;
            const std::size_t begin = job.begin(owner), bytes = job.bytes(owner);
            CHECK(std::memcmp(sum.data() + begin, job.out[rank].data() + begin, bytes) == 0);
        }
    }
}

}  // namespace

TEST(exchange_of_a_view_outlasts_an_outage_of_all_links_and_goes_on_within_a_second) {
    for (const double bytes_per_s : {0.0, 50e6}) {
        for (const Nanos outage : {12 * second, 40 * second, 120 * second}) {
            for (const std::size_t elements : {std::size_t{3'000}, std::size_t{1'500'000}}) {
                Members job(network_of(3, bytes_per_s));
                AllReduce warm(3, 100'000, 1);
                job.watch.wait_all(job.post(warm, 0));
                AllReduce sum(3, elements, 2);
                const auto ids = job.post(sum, 1);
                job.run(elements < 10'000 ? 10 * microsecond : bytes_per_s > 0 ? 20 * millisecond : millisecond);
                job.set_all_dark(true);
                job.run(outage);
                for (std::uint16_t rank = 0; rank < 3; ++rank) CHECK(job.watch.outcome(rank, ids[rank]) == nullptr);
                job.set_all_dark(false);
                const Nanos healed = job.net.now();
                job.watch.wait_all(ids);
                sum.check_exact();
                CHECK(job.net.now() - healed < 1300 * millisecond);
                job.run(3 * silence);
                for (std::uint16_t rank = 0; rank < 3; ++rank) CHECK_EQUAL(job.members(rank), 3U);
            }
        }
    }
}

TEST(path_that_carries_no_data_costs_one_of_its_ends_its_place) {
    Tapped net(network_of(3).core);
    Watch<Tapped> watch(net, 3);
    net.tap = [](Datagram& d) { return d.header.kind != Kind::data || d.source + d.target != 2; };
    AllToAll job(3, 20, [](auto, auto) { return std::size_t{100'000}; });
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < 3; ++rank) {
        net.core(rank).with_views(net.now(), [&](Views& views) { views.watch(net.now()); });
        ExchangeSpec spec = job.spec(rank, 0);
        spec.view = 1;
        ids.push_back(net.post(rank, spec));
    }
    for (const std::uint16_t rank : Some{0, 1}) CHECK(watch.wait(rank, ids[rank]).status == Status::ok);
    CHECK(job.got[0][1] == job.sent[1][0]);
    for (const Nanos until = net.now() + second; net.now() < until && net.advance();) {
    }
    const auto without = [](Views& views) { return views.view()->members == std::vector<Member>{{0, 0}, {1, 0}}; };
    for (const std::uint16_t rank : Some{0, 1}) CHECK(net.core(rank).with_views(net.now(), without));
}

TEST(outage_after_losses_does_not_make_a_path_a_blocked_one) {
    Tapped net(network_of(2).core);
    Watch<Tapped> watch(net, 2);
    bool dark = false, lossy = true;
    net.tap = [&](Datagram& d) { return !dark && !(lossy && d.header.kind == Kind::data && d.source == 0); };
    const auto run = [&](Nanos duration) {
        for (const Nanos until = net.now() + duration; net.now() < until && net.advance();) {
        }
    };
    AllToAll job(2, 21, [](auto, auto) { return std::size_t{200'000}; });
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < 2; ++rank) {
        net.core(rank).with_views(net.now(), [&](Views& views) { views.watch(net.now()); });
        ExchangeSpec spec = job.spec(rank, 0);
        spec.view = 1;
        ids.push_back(net.post(rank, spec));
    }
    run(200 * millisecond);
    dark = true;
    run(3 * silence / 4);  // shorter than the silence: both stay in the view
    dark = false;
    run(silence / 2);  // and losses go on, but not for as long as the silence
    lossy = false;
    watch.wait_all(ids);
    run(silence / 2);
    for (std::uint16_t rank = 0; rank < 2; ++rank) {
        const auto connectivity =
            net.core(rank).with_views(net.now(), [&](Views& v) { return v.connectivity(net.now()); });
        CHECK_EQUAL(connectivity.reachable[0].size(), 2U);
        CHECK_EQUAL(connectivity.reachable[1].size(), 2U);
    }
}

TEST(exchange_that_is_posted_during_an_outage_goes_on_after_it) {
    Members job(network_of(3));
    job.set_all_dark(true);
    job.run(30 * second);
    AllReduce sum(3, 200'000, 3);
    const auto ids = job.post(sum, 0);
    job.run(30 * second);
    job.set_all_dark(false);
    const Nanos healed = job.net.now();
    job.watch.wait_all(ids);
    sum.check_exact();
    CHECK(job.net.now() - healed < 1300 * millisecond);
}

TEST(lossy_exchange_of_a_view_waits_for_a_silent_peer_until_its_deadline) {
    Members job(network_of(2));
    AllReduce sum(2, 4'000, 4);
    job.set_all_dark(true);
    const Nanos start = job.net.now();
    const auto ids = job.post(sum, 0, Reduce::arrived, {.budget = 1.0, .deadline = 5 * silence});
    job.watch.wait_all(ids);
    CHECK(job.net.now() - start >= 5 * silence);
}

TEST(exchange_of_a_view_times_out_all_the_same) {
    Members job(network_of(2));
    AllReduce sum(2, 4'000, 5);
    job.set_all_dark(true);
    ExchangeSpec spec = sum.spec(1, 0, Reduce::in_order);  // rank 0 alone would be half, and go on
    spec.timeout_at = 3 * silence;
    CHECK(job.watch.wait(1, job.post(1, spec)).status == Status::timed_out);
}

TEST(exact_sum_goes_on_without_a_rank_that_the_next_view_drops) {
    for (const std::size_t elements : {std::size_t{4'000}, std::size_t{400'000}}) {
        Members job(network_of(4, 50e6));
        AllReduce warm(4, 10'000, 1);
        job.watch.wait_all(job.post(warm, 0));
        job.net.set_unreachable(2, true);
        AllReduce sum(4, elements, 6);
        const auto ids = job.post(sum, 1);
        job.run(silence / 2);
        for (const std::uint16_t rank : Some{0, 1, 3}) CHECK(job.watch.outcome(rank, ids[rank]) == nullptr);
        for (const std::uint16_t rank : Some{0, 1, 3}) {
            const Outcome& outcome = job.watch.wait(rank, ids[rank]);
            CHECK(outcome.status == Status::ok);
            CHECK(job.number(rank) > 1);
            for (const std::uint16_t count : outcome.counts) CHECK_EQUAL(count, 3);
            for (const Arrival& arrival : outcome.arrivals) CHECK((arrival.missing_bytes == 0) == (arrival.peer != 2));
        }
        check_without(sum, 2);
        // An exchange that is posted for the old view now ends at once.
        AllReduce late(4, elements, 7);
        std::vector<std::uint64_t> again(4);
        for (const std::uint16_t rank : Some{0, 1, 3})
            again[rank] = job.post(rank, late.spec(rank, 2, Reduce::in_order));
        for (const std::uint16_t rank : Some{0, 1, 3}) {
            CHECK(job.watch.wait(rank, again[rank], second).status == Status::ok);
        }
        check_without(late, 2);
    }
}

TEST(goodbye_and_a_cancelled_exchange_of_a_peer_do_not_end_an_exchange_of_a_view) {
    Members job(network_of(4));
    AllReduce sum(4, 4'000, 8);
    std::vector<std::uint64_t> ids(4);
    for (const std::uint16_t rank : Some{0, 1, 2}) ids[rank] = job.post(rank, sum.spec(rank, 0, Reduce::in_order));
    job.run(50 * millisecond);
    job.net.cancel(2, ids[2]);
    CHECK(job.watch.wait(2, ids[2]).status == Status::closed);
    job.net.with_views(3, [](Views&, Nanos) {});
    job.net.core(3).leave();
    job.net.with_views(3, [](Views&, Nanos) {});
    job.run(3 * silence);
    // The view without rank 3 is known. Rank 2 is still in it, although nothing more arrives from it.
    for (const std::uint16_t rank : Some{0, 1}) {
        CHECK(job.number(rank) > 1);
        CHECK(job.watch.outcome(rank, ids[rank]) == nullptr);
    }
    job.net.set_unreachable(2, true);
    for (const std::uint16_t rank : Some{0, 1}) CHECK(job.watch.wait(rank, ids[rank]).status == Status::ok);
}

TEST(prospect_of_an_exchange_stays_good_when_a_peer_that_has_ended_it_leaves) {
    Members job(network_of(4, 10e6));
    const auto can_complete = [&](std::uint16_t rank, std::uint64_t id) {
        return job.net.core(rank).can_complete(id, job.net.now());
    };
    // Only ranks 0 and 1 have much to send each other: 40 ms.
    AllToAll all(4, 30, [](auto from, auto to) { return std::size_t{from + to == 1 ? 400'000U : 100U}; });
    std::vector<std::uint64_t> ids{job.post(0, all.spec(0, 0))};
    job.run(5 * millisecond);
    CHECK(can_complete(0, ids[0]) == CanComplete::unclear);
    for (const std::uint16_t rank : Some{1, 2, 3}) ids.push_back(job.post(rank, all.spec(rank, 0)));
    for (const std::uint16_t rank : Some{2, 3}) CHECK(job.watch.wait(rank, ids[rank]).status == Status::ok);
    job.net.core(3).leave();
    job.net.with_views(3, [](Views&, Nanos) {});
    job.run(10 * millisecond);
    for (const std::uint16_t rank : Some{0, 1}) {
        CHECK_EQUAL(job.number(rank), 2U);
        CHECK(job.watch.outcome(rank, ids[rank]) == nullptr);
        CHECK(can_complete(rank, ids[rank]) == CanComplete::good);
    }
    for (const std::uint16_t rank : Some{0, 1}) CHECK(job.watch.wait(rank, ids[rank]).status == Status::ok);
    for (const std::uint16_t from : Some{1, 2, 3}) CHECK(all.got[0][from] == all.sent[from][0]);
    CHECK(can_complete(0, ids[0]) == CanComplete::good);
}

TEST(exchange_has_no_prospect_once_a_peer_that_it_needs_gives_it_up_or_leaves_or_falls_silent) {
    // Rank 1 is no quorum without rank 0, so no view ends its wait.
    const auto begun = [](Members& job, AllToAll& all) {
        std::vector<std::uint64_t> ids;
        for (const std::uint16_t rank : Some{0, 1}) ids.push_back(job.post(rank, all.spec(rank, 0)));
        job.run(10 * millisecond);
        CHECK(job.net.core(1).can_complete(ids[1], job.net.now()) == CanComplete::good);
        return ids;
    };
    const auto ends = [&](auto&& how, Nanos after) {
        Members job(network_of(2, 10e6));
        AllToAll all(2, 31, [](auto, auto) { return std::size_t{4'000'000}; });
        const auto ids = begun(job, all);
        how(job, ids);
        job.run(after);
        CHECK(job.watch.outcome(1, ids[1]) == nullptr);
        CHECK(job.net.core(1).can_complete(ids[1], job.net.now()) == CanComplete::none);
    };
    ends([](Members& job, const auto& ids) { job.net.cancel(0, ids[0]); }, 10 * millisecond);
    ends([](Members& job, const auto&) { job.net.set_unreachable(0, true); }, silence + 10 * millisecond);
    ends(
        [](Members& job, const auto&) {
            job.net.core(0).leave();
            job.net.with_views(0, [](Views&, Nanos) {});
        },
        10 * millisecond);
}

namespace {

// Rank 0 sends each other rank a third, which that rank forwards.
ExchangeSpec passed_on(std::uint16_t rank, const Buffer& sent, Buffer& got) {
    const std::size_t third = sent.size() / 3;
    ExchangeSpec spec = exchange_on(0, 0);
    const auto place = [&](std::uint16_t of) { return (of - 1U) * third; };
    if (rank == 0) {
        for (std::uint16_t peer = 1; peer < 4; ++peer)
            spec.sends.push_back({.peer = peer, .data = sent.data() + place(peer), .bytes = third});
        return spec;
    }
    std::byte* own = got.data() + place(rank);
    spec.reduction = ReductionSpec{.mode = Reduce::copy,
                                   .wire = Dtype::bytes,
                                   .out_dtype = Dtype::bytes,
                                   .own = nullptr,
                                   .out = own,
                                   .bytes = third};
    spec.receives.push_back({.peer = 0, .reduce = true, .bytes = third});
    for (std::uint16_t peer = 1; peer < 4; ++peer) {
        if (peer == rank) continue;
        spec.sends.push_back({.peer = peer, .second_stage = true, .data = own, .bytes = third});
        spec.receives.push_back({.peer = peer, .second_stage = true, .into = got.data() + place(peer), .bytes = third});
    }
    return spec;
}

}  // namespace

TEST(broadcast_whose_root_is_dropped_ends_with_what_arrived) {
    Members job(network_of(4));
    const Buffer sent = random_buffer(3 * std::size_t{14'400}, 9);
    std::vector<Buffer> got(4, Buffer(sent.size()));
    job.net.set_unreachable(0, true);
    std::vector<std::uint64_t> ids(4);
    for (std::uint16_t rank = 1; rank < 4; ++rank) ids[rank] = job.post(rank, passed_on(rank, sent, got[rank]));
    for (std::uint16_t rank = 1; rank < 4; ++rank) {
        const Outcome& outcome = job.watch.wait(rank, ids[rank]);
        CHECK(outcome.status == Status::ok);
        for (const Arrival& arrival : outcome.arrivals) CHECK_EQUAL(arrival.arrived, 0U);
    }
}

TEST(broadcast_whose_root_is_dropped_ends_also_where_the_root_had_sent_everything) {
    Members job(network_of(4));
    const Buffer sent = random_buffer(3 * std::size_t{14'400}, 9);
    std::vector<Buffer> got(4, Buffer(sent.size()));
    job.net.set_link(0, 3, true);
    std::vector<std::uint64_t> ids;
    for (std::uint16_t rank = 0; rank < 4; ++rank) ids.push_back(job.post(rank, passed_on(rank, sent, got[rank])));
    job.run(200 * millisecond);
    job.net.set_unreachable(0, true);
    for (std::uint16_t rank = 1; rank < 4; ++rank) {
        const Outcome& outcome = job.watch.wait(rank, ids[rank]);
        CHECK(outcome.status == Status::ok);
        for (const Arrival& arrival : outcome.arrivals) {
            const bool had = arrival.second_stage ? arrival.peer != 3 : rank != 3;
            CHECK_EQUAL(arrival.arrived, had ? arrival.chunks : 0U);
        }
    }
}

TEST(peer_that_is_readmitted_is_dropped_from_exchanges_that_began_before) {
    Members job(network_of(3));
    AllReduce sum(3, 4'000, 10);
    job.net.set_unreachable(2, true);
    std::vector<std::uint64_t> ids;
    for (const std::uint16_t rank : Some{0, 1}) ids.push_back(job.post(rank, sum.spec(rank, 0, Reduce::in_order)));
    job.run(100 * millisecond);
    job.net.restart(2, 1);
    for (const std::uint16_t rank : Some{0, 1}) job.net.readmit(rank, 2);
    for (const std::uint16_t rank : Some{0, 1}) CHECK(job.watch.wait(rank, ids[rank], second).status == Status::ok);
    check_without(sum, 2);
}

TEST(vacant_slot_is_not_waited_for_and_can_be_filled) {
    SimConfig config = network_of(4);
    config.core.vacant = {2, 3};
    Members job(config);
    CHECK_EQUAL(job.net.core(0).config().vacant.size(), 2U);
    AllToAll pair(2, 11, [](auto, auto) { return std::size_t{50'000}; });
    const auto first = job.post(0, pair.spec(0, 0), 0), second_id = job.post(1, pair.spec(1, 0), 0);
    CHECK(job.watch.wait(0, first).status == Status::ok);
    CHECK(job.watch.wait(1, second_id).status == Status::ok);
    AllToAll wide(3, 12, [](auto, auto) { return std::size_t{50'000}; });
    CHECK(job.watch.wait(0, job.post(0, wide.spec(0, 1), 0)).status == Status::peer_left);

    job.net.restart(2, 1);
    for (const std::uint16_t rank : Some{0, 1}) job.net.readmit(rank, 2);
    std::vector<std::uint64_t> ids;
    for (const std::uint16_t rank : Some{0, 1, 2}) ids.push_back(job.post(rank, wide.spec(rank, 0, {}, 5), 0));
    for (const std::uint16_t rank : Some{0, 1, 2}) {
        CHECK(job.watch.wait(rank, ids[rank]).status == Status::ok);
        CHECK(wide.complete(rank));
    }
}

TEST(process_comes_into_a_vacant_slot_and_into_the_view) {
    SimConfig config = network_of(4);
    config.core.vacant = {3};
    Members job(config);
    job.run(second);
    CHECK_EQUAL(job.members(0), 3U);
    job.net.restart(3, 1);
    const Buffer card = random_buffer(200, 15);
    for (const std::uint16_t rank : Some{0, 1, 2}) job.net.readmit(rank, 3);
    job.net.with_views(3, [&](Views& views, Nanos now) {
        views.request_admission({3, 1}, card, now);
        views.watch(now);
    });
    job.net.with_views(0, [&](Views& views, Nanos now) { views.request_admission({3, 1}, card, now); });
    job.run(4 * second);
    for (const std::uint16_t rank : Some{0, 1, 2, 3}) {
        CHECK_EQUAL(job.members(rank), 4U);
        CHECK_EQUAL(job.number(rank), job.number(0));
        CHECK(job.net.with_views(rank, [&](Views& views, Nanos) { return views.inside(); }));
    }
    AllReduce sum(4, 10'000, 16);
    std::vector<std::uint64_t> ids;
    for (const std::uint16_t rank : Some{0, 1, 2, 3})
        ids.push_back(job.post(rank, sum.spec(rank, 0, Reduce::in_order), job.number(rank)));
    job.watch.wait_all(ids);
    sum.check_exact();
}

TEST(member_that_restarts_in_a_job_of_two_comes_in_again) {
    Members job(network_of(2));
    job.run(second);
    job.net.restart(1, 1);
    job.net.readmit(0, 1);
    const Buffer card = random_buffer(200, 17);
    job.net.with_views(1, [&](Views& views, Nanos now) {
        views.request_admission({1, 1}, card, now);
        views.watch(now);
    });
    job.net.with_views(0, [&](Views& views, Nanos now) { views.request_admission({1, 1}, card, now); });
    job.run(8 * second);
    for (const std::uint16_t rank : Some{0, 1}) CHECK_EQUAL(job.members(rank), 2U);
}

TEST(leaving_waits_for_no_vacant_slot) {
    SimConfig config = network_of(3);
    config.core.vacant = {2};
    Members job(config);
    job.run(second);
    job.net.core(0).leave();
    job.net.with_views(0, [](Views&, Nanos) {});
    job.run(second);
    CHECK(job.net.core(0).goodbye_acknowledged());
}

TEST(datagram_in_the_name_of_a_vacant_slot_is_foreign) {
    SimConfig config = network_of(3);
    config.core.vacant = {2};
    Members job(config);
    // The core of the vacant slot knows the cookie, as a stranger may.
    job.net.core(2).with_views(job.net.now(), [](Views&) {});
    AllToAll wide(3, 13, [](auto, auto) { return std::size_t{500}; });
    (void)job.post(2, wide.spec(2, 0), 0);
    job.run(second);
    CHECK(job.net.core(0).counters().foreign > 0);
}

TEST(single_link_that_is_cut_loses_one_way_only) {
    Members job(network_of(2));
    job.net.set_link(0, 1, true);
    const std::uint64_t at0 = job.net.core(0).counters().datagrams_received;
    const std::uint64_t at1 = job.net.core(1).counters().datagrams_received;
    job.run(second);
    CHECK_EQUAL(job.net.core(1).counters().datagrams_received, at1);
    CHECK(job.net.core(0).counters().datagrams_received > at0);
    job.net.set_link(0, 1, false);
    job.run(second);
    CHECK(job.net.core(1).counters().datagrams_received > at1);
}

TEST(job_without_views_sends_no_notes) {
    Sim net(network_of(2));
    CHECK(!net.advance());
    AllToAll pair(2, 14, [](auto, auto) { return std::size_t{500}; });
    Watch<Sim> watch(net, 2);
    watch.wait_all({net.post(0, pair.spec(0, 0)), net.post(1, pair.spec(1, 0))});
    while (net.advance()) {
    }
    CHECK(net.now() < 2 * second);
}
