// One peer of an endpoint: the paths to it, the controls and messages that wait to be sent to it, and its liveness.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "exchange/send_queue.hpp"
#include "paths/paths.hpp"
#include "peers/port_unreachable.hpp"
#include "shm/shared_memory_channel.hpp"
#include "wire/controls.hpp"
#include "wire/wire.hpp"

namespace storm {

class Peer {
public:
    static constexpr std::size_t most_view_messages = 16;

    // `credit_bytes`: what it may have in flight to us at first, on each of its `paths`. `chunk_bytes`: the largest
    // chunk of the job.
    Peer(std::uint16_t its_rank, std::uint64_t credit_bytes, const RateControl& its_rate, const PathMtu& its_path,
         std::size_t chunk_bytes, Nanos now, std::size_t paths = 1, Nanos silence = 10 * second);

    // How often a goodbye is retransmitted to a peer that we have dropped: it may be gone and never acknowledge it.
    static constexpr unsigned most_goodbye_repeats = 8;

    // Queues a control datagram. Once the peer has left, only `done` is still queued, and goodbyes as long as
    // `goodbye_repeats` is above 0.
    void queue_control(const Control& what);

    // Queues a view message. Only the latest are kept: each one supersedes those before it.
    void queue_view_message(std::vector<std::byte> message);
    [[nodiscard]] bool has_pending_control() const { return !controls.empty() || !view_messages.empty() || asks(); }
    // Whether a ping is to be sent over a certain path.
    [[nodiscard]] bool asks() const;

    // Liveness. A peer that is silent for too long counts as lost. Any datagram from it ends its silence.
    void on_received(Nanos now);              // through shared memory
    void on_received(Nanos now, Link& link);  // over this path
    void fall_silent() { silent_ = true; }
    [[nodiscard]] bool silent() const { return silent_; }
    [[nodiscard]] Nanos last_received() const { return last_received_; }
    // When a peer that takes part in an exchange begun at `started` counts as silent.
    [[nodiscard]] Nanos silent_at(Nanos started, Nanos silence) const;
    // When to ping a peer from which we only receive: nothing else would show whether it is alive.
    [[nodiscard]] Nanos ping_at(Nanos started, Nanos silence) const;
    void ping(Nanos now, Nanos silence);
    // Its kernel reports that its port is closed (ICMP port unreachable). True once: when the peer counts as dead.
    [[nodiscard]] bool on_unreachable(Nanos now) { return port_unreachable_.on_unreachable(now); }
    // Pings it if its port was reported closed and the next ping is due.
    void probe_if_due(Nanos now);
    [[nodiscard]] Nanos unreachable_timer() const { return left_ ? never : port_unreachable_.timer(); }

    // The peer said goodbye. `why` is its failure cause, empty if it gave none.
    void leave(FailureCause why);
    [[nodiscard]] bool left() const { return left_; }
    [[nodiscard]] FailureCause leave_cause() const { return leave_cause_; }

    // A path is blocked when the peer answers but no data reaches it. The losses themselves must span `silence`: the
    // time since one loss proves nothing, as there may have been nothing to send.
    void on_data_arrived() { forget_losses(); }
    void forget_losses() { data_lost_since_ = never; }
    void on_data_lost(Nanos now);
    // When data of an exchange begun at `started` counts as blocked; `never` if losses do not span that time yet.
    [[nodiscard]] Nanos blocked_at(Nanos started, Nanos silence) const;
    // Whether an exchange that began early enough would count as blocked.
    [[nodiscard]] bool may_be_blocked(Nanos silence) const { return blocked_at(0, silence) != never; }

    // Whether path MTU discovery is worth its cost.
    [[nodiscard]] bool explores_path() const { return !left_ && !silent_; }
    // Whether a tick would change something: a loss, a probe or a path MTU decision is due.
    [[nodiscard]] bool due(Nanos now) const;
    // When something in flight counts as lost; when to probe a path that does not answer; when to send or judge a path
    // MTU probe. Each is the earliest over all paths.
    [[nodiscard]] Nanos loss_timer() const;
    [[nodiscard]] Nanos probe_timer() const;
    [[nodiscard]] Nanos path_timer() const;
    // When to acknowledge what arrived, if the peer may have `credit_bytes` in flight on each path.
    [[nodiscard]] Nanos report_timer(std::uint64_t credit_bytes) const;

    const std::uint16_t rank;
    Links links;                                         // the paths to it
    SendQueue queue;                                     // messages to it
    Controls controls;                                   // filled by `queue_control`
    std::deque<std::vector<std::byte>> view_messages;    // filled by `queue_view_message`
    std::unique_ptr<SharedMemoryChannel> shared_memory;  // shared memory, if it is on the same machine
    bool vacant{};                                       // no process has this rank: its datagrams are forged
    bool goodbye_acked{};                                // it has acknowledged our goodbye
    bool pool_was_full{};                                // the pool refused a chunk from it
    unsigned goodbye_repeats{};                          // how often the goodbye may still be retransmitted to it

private:
    Nanos last_received_;
    Nanos next_ping_{};
    Nanos data_lost_since_{never};  // since when all data to it was lost; `never` if the latest arrived
    Nanos data_lost_at_{};          // when data to it was last lost
    PortUnreachable port_unreachable_;
    bool silent_{}, left_{};
    FailureCause leave_cause_{};
};

}  // namespace storm
