// Runs a core with a thread, a socket per path and a clock: one lane of an endpoint.
//
// One thread at a time drives: reads the socket, moves the core along, writes. That is the engine's own thread, unless a
// caller waits for an exchange; then the caller drives, which saves two context switches where latency matters most.
// Nobody spins: whoever drives sleeps in the kernel until a datagram or a timer is due.
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
    // Starts the engine towards `peers`, by rank (the own entry is not used). Throws std::system_error where the process has
    // no descriptor or thread left; nothing has happened then, and it may be tried again.
    void start(CoreConfig config, std::vector<Address> peers);
    // Starts the engine where ranks have several interfaces: `peers` has the addresses of each rank, by path. A path that only
    // one of two ranks has is not used between them.
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
    // How an exchange ended whose outcome nobody has taken; none while it runs.
    struct EndStatus {
        Status status{};
        std::uint16_t peer{};
        FailureCause failure_cause{};
    };
    [[nodiscard]] std::optional<EndStatus> end_status(std::uint64_t id);
    // Ends an exchange of which another lane's part has ended so.
    void fail(std::uint64_t id, const EndStatus& why);
    // First chunks that arrived for an exchange that was not posted here: see Core::peek.
    [[nodiscard]] std::vector<Pool::First> peek(std::uint32_t channel, std::uint32_t seq);
    // Ends an exchange that nobody wants any more; its outcome is then `Status::closed`.
    void cancel(std::uint64_t id);
    // A new process at `address` has taken the place of a peer: see Core::readmit. Throws std::runtime_error when closed.
    void readmit(std::uint16_t peer, const Address& address, std::uint32_t incarnation,
                 const std::optional<LinkKeys>& keys) {
        readmit(peer, std::vector{address}, incarnation, keys);
    }
    // A new process has taken the place of a peer, and is reached at these addresses, by path.
    void readmit(std::uint16_t peer, const std::vector<Address>& addresses, std::uint32_t incarnation,
                 const std::optional<LinkKeys>& keys);
    // The peer may be reached at this address: see Routes. Throws std::runtime_error when closed.
    void offer(std::uint16_t peer, const Address& address);
    // Goes on from another address of this host over a path, at the same port if it is free: peers follow what they
    // authenticate (Routes). Throws std::system_error, and std::runtime_error when closed.
    void rebind(std::size_t path, const std::string& host);
    // Keeps ports open in a router that translates our address: see Routes.
    void enable_keepalive();
    // By rank: where datagrams go over the first path.
    [[nodiscard]] std::vector<Routes::Route> routes();
    // Shared memory with a peer of the same machine, in three steps, so that nothing can fail once the peer relies on it:
    // makes memory that the peer, one of so many neighbours, will write to, and returns descriptors of it, of the bell that the peer will ring, and of
    // the shelf that it will read; the caller owns them;
    struct SharedMemoryOffer {
        Descriptor ring, doorbell, broadcast_buffer;
    };
    [[nodiscard]] SharedMemoryOffer offer_shared_memory(std::uint16_t peer, std::size_t neighbours);
    // takes those of the peer;
    void accept_shared_memory(std::uint16_t peer, SharedMemoryOffer offer);
    // and uses both. Throws std::invalid_argument if the peer is another process by now.
    void use_shared_memory(std::uint16_t peer, std::uint32_t incarnation);
    // Peers with which memory is shared.
    [[nodiscard]] std::vector<std::uint16_t> near();
    // Calls `work(views, now)` with the endpoint's views and acts on what it changed. Throws std::runtime_error when closed.
    template <class Work>
    auto with_views(Work&& work);
    // Waits until a usable view with a number above this one is known; false when `timeout` has passed.
    bool wait_view(std::uint32_t above, Nanos timeout);
    // Calls `callback(view, inside)` whenever either changes, in the middle of things: it must not call this driver.
    void on_view(std::function<void(const View&, bool)> callback);
    // What another lane's `on_view` told.
    void follow(const View& view, bool inside);
    // See Core::prospect.
    [[nodiscard]] CanComplete can_complete(std::uint64_t id);
    // See Core::unreached.
    [[nodiscard]] std::vector<std::uint16_t> unreachable_peers(std::uint64_t id);
    // Says goodbye without waiting for anything; `close` must follow.
    void leave();
    // Says goodbye, waits at most `linger` until every peer has heard it, ends the thread and closes the socket.
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
    // All of the same moment, and with one lock.
    [[nodiscard]] std::vector<LinkHealth> links(const std::vector<std::uint16_t>& peers);
    // The most that the line carried since the last call.
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
    // What a datagram from this address says about where its sender is.
    void on_source_address(std::size_t path, const Address& from, Nanos now);
    // What the kernels of other machines say of datagrams that went over this path.
    void on_refusals(std::size_t path, Nanos now);
    // Pings addresses that are in question, and moves peers to those that answer.
    void probe_addresses(std::size_t path, Nanos now);
    // One round of what passes through shared memory; true if there may be more.
    bool pass();
    // Some rounds of it, for callers that do not drive: if there is more, whoever drives goes on.
    void pass_some();
    // Looks for a moment whether anything comes through shared memory; false if nothing did.
    bool linger(Lock& lock);
    void collect();
    void rearm();
    void say_goodbye(Lock& lock, Nanos linger);
    [[nodiscard]] Nanos next_timer() const;
    void listen(bool own_thread) noexcept;  // whether the engine's own thread sleeps on the socket
    void arm();
    static void wake(const Descriptor& event);
    void apply_faults();
    // What is known of the paths to a peer: kept for later links to its host, and taken from earlier ones.
    void store_path_metrics(std::uint16_t peer);
    void load_path_metrics(std::uint16_t peer);

    static constexpr std::size_t burst = 8;  // batches per send call

    // One path: a socket, and where peers are reached over it.
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
    // What a caller that drives sleeps on: the nudge, the bell and the sockets.
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
    Descriptor doorbell_;     // rung by peers of this machine: wakes whoever drives
    Descriptor inputs_;       // the sockets and the bell, as one
    FairMutex mutex_;
    std::condition_variable_any changed_;       // an exchange ended, or nobody drives
    std::condition_variable_any view_changed_;  // apart: every exchange would wake those who wait for a view
    std::unique_ptr<Core> core_;
    std::unique_ptr<FaultPath> faults_;
    std::shared_ptr<const FaultSettings> fault_settings_;
    std::vector<std::unique_ptr<Batch>> batches_;  // `burst` for each path
    std::vector<Batch*> free_;                     // those that are not unsent
    Batch reply_;                                  // for addresses that are in question
    std::unordered_map<std::uint64_t, Outcome> ended_;
    // By peer: memory that is not used yet, and the bell to ring.
    struct Near {
        std::unique_ptr<RingMemory> from_it, to_it;
        std::unique_ptr<BroadcastMemory> peer_broadcast_memory;
        Descriptor doorbell;
    };
    std::unordered_map<std::uint16_t, Near> near_;
    std::uint32_t view_number_{};  // the latest that waiting threads were told of
    bool inside_{};                // and whether they were told to be in it
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
