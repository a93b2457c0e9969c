// Runs a core with a thread, a socket per path and a clock: one lane of an endpoint.
//
// One thread at a time drives: reads the socket, moves the core along, writes. That is the engine's own thread, unless
// a caller waits for an exchange; then the caller drives, which saves two context switches where latency matters most.
// No thread spins: the driving thread sleeps in the kernel until a datagram arrives or a timer is due.
#pragma once

#include <poll.h>
#include <sys/types.h>
#include <time.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/descriptor.hpp"
#include "core/core.hpp"
#include "exchange/batch.hpp"
#include "io/fair_mutex.hpp"
#include "io/socket.hpp"
#include "paths/routes.hpp"
#include "shm/ring.hpp"
#include "shm/shared_memory_channel.hpp"
#include "wire/faults.hpp"

namespace storm {

// Nanoseconds of a clock.
[[nodiscard]] Nanos clock_now(clockid_t clock = CLOCK_MONOTONIC);

class Driver {
public:
    // Opens the socket; `port()` can then be published. Throws std::system_error.
    Driver(const std::string& host, std::uint16_t port, const SocketConfig& config);
    // Opens a socket per host: these are the paths.
    Driver(const std::vector<std::string>& hosts, std::uint16_t port, const SocketConfig& config);
    // Says goodbye, except in a process forked from ours: its copy of the driver owns nothing.
    ~Driver();
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    [[nodiscard]] const Socket& socket(std::size_t path = 0) const { return path_sockets_[path]->socket; }
    [[nodiscard]] std::size_t paths() const { return path_sockets_.size(); }
    // Starts the engine towards `peers`, by rank (the own entry is not used). Throws std::system_error where the
    // process has no descriptor or thread left; nothing has happened then, and it may be tried again.
    void start(CoreConfig config, std::vector<Address> peers);
    // Starts the engine where ranks have several interfaces: `peers` has the addresses of each rank, by path. A path
    // that only one of two ranks has is not used between them.
    void start(CoreConfig config, const std::vector<std::vector<Address>>& peers);

    // Begins an exchange and sends what can be sent at once. Deadlines in the spec are relative to now.
    // Throws std::runtime_error when closed or failed. The engine has failed once its core threw anything other than
    // std::invalid_argument, for example when memory ran out: its state is unknown, so it can only be closed.
    // With `by_thread`, the engine's own thread does the work, and the call returns sooner.
    std::uint64_t post(ExchangeSpec spec, bool by_thread = false);
    // Waits until the exchange ends or `timeout` has passed; true with the outcome (once) if it ended.
    bool wait(std::uint64_t id, Nanos timeout, Outcome& outcome);
    // Whether a wait would return, or throw, at once.
    [[nodiscard]] bool ended(std::uint64_t id);
    // Whether the engine has failed: see `post`.
    [[nodiscard]] bool failed();
    // How an exchange ended whose outcome was not taken yet; none while it runs.
    struct EndStatus {
        Status status{};
        std::uint16_t peer{};
        FailureCause failure_cause{};
    };
    [[nodiscard]] std::optional<EndStatus> end_status(std::uint64_t id);
    // Ends an exchange because its part in another lane has ended this way.
    void fail(std::uint64_t id, const EndStatus& why);
    // First chunks that arrived for an exchange that was not posted here: see Core::peek.
    [[nodiscard]] std::vector<Pool::First> peek(std::uint32_t channel, std::uint32_t seq);
    // Cancels an exchange; its outcome is then `Status::closed`.
    void cancel(std::uint64_t id);
    // A new process at `address` has replaced a peer: see Core::readmit. Throws std::runtime_error when closed.
    void readmit(std::uint16_t peer, const Address& address, std::uint32_t incarnation,
                 const std::optional<LinkKeys>& keys) {
        readmit(peer, std::vector{address}, incarnation, keys);
    }
    // A new process has replaced a peer, and is reachable at these addresses, by path.
    void readmit(std::uint16_t peer, const std::vector<Address>& addresses, std::uint32_t incarnation,
                 const std::optional<LinkKeys>& keys);
    // The peer may be reachable at this address: see Routes. Throws std::runtime_error when closed.
    void offer(std::uint16_t peer, const Address& address);
    // Connection migration: rebinds a path to another address of this host, at the same port if it is free. Peers
    // follow once they have validated it (Routes). Throws std::system_error, and std::runtime_error when closed.
    void rebind(std::size_t path, const std::string& host);
    // Keeps ports open in a router that translates our address: see Routes.
    void enable_keepalive();
    // By rank: where datagrams go over the first path.
    [[nodiscard]] std::vector<Routes::Route> routes();
    // Shared memory with a peer of the same machine, in three steps, so that nothing can fail once the peer relies on
    // it. Step 1: makes a ring that the peer, one of `neighbours`, will write to, and returns descriptors of it, of the
    // doorbell that the peer will ring, and of the broadcast buffer that it will read. The caller owns them.
    struct SharedMemoryOffer {
        Descriptor ring, doorbell, broadcast_buffer;
    };
    [[nodiscard]] SharedMemoryOffer offer_shared_memory(std::uint16_t peer, std::size_t neighbours);
    // Step 2: takes the descriptors of the peer.
    void accept_shared_memory(std::uint16_t peer, SharedMemoryOffer offer);
    // Step 3: starts to use both. Throws std::invalid_argument if the peer is another process by now.
    void use_shared_memory(std::uint16_t peer, std::uint32_t incarnation);
    // Peers that are reached through shared memory.
    [[nodiscard]] std::vector<std::uint16_t> near();
    // Calls `work(views, now)` with the endpoint's views and acts on what it changed. Throws std::runtime_error when
    // closed.
    template <class Work>
    auto with_views(Work&& work);
    // Waits until a usable view with a number above this one is known; false when `timeout` has passed.
    bool wait_view(std::uint32_t above, Nanos timeout);
    // Calls `callback(view, inside)` whenever either changes, from within the driver: it must not call this driver.
    void on_view(std::function<void(const View&, bool)> callback);
    // Applies what another lane's `on_view` reported.
    void follow(const View& view, bool inside);
    // See Core::can_complete.
    [[nodiscard]] CanComplete can_complete(std::uint64_t id);
    // See Core::unreachable_peers.
    [[nodiscard]] std::vector<std::uint16_t> unreachable_peers(std::uint64_t id);
    // Says goodbye without waiting for anything; `close` must follow.
    void leave();
    // Says goodbye, waits at most `linger` until every peer has acknowledged it, ends the thread and closes the socket.
    void close(Nanos linger);

    struct Health {
        Counters counters;
        FaultCounters faults;
        std::uint32_t overflow{};
        bool segments{}, coalesces{};
        std::vector<std::uint64_t> lane_bytes_sent{};  // by lane: see Endpoint
    };
    [[nodiscard]] Health health();
    struct LinkHealth {
        Nanos round_trip{};
        double loss{}, bytes_per_s{};
        std::size_t path_bytes{};
        std::vector<PathHealth> paths{};
    };
    // All at the same moment, under one lock.
    [[nodiscard]] std::vector<LinkHealth> links(const std::vector<std::uint16_t>& peers);
    // Peak rates of the bottleneck since the last call.
    [[nodiscard]] BottleneckPeaks::Peaks take_bottleneck_peaks();

    // The faults of every driver in this process, present and future. Null is none.
    static void set_faults(std::shared_ptr<const FaultSettings> settings);

private:
    using Lock = std::unique_lock<FairMutex>;
    class CallerDrives;

    void run();
    static void drop_inherited();  // in a process that was forked from ours
    // Both `drive` (one step) and `attempt` call the core and mark the engine as failed if it throws.
    bool drive();
    template <class Work>
    auto attempt(Work&& work);
    template <class End>
    void end_by(End&& end);
    void fail() noexcept;  // the reason is the exception being handled
    [[nodiscard]] bool over() const { return closed_ || failure_; }
    void check_open() const;
    // One round of reading, timing and writing; true if there may be more to do at once.
    bool step();
    bool flush(Nanos now);
    // Evaluates the source address of a datagram: the sender may have moved.
    void on_source_address(std::size_t path, const Address& from, Nanos now);
    // Processes ICMP errors (port unreachable) about datagrams that were sent over this path.
    void on_refusals(std::size_t path, Nanos now);
    // Probes unvalidated addresses, and moves peers to those that answer.
    void probe_addresses(std::size_t path, Nanos now);
    // One round over shared memory; true if there may be more.
    bool pass();
    // Some rounds of it, for callers that do not drive: if there is more, the driving thread goes on.
    void pass_some();
    // Polls shared memory for a moment; false if nothing arrived.
    bool linger(Lock& lock);
    void collect();
    void rearm();
    void say_goodbye(Lock& lock, Nanos linger);
    [[nodiscard]] Nanos next_timer() const;
    void listen(bool own_thread) noexcept;  // whether the engine's own thread sleeps on the socket
    void arm();
    static void wake(const Descriptor& event);
    void apply_faults();
    // Path metrics of a peer: stored for later links to its host, and loaded from earlier ones.
    void store_path_metrics(std::uint16_t peer);
    void load_path_metrics(std::uint16_t peer);

    static constexpr std::size_t burst = 8;  // batches per send call

    // One path: a socket, and the peers' addresses over it.
    struct PathSocket {
        PathSocket(const Address& address, const SocketConfig& given) : config(given), socket(address, given) {}
        SocketConfig config;
        Socket socket;
        Routes routes;
        std::vector<Batch*> unsent;  // filled, but the socket was full
    };
    // How many paths lead to a process with these addresses.
    [[nodiscard]] std::size_t common_paths(const std::vector<Address>& addresses) const;
    // Whether any socket was full.
    [[nodiscard]] bool full() const;
    // What a driving caller sleeps on: its wake-up descriptor, the doorbell and the sockets.
    struct Polled {
        std::array<pollfd, 2 + most_paths> all{};
        nfds_t count{2};
    };
    [[nodiscard]] Polled to_poll() const;
    [[nodiscard]] Nanos routes_timer() const;

    std::vector<std::unique_ptr<PathSocket>> path_sockets_;  // by path
    Descriptor epoll_, timer_;
    Descriptor thread_wake_;  // wakes the engine's thread
    Descriptor caller_wake_;  // wakes a caller that drives
    Descriptor doorbell_;     // rung by peers of this machine: wakes the driving thread
    Descriptor inputs_;       // the sockets and the doorbell, as one
    FairMutex mutex_;
    std::condition_variable_any changed_;       // an exchange ended, or no thread drives
    std::condition_variable_any view_changed_;  // separate: every exchange would wake threads that wait for a view
    std::unique_ptr<Core> core_;
    std::unique_ptr<FaultPath> faults_;
    std::shared_ptr<const FaultSettings> fault_settings_;
    std::vector<std::unique_ptr<Batch>> batches_;  // `burst` for each path
    std::vector<Batch*> free_;                     // those that are not unsent
    Batch reply_;                                  // for unvalidated addresses
    std::unordered_map<std::uint64_t, Outcome> ended_;
    // By peer: memory that is not used yet, and the doorbell to ring.
    struct Near {
        std::unique_ptr<RingMemory> from_it, to_it;
        std::unique_ptr<BroadcastMemory> peer_broadcast_memory;
        Descriptor doorbell;
    };
    std::unordered_map<std::uint16_t, Near> near_;
    std::uint32_t view_number_{};  // the latest that waiting threads were notified of
    bool inside_{};                // and whether this rank was reported to be in it
    std::function<void(const View&, bool)> on_view_;
    bool caller_drives_{};
    bool listening_{};
    bool more_{};  // the last step may have left something to do
    bool leaving_{}, closing_{}, closed_{};
    std::exception_ptr failure_;
    Nanos ticked_at_{};
    Nanos read_at_{};      // when the socket was last read
    Nanos refusals_at_{};  // when refusals were last looked for
    Nanos armed_at_{never};
    Nanos sleeping_until_{};  // of a caller that drives
    pid_t owner_;             // the process whose thread this is
    std::thread thread_;
};

template <class Work>
auto Driver::attempt(Work&& work) {
    try {
        return work();
    } catch (const std::invalid_argument&) {
        throw;
    } catch (...) {
        fail();
        throw;
    }
}

template <class Work>
auto Driver::with_views(Work&& work) {
    const Lock lock(mutex_);
    check_open();
    const Nanos now = clock_now();
    const auto moved_on = [&] {
        pass_some();
        flush(now);
        collect();
        rearm();
    };
    return attempt([&] {
        const auto now_too = [&](Views& views) { return work(views, now); };
        if constexpr (std::is_void_v<decltype(work(std::declval<Views&>(), now))>) {
            core_->with_views(now, now_too);
            moved_on();
        } else {
            auto result = core_->with_views(now, now_too);
            moved_on();
            return result;
        }
    });
}

}  // namespace storm
