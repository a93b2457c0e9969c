// The protocol core, without I/O: datagrams and time go in; datagrams, timers and outcomes of exchanges come out.
// One Core is one lane of an endpoint. One thread at a time may use it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "base/bitmap.hpp"
#include "base/block_pool.hpp"
#include "base/clock.hpp"
#include "base/counters.hpp"
#include "coding/coding.hpp"
#include "congestion/pacer.hpp"
#include "congestion/path_cache.hpp"
#include "congestion/rate_control.hpp"
#include "core/exchange_timers.hpp"
#include "core/pool.hpp"
#include "exchange/exchange_spec.hpp"
#include "exchange/exchanges.hpp"
#include "link/bottleneck_peaks.hpp"
#include "link/shared_bottleneck.hpp"
#include "peers/credit.hpp"
#include "peers/failure_causes.hpp"
#include "peers/peers.hpp"
#include "shm/broadcast_buffer.hpp"
#include "views/views.hpp"
#include "wire/seal.hpp"
#include "wire/sequences.hpp"
#include "wire/slots.hpp"
#include "wire/wire.hpp"

namespace storm {

class Batch;
struct SharedMemoryChannel;
struct Record;

struct CoreConfig {
    std::uint16_t rank{}, world{};
    std::uint16_t lane{};                    // of the endpoint: see endpoint.hpp. Only lane 0 has views of its own
    std::uint8_t paths{1};                   // number of interfaces: see paths.hpp
    std::vector<std::uint8_t> peer_paths{};  // by rank: its number of paths; empty if all have as many as this rank
    std::size_t datagram_bytes{1472};        // the same on every rank; chunks are fragmented on paths that carry less
    std::size_t least_path_bytes{512};       // a path that does not carry datagrams of this size is not used
    std::size_t receive_buffer{1 << 20};     // what the socket holds; the credit of all peers together is less
    std::size_t pool_bytes{64 << 20};        // memory for chunks of exchanges not posted yet, of all peers together
    std::size_t eager_bytes{256 << 10};      // bytes of a message sent before its receiver reports that it has posted
    RateMode rate_mode{RateMode::unlimited};
    double bytes_per_s{};            // RateMode::fixed: the rate of all links of a path together
    Nanos yield_delay{millisecond};  // RateMode::low_latency: the queueing delay that is allowed
    Nanos silence{10 * second};      // a peer from which nothing arrives for this long counts as lost
    Secrets secrets;
    // Ranks that no process has yet; `readmit` fills such a slot.
    std::vector<std::uint16_t> vacant{};
    bool late{};  // a late joiner: the job started without this process, so it does not know the members
};

class Core {
public:
    Core(CoreConfig config, Nanos now);
    ~Core();

    // Starts an exchange and returns its id. Each sequence number of a channel is posted once, in nearly rising order.
    std::uint64_t post(const ExchangeSpec& spec, Nanos now);
    // Cancels an exchange. Its buffers are free once its outcome, `Status::closed`, is returned by `take_finished`.
    void cancel(std::uint64_t id, Nanos now);
    // Ends an exchange whose part in another lane has failed, with the same failure cause.
    void fail(std::uint64_t id, Status status, std::uint16_t peer, FailureCause failure_cause, Nanos now);
    // Sends a goodbye to every peer. `goodbye_acknowledged` is true once every peer has acknowledged it, has left, is
    // silent or is no longer a member.
    void leave();
    [[nodiscard]] bool goodbye_acknowledged() const;

    // A new process has joined with the rank of an earlier one. The link to it starts from scratch, and exchanges under
    // way go on as if the old process had fallen silent.
    // `incarnation`: must be higher than that of any earlier process of this rank. `keys`: of the link to the new
    // process, if datagrams are sealed. `paths`: number of interfaces of the new process; 0 if as many as this rank.
    // Throws std::invalid_argument.
    void readmit(std::uint16_t rank, std::uint32_t incarnation, const std::optional<LinkKeys>& keys, Nanos now,
                 std::size_t paths = 0);

    // Calls `work(views)` with the views of this endpoint, then applies what it changed.
    template <class Work>
    decltype(auto) with_views(Nanos now, Work&& work);
    // Number of the latest usable view; 0 as long as there is none.
    [[nodiscard]] std::uint32_t view_number() const { return view_ ? view_->number : 0; }
    // The latest usable view, if there is one; and whether this process is in it.
    [[nodiscard]] const std::optional<View>& view() const { return view_; }
    [[nodiscard]] bool inside() const { return inside_; }
    // In lanes other than 0: applies a view that lane 0 has learned, and whether this process is in it.
    void follow(const View& view, bool inside, Nanos now);
    // Peers of an exchange that are unreachable from this lane: they have left, are silent, or answer while no data
    // reaches them. An exchange that waits across views waits for them. Lanes other than 0 must report them to lane 0,
    // which decides on views, or would wait for ever.
    [[nodiscard]] std::vector<std::uint16_t> unreachable_peers(std::uint64_t id, Nanos now) const;

    // Whether the exchange can still complete: see CanComplete. `good` if it has ended.
    [[nodiscard]] CanComplete can_complete(std::uint64_t id, Nanos now) const;

    // Processes a datagram from any sender, trusted or not. It may be decrypted in place. `arrived_at`: when it reached
    // this machine, if that is known to be earlier than `now`; delays are measured up to then.
    void receive(std::span<std::byte> datagram, Nanos now) { receive(datagram, now, now); }
    void receive(std::span<std::byte> datagram, Nanos now, Nanos arrived_at);
    // The sender of the last datagram that `receive` processed, if it was authentic, and whether it had the highest
    // packet number so far.
    struct Heard {
        std::uint16_t rank{};
        std::uint8_t path{};
        bool newest{};
    };
    [[nodiscard]] const std::optional<Heard>& heard() const { return heard_; }

    // Addresses belong to the driver of this core: see routes.hpp. Path challenge: fills a batch with a ping for an
    // address of the peer that is to be validated; false if the peer has left or its rank is vacant. Replies to the
    // ping carry this id, which must not be 0.
    [[nodiscard]] bool challenge(Batch& batch, std::uint16_t rank, std::uint32_t id, Nanos now, std::size_t path = 0);
    // Fills a batch with a report, for such an address.
    void report(Batch& batch, std::uint16_t rank, Nanos now, std::size_t path = 0);
    // Queues a ping to the peer's current address.
    void ping(std::uint16_t rank, std::size_t path = 0);
    [[nodiscard]] Replies take_replies(std::uint16_t rank, std::size_t path = 0);
    // Connection migration: the peer was found at another address. What is in flight to it counts as lost, and rate and
    // path MTU start from scratch.
    void reroute(std::uint16_t rank, Nanos now, std::size_t path = 0);
    // An ICMP port unreachable arrived for the peer's current address. `quoted`: the part of our datagram that it
    // quotes. It is only a hint: see port_unreachable.hpp.
    void refused(std::uint16_t rank, std::span<const std::byte> quoted, Nanos now);
    // How long the peer may take to answer a probe.
    [[nodiscard]] Nanos probe_timeout(std::uint16_t rank, std::size_t path = 0) const;

    // Fills the next batch that may be sent now; false if there is none. Call `transmitted` for each, in any order.
    [[nodiscard]] bool transmit(Batch& batch, Nanos now);
    void transmitted(const Batch& batch, Nanos now);
    // While a path is held, because its socket is full, `transmit` does not use it.
    void hold(std::size_t path, bool held) {
        if (socket_full_[path] && !held) peers_.clear_deferrals();
        socket_full_[path] = held;
    }
    // From now on, data to and from a peer on the same machine goes through shared memory. Throws std::invalid_argument
    // if the rank does not belong to that process, or no longer does.
    void connect(std::uint16_t rank, std::uint32_t incarnation, std::unique_ptr<SharedMemoryChannel> shared_memory,
                 Nanos now);
    // Releases all shared memory; data goes by datagram from now on.
    void disconnect();
    // While shut, peers send us datagrams instead.
    void pause_shared_memory(bool shut);
    // The broadcast buffer's memory, for data to several peers on this machine; null as long as there is none.
    [[nodiscard]] const BroadcastMemory* broadcast_buffer() const {
        return broadcast_buffer_ ? &broadcast_buffer_->memory() : nullptr;
    }
    void set_broadcast_buffer(std::unique_ptr<BroadcastMemory> memory) {
        broadcast_buffer_ = std::make_unique<BroadcastBuffer>(std::move(memory));
    }
    // Reads and writes some records in shared memory; true if there were any.
    bool pass(Nanos now);
    // Peers that share memory with this process, in rising order.
    [[nodiscard]] const std::vector<std::uint16_t>& near() const { return same_host_peers_; }
    // Asks peers to ring our doorbell when they write. False if something is there already: call `pass` first.
    [[nodiscard]] bool may_sleep();
    // Calls `ring(rank)` for each peer that sleeps and has new records to read, or new space to write to.
    template <class Ring>
    void ring_doorbells(Ring&& ring);

    // When to call `tick` at the latest, if `transmit` has returned false.
    [[nodiscard]] Nanos next_timer();
    void tick(Nanos now);

    // An exchange that has ended, if any.
    using Finished = Exchanges::Finished;
    [[nodiscard]] std::optional<Finished> take_finished() { return exchanges_.take_finished(); }

    // For an exchange that is not posted here yet: the first chunk of each peer that has started it.
    [[nodiscard]] std::vector<Pool::First> peek(std::uint32_t channel, std::uint32_t seq) const {
        return pool_.peek(channel, seq);
    }

    void set_overflow(std::uint32_t datagrams) { overflow_ = datagrams; }
    [[nodiscard]] const CoreConfig& config() const { return config_; }
    [[nodiscard]] const Counters& counters() const { return counters_; }
    [[nodiscard]] std::size_t chunk_bytes() const { return chunk_bytes_; }
    [[nodiscard]] Nanos round_trip(std::uint16_t peer) const;
    [[nodiscard]] double loss_from(std::uint16_t peer) const;
    [[nodiscard]] double rate_to(std::uint16_t peer) const;
    // What congestion control has learned of a path, for the next link over it to start with; empty if nothing useful.
    [[nodiscard]] std::optional<PathMetrics> path_metrics(std::uint16_t peer, std::size_t path = 0) const;
    // Gives a link what an earlier link to the peer's host has learned. It starts with that, unless it knows better.
    void recall(std::uint16_t peer, const PathMetrics& metrics, std::size_t path = 0);
    // The peak rates at the bottleneck since the last call.
    [[nodiscard]] BottleneckPeaks::Peaks take_bottleneck_peaks() { return peaks_.take(); }
    // The paths to a peer, by number; none for our own rank.
    [[nodiscard]] std::vector<PathHealth> paths_to(std::uint16_t peer) const;
    // The largest datagram that all paths to a peer are known to carry.
    [[nodiscard]] std::size_t path_bytes(std::uint16_t peer) const;

    // Payload of a datagram of this size, a multiple of 16 bytes, so that no element is split between chunks.
    static std::size_t chunk_bytes_for(std::size_t datagram_bytes, bool sealed);

private:
    // receive.cpp: received datagrams, acknowledgement, loss and retransmission
    void take_piece(Peer& peer, Link& link, Header header, std::uint64_t number, std::span<const std::byte> payload,
                    Nanos now, Nanos arrived_at);
    bool take_data(Peer& peer, const Header& header, std::span<const std::byte> payload, Nanos now);
    bool pool_chunk(Peer& peer, const Header& header, std::span<const std::byte> payload);
    enum class Carrier : std::uint8_t { datagram, memory };
    // False if the datagram must count as lost, so that its sender sends it again.
    bool deliver(Exchange& exchange, Peer& peer, const Header& header, std::span<const std::byte> payload, Nanos now,
                 Carrier carrier);
    void on_progress(Exchange& exchange, Peer& peer, Incoming& message, const Header& header, Nanos now,
                     Carrier carrier);
    bool take_end(Peer& peer, const Header& header, Nanos now);
    void on_end(Exchange& exchange, Peer& peer, bool second_stage, Nanos now);
    void take_report(Peer& peer, Link& link, std::span<const std::byte> body, Nanos now);
    void take_control(Peer& peer, const Header& header, Nanos now);
    void on_control(Exchange& exchange, Peer& peer, const Header& header, Nanos now);
    void drain(Peer& peer, Nanos now);
    void take_bye(Peer& peer, const Header& header, std::span<const std::byte> body, Nanos now);
    void on_peer_left(Peer& peer, Status status, FailureCause failure_cause, Nanos now);
    void take_failed(Peer& peer, const Header& header, Nanos now);
    void on_peer_failed(Exchange& exchange, Peer& peer, FailureCause failure_cause);
    static void mark_posted(Exchange& exchange, const Peer& peer);
    void answer_for_ended(Peer& peer, const Header& header);
    void on_acked(Peer& peer, Link& link, const Flight& flight, Nanos now);
    void on_lost(Peer& peer, Link& link, const Flight& flight, Nanos now);
    void repair(Peer& peer, const Flight& flight, Nanos now);

    // parity.cpp: forward error correction, how messages are coded and decoded
    void plan_parity(Peer& peer, Outgoing& message, std::uint32_t chunk);
    [[nodiscard]] bool wants_parity(const Peer& peer, const Outgoing& message) const;
    [[nodiscard]] static std::unique_ptr<Encoding> begin_coding(const Outgoing& message);
    void add_parity(Batch& batch, Peer& peer, Link& link, Outgoing& message, Nanos now);
    bool take_parity(Exchange& exchange, Peer& peer, Incoming& message, const Header& header,
                     std::span<const std::byte> payload, Nanos now);
    void keep_coded(Incoming& message, const Header& header, std::span<const std::byte> payload);
    void restore(Incoming& message, const Header& header);
    void retransmit(Peer& peer, Outgoing& message, std::uint32_t chunk, Nanos now, bool is_retransmission = false);
    void repair_coded(Peer& peer, Outgoing& message, const Flight& flight, Nanos now);
    void repair_before_parity(Peer& peer, Outgoing& message, Nanos now);
    void stop_coding(Peer& peer, Outgoing& message, Nanos now);
    void count_blocks(Outgoing& message);

    // membership.cpp: view messages, and what a new view changes
    [[nodiscard]] Views& views(Nanos now);
    void on_views_changed(Nanos now);
    void apply_view(const View& view, Nanos now);
    void drop_non_members(Exchange& exchange);
    void drop_peer(Exchange& exchange, std::uint16_t peer);
    void take_view_message(Peer& peer, std::span<const std::byte> body, Nanos now);
    [[nodiscard]] Member member(std::uint16_t rank) const;
    [[nodiscard]] bool is_vacant(std::uint16_t rank) const;
    [[nodiscard]] Nanos views_timer() const { return views_ ? views_->next_timer() : never; }

    // transmit.cpp: what is sent, to which peer and when
    // The source in the header of our datagrams over a path: one number for rank and path.
    [[nodiscard]] std::uint16_t source(const Link& link) const {
        return static_cast<std::uint16_t>(config_.rank + link.index * config_.world);
    }
    [[nodiscard]] bool fill_control(Batch& batch, Peer& peer, Nanos now);
    [[nodiscard]] bool fill_report(Batch& batch, Peer& peer, Link& link, Nanos now);
    [[nodiscard]] bool fill_messages(Batch& batch, Peer& peer, Link& link, Nanos now);
    void send_control(Batch& batch, Peer& peer, Link& link, Header header, Flight flight,
                      std::span<const std::byte> body_bytes, unsigned urgent, Nanos now);
    [[nodiscard]] std::size_t write_last_reports(Peer& peer, std::span<std::byte> body, Nanos now);
    [[nodiscard]] bool fill_probe(Batch& batch, Peer& peer, Nanos now);
    // The path over which chunks of the message may be sent now, and how many; null if credit or pacing allow none.
    [[nodiscard]] Link* choose(Peer& peer, const Outgoing& message, std::size_t& chunks, Nanos now);
    [[nodiscard]] bool fill_data(Batch& batch, Peer& peer, Nanos now);
    void request_loss_reports(Peer& peer);
    [[nodiscard]] std::size_t admit(Link& link, const Outgoing& message, Nanos now);
    void add_chunk(Batch& batch, Link& link, Outgoing& message, std::uint32_t chunk, std::uint8_t flags, Nanos now);
    void add_datagram(Batch& batch, Link& link, const Flight& flight, const Header& header,
                      std::span<const std::byte> payload, Nanos now, ChunkChecksums* checksums = nullptr);
    void share_bottleneck(Nanos now);

    // shared_memory.cpp: data to and from peers on the same machine
    bool take_records(std::uint16_t rank, std::size_t most, Nanos now);
    enum class Taken : std::uint8_t { yes, no_space, out_of_order };
    Taken take_record(Peer& peer, const Record& record, std::span<const std::byte> payload, Nanos now);
    [[nodiscard]] static bool is_in_order(Exchange& exchange, const Header& header);
    [[nodiscard]] bool awaits(std::uint16_t rank) const;
    bool put_records(std::uint16_t rank, Nanos now);
    void drop_broken_peer(Peer& peer, Nanos now);
    // Whether data to the peer goes through shared memory now.
    [[nodiscard]] bool uses_shared_memory(std::uint16_t rank) const;
    // Whether the fixed rate allows no data to any peer now, so that a thousand peers need not be tried one by one.
    [[nodiscard]] bool shut() const {
        return rate_limited_paths_ != 0 && rate_limited_paths_ + 1 == 1U << shared_pacers_.size();
    }
    [[nodiscard]] std::size_t put_run(Outgoing& message, const RingWriter& ring, std::byte* space);
    [[nodiscard]] BroadcastBuffer::Item* put_in_broadcast_buffer(const Outgoing& message, const Record& record,
                                                                 std::uint32_t end);

    // completion.cpp: timers, timeouts and probes, and how exchanges end
    void close(Exchange& exchange, Incoming& message, bool notify_sender);
    void close_stage(Exchange& exchange, bool second_stage);
    void abort_with_peer(Exchange& exchange, Peer& peer, Status status, FailureCause failure_cause);
    // Drives an exchange after a change: queues second-stage chunks that became final, and ends the exchange if it is
    // complete or has failed.
    void settle(Exchange& exchange, Nanos now);
    void finish(Exchange& exchange, Status status, Nanos now);
    void fail_timed_out(Exchange& exchange, Nanos now);
    void tick_link(Peer& peer, Link& link, Nanos now);
    void probe(Peer& peer, Link& link, Nanos now);
    void repeat_unanswered(Peer& peer, Link& link, Nanos now);
    void tick_exchange(Exchange& exchange, Nanos now);
    void tick_receive(Exchange& exchange, Incoming& message, Nanos now);
    void tick_send(Exchange& exchange, Outgoing& message, Nanos now);
    void mark_silent(Peer& peer);
    void refresh_timers();
#ifdef STORM_CHECK_TIMERS
    // For tests: the next timer as found by a scan of all peers and messages, to compare with `next_timer`.
    [[nodiscard]] Nanos scanned_timer() const;
    void check_quiet(Nanos now) const;
#endif

    // core.cpp: how exchanges and peers start
    [[nodiscard]] std::unique_ptr<Peer> make_peer(std::uint16_t rank, std::size_t paths, Nanos now) const;
    [[nodiscard]] RateControl make_rate(Nanos now) const;
    [[nodiscard]] PathMtu make_path() const;
    // A waiting receiver sends `ready` at least this often, which also shows that it is alive.
    [[nodiscard]] Nanos longest_ready_interval() const { return std::min(second / 2, config_.silence / 16); }
    void count_peers();
    void begin_sends(Exchange& exchange);
    void take_pooled(Exchange& exchange, Nanos now);
    void begin_receives(Exchange& exchange, Nanos now);

    CoreConfig config_;
    std::size_t chunk_bytes_;
    Seal seal_;
    BlockPool blocks_;
    CodingMemory coding_memory_;
    Pool pool_;
    Credit credit_;
    SharedBottleneck bottleneck_;
    BottleneckPeaks peaks_;
    Sequences sequences_;
    Slots slots_;
    FailureCauses failure_causes_;
    Exchanges exchanges_;
    Peers peers_;
    ExchangeTimers due_at_;
    std::optional<Views> views_;
    std::optional<View> view_;                      // the latest usable view
    bool inside_{};                                 // whether this process is in it
    std::vector<std::uint32_t> member_since_;       // by rank: the view since which it is a member without a break
    std::vector<std::int64_t> member_incarnation_;  // by rank: its incarnation in the latest view; -1 if no member
    std::vector<std::uint16_t> newly_silent_;       // fell silent in this tick: what is in flight to them is lost
    std::vector<std::uint16_t> blocked_;            // found in this tick: they answer, but no data reaches them
    std::size_t next_rank_{};                       // round robin: the rank to which data is sent next
    std::vector<Pacer> shared_pacers_;              // RateMode::fixed: by path
    unsigned rate_limited_paths_{};                 // bit set of paths whose shared pacer refused in this transmit
    std::array<bool, most_paths> socket_full_{};    // by path: held, because its socket is full
    Nanos paced_until_{never};                      // the earliest time at which a link that pacing held back may send
    Nanos deferred_until_{never};                   // the same for the peer that was tried last
    bool retry_transmit_{};                         // transmit must go round again although a peer had nothing to send
    std::vector<std::uint16_t> same_host_peers_;    // peers that share memory with this process
    Bitmap doorbells_;                              // peers whose doorbells must be rung
    std::unique_ptr<BroadcastBuffer> broadcast_buffer_;  // data that goes to several of them
    bool shared_memory_paused_{};
    Nanos defer_until_{never};  // the earliest time at which an out-of-order contribution is taken anyway
    bool draining_{};           // all records in the ring are taken, in order or not
    std::uint32_t overflow_{};
    std::optional<Heard> heard_;
    Counters counters_;
};

template <class Ring>
void Core::ring_doorbells(Ring&& ring) {
    if (same_host_peers_.empty()) return;
    for (std::size_t rank = doorbells_.next(0); rank < config_.world; rank = doorbells_.next(rank + 1)) {
        doorbells_.clear(rank);
        ring(static_cast<std::uint16_t>(rank));
    }
}

template <class Work>
decltype(auto) Core::with_views(Nanos now, Work&& work) {
    Views& all = views(now);
    if constexpr (std::is_void_v<decltype(work(all))>) {
        work(all);
        on_views_changed(now);
    } else {
        auto result = work(all);
        on_views_changed(now);
        return result;
    }
}

}  // namespace storm
