#include "peers/peer.hpp"

#include <algorithm>
#include <utility>

namespace storm {

Peer::Peer(std::uint16_t its_rank, std::uint64_t credit_bytes, const RateControl& its_rate, const PathMtu& its_path,
           std::size_t chunk_bytes, Nanos now, std::size_t paths, Nanos silence)
    : rank(its_rank),
      links(paths, credit_bytes, its_rate, its_path, chunk_bytes, now),
      last_heard_(now),
      doubt_(silence) {}

void Peer::say(const Control& what) {
    const bool farewell = left_ && what.kind == Kind::bye && !told && farewells > 0;
    if (farewell) --farewells;
    if (!left_ || farewell || what.kind == Kind::done) controls.push(what);
}

void Peer::pass(std::vector<std::byte> note) {
    if (left_) return;
    if (notes.size() == most_notes) notes.pop_front();
    notes.push_back(std::move(note));
}

void Peer::hear(Nanos now) {
    last_heard_ = now;
    silent_ = false;
    doubt_.clear();
    if (!links.several()) links[0].out.heard();
}

void Peer::hear(Nanos now, Link& link) {
    hear(now);
    if (!links.several()) return;
    link.out.heard();
    links.heard_on(link);
}

Nanos Peer::silent_at(Nanos started, Nanos silence) const {
    return std::min(std::max(last_heard_, started) + silence, doubt_.silent_at(started));
}

Nanos Peer::ping_at(Nanos started, Nanos silence) const {
    return std::max(std::max(last_heard_, started) + silence / 4, next_ping_);
}

void Peer::ping(Nanos now, Nanos silence) {
    next_ping_ = now + silence / 4;
    say({.kind = Kind::ping});
}

void Peer::ask_again(Nanos now) {
    if (!left_ && doubt_.ask(now)) say({.kind = Kind::ping});
}

void Peer::leave(Blame why) {
    left_ = true;
    notes.clear();
    left_for_ = why;
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
    return now >= loss_timer() || now >= probe_timer() || now >= doubt_timer() ||
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
