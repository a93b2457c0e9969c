#include "peers/peer.hpp"

#include <algorithm>
#include <utility>

namespace storm {

Peer::Peer(std::uint16_t its_rank, std::uint64_t credit_bytes, const RateControl& its_rate, const PathMtu& its_path,
           std::size_t chunk_bytes, Nanos now, std::size_t paths, Nanos silence)
    : rank(its_rank),
      links(paths, credit_bytes, its_rate, its_path, chunk_bytes, now),
      last_received_(now),
      port_unreachable_(silence) {}

void Peer::queue_control(const Control& what) {
    const bool repeats_goodbye = left_ && what.kind == Kind::bye && !goodbye_acked && goodbye_repeats > 0;
    if (repeats_goodbye) --goodbye_repeats;
    if (!left_ || repeats_goodbye || what.kind == Kind::done) controls.push(what);
}

void Peer::queue_view_message(std::vector<std::byte> message) {
    if (left_) return;
    if (view_messages.size() == most_view_messages) view_messages.pop_front();
    view_messages.push_back(std::move(message));
}

void Peer::on_received(Nanos now) {
    last_received_ = now;
    silent_ = false;
    port_unreachable_.clear();
    if (!links.several()) links[0].out.on_received();
}

void Peer::on_received(Nanos now, Link& link) {
    on_received(now);
    if (!links.several()) return;
    link.out.on_received();
    links.received_on(link);
}

Nanos Peer::silent_at(Nanos started, Nanos silence) const {
    return std::min(std::max(last_received_, started) + silence, port_unreachable_.silent_at(started));
}

Nanos Peer::ping_at(Nanos started, Nanos silence) const {
    return std::max(std::max(last_received_, started) + silence / 4, next_ping_);
}

void Peer::ping(Nanos now, Nanos silence) {
    next_ping_ = now + silence / 4;
    queue_control({.kind = Kind::ping});
}

void Peer::probe_if_due(Nanos now) {
    if (!left_ && port_unreachable_.probe_due(now)) queue_control({.kind = Kind::ping});
}

void Peer::leave(FailureCause why) {
    left_ = true;
    view_messages.clear();
    leave_cause_ = why;
}

void Peer::on_data_lost(Nanos now) {
    data_lost_since_ = std::min(data_lost_since_, now);
    data_lost_at_ = now;
}

Nanos Peer::blocked_at(Nanos started, Nanos silence) const {
    if (data_lost_since_ == never) return never;
    const Nanos at = std::max(data_lost_since_, started) + silence;
    return data_lost_at_ >= at ? at : never;
}

bool Peer::asks() const {
    return !left_ && std::any_of(links.begin(), links.end(), [](const Link& link) { return link.asks; });
}

bool Peer::due(Nanos now) const {
    return now >= loss_timer() || now >= probe_timer() || now >= unreachable_timer() ||
           std::any_of(links.begin(), links.end(), [&](const Link& link) { return link.path.due(now); });
}

Nanos Peer::loss_timer() const {
    Nanos at = never;
    for (const Link& link : links) at = std::min(at, link.out.loss_at());
    return at;
}

Nanos Peer::probe_timer() const {
    Nanos at = never;
    for (const Link& link : links) at = std::min(at, link.down && left_ ? never : link.probe_at());
    return at;
}

Nanos Peer::path_timer() const {
    Nanos at = never;
    if (!explores_path()) return at;
    for (const Link& link : links) at = std::min(at, link.down ? never : link.path.timer(!queue.empty()));
    return at;
}

Nanos Peer::report_timer(std::uint64_t credit_bytes) const {
    Nanos at = never;
    for (const Link& link : links) at = std::min(at, link.in.report_at(credit_bytes, link.report_delay()));
    return at;
}

}  // namespace storm
