#include "sim_switch.hpp"

#include <utility>

namespace storm {

SimSwitch::SimSwitch(std::size_t hosts, const SwitchSettings& settings)
    : delay_(settings.delay), awaited_(2 * hosts, false) {
    for (std::size_t host = 0; host < hosts; ++host) {
        lines_.emplace_back(settings.up);
        lines_.emplace_back(settings.down);
    }
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

void SimSwitch::send(SimPacket packet, Nanos now) {
    const std::size_t line = 2U * packet.source;
    put(line, keep(std::move(packet)), now);
}

void SimSwitch::put(std::size_t line, std::uint32_t packet, Nanos now) {
    const SimPacket& what = packets_[packet];
    if (lines_[line].offer(packet, what.wire_bytes, what.priority, now)) {
        pull(line, now);
    } else {
        free_.push_back(packet);
    }
}

void SimSwitch::pull(std::size_t line, Nanos now) {
    while (lines_[line].next_at() <= now) {
        const SimLine::Departure departure = lines_[line].take(now);
        if (line % 2 == 0) {
            schedule(departure.at + delay_, What::reaches_switch, departure.packet);
        } else {
            schedule(departure.at, What::reaches_host, departure.packet);
        }
    }
    if (awaited_[line] || lines_[line].next_at() == never) return;
    awaited_[line] = true;
    schedule(lines_[line].next_at(), What::line_is_free, static_cast<std::uint32_t>(line));
}

std::optional<SimPacket> SimSwitch::step() {
    const Event event = events_.top();
    events_.pop();
    switch (event.what) {
        case What::line_is_free:
            awaited_[event.which] = false;
            pull(event.which, event.at);
            return std::nullopt;
        case What::reaches_switch:
            put(2U * packets_[event.which].target + 1, event.which, event.at);
            return std::nullopt;
        case What::reaches_host: break;
    }
    free_.push_back(event.which);
    return std::move(packets_[event.which]);
}

std::uint64_t SimSwitch::drops() const {
    std::uint64_t all = 0;
    for (const SimLine& line : lines_) all += line.counts(Priority::normal).drops + line.counts(Priority::low).drops;
    return all;
}

}  // namespace storm
