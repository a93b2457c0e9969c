// Hostile input to Core: forged, replayed, truncated or corrupted datagrams change counters and nothing else.
#include "jobs.hpp"
#include "tapped.hpp"

using namespace storm;
using namespace storm::check;

namespace {

constexpr std::uint64_t cookie = 0x5eed'c0de'1234'5678ULL;

CoreConfig core_config(std::uint16_t world) {
    CoreConfig config;
    config.world = world;
    config.secrets.cookie = cookie;
    return config;
}

// A datagram as one member of the job would make it for another, with arbitrary fields.
Buffer forged(Header header, std::span<const std::byte> payload, std::uint16_t target = 0,
              std::uint64_t its_cookie = cookie) {
    const Seal seal({.cookie = its_cookie, .sealed = false, .links = {}}, header.source);
    header.cookie = seal.visible_cookie();
    Buffer bytes(header_bytes + payload.size());
    const std::span<std::byte, header_bytes> wire(bytes.data(), header_bytes);
    write_header(header, wire);
    std::copy(payload.begin(), payload.end(), bytes.begin() + header_bytes);
    seal.protect(wire, target, seal.payload_check(payload));
    return bytes;
}

using Stranger = std::function<void(Tapped&, const Datagram&, bool delivered)>;

struct Run {
    std::vector<std::vector<float>> out;
    std::vector<Buffer> sent;  // every datagram that any rank sent, in order
    std::vector<Counters> counters;
    Nanos ended{};
};

// A lossy network with a fixed seed. The stranger sees every datagram and may send the ranks anything. What the ranks
// do must not depend on it, down to the last bit on the wire.
Run run_with(const Stranger& stranger, const CoreConfig& config) {
    Tapped net(config);
    Watch watch(net, 3);
    AllReduce job(3, 6'000, 1);
    Run run;
    std::mt19937 random(8);
    bool inside = false;
    net.tap = [&](Datagram& d) {
        run.sent.push_back(d.bytes);
        const bool delivered = random() % 10 != 0;
        if (stranger && !inside) {
            inside = true;
            stranger(net, d, delivered);
            inside = false;
        }
        return delivered;
    };
    for (std::uint32_t seq = 0; seq < 3; ++seq) {
        std::vector<std::uint64_t> ids;
        for (std::uint16_t rank = 0; rank < 3; ++rank)
            ids.push_back(net.post(rank, job.spec(rank, seq, seq == 1 ? Reduce::arrived : Reduce::in_order)));
        watch.wait_all(ids);
    }
    run.out = job.out;
    run.ended = net.now();
    for (std::uint16_t rank = 0; rank < 3; ++rank) run.counters.push_back(net.core(rank).counters());
    return run;
}

// The counters that strangers may change. The `moved` of each run add up to the datagrams from outside.
std::uint64_t refused(const Counters& c) { return c.malformed + c.foreign + c.corrupt + c.duplicates; }

void check_unmoved(const CoreConfig& config, std::uint64_t& injected, const Stranger& stranger) {
    const Run alone = run_with({}, config), disturbed = run_with(stranger, config);
    CHECK(injected > 100);
    CHECK(alone.out == disturbed.out);
    CHECK_EQUAL(alone.ended, disturbed.ended);
    CHECK(alone.sent == disturbed.sent);
    std::uint64_t more = 0;
    for (std::size_t rank = 0; rank < 3; ++rank) {
        const Counters &a = alone.counters[rank], &b = disturbed.counters[rank];
        more += refused(b) - refused(a);
        CHECK_EQUAL(a.authenticated, b.authenticated);
        CHECK_EQUAL(a.unexpected, b.unexpected);
        CHECK_EQUAL(a.late, b.late);
        CHECK_EQUAL(a.repaired, b.repaired);
        CHECK_EQUAL(a.pooled, b.pooled);
        CHECK_EQUAL(a.reports, b.reports);
    }
    CHECK_EQUAL(more, injected);
}

void hand(Tapped& net, std::uint16_t rank, Buffer bytes) { net.core(rank).receive(bytes, net.now()); }

std::vector<CoreConfig> both_kinds() {
    std::vector<CoreConfig> configs{core_config(3)};
    std::string why;
    if (Aead::open(why)) {
        configs.push_back(core_config(3));
        configs.back().secrets.sealed = true;
        configs.back().secrets.links.resize(3);
    }
    return configs;
}

}  // namespace

TEST(random_bytes_change_nothing) {
    for (const CoreConfig& config : both_kinds()) {
        std::mt19937 random(1);
        std::uint64_t injected = 0;
        check_unmoved(config, injected, [&](Tapped& net, const Datagram& d, bool) {
            Buffer noise = random_buffer(random() % 1500, random());
            if (!noise.empty() && random() % 2 == 0)
                noise[0] = static_cast<std::byte>(wire_version << 4 | random() % 16);
            if (noise.size() > 12 && random() % 2 == 0) {
                const auto visible = static_cast<std::uint32_t>(cookie);
                noise[1] = std::byte{};
                noise[2] = static_cast<std::byte>(random() % 3);
                noise[3] = std::byte{};
                std::memcpy(noise.data() + 8, &visible, 4);
            }
            hand(net, d.target, noise);
            ++injected;
        });
    }
}

TEST(datagrams_with_another_jobs_cookie_change_nothing) {
    // Either half may be right: one is in the header, the other goes into the checksum.
    for (const std::uint64_t other : {cookie ^ std::uint64_t{1}, cookie ^ std::uint64_t{1} << 63, ~cookie}) {
        std::uint64_t injected = 0;
        check_unmoved(core_config(3), injected, [&](Tapped& net, const Datagram& d, bool) {
            const Buffer payload = random_buffer(1440, d.header.number);
            Header header = d.header;
            header.number += 1;
            hand(net, d.target, forged(header, payload, d.target, other));
            header.kind = Kind::bye;
            hand(net, d.target, forged(header, {}, d.target, other));
            injected += 2;
        });
    }
}

TEST(replayed_captures_change_nothing) {
    for (const CoreConfig& config : both_kinds()) {
        std::vector<Datagram> captured;
        std::mt19937 random(2);
        std::uint64_t injected = 0;
        check_unmoved(config, injected, [&](Tapped& net, const Datagram& d, bool delivered) {
            // Only what has arrived before is a replay: what was lost on the way would be new.
            for (int i = 0; i < 3 && !captured.empty(); ++i) {
                const Datagram& old = captured[random() % captured.size()];
                if (old.at >= net.now()) continue;
                hand(net, old.target, old.bytes);
                ++injected;
            }
            if (delivered) captured.push_back(d);
        });
    }
}

TEST(truncated_datagrams_change_nothing) {
    for (const CoreConfig& config : both_kinds()) {
        std::mt19937 random(3);
        std::uint64_t injected = 0;
        check_unmoved(config, injected, [&](Tapped& net, const Datagram& d, bool) {
            Buffer part = d.bytes;
            part.resize(random() % part.size());
            hand(net, d.target, part);
            ++injected;
        });
    }
}

TEST(lengthened_datagrams_change_nothing) {
    for (const CoreConfig& config : both_kinds()) {
        std::uint64_t injected = 0;
        check_unmoved(config, injected, [&](Tapped& net, const Datagram& d, bool) {
            Buffer longer = d.bytes;
            longer.push_back(std::byte{});
            hand(net, d.target, longer);
            ++injected;
        });
    }
}

TEST(datagrams_with_any_bit_flipped_change_nothing) {
    for (const CoreConfig& config : both_kinds()) {
        std::mt19937 random(4);
        std::uint64_t injected = 0;
        check_unmoved(config, injected, [&](Tapped& net, const Datagram& d, bool) {
            for (int i = 0; i < 4; ++i) {
                Buffer bent = d.bytes;
                // Headers deserve half of the flips.
                const std::size_t bit = random() % (8 * (i < 2 ? header_bytes : bent.size()));
                bent[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
                hand(net, d.target, bent);
                ++injected;
            }
        });
    }
}

TEST(datagrams_turned_to_another_rank_change_nothing_where_they_are_sealed) {
    for (const CoreConfig& config : both_kinds()) {
        if (!config.secrets.sealed) continue;
        std::uint64_t injected = 0;
        check_unmoved(config, injected, [&](Tapped& net, const Datagram& d, bool) {
            const auto third = static_cast<std::uint16_t>(3 - d.source - d.target);
            hand(net, third, d.bytes);
            ++injected;
        });
    }
}

TEST(chunk_of_the_wrong_size_or_beyond_the_message_is_not_placed) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    Buffer got(3 * 1440 + 100, std::byte{0x55});
    ExchangeSpec receive = exchange_on(0, 0);
    receive.receives.push_back({.peer = 0, .into = got.data(), .bytes = got.size()});
    const std::uint64_t id = net.post(1, receive);
    Header header{.kind = Kind::data, .source = 0, .message_bytes = static_cast<std::uint32_t>(got.size())};
    std::uint64_t unexpected = 0;
    const auto offer = [&](std::uint32_t chunk, std::size_t bytes) {
        ++header.number;
        header.chunk = chunk;
        net.inject(1, forged(header, Buffer(bytes, std::byte{0x77}), 1));
    };
    for (const auto& [chunk, bytes] : std::vector<std::pair<std::uint32_t, std::size_t>>{
             {0, 1439}, {0, 1441}, {0, 0}, {3, 99}, {3, 101}, {3, 1440}, {4, 1440}, {4, 0}, {0xffff'ffff, 1440}}) {
        offer(chunk, bytes);
        CHECK_EQUAL(net.core(1).counters().unexpected, ++unexpected);
    }
    // The second stage of an exchange that has none.
    header.flags = flag_second_stage;
    offer(0, 1440);
    CHECK_EQUAL(net.core(1).counters().unexpected, ++unexpected);
    CHECK(std::all_of(got.begin(), got.end(), [](std::byte b) { return b == std::byte{0x55}; }));
    header.flags = 0;
    for (std::uint32_t chunk = 0; chunk < 3; ++chunk) offer(chunk, 1440);
    CHECK(watch.outcome(1, id) == nullptr);
    offer(3, 100);
    CHECK(watch.outcome(1, id) != nullptr);
    CHECK(std::all_of(got.begin(), got.end(), [](std::byte b) { return b == std::byte{0x77}; }));
}

TEST(hostile_fields_of_a_member_end_in_counters_or_in_its_own_exchange) {
    // A member of the job, which knows its secrets, sends absurd fields. The tensors of no other rank may change.
    Tapped net(core_config(3));
    Watch watch(net, 3);
    std::mt19937 random(6);
    AllToAll honest(3, 1, [](auto, auto) { return std::size_t{50'000}; });
    std::vector<std::uint64_t> ids;
    std::uint32_t number = 1'000'000;
    const auto absurd = [&] {
        constexpr std::array<std::uint32_t, 8> values{0, 1, 34, 35, 0x7fff'ffff, 0x8000'0000, 0xffff'fffe, 0xffff'ffff};
        const auto any = [&] { return values[random() % values.size()]; };
        // The hostile fields name channel 1, which the honest exchange does not use.
        number += 1 + static_cast<std::uint32_t>(random() % 3);
        Header header{.kind = static_cast<Kind>(1 + random() % 9),
                      .flags = static_cast<std::uint8_t>(random() % 8),
                      .source = 2,
                      .number = number,
                      .channel = 1 + any() % 4,
                      .seq = any(),
                      .chunk = any(),
                      .message_bytes = any()};
        if (header.kind == Kind::bye || header.kind == Kind::report) header.kind = Kind::data;
        return forged(header, random_buffer(random() % 2000, random()));
    };
    for (std::uint16_t rank = 0; rank < 3; ++rank) ids.push_back(net.post(rank, honest.spec(rank, 0)));
    // From here on, rank 0 receives nothing from rank 2, only from the forger of its datagrams.
    net.tap = [&](Datagram& d) { return d.source != 2 || d.target != 0; };
    for (int i = 0; i < 5'000; ++i) {
        net.inject(0, absurd());
        if (i % 16 == 0) (void)net.advance();
    }
    const Counters& counters = net.core(0).counters();
    CHECK(counters.pool_bytes <= net.core(0).config().pool_bytes);
    CHECK_EQUAL(counters.datagrams_received >= 5'000, true);
    CHECK(watch.wait(1, ids[1]).status == Status::ok);
    CHECK(honest.got[0][1] == honest.sent[1][0]);
    CHECK(honest.complete(1));
    for (std::size_t at = 0; at < 50'000; ++at)
        CHECK(honest.got[0][2][at] == std::byte{} || honest.got[0][2][at] == honest.sent[2][0][at]);
}

TEST(hostile_reports_of_a_member_acknowledge_no_more_than_was_sent) {
    Tapped net(core_config(2));
    Watch watch(net, 2);
    AllToAll job(2, 1, [](auto, auto) { return std::size_t{100'000}; });
    std::mt19937_64 random(7);
    net.tap = [](Datagram& d) { return d.source != 1; };  // only the forged ones arrive
    const std::uint64_t id = net.post(0, job.spec(0, 0));
    for (std::uint32_t i = 0; i < 2'000; ++i) {
        Report report{.largest = random() % 400,
                      .credit_bytes = static_cast<std::uint32_t>(random() >> (32 + random() % 32)),
                      .overflow = 0,
                      .timed_back = static_cast<std::uint32_t>(random() % 3),
                      .timed_us = static_cast<std::uint32_t>(random()),
                      .held_us = static_cast<std::uint32_t>(random()),
                      .words = static_cast<std::uint32_t>(1 + random() % Report::max_words)};
        for (std::uint64_t& word : report.arrived) word = random() & random() & random();
        if (random() % 4 == 0) report.largest = random() >> random() % 64;
        Buffer body(Report::fixed_bytes + 8 * std::size_t{report.words});
        write_report(report, body);
        if (random() % 8 == 0) body.resize(random() % (body.size() + 1));
        net.inject(0, forged({.kind = Kind::report, .source = 1, .number = 10 + i}, body));
        (void)net.advance();
    }
    // The core may believe that all was delivered. It still waits for what it is to receive, and its timers still work.
    CHECK(watch.outcome(0, id) == nullptr);
    CHECK(net.core(0).round_trip(1) > 0);
    CHECK(watch.wait(0, id, 60 * second).status == Status::peer_silent);
}
