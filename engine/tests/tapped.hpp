// Cores joined by wires that a test can tap: it sees every datagram and may drop, change, hold or forge it.
// Time is virtual; datagrams arrive in the order they were sent unless the tap says otherwise.
#pragma once

#include <deque>
#include <functional>
#include <memory>

#include "exchange/batch.hpp"
#include "jobs.hpp"
#include "sim/sim.hpp"

namespace storm::check {

struct Datagram {
    Nanos at{};
    std::uint16_t source{}, target{};
    Header header;  // as parsed; changing it changes nothing
    Buffer bytes;
};

class Tapped {
public:
    // Returns false if the datagram is to be lost.
    using Tap = std::function<bool(Datagram&)>;

    explicit Tapped(const CoreConfig& config, Nanos delay = 100 * microsecond) : delay_(delay), config_(config) {
        for (std::uint16_t rank = 0; rank < config.world; ++rank) {
            CoreConfig own = config;
            own.rank = rank;
            Sim::seal_as(own.secrets, rank);
            hosts_.push_back({.core = std::make_unique<Core>(own, now_), .socket = {}, .timer = never});
        }
    }

    Tap tap = [](Datagram&) { return true; };
    // How long batches stay in the "socket" before the wire reads them, as if its buffer were full.
    Nanos socket_delay{};

    [[nodiscard]] Nanos now() const { return now_; }
    [[nodiscard]] Core& core(std::uint16_t rank) { return *hosts_.at(rank).core; }
    std::uint64_t post(std::uint16_t rank, ExchangeSpec spec) {
        for (StageSpec& stage : spec.stages) {
            if (stage.deadline != never) stage.deadline += now_;
        }
        if (spec.timeout_at != never) spec.timeout_at += now_;
        const std::uint64_t id = core(rank).post(spec, now_);
        pump(rank);
        return id;
    }
    void cancel(std::uint16_t rank, std::uint64_t id) {
        core(rank).cancel(id, now_);
        pump(rank);
    }
    void leave(std::uint16_t rank) {
        core(rank).leave();
        pump(rank);
    }
    // Another process takes a rank's place; nothing of the old one is left but what is on the wire.
    void restart(std::uint16_t rank, CoreConfig config) {
        config.rank = rank;
        Sim::seal_as(config.secrets, rank);
        hosts_.at(rank) = {.core = std::make_unique<Core>(config, now_), .socket = {}, .timer = never};
    }
    void readmit(std::uint16_t rank, std::uint16_t peer, std::uint32_t incarnation, std::optional<LinkKeys> keys = {}) {
        core(rank).readmit(peer, incarnation, keys, now_);
        pump(rank);
    }
    // Hands a rank these very bytes, as if they came from its socket.
    void inject(std::uint16_t rank, Buffer bytes) {
        core(rank).receive(bytes, now_);
        pump(rank);
    }
    [[nodiscard]] std::vector<Core::Finished> take_finished(std::uint16_t rank) {
        std::vector<Core::Finished> all;
        while (auto one = core(rank).take_finished()) all.push_back(std::move(*one));
        return all;
    }
    // Lets this much time pass, and no more.
    void run(Nanos duration) {
        const Nanos until = now_ + duration;
        while (advance(until)) {
        }
        now_ = until;
    }
    // Runs up to the next thing that happens; false when nothing ever will, or not before `limit`.
    bool advance(Nanos limit = never) {
        Nanos next = never;
        std::size_t who = hosts_.size();
        bool by_timer = false;
        for (std::size_t rank = 0; rank < hosts_.size(); ++rank) {
            const Host& host = hosts_[rank];
            if (!host.socket.empty() && host.socket.front().first < next) {
                next = host.socket.front().first, who = rank, by_timer = false;
            }
            if (host.timer < next) next = host.timer, who = rank, by_timer = true;
        }
        const Nanos arrival = wire_.empty() ? never : wire_.begin()->first.first;
        if (std::min(next, arrival) == never || std::min(next, arrival) > limit) return false;
        if (arrival <= next) {
            Datagram datagram = std::move(wire_.begin()->second);
            wire_.erase(wire_.begin());
            now_ = std::max(now_, datagram.at);
            core(datagram.target).receive(datagram.bytes, now_);
            pump(datagram.target);
            return true;
        }
        // A timer that does not move on would spin for ever.
        spins_ = next <= now_ ? spins_ + 1 : 0;
        if (spins_ > 100'000) throw std::runtime_error("a timer fires for ever without moving on");
        now_ = std::max(now_, next);
        if (by_timer) {
            hosts_[who].core->tick(now_);
        } else {
            unload(static_cast<std::uint16_t>(who));
        }
        pump(static_cast<std::uint16_t>(who));
        return true;
    }

private:
    struct Host {
        std::unique_ptr<Core> core;
        std::deque<std::pair<Nanos, std::unique_ptr<Batch>>> socket;
        Nanos timer{never};
    };
    static constexpr std::size_t socket_batches = 8;

    void pump(std::uint16_t rank) {
        Host& host = hosts_[rank];
        while (host.socket.size() < socket_batches) {
            auto batch = std::make_unique<Batch>();
            if (!host.core->transmit(*batch, now_)) break;
            host.socket.emplace_back(now_ + socket_delay, std::move(batch));
            if (socket_delay == 0) unload(rank);
        }
        host.timer = host.core->next_timer();
        // With a full socket nothing more can be done until it drains.
        if (host.socket.size() == socket_batches) host.timer = std::max(host.timer, host.socket.front().first);
    }
    void unload(std::uint16_t rank) {
        const std::unique_ptr<Batch> batch = std::move(hosts_[rank].socket.front().second);
        hosts_[rank].socket.pop_front();
        // The caller's memory is read only here, so that the address sanitizer notices if it was freed too early.
        Buffer joined;
        for (const iovec& part : batch->parts()) {
            const auto* from = static_cast<const std::byte*>(part.iov_base);
            joined.insert(joined.end(), from, from + part.iov_len);
        }
        CHECK_EQUAL(joined.size(), batch->bytes());
        CHECK_EQUAL(batch->segments(), (joined.size() + batch->segment_bytes() - 1) / batch->segment_bytes());
        for (std::size_t at = 0; at < joined.size(); at += batch->segment_bytes()) {
            const std::size_t size = std::min(batch->segment_bytes(), joined.size() - at);
            CHECK(size <= config_.datagram_bytes);
            Datagram datagram{.at = now_ + delay_, .source = rank, .target = batch->peer(), .header = {}, .bytes = {}};
            const auto begin = joined.begin() + static_cast<std::ptrdiff_t>(at);
            datagram.bytes.assign(begin, begin + static_cast<std::ptrdiff_t>(size));
            datagram.header = parse_header(datagram.bytes).value();
            if (!tap(datagram)) continue;
            const std::pair key(datagram.at, ++order_);
            wire_.emplace(key, std::move(datagram));
        }
        hosts_[rank].core->transmitted(*batch, now_);
    }

    Nanos now_{second}, delay_;
    CoreConfig config_;
    std::vector<Host> hosts_;
    std::map<std::pair<Nanos, std::uint64_t>, Datagram> wire_;  // by time, then by order of departure
    std::uint64_t order_{};
    int spins_{};
};

}  // namespace storm::check
