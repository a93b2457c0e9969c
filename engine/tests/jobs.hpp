// Helpers for tests of whole cores: exchanges with their memory and expected results, and a way to run them.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "core/core.hpp"

namespace storm::check {

using Buffer = std::vector<std::byte>;

inline Buffer random_buffer(std::size_t bytes, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Buffer buffer(bytes);
    for (std::byte& b : buffer) b = static_cast<std::byte>(random());
    return buffer;
}

inline ExchangeSpec exchange_on(std::uint32_t channel, std::uint32_t seq, StageSpec first = {}, StageSpec second = {}) {
    ExchangeSpec spec;
    spec.channel = channel;
    spec.seq = seq;
    spec.stages = {first, second};
    return spec;
}

// Every rank sends every other a message of its own; sizes may differ by pair.
struct AllToAll {
    template <class Size>
    AllToAll(std::uint16_t world_size, std::uint64_t seed, Size&& size) : world(world_size), sent(world), got(world) {
        for (std::uint16_t from = 0; from < world; ++from) {
            for (std::uint16_t to = 0; to < world; ++to) {
                sent[from].push_back(random_buffer(from == to ? 0 : size(from, to), seed + 1000ULL * from + to));
            }
        }
        for (std::uint16_t at = 0; at < world; ++at) {
            for (std::uint16_t from = 0; from < world; ++from) got[at].emplace_back(sent[from][at].size());
        }
    }
    [[nodiscard]] ExchangeSpec spec(std::uint16_t rank, std::uint32_t seq, StageSpec stage = {},
                                    std::uint32_t channel = 0) {
        ExchangeSpec spec = exchange_on(channel, seq, stage);
        for (std::uint16_t step = 1; step < world; ++step) {
            const auto peer = static_cast<std::uint16_t>((rank + step) % world);
            spec.sends.push_back({.peer = peer, .data = sent[rank][peer].data(), .bytes = sent[rank][peer].size()});
            spec.receives.push_back({.peer = peer, .into = got[rank][peer].data(), .bytes = got[rank][peer].size()});
        }
        return spec;
    }
    [[nodiscard]] bool complete(std::uint16_t rank) const {
        for (std::uint16_t from = 0; from < world; ++from) {
            if (from != rank && got[rank][from] != sent[from][rank]) return false;
        }
        return true;
    }

    std::uint16_t world;
    std::vector<std::vector<Buffer>> sent, got;  // [from][to], [at][from]
};

// The two-stage all-reduce of float32 values: reduce-scatter, and each chunk of the result goes on as soon as it is final.
struct AllReduce {
    AllReduce(std::uint16_t world_size, std::size_t elements, std::uint64_t seed) : world(world_size) {
        std::mt19937_64 random(seed);
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            std::vector<float>& values = in.emplace_back(elements);
            // Values whose sum depends on the order.
            for (float& value : values) value = static_cast<float>(static_cast<std::int32_t>(random())) * 1e-3F;
            out.emplace_back(elements, -1.0F);
        }
    }
    // From now on, results replace contributions where these lie.
    void reduce_in_place() {
        in_place = true;
        out = in;
    }
    // Where a rank's shard begins, in elements. The first shards have one element more if the division leaves a rest.
    [[nodiscard]] std::size_t begin(std::uint16_t rank) const {
        const std::size_t elements = in[0].size();
        return rank * (elements / world) + std::min<std::size_t>(rank, elements % world);
    }
    [[nodiscard]] std::size_t bytes(std::uint16_t rank) const {
        return 4 * (begin(static_cast<std::uint16_t>(rank + 1)) - begin(rank));
    }
    [[nodiscard]] ExchangeSpec spec(std::uint16_t rank, std::uint32_t seq, Reduce mode, StageSpec first = {},
                                    StageSpec second = {}) {
        ExchangeSpec spec = exchange_on(0, seq, first, second);
        const auto input = [&](std::uint16_t shard) {
            return reinterpret_cast<const std::byte*>((in_place ? out : in)[rank].data() + begin(shard));
        };
        const auto output = [&](std::uint16_t shard) {
            return reinterpret_cast<std::byte*>(out[rank].data() + begin(shard));
        };
        spec.reduction = ReductionSpec{.mode = mode,
                                       .wire = Dtype::float32,
                                       .out_dtype = Dtype::float32,
                                       .own = bytes(rank) == 0 ? nullptr : input(rank),
                                       .out = bytes(rank) == 0 ? nullptr : output(rank),
                                       .bytes = bytes(rank),
                                       .own_position = rank};
        for (std::uint16_t step = 1; step < world; ++step) {
            const auto peer = static_cast<std::uint16_t>((rank + step) % world);
            spec.sends.push_back({.peer = peer, .data = input(peer), .bytes = bytes(peer)});
            spec.sends.push_back({.peer = peer, .second_stage = true, .data = output(rank), .bytes = bytes(rank)});
            spec.receives.push_back({.peer = peer, .second_stage = true, .into = output(peer), .bytes = bytes(peer)});
        }
        for (std::uint16_t peer = 0; peer < world; ++peer) {
            if (peer != rank) spec.receives.push_back({.peer = peer, .reduce = true, .bytes = bytes(rank)});
        }
        return spec;
    }
    // What every rank must hold after an exact run, to the bit.
    [[nodiscard]] std::vector<float> expected() const {
        std::vector<float> sum = in[0];
        for (std::uint16_t rank = 1; rank < world; ++rank) {
            for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += in[rank][e];
        }
        return sum;
    }
    void check_exact() const {
        const std::vector<float> sum = expected();
        for (std::uint16_t rank = 0; rank < world; ++rank) {
            CHECK(sum.empty() || std::memcmp(sum.data(), out[rank].data(), 4 * sum.size()) == 0);
        }
    }

    std::uint16_t world;
    bool in_place{};
    std::vector<std::vector<float>> in, out;
};

// Collects outcomes from any network that has `take_finished(rank)`, `advance()` and `now()`.
template <class Network>
class Watch {
public:
    Watch(Network& network, std::uint16_t world) : network_(network), ended_(world) {}

    [[nodiscard]] const Outcome* outcome(std::uint16_t rank, std::uint64_t id) {
        collect();
        const auto found = ended_[rank].find(id);
        return found == ended_[rank].end() ? nullptr : &found->second;
    }
    // Runs until that exchange has ended; a test fails when it has not after `wait_limit`.
    const Outcome& wait(std::uint16_t rank, std::uint64_t id, Nanos wait_limit = 30 * second) {
        const Nanos timeout_at = network_.now() + wait_limit;
        for (;;) {
            if (const Outcome* ended = outcome(rank, id)) return *ended;
            const bool more = network_.advance();
            if (more && network_.now() < timeout_at) continue;
            if (const Outcome* ended = outcome(rank, id)) return *ended;
            throw std::runtime_error(
                "rank " + std::to_string(rank) + "'s exchange " + std::to_string(id) +
                (more ? " was still running after its time" : " hung: nothing was left to happen"));
        }
    }
    // Waits for the exchanges of all ranks, given by their ids; each must end with this status.
    void wait_all(const std::vector<std::uint64_t>& ids, Status status = Status::ok, Nanos wait_limit = 30 * second) {
        for (std::uint16_t rank = 0; rank < ids.size(); ++rank) {
            const auto got = static_cast<int>(wait(rank, ids[rank], wait_limit).status);
            CHECK_EQUAL(got, static_cast<int>(status));
        }
    }
    // Forgets the outcomes of a rank: a new process in its place counts its exchanges from the start.
    void forget(std::uint16_t rank) { ended_[rank].clear(); }
    void collect() {
        for (std::uint16_t rank = 0; rank < ended_.size(); ++rank) {
            for (auto& finished : network_.take_finished(rank)) {
                const bool first = ended_[rank].emplace(finished.id, std::move(finished.outcome)).second;
                CHECK(first);  // an exchange ends once
            }
        }
    }

private:
    Network& network_;
    std::vector<std::map<std::uint64_t, Outcome>> ended_;
};

}  // namespace storm::check
