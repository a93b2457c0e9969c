// Unexpected messages in Core, for exchanges that ranks post at different times: which chunks wait in the pool, which
// are refused, how much memory a peer can claim, and how long buffers are in use.
#include <memory>

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

ExchangeSpec send_to(std::uint16_t peer, const Buffer& message, std::uint32_t seq, StageSpec stage = {}) {
    ExchangeSpec spec = exchange_on(0, seq, stage);
    spec.sends.push_back({.peer = peer, .data = message.data(), .bytes = message.size()});
    return spec;
}

ExchangeSpec receive_from(std::uint16_t peer, Buffer& into, std::uint32_t seq, StageSpec stage = {}) {
    ExchangeSpec spec = exchange_on(0, seq, stage);
    spec.receives.push_back({.peer = peer, .into = into.data(), .bytes = into.size()});
    return spec;
}

}  // namespace

TEST(chunks_of_an_exchange_that_is_not_posted_yet_wait_in_the_pool) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    const Buffer sent = random_buffer(100'000, 1);
    Buffer got(sent.size());
    const std::uint64_t sender = net.post(0, send_to(1, sent, 0));
    // Within the eager bytes: the sender need not wait for the receiver.
    CHECK(watch.wait(0, sender).status == Status::ok);
    const Counters& counters = net.core(1).counters();
    CHECK_EQUAL(counters.pooled, 70U);
    CHECK(counters.pool_bytes >= 100'000);
    const std::uint64_t receiver = net.post(1, receive_from(0, got, 0));
    CHECK(watch.outcome(1, receiver) != nullptr);  // all had arrived
    CHECK(got == sent);
    CHECK_EQUAL(counters.pool_bytes, 0U);
    CHECK(counters.pool_peak_bytes >= 100'000);
}

TEST(end_that_came_before_the_exchange_was_posted_is_remembered) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    const Buffer sent = random_buffer(10 * 1440, 1);
    Buffer got(sent.size());
    net.tap = [](Datagram& d) { return d.header.kind != Kind::data || d.header.chunk != 4; };
    const std::uint64_t sender = net.post(0, send_to(1, sent, 0, {.budget = 0.5}));
    CHECK(watch.wait(0, sender).status == Status::ok);
    net.run(100 * millisecond);
    const std::uint64_t receiver = net.post(1, receive_from(0, got, 0, {.budget = 0.5}));
    const Outcome& outcome = watch.wait(1, receiver);
    CHECK_EQUAL(outcome.arrivals[0].arrived, 9U);
    CHECK(outcome.ended - outcome.started <= 5 * millisecond);
}

TEST(late_exchange_completes_in_a_storm_whoever_is_late) {
    for (std::uint16_t late = 0; late < 3; ++late) {
        SimConfig config;
        config.core = core_config(3);
        config.faults.seed = late;
        config.faults.default_link = {.loss = 0.2, .duplicate = 0.1, .reorder = 0.1, .corrupt = 0.02};
        Sim sim(config);
        Watch watch(sim, 3);
        AllReduce job(3, 400'000, 2);  // a shard is more than the eager bytes
        std::vector<std::uint64_t> ids(3);
        for (std::uint16_t rank = 0; rank < 3; ++rank) {
            if (rank != late) ids[rank] = sim.post(rank, job.spec(rank, 0, Reduce::in_order));
        }
        for (const Nanos until = sim.now() + second; sim.now() < until;) CHECK(sim.advance());
        ids[late] = sim.post(late, job.spec(late, 0, Reduce::in_order));
        watch.wait_all(ids);
        job.check_exact();
    }
}

TEST(sender_waits_as_long_as_it_takes_for_a_receiver_that_lives) {
    // Nothing is in flight while it waits. That does not make the peer count as lost.
    Tapped net(core_config(2));
    Watch watch(net, 2);
    const Buffer sent = random_buffer(1'000'000, 2);
    Buffer got(sent.size());
    const std::uint64_t sender = net.post(0, send_to(1, sent, 0));
    net.run(5 * net.core(0).config().silence);
    CHECK(watch.outcome(0, sender) == nullptr);
    const std::uint64_t receiver = net.post(1, receive_from(0, got, 0));
    watch.wait_all({sender, receiver});
    CHECK(got == sent);
}

TEST(receiver_waits_as_long_as_it_takes_for_a_sender_that_lives) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    const Buffer sent = random_buffer(1'000'000, 2);
    Buffer got(sent.size());
    const std::uint64_t receiver = net.post(1, receive_from(0, got, 0));
    net.run(5 * net.core(0).config().silence);
    CHECK(watch.outcome(1, receiver) == nullptr);
    CHECK(net.core(1).counters().asks < 150);  // in fifty seconds
    const std::uint64_t sender = net.post(0, send_to(1, sent, 0));
    watch.wait_all({sender, receiver});
    CHECK(got == sent);
}

TEST(full_pool_refuses_and_what_was_refused_comes_again_after_posting) {
    for (const double loss : {0.0, 0.2}) {
        CoreConfig config = core_config(2);
        config.pool_bytes = 50'000;
        Tapped net(config);
        Watch watch(net, 2);
        std::mt19937 random(5);
        net.tap = [&](Datagram&) { return static_cast<double>(random() % 1000) >= 1000 * loss; };
        std::vector<Buffer> sent, got;
        std::vector<std::uint64_t> senders, receivers;
        for (std::uint32_t i = 0; i < 5; ++i) {
            sent.push_back(random_buffer(30'000, i));
            got.emplace_back(30'000);
            senders.push_back(net.post(0, send_to(1, sent[i], i)));
        }
        net.run(3 * second);
        const Counters& counters = net.core(1).counters();
        CHECK(counters.pool_refused > 0);
        CHECK(counters.pool_peak_bytes <= 50'000);
        // A sender that receives `wait` does so: it does not retransmit at full rate.
        CHECK(counters.pool_refused < 400);
        const Nanos posted_at = net.now();
        for (std::uint32_t i = 0; i < 5; ++i) receivers.push_back(net.post(1, receive_from(0, got[i], i)));
        for (std::uint32_t i = 0; i < 5; ++i) {
            CHECK(watch.wait(0, senders[i], 5 * second).status == Status::ok);
            CHECK(watch.wait(1, receivers[i], 5 * second).status == Status::ok);
            CHECK(got[i] == sent[i]);
        }
        // After posting, the receiver sends `ready` at once, without a timer.
        if (loss == 0) CHECK(net.now() - posted_at < 5 * millisecond);
        CHECK_EQUAL(counters.pool_bytes, 0U);
    }
}

TEST(pool_without_any_room_delays_and_does_not_break) {
    CoreConfig config = core_config(3);
    config.pool_bytes = 0;
    SimConfig network;
    network.core = config;
    network.faults.default_link.loss = 0.1;
    Sim sim(network);
    Watch watch(sim, 3);
    for (std::uint32_t round = 0; round < 4; ++round) {
        AllReduce job(3, 50'000, round);
        std::vector<std::uint64_t> ids(3);
        for (std::uint16_t step = 0; step < 3; ++step) {
            const auto rank = static_cast<std::uint16_t>((round + step) % 3);
            ids[rank] = sim.post(rank, job.spec(rank, round, Reduce::in_order));
            for (const Nanos until = sim.now() + 30 * millisecond; sim.now() < until && sim.advance();) {
            }
        }
        watch.wait_all(ids);
        job.check_exact();
    }
}

TEST(flood_from_an_insider_cannot_exceed_the_pool) {
    // A peer of the job that sends without end, for exchanges that no rank will ever post.
    CoreConfig config = core_config(3);
    config.pool_bytes = 100'000;
    Tapped net(config);
    Watch watch(net, 3);
    const Buffer message = random_buffer(10'000, 3);
    std::uint64_t sent = 0;
    for (std::uint32_t seq = 0; seq < 500; ++seq) {
        ExchangeSpec spec = send_to(1, message, seq);
        spec.channel = seq % 7;
        spec.seq = seq / 7;
        net.post(0, spec);
        net.run(millisecond);
        sent += message.size();
        CHECK(net.core(1).counters().pool_bytes <= 50'000);  // its share: a third rank may need the rest
    }
    CHECK(sent > 40 * net.core(1).counters().pool_peak_bytes);
    // There is still space for the third rank's chunks.
    Buffer got(message.size());
    const std::uint64_t sender = net.post(2, [&] {
        ExchangeSpec spec = send_to(1, message, 0);
        spec.channel = 99;
        return spec;
    }());
    CHECK(watch.wait(2, sender, second).status == Status::ok);
    ExchangeSpec spec = receive_from(2, got, 0);
    spec.channel = 99;
    CHECK(watch.wait(1, net.post(1, spec), second).status == Status::ok);
    CHECK(got == message);
}

TEST(send_buffer_is_not_read_after_its_exchange_has_ended) {
    // Batches wait in the socket for a while. Exchanges end by acknowledgement, by deadline and by cancelling, and
    // their memory is freed at once. The address sanitizer checks it.
    for (const double loss : {0.0, 0.3}) {
        CoreConfig config = core_config(2);
        config.receive_buffer = 64 << 10;
        Tapped net(config);
        net.socket_delay = 300 * microsecond;
        std::mt19937 random(9);
        net.tap = [&](Datagram&) { return static_cast<double>(random() % 1000) >= 1000 * loss; };
        struct Running {
            std::unique_ptr<std::byte[]> sent, got;
        };
        std::array<std::map<std::uint64_t, Running>, 2> running;
        const auto collect = [&] {
            for (std::uint16_t rank = 0; rank < 2; ++rank) {
                for (const auto& finished : net.take_finished(rank)) CHECK_EQUAL(running[rank].erase(finished.id), 1U);
            }
        };
        for (std::uint32_t seq = 0; seq < 300; ++seq) {
            const std::size_t bytes = 1 + random() % 40'000;
            const StageSpec stage{.budget = static_cast<double>(seq % 3) / 2,
                                  .deadline = seq % 4 == 0 ? 2 * millisecond : never};
            for (std::uint16_t rank = 0; rank < 2; ++rank) {
                Running memory{.sent = std::make_unique<std::byte[]>(bytes),
                               .got = std::make_unique<std::byte[]>(bytes)};
                ExchangeSpec spec = exchange_on(0, seq, stage);
                const auto peer = static_cast<std::uint16_t>(1 - rank);
                spec.sends.push_back({.peer = peer, .data = memory.sent.get(), .bytes = bytes});
                spec.receives.push_back({.peer = peer, .into = memory.got.get(), .bytes = bytes});
                const std::uint64_t id = net.post(rank, spec);
                running[rank].emplace(id, std::move(memory));
                if (seq % 5 == 0) {
                    net.run(static_cast<Nanos>(random() % 400) * microsecond);
                    net.cancel(rank, id);
                }
                collect();
            }
            for (int i = 0; i < 30; ++i) {
                (void)net.advance();
                collect();
            }
        }
        for (int i = 0; i < 200'000 && !(running[0].empty() && running[1].empty()); ++i) {
            (void)net.advance();
            collect();
        }
        CHECK(running[0].empty() && running[1].empty());
    }
}
