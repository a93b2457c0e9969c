#include "traffic/sim_service.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace storm {

namespace {

constexpr std::uint32_t header_bytes = 14 + 20 + 32;   // Ethernet, IPv4, TCP with timestamps
constexpr std::uint32_t opening_bytes = 14 + 20 + 40;  // with the options of the handshake
constexpr Nanos connect_retry_after = second;
constexpr Nanos request_retry_after = 200 * millisecond;

}  // namespace

SimService::SimService(const ServiceSettings& settings, std::size_t hosts, Nanos now)
    : settings_(settings),
      hosts_(hosts),
      segments_((settings.response_bytes + tcp_payload_bytes - 1) / tcp_payload_bytes),
      chance_(settings.seed),
      idle_(hosts * hosts) {
    if (hosts < 2) throw std::invalid_argument("a service needs at least two hosts");
    if (!(settings.requests_per_s >= 0)) throw std::invalid_argument("requests_per_s must not be negative");
    if (settings.response_bytes == 0) throw std::invalid_argument("response_bytes must be above 0");
    if (settings.request_bytes > tcp_payload_bytes) {
        throw std::invalid_argument("request_bytes must fit into one segment of 1448 bytes");
    }
    arrive_after(now);
}

void SimService::arrive_after(Nanos now) {
    if (settings_.requests_per_s == 0) return;
    const double even = (static_cast<double>(chance_() >> 11) + 0.5) * 0x1p-53;
    arrival_ = now + static_cast<Nanos>(-std::log(even) / settings_.requests_per_s * 1e9);
}

std::vector<std::uint32_t>& SimService::idle(std::uint16_t client, std::uint16_t server) {
    return idle_[client * hosts_ + server];
}

Nanos SimService::next_at() const { return std::min(arrival_, timers_.empty() ? never : timers_.top().at); }

void SimService::tick(Nanos now, SimSwitch& network) {
    if (arrival_ <= now) {
        const auto client = static_cast<std::uint16_t>(chance_() % hosts_);
        const auto step = 1 + chance_() % (hosts_ - 1);
        begin_request(client, static_cast<std::uint16_t>((client + step) % hosts_), now, network);
        arrive_after(now);
    }
    while (!timers_.empty() && timers_.top().at <= now) {
        const auto [at, which] = timers_.top();
        timers_.pop();
        Connection& one = connections_[which];
        if (at != one.armed_at) continue;  // an earlier one replaced it
        one.armed_at = never;
        if (one.retry_at <= now) send_first(which, now, network);
        if (one.receiver.timer() <= now) send_ack(which, now, network);
        if (one.sender.timer() <= now) {
            one.sender.on_timer(now);
            send_data(which, now, network);
        }
        arm(which);
    }
}

void SimService::begin_request(std::uint16_t client, std::uint16_t server, Nanos now, SimSwitch& network) {
    ++asked_;
    std::vector<std::uint32_t>& ready = idle(client, server);
    auto which = static_cast<std::uint32_t>(connections_.size());
    if (ready.empty()) {
        Connection& fresh = connections_.emplace_back();
        fresh.client = client;
        fresh.server = server;
        fresh.opened_at = now;
    } else {
        which = ready.back();
        ready.pop_back();
    }
    Connection& one = connections_[which];
    one.requested_at = now;
    ++one.requests;
    send_first(which, now, network);
    arm(which);
}

// What the client sends before any response: the request, once the connection is open.
void SimService::send_first(std::uint32_t which, Nanos now, SimSwitch& network) {
    Connection& one = connections_[which];
    if (!one.open) {
        one.retry_at = now + connect_retry_after;
        send(one, true, {.connection = which, .kind = Segment::Kind::open}, 0, now, network);
        return;
    }
    one.retry_at = now + request_retry_after;
    send(one, true, {.connection = which, .kind = Segment::Kind::request, .number = one.requests},
         settings_.request_bytes, now, network);
}

void SimService::send(const Connection& from, bool by_client, Segment segment, std::uint32_t payload, Nanos now,
                      SimSwitch& network) const {
    const bool opening = segment.kind == Segment::Kind::open || segment.kind == Segment::Kind::opened;
    network.send({.source = by_client ? from.client : from.server,
                  .target = by_client ? from.server : from.client,
                  .priority = Priority::normal,
                  .wire_bytes = payload + (opening ? opening_bytes : header_bytes),
                  .segment = segment},
                 now);
}

void SimService::send_data(std::uint32_t which, Nanos now, SimSwitch& network) {
    Connection& one = connections_[which];
    while (const auto sent = one.sender.next(now)) {
        const bool last = sent->number % segments_ == segments_ - 1;
        const std::uint32_t payload =
            last ? settings_.response_bytes - (segments_ - 1) * tcp_payload_bytes : tcp_payload_bytes;
        send(one, false,
             {.connection = which, .kind = Segment::Kind::data, .number = sent->number, .order = sent->order}, payload,
             now, network);
    }
}

void SimService::send_ack(std::uint32_t which, Nanos now, SimSwitch& network) {
    Connection& one = connections_[which];
    send(one, true,
         {.connection = which,
          .kind = Segment::Kind::ack,
          .order = one.receiver.order(),
          .next = one.receiver.next(),
          .sacked = one.receiver.newest()},
         0, now, network);
    one.receiver.acked();
}

void SimService::receive(const SimPacket& packet, Nanos now, SimSwitch& network) {
    const Segment& segment = *packet.segment;
    Connection& one = connections_[segment.connection];
    switch (segment.kind) {
        case Segment::Kind::open:
            send(one, false, {.connection = segment.connection, .kind = Segment::Kind::opened}, 0, now, network);
            break;
        case Segment::Kind::opened:
            if (one.open) break;
            one.open = true;
            one.sender.open(now - one.opened_at);
            send_first(segment.connection, now, network);
            break;
        case Segment::Kind::request:
            if (segment.number == one.responses) break;  // a retried request, although the first one arrived
            one.responses = segment.number;
            one.sender.write(segments_, now);
            send_data(segment.connection, now, network);
            break;
        case Segment::Kind::data: receive_data(segment.connection, segment, now, network); break;
        case Segment::Kind::ack:
            one.sender.on_ack(segment.next, segment.sacked, segment.order, now);
            send_data(segment.connection, now, network);
            break;
    }
    arm(segment.connection);
}

void SimService::receive_data(std::uint32_t which, const Segment& segment, Nanos now, SimSwitch& network) {
    Connection& one = connections_[which];
    one.retry_at = never;
    const bool was_complete = one.receiver.next() >= one.requests * segments_;
    const bool at_once = one.receiver.on_data(segment.number, segment.order, now);
    if (at_once) send_ack(which, now, network);
    if (was_complete || one.receiver.next() < one.requests * segments_) return;
    answered_.push_back({one.requested_at, now - one.requested_at});
    idle(one.client, one.server).push_back(which);
}

void SimService::arm(std::uint32_t which) {
    Connection& one = connections_[which];
    const Nanos at = std::min({one.retry_at, one.receiver.timer(), one.sender.timer()});
    if (at >= one.armed_at) return;
    one.armed_at = at;
    timers_.push({at, which});
}

std::uint64_t SimService::resent() const {
    std::uint64_t all = 0;
    for (const Connection& each : connections_) all += each.sender.resent();
    return all;
}

std::uint64_t SimService::timeouts() const {
    std::uint64_t all = 0;
    for (const Connection& each : connections_) all += each.sender.timeouts();
    return all;
}

}  // namespace storm
