// Drivers of one machine that share memory, several in one process. The thread sanitizer runs this file, too.
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <future>
#include <string>
#include <thread>

#include "io/driver.hpp"
#include "jobs.hpp"
#include "peers/peer.hpp"
#include "tapped.hpp"
#include "team.hpp"

using namespace storm;
using namespace storm::check;

namespace {

// As two processes would, one after the other.
void share_memory(Driver& one, std::uint16_t its_rank, Driver& other, std::uint16_t other_rank) {
    Driver::SharedMemoryOffer from_one = one.offer_shared_memory(other_rank, 1),
                              from_other = other.offer_shared_memory(its_rank, 1);
    one.accept_shared_memory(other_rank, std::move(from_other));
    other.accept_shared_memory(its_rank, std::move(from_one));
    one.use_shared_memory(other_rank, 0);
    other.use_shared_memory(its_rank, 0);
}

void share_memory(Team& team) {
    for (std::uint16_t one = 0; one < team.drivers.size(); ++one) {
        for (std::uint16_t other = 0; other < one; ++other) share_memory(team[one], one, team[other], other);
    }
}

std::uint64_t shared_bytes(Team& team) {
    std::uint64_t sum = 0;
    for (const auto& driver : team.drivers) sum += driver->health().counters.shared_bytes_received;
    return sum;
}

}  // namespace

TEST(drivers_that_share_memory_all_reduce_exactly_and_lossily) {
    for (const std::uint16_t world : std::initializer_list<std::uint16_t>{2, 3, 5}) {
        Team team(world);
        share_memory(team);
        train(team, 5, 100'003);
        train(team, 5, 100'003, {.budget = 1.0}, 5);
        // Twice (n-1)/n of the tensor, by each rank, each time.
        const std::uint64_t expected = 10ULL * 2 * (world - 1) * 100'003 * 4;
        CHECK(shared_bytes(team) > expected * 99 / 100 && shared_bytes(team) < expected * 101 / 100);
    }
}

TEST(what_goes_to_several_ranks_is_written_once) {
    for (const std::uint16_t world : std::initializer_list<std::uint16_t>{2, 4, 9}) {
        Team team(world);
        share_memory(team);
        std::vector<Buffer> sent, got(world, Buffer(std::size_t{world} * 3'000'000));
        for (std::uint16_t rank = 0; rank < world; ++rank) sent.push_back(random_buffer(3'000'000, rank));
        for (std::uint32_t seq = 0; seq < 3; ++seq) {
            std::vector<std::uint64_t> ids;
            for (std::uint16_t rank = 0; rank < world; ++rank) {
                ExchangeSpec spec = exchange_on(0, seq);
                for (std::uint16_t peer = 0; peer < world; ++peer) {
                    if (peer == rank) continue;
                    spec.sends.push_back({.peer = peer, .data = sent[rank].data(), .bytes = sent[rank].size()});
                    spec.receives.push_back(
                        {.peer = peer, .into = got[rank].data() + peer * std::size_t{3'000'000}, .bytes = 3'000'000});
                }
                ids.push_back(team[rank].post(spec));
            }
            for (std::uint16_t rank = 0; rank < world; ++rank) {
                CHECK(wait_for(team[rank], ids[rank]).status == Status::ok);
                for (std::uint16_t peer = 0; peer < world; ++peer) {
                    if (peer == rank) continue;
                    CHECK(std::memcmp(got[rank].data() + peer * std::size_t{3'000'000}, sent[peer].data(), 3'000'000) ==
                          0);
                }
                // The next round has other bytes in the same place.
                std::memset(got[rank].data(), 0, got[rank].size());
            }
            for (std::uint16_t rank = 0; rank < world; ++rank)
                sent[rank] = random_buffer(3'000'000, 100 * seq + rank + 1);
        }
        std::uint64_t once = 0, all = 0;
        for (const auto& driver : team.drivers) {
            once += driver->health().counters.shelved_bytes_sent;
            all += driver->health().counters.shared_bytes_sent;
        }
        CHECK(world == 2 ? once == 0 : once > all / 4);
    }
}

TEST(nothing_is_passed_to_a_rank_that_does_not_read_yet) {
    Team team(2);
    Driver::SharedMemoryOffer from_one = team[1].offer_shared_memory(0, 1),
                              from_zero = team[0].offer_shared_memory(1, 1);
    team[0].accept_shared_memory(1, std::move(from_one));
    team[1].accept_shared_memory(0, std::move(from_zero));
    team[0].use_shared_memory(1, 0);
    train(team, 2, 50'000);
    CHECK_EQUAL(shared_bytes(team), 0U);
    team[1].use_shared_memory(0, 0);
    train(team, 2, 50'000, {}, 2);
    CHECK(shared_bytes(team) > 0);
}

TEST(messages_larger_than_the_ring_pass_with_any_size_of_chunk) {
    for (const std::size_t datagram : std::initializer_list<std::size_t>{256, 1'472, 65'000}) {
        Team team(3, {}, "127.0.0.1", [&](CoreConfig& config) { config.datagram_bytes = datagram; });
        share_memory(team);
        train(team, 2, 1'500'001);
    }
}

TEST(empty_messages_pass_through_shared_memory) {
    Team team(2);
    share_memory(team);
    train(team, 3, 1);
    train(team, 3, 0, {}, 3);
}

TEST(a_rank_may_be_far_ahead_of_another_in_shared_memory) {
    Team team(2);
    share_memory(team);
    constexpr std::uint32_t ahead = 400;
    std::vector<AllToAll> jobs;
    for (std::uint32_t i = 0; i < ahead; ++i) jobs.emplace_back(2, i, [](auto, auto) { return std::size_t{300'000}; });
    std::vector<std::uint64_t> posted;
    for (std::uint32_t i = 0; i < ahead; ++i) posted.push_back(team[0].post(jobs[i].spec(0, 0, {}, i)));
    // The other begins with the last one.
    for (std::uint32_t i = ahead; i-- > 0;)
        CHECK(wait_for(team[1], team[1].post(jobs[i].spec(1, 0, {}, i))).status == Status::ok);
    for (const std::uint64_t id : posted) CHECK(wait_for(team[0], id).status == Status::ok);
    for (const AllToAll& job : jobs) CHECK(job.complete(0) && job.complete(1));
}

TEST(what_was_passed_before_a_goodbye_still_arrives) {
    for (int round = 0; round < 20; ++round) {
        Team team(2);
        share_memory(team);
        AllToAll job(2, 1, [](auto, auto) { return std::size_t{200'000}; });
        ExchangeSpec sends = job.spec(0, 0), receives = job.spec(1, 0);
        sends.receives.clear();
        receives.sends.clear();
        CHECK(wait_for(team[0], team[0].post(sends)).status == Status::ok);
        team[0].close(0);
        CHECK(wait_for(team[1], team[1].post(receives)).status == Status::ok);
        CHECK(job.complete(1));
    }
}

TEST(a_term_that_waits_for_its_turn_is_taken_before_a_goodbye) {
    for (int round = 0; round < 20; ++round) {
        Team team(3);
        share_memory(team);
        AllReduce job(3, 3'000, 1);
        ExchangeSpec collects = job.spec(0, 0, Reduce::in_order);
        collects.sends.clear();
        std::erase_if(collects.receives, [](const ReceiveSpec& receive) { return receive.second_stage; });
        const auto gives = [&](std::uint16_t rank) {
            ExchangeSpec spec = job.spec(rank, 0, Reduce::in_order);
            spec.receives.clear();
            spec.reduction.reset();
            std::erase_if(spec.sends, [](const SendSpec& send) { return send.second_stage || send.peer != 0; });
            return spec;
        };
        const std::uint64_t id = team[0].post(collects);
        // Rank 2 leaves before rank 1 has begun, whose turn is first.
        CHECK(wait_for(team[2], team[2].post(gives(2))).status == Status::ok);
        team[2].close(second / 10);
        CHECK(wait_for(team[1], team[1].post(gives(1))).status == Status::ok);
        CHECK(wait_for(team[0], id).status == Status::ok);
        CHECK(std::memcmp(job.expected().data(), job.out[0].data(), job.bytes(0)) == 0);
    }
}

TEST(a_peer_that_dies_with_a_full_ring_is_named) {
    Team team(2, {}, "127.0.0.1", [](CoreConfig& config) { config.silence = 300 * millisecond; });
    share_memory(team);
    AllToAll job(2, 1, [](auto, auto) { return std::size_t{3'000'000}; });
    const std::uint64_t id = team[0].post(job.spec(0, 0, {}, 0));
    team[1].close(0);
    const Outcome outcome = wait_for(team[0], id);
    CHECK(outcome.status == Status::peer_left);
    CHECK_EQUAL(outcome.peer, 1);
}

// Rank 1 writes invalid data into what it shares with rank 0, while all three ranks run an exchange.
template <class Write>
void check_that_nonsense_costs_its_writer_alone(Write write) {
    // Eager enough to fill the ring at once, so that its writer looks how far its reader has read.
    Team team(3, {}, "127.0.0.1", [](CoreConfig& config) { config.eager_bytes = 16 << 20; });
    share_memory(team[2], 2, team[0], 0);
    share_memory(team[2], 2, team[1], 1);
    Driver::SharedMemoryOffer from_one = team[1].offer_shared_memory(0, 1),
                              from_zero = team[0].offer_shared_memory(1, 1);
    // What rank 1 writes to, and what it reads from.
    const RingMemory to_zero(Descriptor(dup(from_zero.ring.get()))), to_one(Descriptor(dup(from_one.ring.get())));
    team[0].accept_shared_memory(1, std::move(from_one));
    team[1].accept_shared_memory(0, std::move(from_zero));
    team[0].use_shared_memory(1, 0);
    team[1].use_shared_memory(0, 0);
    train(team, 2, 10'000);

    AllToAll job(3, 1, [](auto, auto) { return std::size_t{8'000'000}; });
    const std::uint64_t first = team[0].post(job.spec(0, 2));
    // Again and again: the engine of rank 1 works, and may overwrite it before rank 0 has looked.
    Outcome severed;
    for (int round = 0; round < 5'000; ++round) {
        write(to_zero, to_one);
        if (team[0].wait(first, millisecond, severed)) break;
    }
    const std::uint64_t second = team[1].post(job.spec(1, 2)), third = team[2].post(job.spec(2, 2));
    CHECK(severed.status == Status::memory_broken);
    CHECK_EQUAL(severed.peer, 1);
    for (const Outcome& told : {wait_for(team[1], second), wait_for(team[2], third)}) {
        CHECK(told.status == Status::peer_left || told.status == Status::peer_failed);
        CHECK((told.failure_cause == FailureCause{1, Status::memory_broken}));
    }
    // No rank can exchange anything with both, but with either.
    CHECK(team[0].near() == std::vector<std::uint16_t>{2});
    CHECK(wait_for(team[0], team[0].post(job.spec(0, 3))).status == Status::peer_left);
    for (const auto& [one, other] : {std::pair<std::uint16_t, std::uint16_t>{0, 2}, {1, 2}}) {
        AllToAll pair(3, 2, [](auto, auto) { return std::size_t{300'000}; });
        const auto among = [&](std::uint16_t rank) {
            ExchangeSpec spec = pair.spec(rank, 4, {}, one);
            std::erase_if(spec.sends, [&](const SendSpec& send) { return send.peer != one && send.peer != other; });
            std::erase_if(spec.receives, [&](const ReceiveSpec& got) { return got.peer != one && got.peer != other; });
            return spec;
        };
        const std::uint64_t id = team[one].post(among(one));
        CHECK(wait_for(team[other], team[other].post(among(other))).status == Status::ok);
        CHECK(wait_for(team[one], id).status == Status::ok);
        CHECK(pair.got[one][other] == pair.sent[other][one] && pair.got[other][one] == pair.sent[one][other]);
    }
}

TEST(an_index_that_is_nonsense_costs_only_the_rank_that_wrote_it) {
    check_that_nonsense_costs_its_writer_alone([](const RingMemory& to_zero, const RingMemory&) {
        to_zero.shared().tail.store(to_zero.shared().tail.load() + RingMemory::most_bytes + 1);
    });
    check_that_nonsense_costs_its_writer_alone([](const RingMemory& to_zero, const RingMemory&) {
        to_zero.shared().tail.store(to_zero.shared().tail.load() - 64);
    });
    check_that_nonsense_costs_its_writer_alone([](const RingMemory& to_zero, const RingMemory&) {
        to_zero.shared().tail.store(to_zero.shared().tail.load() + 1);  // less than the head of a record
    });
    check_that_nonsense_costs_its_writer_alone(
        [](const RingMemory&, const RingMemory& to_one) { to_one.shared().head.store(~std::uint64_t{0} / 2); });
}

TEST(a_record_that_is_nonsense_costs_only_the_rank_that_wrote_it) {
    const auto overwrite = [](const RingMemory& ring, const Record& record, std::size_t bytes) {
        const std::uint64_t tail = ring.shared().tail.load();
        record.write(ring.at(tail));
        ring.shared().tail.store(tail + bytes);
    };
    check_that_nonsense_costs_its_writer_alone([&](const RingMemory& to_zero, const RingMemory&) {
        overwrite(to_zero, {.kind = Kind::bye}, Record::size(0));
    });
    check_that_nonsense_costs_its_writer_alone([&](const RingMemory& to_zero, const RingMemory&) {
        overwrite(to_zero, {.bytes = 0xffff'ffff, .kind = Kind::data}, Record::size(1'000));
    });
    // Beyond the end of the broadcast buffer, by a little and by so much that the sum has more than 32 bits.
    for (const std::uint32_t position : {std::uint32_t{BroadcastMemory::capacity - 999}, 0xffff'fff0U}) {
        check_that_nonsense_costs_its_writer_alone([&](const RingMemory& to_zero, const RingMemory&) {
            overwrite(to_zero, {.bytes = 1'000, .kind = Kind::data, .in_broadcast_buffer = 1, .position = position},
                      Record::size(0));
        });
    }
}

TEST(a_record_that_means_nothing_is_counted_and_passed_over) {
    Team team(2);
    Driver::SharedMemoryOffer from_one = team[1].offer_shared_memory(0, 1),
                              from_zero = team[0].offer_shared_memory(1, 1);
    const RingMemory to_zero(Descriptor(dup(from_zero.ring.get())));
    team[0].accept_shared_memory(1, std::move(from_one));
    team[0].use_shared_memory(1, 0);
    AllToAll job(2, 1, [](auto, auto) { return std::size_t{1'000}; });
    const std::uint64_t id = team[0].post(job.spec(0, 0));
    // No such chunk, a stage that the exchange does not have, and unknown flags.
    std::uint64_t tail = 0;
    for (const Record& record : {Record{.chunk = 9, .message_bytes = 1'000, .kind = Kind::data},
                                 Record{.message_bytes = 1'000, .kind = Kind::data, .flags = 0xff},
                                 Record{.kind = Kind::end, .flags = 0xff}}) {
        record.write(to_zero.at(tail));
        tail += Record::size(0);
    }
    to_zero.shared().tail.store(tail);
    team[0].post(job.spec(0, 1));  // looks at its rings
    team[1].accept_shared_memory(0, std::move(from_zero));
    CHECK(wait_for(team[1], team[1].post(job.spec(1, 0))).status == Status::ok);
    CHECK(wait_for(team[0], id).status == Status::ok);
    CHECK(job.complete(0));
    CHECK_EQUAL(team[0].health().counters.unexpected, 2U);
}

TEST(injected_faults_have_data_travel_by_datagram) {
    Team team(2);
    share_memory(team);
    FaultSettings faults;
    faults.default_link.loss = 0.1;
    Driver::set_faults(std::make_shared<const FaultSettings>(faults));
    const std::uint64_t before = shared_bytes(team);
    train(team, 3, 300'000);
    CHECK_EQUAL(shared_bytes(team), before);
    CHECK(team[0].health().faults.lost + team[1].health().faults.lost > 0);
    Driver::set_faults(nullptr);
    train(team, 3, 300'000, {}, 3);
    CHECK(shared_bytes(team) > before);
}

TEST(several_threads_pass_data_at_once) {
    Team team(3);
    share_memory(team);
    std::vector<std::future<void>> threads;
    for (std::uint32_t thread = 0; thread < 4; ++thread) {
        threads.push_back(on_thread([&, thread] { train(team, 6, 70'001 + thread, {}, 100 * thread); }));
    }
    for (auto& thread : threads) thread.get();
}

TEST(idle_drivers_that_share_memory_use_no_processor_time) {
    Team team(3);
    share_memory(team);
    train(team, 2, 10'000);
    const std::clock_t before = std::clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    CHECK(std::clock() - before < CLOCKS_PER_SEC / 20);
}

TEST(memory_and_descriptors_are_given_back) {
    const std::size_t before = descriptors_now();
    for (int round = 0; round < 3; ++round) {
        Team team(3);
        share_memory(team);
        train(team, 1, 10'000);
    }
    CHECK_EQUAL(descriptors_now(), before);
}

TEST(a_driver_that_is_closed_keeps_no_shared_memory) {
    const auto mapped = [] {
        std::ifstream maps("/proc/self/maps");
        std::size_t rings = 0;
        for (std::string line; std::getline(maps, line);) rings += line.find("memfd:stormtorch") != std::string::npos;
        return rings;
    };
    Team team(3);
    share_memory(team);
    train(team, 1, 10'000);
    CHECK(mapped() > 0);
    for (const auto& driver : team.drivers) driver->close(0);
    CHECK_EQUAL(mapped(), 0U);
}

TEST(a_descriptor_that_is_no_ring_is_refused) {
    Team team(2);
    Driver::SharedMemoryOffer offer = team[0].offer_shared_memory(1, 1);
    const auto copy = [](const Descriptor& of) { return Descriptor(dup(of.get())); };
    const auto refused = [&](int fd) {
        try {
            team[1].accept_shared_memory(0, {.ring = Descriptor(fd),
                                             .doorbell = copy(offer.doorbell),
                                             .broadcast_buffer = copy(offer.broadcast_buffer)});
        } catch (const std::exception&) {
            return true;
        }
        return false;
    };
    CHECK(refused(dup(0)));
    const int unsealed = memfd_create("other", MFD_CLOEXEC);
    CHECK(ftruncate(unsealed, 64 << 10) == 0);
    CHECK(refused(unsealed));
    CHECK(refused(dup(offer.broadcast_buffer.get())));
    try {
        team[1].accept_shared_memory(
            0, {.ring = copy(offer.ring), .doorbell = copy(offer.doorbell), .broadcast_buffer = copy(offer.ring)});
        CHECK(false);
    } catch (const std::invalid_argument&) {
    }
    try {
        team[1].use_shared_memory(0, 0);
        CHECK(false);
    } catch (const std::invalid_argument&) {
    }
}

TEST(a_goodbye_to_a_rank_that_wrote_nonsense_is_said_again_until_it_is_heard_but_not_for_ever) {
    for (const int deaf : {2, 1'000}) {
        CoreConfig config;
        config.world = 2;
        config.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
        Tapped net(config);
        Watch<Tapped> watch(net, 2);
        int goodbyes = 0;
        net.tap = [&](Datagram& d) { return d.header.kind != Kind::bye || ++goodbyes > deaf; };
        auto to_zero = std::make_unique<RingMemory>(1);
        const RingMemory nonsense(Descriptor(dup(to_zero->file())));
        net.core(0).connect(1, 0,
                            std::make_unique<SharedMemoryChannel>(std::make_unique<RingMemory>(1), std::move(to_zero),
                                                                  std::make_unique<BroadcastMemory>()),
                            net.now());
        nonsense.shared().tail.store(~0ULL);
        (void)net.core(0).pass(net.now());
        CHECK(net.core(0).near().empty());
        net.cancel(0, 0);  // sends what is to be sent
        net.run(60 * second);
        if (deaf > 2) {
            CHECK(goodbyes > 3 && goodbyes <= 1 + static_cast<int>(Peer::most_goodbye_repeats));
            continue;
        }
        CHECK_EQUAL(goodbyes, 3);
        AllToAll job(2, 1, [](auto, auto) { return std::size_t{100}; });
        CHECK(watch.wait(1, net.post(1, job.spec(1, 0))).status == Status::peer_left);
    }
}
