// All that an endpoint knows of one peer: the paths to it, what waits to be sent to it, and whether it lives.
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

    // `credit_bytes`: what it may have in flight to us at first, on each of so many paths. `chunk_bytes`: no chunk of the job
    // is larger.
    Peer(std::uint16_t its_rank, std::uint64_t credit_bytes, const RateControl& its_rate, const PathMtu& its_path,
         std::size_t chunk_bytes, Nanos now, std::size_t paths = 1, Nanos silence = 10 * second);

    // How often a goodbye is said again to a peer that we part from: it may be gone, and never answer.
    static constexpr unsigned most_goodbye_repeats = 8;

    // Queues a control datagram. Once the peer has left, only `done` is still said, and goodbyes as long as `goodbye_repeats` lasts.
    void queue_control(const Control& what);

    // Queues a note. Only the latest are kept: each says more than those before.
    void queue_view_message(std::vector<std::byte> note);
    [[nodiscard]] bool has_pending_control() const { return !controls.empty() || !view_messages.empty() || asks(); }
    // Whether a ping is to be sent over a certain path.
    [[nodiscard]] bool asks() const;

    // Silence. A peer that was silent for too long is taken for lost; it is healed by any datagram that it sends.
    void on_received(Nanos now);              // through shared memory
    void on_received(Nanos now, Link& link);  // over this path
    void fall_silent() { silent_ = true; }
    [[nodiscard]] bool silent() const { return silent_; }
    [[nodiscard]] Nanos last_received() const { return last_received_; }
    // When a peer that takes part in an exchange begun at `started` counts as silent.
    [[nodiscard]] Nanos silent_at(Nanos started, Nanos silence) const;
    // When to ping a peer that we only wait for: nothing else would show whether it lives.
    [[nodiscard]] Nanos ping_at(Nanos started, Nanos silence) const;
    void ping(Nanos now, Nanos silence);
    // The kernel of its machine says that nobody listens there. True once: when it counts as dead by that.
    [[nodiscard]] bool on_unreachable(Nanos now) { return port_unreachable_.on_unreachable(now); }
    // Asks it for a sign of life, if it is time.
    void probe_if_due(Nanos now);
    [[nodiscard]] Nanos unreachable_timer() const { return left_ ? never : port_unreachable_.timer(); }

    // A goodbye: the peer left, and why if it said so.
    void leave(FailureCause why);
    [[nodiscard]] bool left() const { return left_; }
    [[nodiscard]] FailureCause leave_cause() const { return leave_cause_; }

    // A path is blocked when the peer answers but no data reaches it. Losses themselves, and not merely the time since
    // one, must span the silence, as there may have been nothing to send.
    void on_data_arrived() { forget_losses(); }
    void forget_losses() { data_lost_since_ = never; }
    void on_data_lost(Nanos now);
    // When data of an exchange begun at `started` counts as blocked; `never` unless losses span that time already.
    [[nodiscard]] Nanos blocked_at(Nanos started, Nanos silence) const;
    // Whether an exchange that began early enough is blocked.
    [[nodiscard]] bool may_be_blocked(Nanos silence) const { return blocked_at(0, silence) != never; }

    // Whether probing for the largest datagram that the path carries is worth its cost.
    [[nodiscard]] bool explores_path() const { return !left_ && !silent_; }
    // Whether a tick would change something: a loss, a probe or a finding about the path is due.
    [[nodiscard]] bool due(Nanos now) const;
    // When something in flight counts as lost; when to ask whether a path answers; when to send or to judge a probe of a
    // path's size. The earliest over all paths.
    [[nodiscard]] Nanos loss_timer() const;
    [[nodiscard]] Nanos probe_timer() const;
    [[nodiscard]] Nanos path_timer() const;
    // When what arrived is to be reported, if the peer may have so much in flight on each path.
    [[nodiscard]] Nanos report_timer(std::uint64_t credit_bytes) const;

    const std::uint16_t rank;
    Links links;                                         // the paths to it
    SendQueue queue;                                     // messages to it
    Controls controls;                                   // filled by `queue_control`
    std::deque<std::vector<std::byte>> view_messages;    // filled by `queue_view_message`
    std::unique_ptr<SharedMemoryChannel> shared_memory;  // shared memory, if it is on the same machine
    bool vacant{};                                       // nobody has the slot: whatever comes from it is forged
    bool goodbye_acked{};                                // it knows that we leave
    bool pool_was_full{};                                // the pool turned a chunk from it away
    unsigned goodbye_repeats{};                          // how often it may still be told again that we part from it

private:
    Nanos last_received_;
    Nanos next_ping_{};
    Nanos data_lost_since_{never};  // since when all data to it was lost; `never` when the latest arrived
    Nanos data_lost_at_{};          // when data to it was last lost
    PortUnreachable port_unreachable_;
    bool silent_{}, left_{};
    FailureCause leave_cause_{};
};

}  // namespace storm
