// Network emulation between hosts, packet by packet: uplinks and downlinks with a rate and a queue, links with loss and
// delay. It replaces netem where the kernel lacks it. Packets and time go in, packets come out when they are due; the
// owner does the reading, writing and waiting (relay_main.cpp with TUN devices, tests under virtual time).
//
//   receive -> uplink of the sender -> loss and delay of the link -> downlink of the receiver -> deliver
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/clock.hpp"
#include "wire/faults.hpp"

namespace storm {

enum class Direction : std::uint8_t { up, down };

// Cumulative counters. Bytes are those of IP packets, without the overhead that is charged against the rate.
struct RelayQueueStats {
    std::uint64_t packets{}, bytes{};  // sent on
    std::uint64_t overflowed{};        // packets that found the queue full
    Nanos busy{};                      // time spent sending at the rate
};

struct RelayHostStats {
    std::uint16_t host{};
    RelayQueueStats up, down;
};

struct RelayLinkStats {
    std::uint16_t from{}, to{};
    std::uint64_t seen{}, lost{};
    std::uint64_t bursts{};      // runs of lost packets
    std::uint64_t overflowed{};  // packets that found the delay line full
};

struct RelayStats {
    std::vector<RelayLinkStats> links;
    std::vector<RelayHostStats> hosts;
    std::uint64_t cut{};        // packets from or to a host that was cut off, or on a link that was
    std::uint64_t too_large{};  // packets above the MTU of a line
    std::uint64_t strays{};     // not IPv4, malformed, or for no host here
    std::uint64_t refused{};    // packets that `deliver` could not write
    // How late packets were delivered: delay that this machine added to the network.
    std::uint64_t delivered{};
    Nanos late_total{}, late_max{};
};

struct RelayLinkSettings {
    LinkFaults faults{};  // only loss, bursts, delay, jitter and trace are used; a relay keeps the order of a link
    std::uint64_t seed{};
};

// Arguments must be valid (RelayCommands checks user input); packets may be anything. Time never runs backwards: an
// earlier `now` counts as the latest.
class Relay {
public:
    static constexpr std::size_t max_hosts = 256;
    static constexpr std::size_t max_packet_bytes = 2048;    // size of a buffer, and so the largest MTU
    static constexpr std::size_t max_packets = 131'072;      // in all queues together: 256 MiB of buffers
    static constexpr std::size_t max_line_packets = 16'384;  // on one link: 32 MiB of buffers, 0.2 s at 1 Gbit/s
    static constexpr std::size_t default_queue_bytes = 512 << 10;
    static constexpr std::size_t default_overhead_bytes = 14;  // an Ethernet header, as tc counts
    static constexpr std::size_t max_overhead_bytes = 1024;

    // Called from within advance; false when the packet could not be written.
    using Deliver = std::function<bool(std::uint16_t host, std::span<const std::byte> packet)>;
    explicit Relay(Deliver deliver);

    void add_host(std::uint16_t host, std::uint32_t address);
    [[nodiscard]] bool has_host(std::uint16_t host) const { return host < max_hosts && hosts_[host] != nullptr; }
    [[nodiscard]] bool has_address(std::uint32_t address) const { return by_address_.contains(address); }

    // 0 is unlimited. From `now` on, waiting packets and the rest of the packet being sent drain at the new rate.
    void set_rate(std::uint16_t host, Direction direction, std::uint64_t bits_per_s, Nanos now);
    // Bytes, with overhead, that may wait behind the packet being sent. Packets that already wait stay.
    void set_queue(std::uint16_t host, Direction direction, std::size_t bytes);
    [[nodiscard]] const RelayLinkSettings& link(std::uint16_t from, std::uint16_t to) const;
    // Restarts the link's random sequence; packets in flight keep their time. Throws as LinkFaults::validate does, and
    // then changes nothing.
    void set_link(std::uint16_t from, std::uint16_t to, RelayLinkSettings settings);
    // From now until it is reconnected, nothing from or to this host is delivered, not even what is in flight.
    void set_cut(std::uint16_t host, bool cut) { hosts_[host]->cut = cut; }
    // The same for what one host sends to another; the way back stays open.
    void set_link_cut(std::uint16_t from, std::uint16_t to, bool cut) { hosts_[from]->to[to]->cut = cut; }
    // Larger packets from or to this host vanish; 0 lets all pass. Packets that have left the uplink keep their fate.
    void set_mtu(std::uint16_t host, std::size_t bytes) { hosts_[host]->mtu_bytes = bytes; }
    // Applies to packets that arrive from now on.
    void set_overhead(std::size_t bytes) { overhead_bytes_ = bytes; }

    // Where to put the next packet: valid until the next call of receive.
    [[nodiscard]] std::span<std::byte> buffer();
    // The first `length` bytes of buffer() are a packet that `from` sent. Delivers nothing: after one or many packets,
    // call advance.
    void receive(std::uint16_t from, std::size_t length, Nanos now);
    // Delivers all that is due, host by host: a receiver that sleeps is woken once and not for every packet.
    void advance(Nanos now);
    // When `advance` has something to do; `never` while nothing waits.
    [[nodiscard]] Nanos next_at() const { return events_.empty() ? never : events_.front().at; }

    [[nodiscard]] std::size_t packets_held() const { return held_; }
    [[nodiscard]] RelayStats stats() const;

private:
    using Slot = std::uint32_t;
    static constexpr Slot none = ~Slot{0};
    static constexpr std::size_t slab_packets = 64;

    // A packet in a buffer. Packets are chained by `next`, so that no queue allocates.
    struct Packet {
        Nanos due{};  // when it leaves the delay line, or left the downlink
        Slot next{none};
        std::uint16_t length{}, charged_bytes{};
        std::uint16_t from{}, to{};
    };
    struct Fifo {
        Slot head{none}, tail{none};
        std::size_t size{};
        [[nodiscard]] bool empty() const { return head == none; }
    };
    struct Server {
        Fifo fifo;  // the first one is being sent, the others wait
        std::uint64_t bits_per_s{};
        std::size_t queue_bytes{default_queue_bytes}, waiting_bytes{};
        Nanos began_at{}, done_at{never};  // of the first
        RelayQueueStats stats;
    };
    struct Link {
        Link(std::uint16_t from, std::uint16_t to) : fates(LinkFaults{}, 0, from, to) {
            stats.from = from;
            stats.to = to;
        }
        RelayLinkSettings settings;
        bool cut{};
        bool losing{};  // whether its latest packet was lost
        FaultyLink fates;
        Fifo line;  // in the order of `due`
        Nanos last_due{};
        RelayLinkStats stats;
    };
    struct Host {
        std::uint32_t address{};
        bool cut{};
        std::size_t mtu_bytes{};
        Server up, down;
        Fifo outbox;  // due, and delivered by the next advance
        std::array<std::unique_ptr<Link>, max_hosts> to;
    };
    enum class Stage : std::uint8_t { uplink, line, downlink };
    // An event: the first packet of a queue is due. A change of rate leaves stale events behind, which are recognised
    // by their time.
    struct Event {
        Nanos at{};
        std::uint64_t order{};
        Stage stage{};
        std::uint16_t from{}, to{};
        bool operator>(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
    };

    [[nodiscard]] Slot take();
    void give_back(Slot slot);
    [[nodiscard]] std::byte* bytes_of(Slot slot) const;
    void push(Fifo& fifo, Slot slot);
    Slot pop(Fifo& fifo);

    [[nodiscard]] Server& server(std::uint16_t host, Direction direction);
    [[nodiscard]] bool is_cut(const Packet& packet) const;
    [[nodiscard]] bool is_too_large(const Packet& packet) const;
    void schedule(Nanos at, Stage stage, std::uint16_t from, std::uint16_t to);
    void enter(Server& server, Stage stage, Slot slot, Nanos now);
    void begin(Server& server, Nanos now);
    void serve(Server& server, Stage stage, std::uint16_t host, Nanos now);
    void leave(Server& server, Stage stage, Slot slot, Nanos now);
    void cross(Slot slot, Nanos now);
    void release(Link& link, Nanos now);
    void run_events(Nanos now);
    void post(Slot slot, Nanos now);
    void deliver(Host& host);

    Deliver deliver_;
    std::array<std::unique_ptr<Host>, max_hosts> hosts_;
    std::unordered_map<std::uint32_t, std::uint16_t> by_address_;
    std::vector<std::uint16_t> to_deliver_;  // hosts whose outbox is not empty
    std::size_t overhead_bytes_{default_overhead_bytes};

    std::vector<std::unique_ptr<std::byte[]>> slabs_;
    std::vector<Packet> packets_;  // by slot
    std::vector<Slot> free_;
    Slot spare_{none};  // the slot that buffer() returns
    std::array<std::byte, max_packet_bytes> scratch_;
    std::size_t held_{};

    std::vector<Event> events_;  // a heap, the earliest in front
    std::uint64_t order_{};
    Nanos now_{};
    RelayStats totals_;  // its lists stay empty
};

}  // namespace storm
