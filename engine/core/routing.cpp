// Connection migration: path challenges that validate addresses, and the switch of a link to a new address.
#include <array>

#include "core/core.hpp"
#include "exchange/batch.hpp"
#include "peers/peer.hpp"

namespace storm {

bool Core::challenge(Batch& batch, std::uint16_t rank, std::uint32_t id, Nanos now, std::size_t path) {
    Peer& peer = peers_[rank];
    if (peer.vacant || peer.left() || path >= peer.links.size()) return false;
    Link& link = peer.links[path];
    batch.begin(rank, Batch::max_bytes, link.index);
    const auto bytes = static_cast<std::uint32_t>(header_bytes + seal_.overhead_bytes());
    add_datagram(batch, link, {.bytes = bytes, .kind = Kind::ping, .challenge = id},
                 {.kind = Kind::ping, .source = source(link), .cookie = seal_.visible_cookie()}, {}, now);
    return true;
}

void Core::report(Batch& batch, std::uint16_t rank, Nanos now, std::size_t path) {
    Link& link = peers_[rank].links[path];
    std::array<std::byte, Report::fixed_bytes + 8 * Report::max_words> body;
    const std::size_t bytes = write_report(link.in.make_report(credit_.bytes(rank), overflow_, now), body);
    link.in.report_now();  // the current address gets a report as well
    batch.begin(rank, Batch::max_bytes, link.index);
    add_datagram(batch, link,
                 {.bytes = static_cast<std::uint32_t>(header_bytes + bytes), .kind = Kind::report, .settled = true},
                 {.kind = Kind::report, .source = source(link), .cookie = seal_.visible_cookie()},
                 std::span(body).first(bytes), now);
    ++counters_.reports;
}

void Core::ping(std::uint16_t rank, std::size_t path) {
    if (rank == config_.rank || peers_.look(rank).vacant || path >= peers_.look(rank).links.size()) return;
    Peer& peer = peers_[rank];
    if (peer.links.several()) {
        peer.links[path].asks = true;
    } else {
        peer.queue_control({.kind = Kind::ping});
    }
}

Replies Core::take_replies(std::uint16_t rank, std::size_t path) {
    return std::exchange(peers_.attempt(rank).links[path].replies, {});
}

void Core::reroute(std::uint16_t rank, Nanos now, std::size_t path) {
    Peer& peer = peers_[rank];
    Link& link = peer.links[path];
    ++counters_.reroutes;
    // Datagrams in flight went to the old address, which no longer answers: they count as lost.
    link.out.mark_all_lost([&](const Flight& flight) { on_lost(peer, link, flight, now); });
    link.rate = make_rate(now);
    link.path = make_path();
    link.fit_reports(link.path.bytes());
    peer.forget_losses();
}

Nanos Core::probe_timeout(std::uint16_t rank, std::size_t path) const {
    return peers_.look(rank).links[path].out.probe_timeout();
}

}  // namespace storm
