// The exchanges of a fuzzed job: what every rank posts, the memory it needs, and what must be in it on success.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "exchange/exchange_spec.hpp"

namespace storm::fuzz {

inline std::byte pattern(std::uint16_t from, std::uint16_t to, std::uint32_t key, std::size_t at) {
    return static_cast<std::byte>(from * 31U + to * 17U + key * 101U + at * 7U + at / 251U);
}

enum class Shape : std::uint8_t { all_to_all, all_reduce, broadcast };

// What every rank posts under one channel and sequence number: the same on all, as in a real job.
struct Plan {
    Shape shape{};
    std::uint32_t channel{}, seq{}, bytes{};
    std::array<StageSpec, 2> stages{};
    bool lossy{};     // in any way
    bool in_place{};  // results replace contributions where these lie

    [[nodiscard]] std::uint32_t key() const { return channel * 64 + seq; }
};

struct Posted {
    const Plan* plan{};
    std::uint64_t id{};
    bool ended{}, cancelled{};
    Outcome outcome;
    std::vector<std::vector<std::byte>> sent, got;  // by peer
    std::vector<float> in, out;
};

inline std::size_t size_of(const Plan& plan, std::uint16_t from, std::uint16_t to) {
    return plan.bytes + from * 5U + to;
}

inline std::vector<std::byte> message(std::uint16_t from, std::uint16_t to, std::uint32_t key, std::size_t bytes) {
    std::vector<std::byte> out(bytes);
    for (std::size_t i = 0; i < bytes; ++i) out[i] = pattern(from, to, key, i);
    return out;
}

// Every rank sends every other a message of its own.
inline void all_to_all(std::uint16_t rank, std::uint16_t world, const Plan& plan, Posted& posted, ExchangeSpec& spec) {
    for (std::uint16_t peer = 0; peer < world; ++peer) {
        if (peer == rank) continue;
        posted.sent[peer] = message(rank, peer, plan.key(), size_of(plan, rank, peer));
        posted.got[peer].resize(size_of(plan, peer, rank));
        spec.sends.push_back({.peer = peer, .data = posted.sent[peer].data(), .bytes = posted.sent[peer].size()});
        spec.receives.push_back({.peer = peer, .into = posted.got[peer].data(), .bytes = posted.got[peer].size()});
    }
}

inline float value(std::uint16_t rank, std::size_t element) {
    return static_cast<float>((element * 7 + rank * 13) % 50);
}

// Shards are equal here; the values are small integers, so that sums do not depend on their order.
inline void all_reduce(std::uint16_t rank, std::uint16_t world, const Plan& plan, Posted& posted, ExchangeSpec& spec) {
    const std::size_t shard = plan.bytes / 4;
    posted.in.resize(shard * world);
    posted.out.assign(shard * world, -1.0F);
    for (std::size_t e = 0; e < posted.in.size(); ++e) posted.in[e] = value(rank, e);
    if (plan.in_place) posted.out = posted.in;
    const auto input = [&](std::size_t of) {
        return reinterpret_cast<const std::byte*>((plan.in_place ? posted.out : posted.in).data() + of * shard);
    };
    const auto output = [&](std::size_t of) { return reinterpret_cast<std::byte*>(posted.out.data() + of * shard); };
    const bool lossy = plan.stages[0].budget > 0 || plan.stages[0].deadline != never;
    spec.reduction = ReductionSpec{.mode = lossy ? Reduce::arrived : Reduce::in_order,
                                   .wire = Dtype::float32,
                                   .out_dtype = Dtype::float32,
                                   .own = input(rank),
                                   .out = output(rank),
                                   .bytes = plan.bytes,
                                   .own_position = rank};
    for (std::uint16_t peer = 0; peer < world; ++peer) {
        if (peer == rank) continue;
        spec.sends.push_back({.peer = peer, .data = input(peer), .bytes = plan.bytes});
        spec.sends.push_back({.peer = peer, .second_stage = true, .data = output(rank), .bytes = plan.bytes});
        spec.receives.push_back({.peer = peer, .reduce = true, .bytes = plan.bytes});
        spec.receives.push_back({.peer = peer, .second_stage = true, .into = output(peer), .bytes = plan.bytes});
    }
}

// Along a chain: 0 sends to 1, and every rank forwards to the next.
inline void broadcast(std::uint16_t rank, std::uint16_t world, const Plan& plan, Posted& posted, ExchangeSpec& spec) {
    const auto next = static_cast<std::uint16_t>(rank + 1);
    if (rank == 0) {
        posted.sent[1] = message(0, 0, plan.key(), plan.bytes);
        spec.sends.push_back({.peer = 1, .data = posted.sent[1].data(), .bytes = plan.bytes});
    } else if (rank == 1) {
        posted.got[0].resize(plan.bytes);
        spec.receives.push_back({.peer = 0, .reduce = true, .bytes = plan.bytes});
        spec.reduction = ReductionSpec{.mode = Reduce::copy,
                                       .wire = Dtype::bytes,
                                       .out_dtype = Dtype::bytes,
                                       .own = nullptr,
                                       .out = posted.got[0].data(),
                                       .bytes = plan.bytes};
        if (next < world) {
            spec.sends.push_back(
                {.peer = next, .second_stage = true, .data = posted.got[0].data(), .bytes = plan.bytes});
        }
    } else {
        posted.got[1].resize(plan.bytes);
        spec.receives.push_back({.peer = 1, .second_stage = true, .into = posted.got[1].data(), .bytes = plan.bytes});
    }
}

// The exchange that a rank posts for a plan; its messages lie in `posted`.
inline ExchangeSpec spec_of(std::uint16_t rank, std::uint16_t world, const Plan& plan, Posted& posted, Nanos now) {
    ExchangeSpec spec;
    spec.channel = plan.channel;
    spec.seq = plan.seq;
    spec.stages = plan.stages;
    for (StageSpec& stage : spec.stages) {
        if (stage.deadline != never) stage.deadline += now;
    }
    posted.plan = &plan;
    posted.sent.resize(world);
    posted.got.resize(world);
    switch (plan.shape) {
        case Shape::all_to_all: all_to_all(rank, world, plan, posted, spec); break;
        case Shape::all_reduce: all_reduce(rank, world, plan, posted, spec); break;
        case Shape::broadcast: broadcast(rank, world, plan, posted, spec); break;
    }
    return spec;
}

}  // namespace storm::fuzz
