// Multipath in Core: chunks are divided by the rates of the paths, and a path may go down and recover.
#include <array>

#include "jobs.hpp"
#include "sim/sim.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr double mbit = 1e6 / 8;
constexpr std::uint64_t cookie = 0x5eed'c0de'1234'5678ULL;

SimConfig two_paths(bool sealed = false, std::uint16_t world = 2) {
    SimConfig config;
    config.core.world = world;
    config.core.paths = 2;
    config.core.rate_mode = RateMode::automatic;
    config.core.secrets.cookie = cookie;
    config.delay = 5 * millisecond;
    config.bytes_per_s = 100 * mbit;
    if (sealed) {
        config.core.secrets.sealed = true;
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            config.core.secrets.links.emplace_back().opening.fill(static_cast<std::byte>(rank + 1));
        }
    }
    return config;
}

// Exchanges one after the other, of messages of the same size between all ranks.
class Exchanging {
public:
    Exchanging(Sim& sim, std::size_t bytes, std::uint16_t world = 2, StageSpec stage = {})
        : sim_(sim), watch_(sim, world), bytes_(bytes), world_(world), stage_(stage) {}

    // Begins the next one; `finish` must follow.
    void begin() {
        job_.emplace(world_, 11 + seq_, [this](auto, auto) { return bytes_; });
        ids_.clear();
        began_ = sim_.now();
        for (std::uint16_t rank = 0; rank < world_; ++rank)
            ids_.push_back(sim_.post(rank, job_->spec(rank, seq_, stage_)));
        ++seq_;
    }
    // Runs to its end, checks that nothing is missing or wrong, and returns how long it took in seconds.
    double finish() {
        watch_.wait_all(ids_);
        for (std::uint16_t rank = 0; rank < world_; ++rank) CHECK(stage_.budget > 0 || job_->complete(rank));
        return static_cast<double>(sim_.now() - began_) * 1e-9;
    }
    double run() {
        begin();
        return finish();
    }
    void advance(Nanos time) {
        const Nanos until = sim_.now() + time;
        while (sim_.now() < until && sim_.advance()) watch_.collect();
    }

private:
    Sim& sim_;
    Watch<Sim> watch_;
    std::size_t bytes_;
    std::uint16_t world_;
    StageSpec stage_;
    std::uint32_t seq_{};
    Nanos began_{};
    std::optional<AllToAll> job_;
    std::vector<std::uint64_t> ids_;
};

// How long the latest of several exchanges takes.
double steady_s(Sim& sim, std::size_t bytes) {
    Exchanging exchanging(sim, bytes);
    double latest = 0;
    for (int i = 0; i < 4; ++i) latest = exchanging.run();
    return latest;
}

constexpr std::size_t large = 4 << 20;

}  // namespace

TEST(messages_are_divided_between_paths_by_what_they_carry) {
    for (const bool sealed : {false, true}) {
        SimConfig config = two_paths(sealed);
        Sim both(config);
        both.set_path(1, {.bytes_per_s = 50 * mbit});
        const double with_both = steady_s(both, large);
        const std::vector<PathHealth> paths = both.core(0).paths_to(1);
        CHECK_EQUAL(paths.size(), 2U);
        CHECK(paths[0].up && paths[1].up && paths[0].outages + paths[1].outages == 0);
        // About two to one.
        CHECK(paths[0].bytes_sent > 3 * paths[1].bytes_sent / 2 && paths[0].bytes_sent < 3 * paths[1].bytes_sent);

        config.core.paths = 1;
        Sim one(config);
        CHECK(1.35 * with_both < steady_s(one, large));
    }
}

TEST(path_that_loses_much_does_not_slow_the_other_down) {
    SimConfig config = two_paths();
    Sim sim(config);
    sim.set_path(1, {.loss = 0.2});
    const double with_both = steady_s(sim, large);
    CHECK(sim.core(0).loss_from(1) > 0.05);
    config.core.paths = 1;
    Sim one(config);
    CHECK(1.4 * with_both < steady_s(one, large));
}

TEST(path_that_dies_costs_a_few_round_trips_and_is_used_again_when_it_returns) {
    for (const std::size_t dying : {std::size_t{0}, std::size_t{1}}) {
        for (const bool sealed : {false, true}) {
            Sim sim(two_paths(sealed));
            Exchanging exchanging(sim, large);
            double healthy = 0;
            for (int i = 0; i < 3; ++i) healthy = exchanging.run();
            exchanging.begin();
            exchanging.advance(static_cast<Nanos>(healthy * 0.4 * 1e9));
            sim.set_path(dying, {.unreachable = true});
            const double hit = exchanging.finish();
            const double alone = exchanging.run();
            // Before it died, both carried; afterwards one did.
            CHECK(hit < 0.4 * healthy + 0.65 * alone + 0.15);
            CHECK(!sim.core(0).paths_to(1)[dying].up && sim.core(0).paths_to(1)[1 - dying].up);
            CHECK_EQUAL(sim.core(0).counters().path_outages, 1U);
            CHECK(alone > 1.5 * healthy);
            const std::uint64_t before = sim.core(0).paths_to(1)[dying].bytes_sent;
            exchanging.advance(5 * second);
            // It is probed about twice a second, and nothing else.
            const std::uint64_t asked = sim.core(0).paths_to(1)[dying].bytes_sent - before;
            CHECK(asked > 200 && asked < 5'000);

            sim.set_path(dying, {});
            exchanging.advance(2 * second);
            CHECK(sim.core(0).paths_to(1)[dying].up && sim.core(1).paths_to(0)[dying].up);
            exchanging.run();
            CHECK(exchanging.run() < 1.2 * healthy);
        }
    }
}

TEST(end_of_a_message_that_went_into_a_dying_path_comes_over_the_other) {
    Sim sim(two_paths());
    Exchanging exchanging(sim, 64 << 10);
    for (int i = 0; i < 8; ++i) exchanging.run();
    for (std::size_t dying = 0; dying < 2; ++dying) {
        exchanging.begin();
        sim.set_path(dying, {.unreachable = true});
        CHECK(exchanging.finish() < 0.2);
        CHECK(exchanging.run() < 0.1);
        sim.set_path(dying, {});
        exchanging.advance(2 * second);
    }
}

TEST(peer_is_silent_only_when_all_its_paths_are) {
    SimConfig config = two_paths();
    config.core.silence = 2 * second;
    Sim sim(config);
    Exchanging exchanging(sim, 1 << 20);
    exchanging.run();
    sim.set_path(0, {.unreachable = true});
    exchanging.advance(5 * second);
    exchanging.run();
    sim.set_path(1, {.unreachable = true});
    Buffer sent(1000), got(1000);
    ExchangeSpec spec = exchange_on(9, 0);
    spec.sends.push_back({.peer = 1, .data = sent.data(), .bytes = sent.size()});
    Watch watch(sim, 2);
    const std::uint64_t id = sim.post(0, spec);
    CHECK(watch.wait(0, id).status == Status::peer_silent);
    // Whichever path returns first ends the outage, also the one that went down before.
    sim.set_path(0, {});
    for (int i = 0; i < 2000 && sim.advance() && !sim.core(0).paths_to(1)[0].up; ++i) {
    }
    CHECK(sim.core(0).paths_to(1)[0].up);
}

TEST(lossy_messages_over_paths_of_different_length_lose_no_more_than_paths_do) {
    Sim sim(two_paths());
    sim.set_path(1, {.delay = 40 * millisecond});
    Exchanging exact(sim, large);
    for (int i = 0; i < 3; ++i) exact.run();
    Watch watch(sim, 2);
    AllToAll job(2, 5, [](auto, auto) { return large; }), next(2, 6, [](auto, auto) { return large; });
    std::vector<std::uint64_t> ids, next_ids;
    // Something follows, so that the longer path is in use up to the end.
    for (std::uint16_t rank = 0; rank < 2; ++rank) {
        ids.push_back(sim.post(rank, job.spec(rank, 0, {.budget = 0.5}, 3)));
        next_ids.push_back(sim.post(rank, next.spec(rank, 0, {}, 4)));
    }
    watch.wait_all(ids);
    watch.wait_all(next_ids);
    for (const Arrival& arrival : watch.outcome(0, ids[0])->arrivals) {
        // Nothing is lost, so what is late on the longer path must be waited for.
        CHECK(arrival.missing_bytes < large / 200);
    }
    CHECK(sim.core(0).paths_to(1)[1].bytes_sent > large / 4);
}

TEST(small_messages_do_not_wait_for_the_longer_path) {
    SimConfig config = two_paths();
    Sim sim(config);
    sim.set_path(1, {.delay = 50 * millisecond});
    Exchanging exchanging(sim, 32 << 10);
    double latest = 0;
    for (int i = 0; i < 10; ++i) latest = exchanging.run();
    CHECK(latest < 0.03);
}

TEST(rank_that_leaves_says_what_arrived_over_every_path) {
    Sim sim(two_paths());
    Exchanging warm(sim, 1 << 20);
    warm.run();
    Watch watch(sim, 2);
    const Buffer sent = random_buffer(400'000, 3);
    Buffer got(sent.size());
    ExchangeSpec out = exchange_on(9, 0), in = exchange_on(9, 0);
    out.sends.push_back({.peer = 1, .data = sent.data(), .bytes = sent.size()});
    in.receives.push_back({.peer = 0, .into = got.data(), .bytes = got.size()});
    const std::uint64_t sending = sim.post(0, out), receiving = sim.post(1, in);
    watch.wait(1, receiving);
    // The last reports on one path are lost, and with them the path.
    sim.set_path(1, {.unreachable = true});
    sim.core(1).leave();
    sim.cancel(1, receiving);  // it has ended: this only sends what waits
    CHECK(watch.wait(0, sending).status == Status::ok);
    CHECK(got == sent);
}

TEST(peers_use_the_paths_that_both_have) {
    SimConfig config = two_paths();
    config.core.world = 3;
    config.core.peer_paths = {2, 2, 1};
    Sim sim(config);
    Exchanging exchanging(sim, 1 << 20, 3);
    exchanging.run();
    CHECK_EQUAL(sim.core(0).paths_to(1).size(), 2U);
    CHECK_EQUAL(sim.core(0).paths_to(2).size(), 1U);
    CHECK(sim.core(0).paths_to(0).empty());
}

TEST(datagram_of_a_path_that_does_not_exist_is_foreign) {
    for (const bool sealed : {false, true}) {
        SimConfig config = two_paths(sealed);
        Sim sim(config);
        CoreConfig more = config.core;
        more.rank = 1;
        more.paths = 4;
        Sim::seal_as(more.secrets, 1);
        Core stranger(more, sim.now());  // knows all secrets, but has more paths
        Batch batch;
        std::array<int, 4> sent{};
        while (stranger.transmit(batch, sim.now())) {
            Buffer bytes;
            for (const iovec& part : batch.parts()) {
                const auto* from = static_cast<const std::byte*>(part.iov_base);
                bytes.insert(bytes.end(), from, from + part.iov_len);
            }
            const Counters before = sim.core(0).counters();
            sim.core(0).receive(bytes, sim.now());
            const Counters& after = sim.core(0).counters();
            CHECK_EQUAL(after.foreign - before.foreign, batch.path() < 2 ? 0U : 1U);
            CHECK_EQUAL(after.authenticated - before.authenticated, batch.path() < 2 ? 1U : 0U);
            ++sent[batch.path()];
        }
        for (const int each : sent) CHECK(each > 0);
    }
}

TEST(same_number_on_two_paths_is_sealed_by_different_nonces) {
    const SimConfig config = two_paths(true);
    Secrets secrets = config.core.secrets;
    Sim::seal_as(secrets, 0);
    Seal seal(secrets, 0, 2);
    const Buffer payload(64);
    std::vector<Buffer> sealed;
    for (const std::uint16_t source : {std::uint16_t{0}, std::uint16_t{2}}) {
        std::array<std::byte, header_bytes> header{};
        write_header({.kind = Kind::data, .source = source, .cookie = seal.visible_cookie(), .number = 7}, header);
        seal.encrypt(header, payload, 1, 7, sealed.emplace_back(payload.size() + tag_bytes));
    }
    // Under one nonce, equal bytes would become equal bytes.
    CHECK(!std::equal(payload.begin(), payload.end(), sealed[0].begin()));
    CHECK(!std::equal(sealed[0].begin(), sealed[0].begin() + 64, sealed[1].begin()));
}

TEST(readmitted_process_may_have_another_number_of_paths) {
    SimConfig config = two_paths();
    Sim sim(config);
    Exchanging exchanging(sim, 1 << 20);
    exchanging.run();
    sim.core(0).readmit(1, 1, std::nullopt, sim.now(), 1);
    CHECK_EQUAL(sim.core(0).paths_to(1).size(), 1U);
    sim.core(0).readmit(1, 2, std::nullopt, sim.now(), 4);
    CHECK_EQUAL(sim.core(0).paths_to(1).size(), 2U);
}

TEST(number_of_paths_is_checked) {
    const auto refused = [](std::uint8_t paths, std::uint16_t world) {
        CoreConfig config;
        config.world = world;
        config.paths = paths;
        try {
            const Core core(config, second);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(refused(0, 2) && refused(5, 2) && refused(4, 20'000));
    CHECK(!refused(4, 2));
}
