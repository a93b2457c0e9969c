#include "relay/relay.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>

namespace storm {
namespace {

constexpr std::size_t ipv4_header_bytes = 20;
constexpr std::size_t destination_offset = 16;

unsigned byte_at(std::span<const std::byte> packet, std::size_t at) { return std::to_integer<unsigned>(packet[at]); }

// Packets are untrusted: what is not one whole IPv4 packet has no destination.
std::optional<std::uint32_t> destination(std::span<const std::byte> packet) {
    if (packet.size() < ipv4_header_bytes || byte_at(packet, 0) >> 4 != 4) return std::nullopt;
    const std::size_t header_bytes = (byte_at(packet, 0) & 15U) * 4U;
    const std::size_t total_bytes = byte_at(packet, 2) << 8 | byte_at(packet, 3);
    if (header_bytes < ipv4_header_bytes || header_bytes > total_bytes || total_bytes != packet.size())
        return std::nullopt;
    std::uint32_t address = 0;
    for (std::size_t i = 0; i < 4; ++i) address = address << 8 | byte_at(packet, destination_offset + i);
    return address;
}

Nanos sending_time(std::size_t bytes, std::uint64_t bits_per_s) {
    if (bits_per_s == 0) return 0;
    return std::llround(static_cast<double>(bytes) * 8e9 / static_cast<double>(bits_per_s));
}

}  // namespace

Relay::Relay(Deliver deliver) : deliver_(std::move(deliver)) {}

// --- settings --------------------------------------------------------------------------------------------------------

void Relay::add_host(std::uint16_t host, std::uint32_t address) {
    hosts_[host] = std::make_unique<Host>();
    hosts_[host]->address = address;
    by_address_[address] = host;
    for (std::uint16_t other = 0; other < max_hosts; ++other) {
        if (other == host || hosts_[other] == nullptr) continue;
        hosts_[host]->to[other] = std::make_unique<Link>(host, other);
        hosts_[other]->to[host] = std::make_unique<Link>(other, host);
    }
}

Relay::Server& Relay::server(std::uint16_t host, Direction direction) {
    return direction == Direction::up ? hosts_[host]->up : hosts_[host]->down;
}

void Relay::set_rate(std::uint16_t host, Direction direction, std::uint64_t bits_per_s, Nanos now) {
    run_events(now);
    Server& changed = server(host, direction);
    const std::uint64_t before = std::exchange(changed.bits_per_s, bits_per_s);
    if (changed.fifo.empty() || before == bits_per_s) return;
    // Something waits, so there was a rate.
    const double left_bits = static_cast<double>(changed.done_at - now_) * static_cast<double>(before);
    changed.done_at = now_ + (bits_per_s == 0 ? 0 : std::llround(left_bits / static_cast<double>(bits_per_s)));
    schedule(changed.done_at, direction == Direction::up ? Stage::uplink : Stage::downlink, host, host);
}

void Relay::set_queue(std::uint16_t host, Direction direction, std::size_t bytes) {
    server(host, direction).queue_bytes = bytes;
}

const RelayLinkSettings& Relay::link(std::uint16_t from, std::uint16_t to) const {
    return hosts_[from]->to[to]->settings;
}

void Relay::set_link(std::uint16_t from, std::uint16_t to, RelayLinkSettings settings) {
    FaultyLink fates(settings.faults, settings.seed, from, to);  // validates
    Link& changed = *hosts_[from]->to[to];
    changed.settings = std::move(settings);
    changed.fates = std::move(fates);
}

// --- buffers ---------------------------------------------------------------------------------------------------------

Relay::Slot Relay::take() {
    if (free_.empty()) {
        if (packets_.size() == max_packets) return none;
        // The memory is not touched before it is needed, and what was used last is used next: it is still in the cache.
        slabs_.push_back(std::make_unique_for_overwrite<std::byte[]>(slab_packets * max_packet_bytes));
        const std::size_t first = packets_.size();
        packets_.resize(first + slab_packets);
        for (std::size_t i = slab_packets; i-- > 0;) free_.push_back(static_cast<Slot>(first + i));
    }
    const Slot slot = free_.back();
    free_.pop_back();
    return slot;
}

void Relay::give_back(Slot slot) {
    free_.push_back(slot);
    --held_;
}

std::byte* Relay::bytes_of(Slot slot) const {
    return slabs_[slot / slab_packets].get() + slot % slab_packets * max_packet_bytes;
}

void Relay::push(Fifo& fifo, Slot slot) {
    packets_[slot].next = none;
    (fifo.empty() ? fifo.head : packets_[fifo.tail].next) = slot;
    fifo.tail = slot;
    ++fifo.size;
}

Relay::Slot Relay::pop(Fifo& fifo) {
    const Slot slot = fifo.head;
    fifo.head = packets_[slot].next;
    --fifo.size;
    return slot;
}

std::span<std::byte> Relay::buffer() {
    if (spare_ == none) spare_ = take();
    // With no buffer left, packets are still taken from the host, as a full network would: to be dropped.
    if (spare_ == none) return scratch_;
    return {bytes_of(spare_), max_packet_bytes};
}

// --- the path of a packet
// ---------------------------------------------------------------------------------------------

void Relay::receive(std::uint16_t from, std::size_t length, Nanos now) {
    run_events(now);
    Host& sender = *hosts_[from];
    if (sender.cut) {
        ++totals_.cut;
        return;
    }
    const std::span<const std::byte> bytes = buffer();
    const auto address = length <= bytes.size() ? destination(bytes.first(length)) : std::nullopt;
    const auto target = address ? by_address_.find(*address) : by_address_.end();
    if (target == by_address_.end() || target->second == from) {
        ++totals_.strays;
        return;
    }
    if (spare_ == none) {
        ++sender.up.stats.overflowed;
        return;
    }
    const Slot slot = std::exchange(spare_, none);
    ++held_;
    packets_[slot] = Packet{.length = static_cast<std::uint16_t>(length),
                            .charged_bytes = static_cast<std::uint16_t>(length + overhead_bytes_),
                            .from = from,
                            .to = target->second};
    enter(sender.up, Stage::uplink, slot, now_);
}

void Relay::schedule(Nanos at, Stage stage, std::uint16_t from, std::uint16_t to) {
    events_.push_back({.at = at, .order = ++order_, .stage = stage, .from = from, .to = to});
    std::push_heap(events_.begin(), events_.end(), std::greater<>());
}

// Events run at their own time, however late they are processed: a slow machine delays packets, but neither slows down
// the rates nor fills the queues.
void Relay::run_events(Nanos now) {
    now_ = std::max(now_, now);
    while (!events_.empty() && events_.front().at <= now_) {
        std::pop_heap(events_.begin(), events_.end(), std::greater<>());
        const Event event = events_.back();
        events_.pop_back();
        switch (event.stage) {
            case Stage::uplink: serve(hosts_[event.from]->up, event.stage, event.from, event.at); break;
            case Stage::line: release(*hosts_[event.from]->to[event.to], event.at); break;
            case Stage::downlink: serve(hosts_[event.to]->down, event.stage, event.to, event.at); break;
        }
    }
}

void Relay::enter(Server& server, Stage stage, Slot slot, Nanos now) {
    const Packet& packet = packets_[slot];
    if (server.fifo.empty()) {
        if (server.bits_per_s == 0) {
            leave(server, stage, slot, now);
            return;
        }
        push(server.fifo, slot);
        begin(server, now);
        const std::uint16_t host = stage == Stage::uplink ? packet.from : packet.to;
        schedule(server.done_at, stage, host, host);
        return;
    }
    if (server.waiting_bytes + packet.charged_bytes > server.queue_bytes) {
        ++server.stats.overflowed;
        give_back(slot);
        return;
    }
    server.waiting_bytes += packet.charged_bytes;
    push(server.fifo, slot);
}

void Relay::begin(Server& server, Nanos now) {
    server.began_at = now;
    server.done_at = now + sending_time(packets_[server.fifo.head].charged_bytes, server.bits_per_s);
}

void Relay::serve(Server& server, Stage stage, std::uint16_t host, Nanos now) {
    if (server.done_at != now) return;  // stale: the rate was changed
    while (server.done_at <= now) {
        const Slot slot = pop(server.fifo);
        server.stats.busy += server.done_at - server.began_at;
        if (server.fifo.empty()) {
            server.done_at = never;
        } else {
            server.waiting_bytes -= packets_[server.fifo.head].charged_bytes;
            begin(server, now);
        }
        leave(server, stage, slot, now);
    }
    if (!server.fifo.empty()) schedule(server.done_at, stage, host, host);
}

void Relay::leave(Server& server, Stage stage, Slot slot, Nanos now) {
    ++server.stats.packets;
    server.stats.bytes += packets_[slot].length;
    if (stage == Stage::uplink)
        cross(slot, now);
    else
        post(slot, now);
}

bool Relay::is_cut(const Packet& packet) const {
    return hosts_[packet.from]->cut || hosts_[packet.to]->cut || hosts_[packet.from]->to[packet.to]->cut;
}

bool Relay::is_too_large(const Packet& packet) const {
    for (const std::uint16_t host : {packet.from, packet.to})
        if (hosts_[host]->mtu_bytes != 0 && packet.length > hosts_[host]->mtu_bytes) return true;
    return false;
}

void Relay::cross(Slot slot, Nanos now) {
    Packet& packet = packets_[slot];
    Link& link = *hosts_[packet.from]->to[packet.to];
    if (is_cut(packet) || is_too_large(packet)) {
        ++(is_cut(packet) ? totals_.cut : totals_.too_large);
        give_back(slot);
        return;
    }
    const Fate fate = link.fates.next(now);
    ++link.stats.seen;
    if (fate.lost) {
        ++link.stats.lost;
        if (!std::exchange(link.losing, true)) ++link.stats.bursts;
        give_back(slot);
        return;
    }
    link.losing = false;
    packet.due = std::max(now + fate.delay, link.last_due);
    if (packet.due <= now && link.line.empty()) {
        enter(hosts_[packet.to]->down, Stage::downlink, slot, now);
        return;
    }
    if (link.line.size == max_line_packets) {
        ++link.stats.overflowed;
        give_back(slot);
        return;
    }
    link.last_due = packet.due;
    if (link.line.empty()) schedule(packet.due, Stage::line, packet.from, packet.to);
    push(link.line, slot);
}

void Relay::release(Link& link, Nanos now) {
    while (!link.line.empty() && packets_[link.line.head].due <= now) {
        const Slot slot = pop(link.line);
        enter(hosts_[packets_[slot].to]->down, Stage::downlink, slot, now);
    }
    if (!link.line.empty()) schedule(packets_[link.line.head].due, Stage::line, link.stats.from, link.stats.to);
}

void Relay::post(Slot slot, Nanos now) {
    packets_[slot].due = now;
    const std::uint16_t to = packets_[slot].to;
    if (hosts_[to]->outbox.empty()) to_deliver_.push_back(to);
    push(hosts_[to]->outbox, slot);
}

void Relay::deliver(Host& host) {
    while (!host.outbox.empty()) {
        const Slot slot = pop(host.outbox);
        const Packet& packet = packets_[slot];
        if (is_cut(packet)) {
            ++totals_.cut;
        } else if (deliver_(packet.to, {bytes_of(slot), packet.length})) {
            ++totals_.delivered;
            totals_.late_total += now_ - packet.due;
            totals_.late_max = std::max(totals_.late_max, now_ - packet.due);
        } else {
            ++totals_.refused;
        }
        give_back(slot);
    }
}

void Relay::advance(Nanos now) {
    run_events(now);
    for (const std::uint16_t host : to_deliver_) deliver(*hosts_[host]);
    to_deliver_.clear();
}

RelayStats Relay::stats() const {
    RelayStats all = totals_;
    for (std::uint16_t from = 0; from < max_hosts; ++from) {
        if (hosts_[from] == nullptr) continue;
        all.hosts.push_back({.host = from, .up = hosts_[from]->up.stats, .down = hosts_[from]->down.stats});
        for (const auto& link : hosts_[from]->to)
            if (link != nullptr) all.links.push_back(link->stats);
    }
    return all;
}

}  // namespace storm
