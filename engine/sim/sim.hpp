// Network simulation under virtual time: any number of real cores, connected by links that delay, queue and lose.
// An hour of traffic costs what its datagrams cost, and the same seed gives the same run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <type_traits>
#include <vector>

#include "base/timers.hpp"
#include "core/core.hpp"
#include "exchange/batch.hpp"
#include "sim/medium.hpp"
#include "wire/faults.hpp"

namespace storm {

// One path of all ranks, where there are several: each has a switch of its own.
struct SimPath {
    double bytes_per_s{};  // of each rank's link to that switch, both ways; 0 is as SimConfig says
    Nanos delay{-1};       // one way; negative is as SimConfig says
    double loss{};         // besides the faults
    bool unreachable{};    // all that it carries is lost
};

struct SimConfig {
    CoreConfig core;  // as for every rank; `rank` is filled in
    FaultSettings faults;
    Nanos delay{50 * microsecond};       // one way
    double bytes_per_s{};                // of each rank's link to the switch, both ways; 0 is unlimited
    std::size_t queue_bytes{512 << 10};  // at the switch, per rank
    Medium* medium{};                    // takes the place of these links, and of all paths; outlives the simulation
};

class Sim {
public:
    explicit Sim(const SimConfig& config);
    ~Sim();
    Sim(const Sim&) = delete;
    Sim& operator=(const Sim&) = delete;

    [[nodiscard]] Nanos now() const { return now_; }
    [[nodiscard]] Core& core(std::uint16_t rank) { return *hosts_.at(rank).core; }
    // Deadlines in the spec are relative to now.
    std::uint64_t post(std::uint16_t rank, ExchangeSpec spec);
    void cancel(std::uint16_t rank, std::uint64_t id);
    // Runs the next event; false when there is none.
    bool advance();
    // Exchanges that ended at a rank since the last call.
    [[nodiscard]] std::vector<Core::Finished> take_finished(std::uint16_t rank);
    // Makes a rank unreachable, or reachable again: what it sends and what is sent to it is lost meanwhile.
    void set_unreachable(std::uint16_t rank, bool unreachable) { hosts_.at(rank).unreachable = unreachable; }
    // Makes one rank unreachable from another, or reachable again. The reverse direction is another link.
    void set_link(std::uint16_t from, std::uint16_t to, bool unreachable);
    // One config serves all ranks: each seals what it sends by the key with which all others open it.
    static void seal_as(Secrets& secrets, std::uint16_t rank);
    // A rank's process dies, and a new one without state replaces it. It is not heard before it is readmitted.
    void restart(std::uint16_t rank, std::uint32_t incarnation);
    // One rank accepts the present process of another.
    void readmit(std::uint16_t rank, std::uint16_t peer);
    // Calls `work(views, now)` with a rank's views.
    template <class Work>
    decltype(auto) with_views(std::uint16_t rank, Work&& work);

    // Runs until that time, or until there are no events.
    void run_until(Nanos at);

    // Sets the rate of every rank's link, from now on.
    void set_rate(double bytes_per_s) { config_.bytes_per_s = bytes_per_s; }
    // Sets the rates of one rank's link, up to the switch and down from it, from now on; 0 is that of all.
    void set_link_rate(std::uint16_t rank, double up, double down) {
        hosts_.at(rank).up = up;
        hosts_.at(rank).down = down;
    }
    // Sets what a path is like, from now on.
    void set_path(std::size_t path, const SimPath& like) { paths_.at(path) = like; }
    // Replaces the faults of all links, from now on.
    void set_faults(const FaultSettings& faults);

    [[nodiscard]] std::uint64_t queue_drops() const {
        return queue_drops_ + (config_.medium ? config_.medium->drops() : 0);
    }
    [[nodiscard]] const FaultCounters& fault_counters(std::uint16_t rank) const {
        return hosts_.at(rank).faults->counters();
    }

private:
    struct Host {
        std::unique_ptr<Core> core;
        std::unique_ptr<FaultPath> faults;
        std::array<Nanos, most_paths> uplink_free_at{}, downlink_free_at{};
        double up{}, down{};  // bytes per second, where they differ from those of the others
        bool unreachable{};
        std::set<std::uint16_t> severed;  // ranks that nothing reaches from here
    };
    struct Packet {
        Nanos at{};
        std::uint64_t order{};
        std::uint16_t source{}, target{};
        std::uint8_t path{};
        bool queued{};  // has passed the switch's queue
        std::vector<std::byte> bytes;
        bool operator>(const Packet& other) const { return at != other.at ? at > other.at : order > other.order; }
    };

    [[nodiscard]] double rate(double own, std::uint8_t path) const;
    [[nodiscard]] std::unique_ptr<Core> make_core(std::uint16_t rank) const;
    void pump(std::uint16_t rank);
    void arrive(Packet packet);
    void step_medium();
    void deliver(std::uint16_t source, std::uint16_t target, std::span<std::byte> bytes);
    [[nodiscard]] Nanos next_at() const;

    SimConfig config_;
    Nanos now_{second};  // not zero, which would mean no time
    std::uint64_t order_{};
    std::uint64_t queue_drops_{};
    std::vector<Host> hosts_;
    Timers timers_;  // of hosts: with a thousand, looking at all of them for every packet would take most of the time
    std::vector<std::uint32_t> incarnations_;  // by rank
    std::array<SimPath, most_paths> paths_{};
    std::mt19937_64 chance_{7};  // of the losses of paths
    std::priority_queue<Packet, std::vector<Packet>, std::greater<>> packets_;
    Batch batch_;
};

template <class Work>
decltype(auto) Sim::with_views(std::uint16_t rank, Work&& work) {
    const auto now_too = [&](Views& views) { return work(views, now_); };
    if constexpr (std::is_void_v<decltype(work(std::declval<Views&>(), now_))>) {
        core(rank).with_views(now_, now_too);
        pump(rank);
    } else {
        auto result = core(rank).with_views(now_, now_too);
        pump(rank);
        return result;
    }
}

}  // namespace storm
