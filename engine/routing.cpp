// What a core has to do with addresses: it makes pings for those that are in question, and begins anew at another one.
#include <array>

#include "batch.hpp"
#include "core.hpp"
#include "peer.hpp"

namespace storm {

bool Core::challenge(Batch& batch, std::uint16_t rank, std::uint32_t id, Nanos now) {
    Peer& peer = peers_[rank];
    if (peer.vacant || peer.left()) return false;
    batch.begin(rank, Batch::max_bytes);
    const auto bytes = static_cast<std::uint32_t>(header_bytes + seal_.overhead_bytes());
    add_datagram(batch, peer, {.bytes = bytes, .kind = Kind::ping, .challenge = id},
                 {.kind = Kind::ping, .source = config_.rank, .cookie = seal_.visible_cookie()}, {}, now);
    return true;
}

void Core::report(Batch& batch, std::uint16_t rank, Nanos now) {
    Peer& peer = peers_[rank];
    std::array<std::byte, Report::fixed_bytes + 8 * Report::max_words> body;
    const std::size_t bytes = write_report(peer.in.make_report(credit_.bytes(rank), overflow_, now), body);
    peer.in.report_now();  // the present address gets one as well
    batch.begin(rank, Batch::max_bytes);
    add_datagram(batch, peer,
                 {.bytes = static_cast<std::uint32_t>(header_bytes + bytes), .kind = Kind::report, .settled = true},
                 {.kind = Kind::report, .source = config_.rank, .cookie = seal_.visible_cookie()},
                 std::span(body).first(bytes), now);
    ++counters_.reports;
}

void Core::ping(std::uint16_t rank) {
    if (rank == config_.rank || peers_.look(rank).vacant) return;
    peers_[rank].say({.kind = Kind::ping});
}

Replies Core::take_replies(std::uint16_t rank) { return std::exchange(peers_.attempt(rank).replies, {}); }

void Core::reroute(std::uint16_t rank, Nanos now) {
    Peer& peer = peers_[rank];
    ++counters_.reroutes;
    // Datagrams in flight went to the old address, which no longer answers: they count as lost, and the new path is unknown.
    peer.out.abandon([&](const Flight& flight) { on_lost(peer, flight, now); });
    peer.rate = make_rate(now);
    peer.path = make_path();
    peer.fit_reports(peer.path.bytes());
    peer.forget_losses();
}

Nanos Core::patience(std::uint16_t rank) const { return peers_.look(rank).out.patience(); }

}  // namespace storm
