// Ranks of one job as real cores on a network that the fuzzer's program controls. Afterwards the network becomes
// honest: then every exchange must end, and exact ones must be exact.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "coding/coding.hpp"
#include "core/core.hpp"
#include "exchange/batch.hpp"
#include "plans.hpp"
#include "program.hpp"

namespace storm::fuzz {

inline constexpr std::uint64_t cookie = 0x5eed'c0de'1234'5678ULL;
inline constexpr std::size_t datagram_bytes = 128, chunk_bytes = 96, least_path_bytes = 96;
inline constexpr std::uint32_t channels = 2, most_posts = 12;
inline constexpr Nanos silence = 2 * second;

struct Datagram {
    std::uint16_t source{}, target{};
    std::vector<std::byte> bytes;
};

class World {
public:
    // `pool_bytes`: half of it is memory for what is kept until a block can be decoded.
    World(std::uint16_t size, bool forgery_allowed, std::size_t pool_bytes, std::uint8_t paths = 1)
        : world_(size),
          paths_(paths),
          forgery_allowed_(forgery_allowed),
          pool_bytes_(pool_bytes),
          first_plan_(size),
          incarnations_(size),
          hostile_(size) {
        for (std::uint16_t rank = 0; rank < world_; ++rank) {
            cores_.push_back(make_core(rank));
            posted_.emplace_back();
            left_.push_back(false);
        }
    }

    void step(Program& program) {
        const std::uint8_t operation = program.byte();
        const auto rank = static_cast<std::uint16_t>(program.byte() % world_);
        switch (operation % 12) {
            case 0:
            case 1: post(rank, program.byte()); break;
            case 2: plan(program); break;
            case 3:
                for (int i = 0; i < 8; ++i) deliver(program.byte());
                break;
            case 4: deliver(program.byte()); break;
            case 5: drop(program.byte()); break;
            case 6: duplicate(program.byte()); break;
            case 7: flip_bit(program); break;
            case 8:
                if (forgery_allowed_ && operation / 12 % 2 == 0) forge(program, rank);
                if (forgery_allowed_ && operation / 12 % 2 == 1) forge_parity(program, rank);
                break;
            case 9: wait(Nanos{program.byte()} * program.byte() * 20 * microsecond); break;
            case 10:
                if (!posted_[rank].empty()) cancel(rank, program.byte() % posted_[rank].size());
                break;
            default:
                if (operation % 5 == 0) leave(rank);
                if (operation % 5 == 1) restart(rank);
                // What every path carries from now on, also when the network has become honest.
                if (operation % 5 == 2) path_mtu_ = least_path_bytes + program.byte() % 33;
                // One path carries nothing from now on, or all carry something.
                if (operation % 5 == 3 && paths_ > 1) dead_path_ = program.byte() % (paths_ + 1U);
                break;
        }
        check();
    }

    // The network is honest from here on. Every rank posts what any rank has posted, and all of it must end.
    void finish() {
        for (std::uint16_t rank = 0; rank < world_; ++rank) {
            for (std::size_t i = 0; i < plans_.size(); ++i) post(rank, static_cast<std::uint8_t>(i));
        }
        const Nanos timeout_at = now_ + 20 * silence;
        for (;;) {
            // Trips take no time here, but what is retransmitted before its path's MTU is known is lost again at once.
            for (int trips = 1; !wire_.empty(); ++trips) {
                deliver(0);
                if (trips % 64 == 0) wait(millisecond);
            }
            if (all_ended()) break;
            Nanos next = never;
            for (std::uint16_t rank = 0; rank < world_; ++rank) {
                if (!left_[rank]) next = std::min(next, cores_[rank]->next_timer());
            }
            REQUIRE(next != never);  // a hang: nothing would ever happen
            if (byzantine_ && (now_ >= timeout_at || spins_ > 500)) break;
            REQUIRE(now_ < timeout_at);
            REQUIRE(++spins_ < 20'000);
            wait(std::max<Nanos>(next - now_, 0));
            check();
        }
        for (std::uint16_t rank = 0; rank < world_; ++rank) {
            for (const auto& posted : posted_[rank]) check_result(rank, *posted);
        }
    }

private:
    [[nodiscard]] std::unique_ptr<Core> make_core(std::uint16_t rank) const {
        CoreConfig config;
        config.rank = rank;
        config.world = world_;
        config.paths = paths_;
        config.datagram_bytes = datagram_bytes;
        config.least_path_bytes = least_path_bytes;
        config.receive_buffer = 16 << 10;
        config.pool_bytes = pool_bytes_;
        config.eager_bytes = 512;
        config.silence = silence;
        config.secrets.cookie = cookie;
        config.secrets.incarnations = incarnations_;
        return std::make_unique<Core>(config, now_);
    }

    void plan(Program& program) {
        if (plans_.size() >= most_posts) return;
        auto plan = std::make_unique<Plan>();
        const std::uint8_t kind = program.byte();
        plan->shape = static_cast<Shape>(kind % 3);
        plan->channel = kind / 3 % channels;
        plan->seq = next_seq_[plan->channel]++;
        // Now and then several blocks, or several stretches of them.
        plan->bytes = program.byte() * (kind % 61 == 60 ? 300U : kind % 7 == 0 ? 16U : 3U);
        if (plan->shape == Shape::all_reduce) plan->bytes &= ~3U;
        static constexpr std::array<double, 4> budgets{0, 0, 0.25, 1};
        const std::uint8_t loss = program.byte();
        plan->stages[0].budget = budgets[loss % 4];
        plan->stages[1].budget = plan->shape == Shape::broadcast ? plan->stages[0].budget : budgets[loss / 4 % 4];
        if (loss / 16 % 4 == 1) plan->stages[0].deadline = plan->stages[1].deadline = 30 * millisecond;
        const std::uint8_t coding = program.byte();
        static constexpr std::array<double, 8> redundancies{0, StageSpec::automatic, 0.1, 0.3, 0.5, 1, 2, 4};
        plan->stages[0].redundancy = redundancies[coding % 8];
        plan->stages[1].redundancy = redundancies[coding / 8 % 8];
        plan->in_place = coding >= 128;
        for (const StageSpec& stage : plan->stages) plan->lossy |= stage.budget > 0 || stage.deadline != never;
        plans_.push_back(std::move(plan));
    }

    void post(std::uint16_t rank, std::uint8_t which) {
        if (plans_.empty() || left_[rank]) return;
        const Plan& plan = *plans_[which % plans_.size()];
        if (which % plans_.size() < first_plan_[rank]) return;
        for (const auto& before : posted_[rank]) {
            if (before->plan == &plan) return;
        }
        auto posted = std::make_unique<Posted>();
        const ExchangeSpec spec = spec_of(rank, world_, plan, *posted, now_);
        posted->id = cores_[rank]->post(spec, now_);
        posted_[rank].push_back(std::move(posted));
        pump(rank);
    }

    void pump(std::uint16_t rank) {
        int sent = 0;
        while (cores_[rank]->transmit(batch_, now_)) {
            REQUIRE(++sent < 10'000);
            std::vector<std::byte> joined;
            for (const iovec& part : batch_.parts()) {
                const auto* from = static_cast<const std::byte*>(part.iov_base);
                joined.insert(joined.end(), from, from + part.iov_len);
            }
            REQUIRE(joined.size() == batch_.bytes() && batch_.segments() <= Batch::max_segments);
            for (std::size_t at = 0; at < joined.size(); at += batch_.segment_bytes()) {
                const std::size_t size = std::min(batch_.segment_bytes(), joined.size() - at);
                const auto begin = joined.begin() + static_cast<std::ptrdiff_t>(at);
                REQUIRE(size <= datagram_bytes);
                if (size > path_mtu_ || batch_.path() == dead_path_) continue;
                wire_.push_back({rank, batch_.peer(), {begin, begin + static_cast<std::ptrdiff_t>(size)}});
            }
            cores_[rank]->transmitted(batch_, now_);
        }
        while (auto finished = cores_[rank]->take_finished()) {
            const auto found = std::find_if(posted_[rank].begin(), posted_[rank].end(),
                                            [&](const auto& p) { return p->id == finished->id; });
            REQUIRE(found != posted_[rank].end());
            end(**found, std::move(finished->outcome));
        }
    }
    static void end(Posted& posted, Outcome outcome) {
        REQUIRE(!posted.ended);
        REQUIRE(outcome.status != Status::running);
        posted.ended = true;
        posted.outcome = std::move(outcome);
        // Its memory is the caller's again: scribble over it, so that a later read shows up as wrong bytes elsewhere.
        for (auto& message : posted.sent) std::fill(message.begin(), message.end(), std::byte{0xdd});
    }

    void deliver_to(std::uint16_t target, std::vector<std::byte> bytes) {
        if (left_[target]) return;
        cores_[target]->receive(bytes, now_);
        pump(target);
    }
    void deliver(std::uint8_t which) {
        if (wire_.empty()) return;
        const std::size_t at = which % std::min<std::size_t>(wire_.size(), 16);
        Datagram datagram = std::move(wire_[at]);
        wire_.erase(wire_.begin() + static_cast<std::ptrdiff_t>(at));
        deliver_to(datagram.target, std::move(datagram.bytes));
    }
    void drop(std::uint8_t which) {
        if (!wire_.empty()) wire_.erase(wire_.begin() + static_cast<std::ptrdiff_t>(which % wire_.size()));
    }
    void duplicate(std::uint8_t which) {
        if (wire_.empty()) return;
        const Datagram& datagram = wire_[which % wire_.size()];
        deliver_to(datagram.target, datagram.bytes);
    }
    void flip_bit(Program& program) {
        if (wire_.empty()) return;
        Datagram& datagram = wire_[program.byte() % wire_.size()];
        const std::size_t bit = program.word() % (8 * datagram.bytes.size());
        datagram.bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    }
    // A Byzantine member of the job: any fields, any payload, under the right cookie and check.
    void forge(Program& program, std::uint16_t source) {
        const auto target = static_cast<std::uint16_t>((source + 1 + program.byte() % (world_ - 1U)) % world_);
        const Seal seal({.cookie = cookie, .sealed = false, .links = {}, .incarnations = incarnations_}, source);
        Header header{.kind = static_cast<Kind>(1 + program.byte() % 10),
                      .flags = static_cast<std::uint8_t>(program.byte() & (known_flags & ~flag_sealed)),
                      .source = static_cast<std::uint16_t>(source + (paths_ > 1 ? program.byte() % 4 * world_ : 0)),
                      .check = 0,
                      .cookie = seal.visible_cookie(),
                      .number = program.byte(),
                      .channel = program.byte() % (channels + 1),
                      .seq = program.byte() % most_posts,
                      .chunk = program.byte(),
                      .message_bytes = program.byte()};
        const std::uint8_t wild = program.byte();
        if ((wild & 1) != 0) header.number = program.word();
        if ((wild & 2) != 0) header.chunk = program.word();
        if ((wild & 4) != 0) header.message_bytes = program.word();
        if ((wild & 8) != 0) header.seq = program.word();
        std::vector<std::byte> payload(program.byte());
        for (std::byte& b : payload) b = static_cast<std::byte>(program.byte());
        send_forged(header, payload, target);
    }
    // Parity of a message that was planned, or that is long over: any name, perhaps another length, and as its payload
    // what is on the wire or anything else. Chunks, too, may announce parity although none follows.
    void forge_parity(Program& program, std::uint16_t source) {
        if (plans_.empty()) return;
        const Plan& plan = *plans_[program.byte() % plans_.size()];
        const auto target = static_cast<std::uint16_t>((source + 1 + program.byte() % (world_ - 1U)) % world_);
        const std::size_t bytes = plan.shape == Shape::all_to_all ? size_of(plan, source, target) : plan.bytes;
        const std::uint8_t kind = program.byte();
        const bool parity = kind % 8 != 0;
        ParityName name{program.byte() % 4U, program.byte() % 4U, program.byte() % 64U};
        if (kind % 16 == 1) name.stretch = program.word() >> 10;
        if (kind % 16 == 3) name.index = 255U - name.index;
        const Header header{.kind = Kind::data,
                            .flags = static_cast<std::uint8_t>((parity ? flag_parity : flag_coded) |
                                                               (program.byte() & (flag_second_stage | flag_last))),
                            .source = source,
                            .check = 0,
                            .cookie = Seal({.cookie = cookie, .incarnations = incarnations_}, source).visible_cookie(),
                            .number = ++forged_,
                            .channel = plan.channel,
                            .seq = plan.seq,
                            .chunk = parity ? name.pack() : program.byte(),
                            .message_bytes = static_cast<std::uint32_t>(bytes)};
        const std::uint8_t length = program.byte();
        std::vector<std::byte> payload(length < 224 ? std::min(chunk_bytes, std::max<std::size_t>(bytes, 1))
                                                    : length - 150U);
        if (!wire_.empty() && length % 2 == 0) {
            const std::vector<std::byte>& other = wire_[program.byte() % wire_.size()].bytes;
            const std::size_t many = std::min(payload.size(), other.size() - header_bytes);
            std::copy_n(other.begin() + header_bytes, many, payload.begin());
        } else {
            for (std::byte& b : payload) b = static_cast<std::byte>(program.byte());
        }
        send_forged(header, payload, target);
    }
    void send_forged(const Header& header, const std::vector<std::byte>& payload, std::uint16_t target) {
        const Seal seal({.cookie = cookie, .sealed = false, .links = {}, .incarnations = incarnations_}, header.source);
        std::vector<std::byte> bytes(header_bytes + payload.size());
        const std::span<std::byte, header_bytes> wire(bytes.data(), header_bytes);
        write_header(header, wire);
        std::copy(payload.begin(), payload.end(), bytes.begin() + header_bytes);
        seal.protect(wire, target, header.kind == Kind::data ? seal.data_check(payload) : seal.payload_check(payload));
        hostile_[header.source] = true;
        byzantine_ = true;
        deliver_to(target, std::move(bytes));
    }
    void wait(Nanos duration) {
        now_ += duration;
        for (std::uint16_t rank = 0; rank < world_; ++rank) {
            if (left_[rank]) continue;
            cores_[rank]->tick(now_);
            pump(rank);
        }
    }
    void cancel(std::uint16_t rank, std::size_t which) {
        Posted& posted = *posted_[rank][which];
        if (!posted.ended) posted.cancelled = disturbed_ = true;
        cores_[rank]->cancel(posted.id, now_);
        pump(rank);
        REQUIRE(posted.ended);
    }
    // A process ends: what it still runs is cancelled, then it says goodbye and receives nothing more.
    void leave(std::uint16_t rank) {
        if (left_[rank]) return;
        for (std::size_t i = 0; i < posted_[rank].size(); ++i) cancel(rank, i);
        disturbed_ = true;
        cores_[rank]->leave();
        pump(rank);
        left_[rank] = true;
    }
    // A process crashes and another replaces it; what is on the wire stays there. The others readmit it when all have
    // begun what was planned before, of which it knows nothing.
    void restart(std::uint16_t rank) {
        for (std::uint16_t other = 0; other < world_; ++other) {
            for (std::size_t i = 0; other != rank && i < plans_.size(); ++i) post(other, static_cast<std::uint8_t>(i));
        }
        disturbed_ = true;
        ++incarnations_[rank];
        first_plan_[rank] = plans_.size();
        cores_[rank] = make_core(rank);
        posted_[rank].clear();
        left_[rank] = false;
        for (std::uint16_t other = 0; other < world_; ++other) {
            if (other == rank || left_[other]) continue;
            cores_[other]->readmit(rank, incarnations_[rank], {}, now_);
            pump(other);
        }
    }
    [[nodiscard]] bool all_ended() const {
        for (const auto& of_rank : posted_) {
            for (const auto& posted : of_rank) {
                if (!posted->ended) return false;
            }
        }
        return true;
    }

    void check() const {
        for (const auto& core : cores_) {
            const Counters& c = core->counters();
            REQUIRE(c.pool_bytes <= pool_bytes_ && c.pool_peak_bytes <= pool_bytes_);
            REQUIRE(c.malformed + c.foreign + c.corrupt + c.duplicates + c.unexpected + c.late <=
                    2 * c.datagrams_received);
            REQUIRE(c.bytes_sent >= c.datagrams_sent * header_bytes);
        }
    }

    void check_result(std::uint16_t rank, const Posted& posted) const {
        const Outcome& outcome = posted.outcome;
        const Plan& plan = *posted.plan;
        if (!posted.ended) return;
        if (posted.cancelled) {
            REQUIRE(outcome.status == Status::closed || outcome.status != Status::running);
            return;
        }
        // A forgery may end an exchange or corrupt it, but only the forger's part of it.
        if (outcome.status != Status::ok) {
            REQUIRE(outcome.failure_cause && outcome.failure_cause.culprit < world_ &&
                    outcome.failure_cause.cause != Status::peer_failed);
            REQUIRE(byzantine_ || disturbed_ || outcome.status == Status::peer_silent ||
                    outcome.status == Status::peer_failed ||
                    (outcome.status == Status::path_blocked && path_mtu_ < datagram_bytes));
            return;
        }
        for (const Arrival& arrival : outcome.arrivals) {
            REQUIRE(arrival.arrived <= arrival.chunks);
            REQUIRE(arrival.missing_bytes <= arrival.bytes);
            const StageSpec& stage = plan.stages[arrival.second_stage ? 1 : 0];
            const bool exact = stage.budget == 0 && stage.deadline == never;
            if (exact) REQUIRE(arrival.arrived == arrival.chunks && arrival.missing_bytes == 0);
            if (hostile_[arrival.peer] || plan.shape == Shape::all_reduce) continue;
            const auto& got = posted.got[arrival.peer];
            for (std::size_t at = 0; at < got.size(); ++at) {
                const std::size_t chunk = at / chunk_bytes;
                const bool here = (arrival.mask[chunk / 64] >> (chunk % 64) & 1) != 0;
                const bool from_root = plan.shape == Shape::broadcast;
                if (from_root && byzantine_) continue;  // honest ranks forward the root's forgeries
                const std::byte expected =
                    from_root ? pattern(0, 0, plan.key(), at) : pattern(arrival.peer, rank, plan.key(), at);
                REQUIRE(got[at] == (here ? expected : std::byte{}));
            }
        }
        if (plan.shape != Shape::all_reduce || plan.lossy || byzantine_) return;
        for (std::size_t e = 0; e < posted.out.size(); ++e) {
            float sum = 0;
            for (std::uint16_t from = 0; from < world_; ++from) sum += value(from, e);
            REQUIRE(posted.out[e] == sum);
        }
    }

    std::uint16_t world_;
    std::uint8_t paths_;
    std::size_t dead_path_{most_paths};  // a path that carries nothing
    bool forgery_allowed_;
    std::size_t pool_bytes_;
    std::uint32_t forged_{1000};  // numbers of forged parity: above all honest ones for a while
    Nanos now_{second};
    int spins_{};
    std::vector<std::unique_ptr<Core>> cores_;
    std::vector<std::unique_ptr<Plan>> plans_;
    std::array<std::uint32_t, channels> next_seq_{};
    std::vector<std::vector<std::unique_ptr<Posted>>> posted_;
    std::vector<std::size_t> first_plan_;  // how many plans were there before this process of the rank
    std::vector<std::uint32_t> incarnations_;
    std::vector<bool> left_, hostile_;
    bool byzantine_{}, disturbed_{};
    std::deque<Datagram> wire_;
    std::size_t path_mtu_{datagram_bytes};
    Batch batch_;
};

}  // namespace storm::fuzz
