#include "sim/sim.hpp"

#include <algorithm>
#include <stdexcept>

namespace storm {

Sim::Sim(const SimConfig& config) : config_(config), timers_(config.core.world) {
    config_.faults.validate();
    const auto faults = std::make_shared<const FaultSettings>(config_.faults);
    for (std::uint16_t rank = 0; rank < config_.core.world; ++rank) {
        Host& host = hosts_.emplace_back();
        incarnations_.push_back(
            rank < config_.core.secrets.incarnations.size() ? config_.core.secrets.incarnations[rank] : 0);
        host.core = make_core(rank);
        host.faults = std::make_unique<FaultPath>(rank);
        host.faults->set(faults, now_);
    }
}

Sim::~Sim() = default;

void Sim::seal_as(Secrets& secrets, std::uint16_t rank) {
    if (!secrets.sealed) return;
    const Key own = secrets.links.at(rank).opening;
    for (LinkKeys& link : secrets.links) link.sealing = own;
}

std::unique_ptr<Core> Sim::make_core(std::uint16_t rank) const {
    CoreConfig own = config_.core;
    own.rank = rank;
    if (!own.peer_paths.empty()) own.paths = own.peer_paths.at(rank);
    seal_as(own.secrets, rank);
    // A vacant slot has a core too, so that a process can join in it; it knows of no peer.
    own.late = std::erase(own.vacant, rank) > 0 || incarnations_[rank] > 0;
    return std::make_unique<Core>(std::move(own), now_);
}

void Sim::set_link(std::uint16_t from, std::uint16_t to, bool unreachable) {
    std::set<std::uint16_t>& severed = hosts_.at(from).severed;
    if (unreachable) {
        severed.insert(to);
    } else {
        severed.erase(to);
    }
}

void Sim::restart(std::uint16_t rank, std::uint32_t incarnation) {
    incarnations_.at(rank) = incarnation;
    config_.core.secrets.incarnations = incarnations_;
    std::erase(config_.core.vacant, rank);
    hosts_[rank].core = make_core(rank);
    pump(rank);
}

void Sim::readmit(std::uint16_t rank, std::uint16_t peer) {
    Secrets secrets = config_.core.secrets;
    seal_as(secrets, rank);
    core(rank).readmit(peer, incarnations_.at(peer),
                       secrets.sealed ? std::optional(secrets.links.at(peer)) : std::nullopt, now_);
    pump(rank);
}

void Sim::set_faults(const FaultSettings& faults) {
    const auto shared = std::make_shared<const FaultSettings>(faults);
    for (Host& host : hosts_) host.faults->set(shared, now_);
}

std::uint64_t Sim::post(std::uint16_t rank, ExchangeSpec spec) {
    for (StageSpec& stage : spec.stages) {
        if (stage.deadline != never) stage.deadline += now_;
    }
    if (spec.timeout_at != never) spec.timeout_at += now_;
    const std::uint64_t id = core(rank).post(spec, now_);
    pump(rank);
    return id;
}

void Sim::cancel(std::uint16_t rank, std::uint64_t id) {
    core(rank).cancel(id, now_);
    pump(rank);
}

std::vector<Core::Finished> Sim::take_finished(std::uint16_t rank) {
    std::vector<Core::Finished> all;
    while (auto one = core(rank).take_finished()) all.push_back(std::move(*one));
    return all;
}

void Sim::run_until(Nanos at) {
    while (next_at() <= at && advance()) {
    }
    now_ = std::max(now_, at);
}

Nanos Sim::next_at() const {
    Nanos next = std::min(packets_.empty() ? never : packets_.top().at, timers_.earliest());
    if (config_.medium) next = std::min(next, config_.medium->next_at());
    return next;
}

bool Sim::advance() {
    Nanos next = packets_.empty() ? never : packets_.top().at;
    const bool by_medium = config_.medium && config_.medium->next_at() < next;
    if (by_medium) next = config_.medium->next_at();
    const bool by_timer = timers_.earliest() < next;
    if (by_timer) next = timers_.earliest();
    if (next == never) return false;
    now_ = std::max(now_, next);
    if (by_timer) {
        const auto timed = static_cast<std::uint16_t>(timers_.first());
        Host& host = hosts_[timed];
        host.faults->release(now_, [&](std::span<std::byte> datagram) { host.core->receive(datagram, now_); });
        host.core->tick(now_);
        pump(timed);
    } else if (by_medium) {
        step_medium();
    } else {
        // The heap owns its elements; the packet is moved out just before it is popped.
        Packet packet = std::move(const_cast<Packet&>(packets_.top()));
        packets_.pop();
        arrive(std::move(packet));
    }
    return true;
}

double Sim::rate(double own, std::uint8_t path) const {
    if (own > 0) return own;
    return paths_[path].bytes_per_s > 0 ? paths_[path].bytes_per_s : config_.bytes_per_s;
}

void Sim::arrive(Packet packet) {
    Host& host = hosts_[packet.target];
    if (host.unreachable || hosts_[packet.source].unreachable || hosts_[packet.source].severed.contains(packet.target))
        return;
    const SimPath& like = paths_[packet.path];
    if (like.unreachable) return;
    if (like.loss > 0 && !packet.queued && std::bernoulli_distribution(like.loss)(chance_)) return;
    const double speed = rate(host.down, packet.path);
    Nanos& free_at = host.downlink_free_at[packet.path];
    if (!packet.queued && speed > 0) {
        // The switch's queue towards the target drops what does not fit.
        const double waiting_s = static_cast<double>(std::max<Nanos>(free_at - now_, 0)) * 1e-9;
        if (waiting_s * speed + static_cast<double>(packet.bytes.size()) > static_cast<double>(config_.queue_bytes)) {
            ++queue_drops_;
            return;
        }
        const auto takes = static_cast<Nanos>(static_cast<double>(packet.bytes.size()) / speed * 1e9);
        free_at = std::max(free_at, now_) + takes;
        packet.at = free_at;
        packet.queued = true;
        packet.order = ++order_;
        packets_.push(std::move(packet));
        return;
    }
    deliver(packet.source, packet.target, packet.bytes);
}

void Sim::deliver(std::uint16_t source, std::uint16_t target, std::span<std::byte> bytes) {
    Host& host = hosts_[target];
    host.faults->receive(source, bytes, now_,
                         [&](std::span<std::byte> datagram) { host.core->receive(datagram, now_); });
    pump(target);
}

void Sim::step_medium() {
    std::optional<Medium::Datagram> datagram = config_.medium->step(now_);
    if (!datagram) return;
    const Host& source = hosts_[datagram->source];
    if (hosts_[datagram->target].unreachable || source.unreachable || source.severed.contains(datagram->target)) return;
    deliver(datagram->source, datagram->target, datagram->bytes);
}

void Sim::pump(std::uint16_t rank) {
    Host& host = hosts_[rank];
    while (host.core->transmit(batch_, now_)) {
        const SimPath& like = paths_[batch_.path()];
        const double speed = rate(host.up, batch_.path());
        Nanos& free_at = host.uplink_free_at[batch_.path()];
        std::vector<std::byte> joined;
        joined.reserve(batch_.bytes());
        for (const iovec& part : batch_.parts()) {
            const auto* from = static_cast<const std::byte*>(part.iov_base);
            joined.insert(joined.end(), from, from + part.iov_len);
        }
        for (std::size_t at = 0; at < joined.size(); at += batch_.segment_bytes()) {
            const std::size_t size = std::min(batch_.segment_bytes(), joined.size() - at);
            const auto begin = joined.begin() + static_cast<std::ptrdiff_t>(at);
            if (config_.medium) {
                config_.medium->send({rank, batch_.peer(), {begin, begin + static_cast<std::ptrdiff_t>(size)}}, now_);
                continue;
            }
            Nanos leaves = now_;
            if (speed > 0) {
                const auto takes = static_cast<Nanos>(static_cast<double>(size) / speed * 1e9);
                leaves = free_at = std::max(free_at, now_) + takes;
            }
            packets_.push({.at = leaves + (like.delay < 0 ? config_.delay : like.delay),
                           .order = ++order_,
                           .source = rank,
                           .target = batch_.peer(),
                           .path = batch_.path(),
                           .queued = false,
                           .bytes = {begin, begin + static_cast<std::ptrdiff_t>(size)}});
        }
        host.core->transmitted(batch_, now_);
    }
    timers_.set(rank, std::min(host.core->next_timer(), host.faults->next_release_at()));
}

}  // namespace storm
