// Gives a core its thread, its socket and its clock.
//
// One thread at a time drives: reads the socket, moves the core along, writes. That is the engine's own thread, unless a
// caller waits for an exchange; then the caller drives, which spares two context switches where it matters most.
// Nobody spins: whoever drives sleeps in the kernel until a datagram or a timer is due.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core.hpp"
#include "faults.hpp"
#include "socket.hpp"

namespace storm {

// Nanoseconds of CLOCK_MONOTONIC.
[[nodiscard]] Nanos clock_now();

class Driver {
public:
    // Opens the socket; `port()` can then be published. Throws std::system_error.
    Driver(const std::string& host, std::uint16_t port, const SocketConfig& config);
    ~Driver();
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    [[nodiscard]] const Socket& socket() const { return socket_; }
    // Starts the engine towards `peers`, by rank (the own entry is not used).
    void start(CoreConfig config, std::vector<Address> peers);

    // Begins an exchange and sends what can be sent at once. Deadlines in the spec are relative to now.
    // Throws std::runtime_error when closed.
    std::uint64_t post(ExchangeSpec spec);
    // Waits until the exchange ends or `timeout` has passed; true with the outcome (once) if it ended.
    bool wait(std::uint64_t id, Nanos timeout, Outcome& outcome);
    [[nodiscard]] bool ended(std::uint64_t id);
    // Ends an exchange that nobody wants any more; its outcome is then `Status::closed`.
    void cancel(std::uint64_t id);
    // A new process at `address` has taken the place of a peer: see Core::readmit. Throws std::runtime_error when closed.
    void readmit(std::uint16_t peer, const Address& address, std::uint16_t incarnation, const std::optional<Key>& key);
    // Says goodbye, waits at most `linger` until every peer has heard it, ends the thread and closes the socket.
    void close(Nanos linger);

    struct Health {
        Counters counters;
        FaultCounters faults;
        std::uint32_t overflow{};
        bool segments{}, coalesces{};
    };
    [[nodiscard]] Health health();
    struct LinkHealth {
        Nanos round_trip{};
        double loss{}, bytes_per_s{};
        std::size_t path_bytes{};
    };
    [[nodiscard]] LinkHealth link(std::uint16_t peer);

    // The faults of every driver in this process, present and future. Null is none.
    static void set_faults(std::shared_ptr<const FaultSettings> settings);

private:
    using Lock = std::unique_lock<std::mutex>;

    void run();
    // One round of reading, timing and writing; true if there may be more to do at once.
    bool step();
    bool flush(Nanos now);
    void collect();
    [[nodiscard]] Nanos next_timer() const;
    void listen(bool own_thread);  // whether the engine's own thread sleeps on the socket
    void arm();
    void wake(int fd) const;
    void apply_faults();

    static constexpr std::size_t burst = 8;  // batches per send call

    Socket socket_;
    int epoll_{-1}, timer_{-1};
    int wake_{-1};   // wakes the engine's thread
    int nudge_{-1};  // wakes a caller that drives
    std::mutex mutex_;
    std::condition_variable changed_;  // an exchange ended, or nobody drives
    std::unique_ptr<Core> core_;
    std::unique_ptr<FaultPath> faults_;
    std::shared_ptr<const FaultSettings> fault_settings_;
    std::array<Batch, burst> batches_;
    std::vector<Batch*> unsent_;  // filled, but the socket was full
    std::unordered_map<std::uint64_t, Outcome> ended_;
    bool caller_drives_{};
    bool listening_{};
    bool closed_{};
    Nanos ticked_at_{};
    Nanos armed_at_{never};
    Nanos sleeping_until_{};  // of a caller that drives
    std::thread thread_;
};

}  // namespace storm
