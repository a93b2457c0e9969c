#include "peer.hpp"

#include <algorithm>
#include <utility>

namespace storm {
namespace {

// How many words a report may have in a datagram of this size.
std::size_t report_words(std::size_t datagram_bytes) {
    return (datagram_bytes - header_bytes - tag_bytes - Report::fixed_bytes) / 8;
}

}  // namespace

Peer::Peer(std::uint16_t its_rank, std::uint64_t credit_bytes, const RateControl& its_rate, const PathMtu& its_path,
           std::size_t chunk_bytes, Nanos now)
    : rank(its_rank),
      out(credit_bytes, now),
      in(report_words(its_path.bytes())),
      rate(its_rate),
      path(its_path),
      pieces(chunk_bytes),
      last_heard_(now) {}

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
    out.heard();
}

Nanos Peer::silent_at(Nanos started, Nanos silence) const { return std::max(last_heard_, started) + silence; }

Nanos Peer::ping_at(Nanos started, Nanos silence) const {
    return std::max(std::max(last_heard_, started) + silence / 4, next_ping_);
}

void Peer::ping(Nanos now, Nanos silence) {
    next_ping_ = now + silence / 4;
    say({.kind = Kind::ping});
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

void Peer::fit_reports(std::size_t datagram_bytes) { in.set_most_words(report_words(datagram_bytes)); }

PieceCut Peer::cut(std::size_t chunk_bytes, std::size_t seal_bytes) const {
    const std::size_t overhead = header_bytes + seal_bytes;
    if (chunk_bytes + overhead <= path.bytes()) return {chunk_bytes, 1};
    return PieceCut::within(chunk_bytes, path.bytes(), overhead);
}

Nanos Peer::report_delay() const { return std::clamp<Nanos>(out.smooth_rtt() / 8, millisecond / 2, 10 * millisecond); }

}  // namespace storm
