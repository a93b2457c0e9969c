// Multipath: the paths to one peer. A path is a pair of interfaces, ours and the peer's, with its own packet numbers,
// rate and MTU.
//
// Data for the peer is sent over any path with capacity, so each path gets chunks in proportion to its rate, and a
// chunk that one path lost may be retransmitted over another. A path that answers nothing while another does is down:
// what is in flight on it is retransmitted over the others, and it is only probed from time to time. With one path,
// none of this happens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.hpp"
#include "congestion/rate_control.hpp"
#include "link/link.hpp"
#include "paths/path_mtu.hpp"
#include "paths/routes.hpp"
#include "wire/pieces.hpp"
#include "wire/wire.hpp"

namespace storm {

// The header's source identifies rank and path: see `Core::source`.
inline constexpr std::size_t most_paths = 4;

// One path to a peer.
struct Link {
    // How long a path whose round trip is not known may take to answer.
    static constexpr Nanos unknown_rtt_timeout = 300 * millisecond;
    // A path that is down is probed at once, then less and less often.
    static constexpr Nanos longest_probe_interval = second / 2;

    Link(std::uint8_t path_index, std::uint64_t credit_bytes, const RateControl& its_rate, const PathMtu& its_path,
         std::size_t chunk_bytes, Nanos now);

    // The path carries datagrams of this size at most: reports must fit it.
    void fit_reports(std::size_t datagram_bytes);
    // How long a report may wait for more to report.
    [[nodiscard]] Nanos report_delay() const;
    // How a chunk is sent: whole as one piece, or in several where the path carries less. `seal_bytes`: what sealing
    // adds to a datagram.
    [[nodiscard]] PieceLayout layout(std::size_t chunk_bytes, std::size_t seal_bytes) const;
    // When to probe whether the path still answers, or answers again.
    [[nodiscard]] Nanos probe_at() const { return down ? probe_due_at : out.probe_at(); }
    // Whether answers are overdue.
    [[nodiscard]] bool suspect(Nanos now) const { return out.probes() > 0 || out.ack_overdue(now); }
    // Whether nothing was answered for so long that the path is dead, if another one answers.
    [[nodiscard]] bool unanswered(Nanos now) const;
    void mark_down(Nanos now);
    // A path that is down was probed once more.
    void on_probe_sent(Nanos now);
    // Something that was sent over it has arrived.
    void on_answer(Nanos now);
    // When something sent now might arrive, apart from the bytes before it.
    [[nodiscard]] Nanos delay(Nanos now) const;

    std::uint8_t index;
    Outbound out;
    Inbound in;
    RateControl rate;
    PathMtu path;
    Pieces pieces;    // chunks that are not complete
    Replies replies;  // since the driver last took them
    bool down{};
    bool asks{};                // a ping is to be sent over this very path
    Nanos probe_due_at{never};  // when to probe again, while it is down
    Nanos probe_interval{};     // and how long after that
    Nanos answered_at{};        // when the latest answer arrived
    std::uint64_t bytes_sent{}, bytes_received{};
    std::uint32_t outages{};  // how often it went down
};

// Reported state of a path.
struct PathHealth {
    bool up{};
    Nanos round_trip{};
    double loss{};         // of what the peer sent over it
    double bytes_per_s{};  // estimated rate to the peer
    std::uint64_t bytes_sent{}, bytes_received{};
    std::uint32_t outages{};
};

// All paths to one peer. There is at least one, and at least one is up.
class Links {
public:
    Links(std::size_t count, std::uint64_t credit_bytes, const RateControl& rate, const PathMtu& path,
          std::size_t chunk_bytes, Nanos now);

    [[nodiscard]] std::size_t size() const { return all_.size(); }
    [[nodiscard]] bool several() const { return all_.size() > 1; }
    [[nodiscard]] Link& operator[](std::size_t index) { return all_[index]; }
    [[nodiscard]] const Link& operator[](std::size_t index) const { return all_[index]; }
    [[nodiscard]] auto begin() { return all_.begin(); }
    [[nodiscard]] auto end() { return all_.end(); }
    [[nodiscard]] auto begin() const { return all_.begin(); }
    [[nodiscard]] auto end() const { return all_.end(); }

    // Indices of the paths that are up, in the order in which they should be used: those that answer first, and of them
    // those with the shorter round trip.
    struct Order {
        std::array<std::uint8_t, most_paths> paths{};
        std::size_t count{};
        [[nodiscard]] auto begin() const { return paths.begin(); }
        [[nodiscard]] auto end() const { return paths.begin() + static_cast<std::ptrdiff_t>(count); }
    };
    [[nodiscard]] Order order(Nanos now) const;
    // Whether another path has answered since this one's answers are overdue.
    [[nodiscard]] bool survives(const Link& link) const;
    // True if this many waiting bytes would arrive sooner over the paths before this one in `order` alone.
    [[nodiscard]] bool better_without(const Link& link, const Order& order, std::uint64_t waiting_bytes,
                                      Nanos now) const;

    // Reports are due at once, on paths with something unreported and on the one that received last.
    void report_unreported();
    // Reports are due at once, on all paths.
    void report_now();
    void received_on(const Link& link) { last_received_ = link.index; }

    // All paths that are up, as one: the mean of their losses, weighted by rate; the longest bursts; the sum of their
    // rates; the longest round trip and probe timeout.
    [[nodiscard]] double loss() const;
    [[nodiscard]] bool lossy() const { return loss() > 0.02; }
    [[nodiscard]] double burst() const;
    [[nodiscard]] double bytes_per_s() const;
    [[nodiscard]] Nanos round_trip() const;
    [[nodiscard]] Nanos probe_timeout() const;
    // The largest difference between the one-way delays of two paths.
    [[nodiscard]] Nanos spread() const;
    // True if a chunk is split into pieces on any path.
    [[nodiscard]] bool splits_chunks(std::size_t chunk_bytes, std::size_t seal_bytes) const;

    [[nodiscard]] std::vector<PathHealth> health() const;

private:
    std::vector<Link> all_;
    std::uint8_t last_received_{};
};

}  // namespace storm
