#include "traffic/sim_switch.hpp"

#include <utility>

namespace storm {

SimSwitch::SimSwitch(std::size_t hosts, const SwitchSettings& settings)
    : delay_(settings.delay), hosts_(hosts), hosts_per_rack_(settings.hosts_per_rack) {
    for (std::size_t host = 0; host < hosts; ++host) {
        links_.emplace_back(settings.up);
        links_.emplace_back(settings.down);
    }
    const std::size_t racks = hosts_per_rack_ == 0 ? 0 : (hosts + hosts_per_rack_ - 1) / hosts_per_rack_;
    for (std::size_t line = 0; line < 2 * racks; ++line) links_.emplace_back(settings.trunk);
    awaited_.assign(links_.size(), false);
}

std::uint32_t SimSwitch::keep(SimPacket packet) {
    if (free_.empty()) {
        packets_.push_back(std::move(packet));
        return static_cast<std::uint32_t>(packets_.size() - 1);
    }
    const std::uint32_t place = free_.back();
    free_.pop_back();
    packets_[place] = std::move(packet);
    return place;
}

std::size_t SimSwitch::after(std::size_t line, const SimPacket& packet) const {
    const std::size_t trunks = 2 * hosts_, home = rack(packet.source), there = rack(packet.target);
    if (home != there && line == 2U * packet.source) return trunks + 2 * home;
    if (home != there && line == trunks + 2 * home) return trunks + 2 * there + 1;
    return 2U * packet.target + 1;
}

void SimSwitch::set_trunk(std::size_t rack, double bytes_per_s) {
    for (const std::size_t way : {0U, 1U}) links_.at(2 * (hosts_ + rack) + way).set_rate(bytes_per_s);
}

void SimSwitch::send(SimPacket packet, Nanos now) {
    const std::size_t line = 2U * packet.source;
    put(line, keep(std::move(packet)), now);
}

void SimSwitch::put(std::size_t line, std::uint32_t packet, Nanos now) {
    const SimPacket& what = packets_[packet];
    if (links_[line].offer(packet, what.wire_bytes, what.priority, now)) {
        pull(line, now);
    } else {
        free_.push_back(packet);
    }
}

void SimSwitch::pull(std::size_t line, Nanos now) {
    while (links_[line].next_at() <= now) {
        const SimLink::Departure departure = links_[line].take(now);
        const SimPacket& packet = packets_[departure.packet];
        if (line == 2U * packet.target + 1) {
            schedule(departure.at, What::reaches_host, departure.packet);
        } else {
            // Half of a trunk's delay on each of its links.
            const Nanos takes = line < 2 * hosts_ ? delay_ : delay_ / 2;
            schedule(departure.at + takes, What::reaches_switch, departure.packet, after(line, packet));
        }
    }
    if (awaited_[line] || links_[line].next_at() == never) return;
    awaited_[line] = true;
    schedule(links_[line].next_at(), What::link_is_free, static_cast<std::uint32_t>(line));
}

std::optional<SimPacket> SimSwitch::step() {
    const Event event = events_.top();
    events_.pop();
    switch (event.what) {
        case What::link_is_free:
            awaited_[event.which] = false;
            pull(event.which, event.at);
            return std::nullopt;
        case What::reaches_switch: put(event.into, event.which, event.at); return std::nullopt;
        case What::reaches_host: break;
    }
    free_.push_back(event.which);
    return std::move(packets_[event.which]);
}

std::uint64_t SimSwitch::drops() const {
    std::uint64_t all = 0;
    for (const SimLink& line : links_) all += line.counts(Priority::normal).drops + line.counts(Priority::low).drops;
    return all;
}

std::uint64_t SimSwitch::trunk_drops() const {
    std::uint64_t all = 0;
    for (std::size_t line = 2 * hosts_; line < links_.size(); ++line)
        all += links_[line].counts(Priority::normal).drops + links_[line].counts(Priority::low).drops;
    return all;
}

}  // namespace storm
