// The protocol without any input or output: datagrams and time go in; datagrams, timers and outcomes come out.
// One Core is one lane of an endpoint. It is used by one thread at a time.
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
    std::uint8_t paths{1};                   // interfaces: see paths.hpp
    std::vector<std::uint8_t> peer_paths{};  // by rank: how many it has; empty if all have as many as we
    std::size_t datagram_bytes{1472};        // the same on every rank of a job; a path that carries less gets pieces
    std::size_t least_path_bytes{512};       // a path that does not even carry datagrams of this size is of no use
    std::size_t receive_buffer{1 << 20};     // what the socket holds; all peers together get credit for less
    std::size_t pool_bytes{64 << 20};        // room for chunks of exchanges not posted yet, of all peers together
    std::size_t eager_bytes{256 << 10};  // bytes of a message that leave before its receiver says that it has posted
    RateMode rate_mode{RateMode::unlimited};
    double bytes_per_s{};            // RateMode::fixed: the rate of all links of a path together
    Nanos yield_delay{millisecond};  // RateMode::low_latency: how long a queue may last
    Nanos silence{10 * second};      // a peer that is not heard for so long is taken for lost
    Secrets secrets;
    // Ranks that no process has yet; `readmit` fills such a slot.
    std::vector<std::uint16_t> vacant{};
    bool late{};  // the job began without this process, so that it does not know who its members are
};

class Core {
public:
    Core(CoreConfig config, Nanos now);
    ~Core();

    // Begins an exchange and returns its id. On one channel every sequence number is posted once, in nearly rising order.
    std::uint64_t post(const ExchangeSpec& spec, Nanos now);
    // Ends an exchange that the caller no longer wants; its buffers are free when `Status::closed` comes out.
    void cancel(std::uint64_t id, Nanos now);
    // Ends an exchange of which another lane's part has failed, for the same reason.
    void fail(std::uint64_t id, Status status, std::uint16_t peer, FailureCause failure_cause, Nanos now);
    // Tells every peer that we leave. `goodbye_acknowledged` is true once every peer has heard it, has left itself or is lost.
    void leave();
    [[nodiscard]] bool goodbye_acknowledged() const;

    // A new process has taken the place of a peer: the link to it begins anew, and exchanges under way go on as if the old
    // process had fallen silent. `incarnation` is higher than that of any earlier process of this rank; `keys` are
    // those of the link to the new one, if datagrams are sealed. Throws std::invalid_argument.
    // `paths`: interfaces that the new process has; 0 if as many as we.
    void readmit(std::uint16_t rank, std::uint32_t incarnation, const std::optional<LinkKeys>& keys, Nanos now,
                 std::size_t paths = 0);

    // Calls `work(views)` with the views of this endpoint and acts on what it changed.
    template <class Work>
    decltype(auto) with_views(Nanos now, Work&& work);
    // Number of the latest view that is known and usable here; 0 as long as nobody has asked for any.
    [[nodiscard]] std::uint32_t view_number() const { return view_ ? view_->number : 0; }
    // The latest usable view, if there is one, and whether this process is in it.
    [[nodiscard]] const std::optional<View>& view() const { return view_; }
    [[nodiscard]] bool inside() const { return inside_; }
    // In a lane other than 0: acts on a view that lane 0 has learned of, or on its coming to be inside or outside.
    void follow(const View& view, bool inside, Nanos now);
    // Peers of an exchange that this lane does not reach: gone, silent, or answering while no data gets through. An
    // exchange for a view waits for them; in a lane other than 0 that would be for ever, unless lane 0 is told.
    [[nodiscard]] std::vector<std::uint16_t> unreachable_peers(std::uint64_t id, Nanos now) const;

    // See Prospect; `good` if the exchange has ended.
    [[nodiscard]] CanComplete can_complete(std::uint64_t id, Nanos now) const;

    // Takes a datagram from anyone, also from strangers. It may be decrypted in place. `arrived_at`: when it came to this
    // machine, if that is known to be earlier: delays are measured up to then.
    void receive(std::span<std::byte> datagram, Nanos now) { receive(datagram, now, now); }
    void receive(std::span<std::byte> datagram, Nanos now, Nanos arrived_at);
    // Who sent the datagram that `receive` took last, if it was authentic, and whether it had the highest number so far.
    struct Heard {
        std::uint16_t rank{};
        std::uint8_t path{};
        bool newest{};
    };
    [[nodiscard]] const std::optional<Heard>& heard() const { return heard_; }

    // Addresses belong to whoever drives this core: see routes.hpp. Fills a batch with a ping for an address of the peer
    // that is in question; false if there is nobody to ask. Replies to it bear this id, which is not 0.
    [[nodiscard]] bool challenge(Batch& batch, std::uint16_t rank, std::uint32_t id, Nanos now, std::size_t path = 0);
    // Fills a batch with a report, for such an address.
    void report(Batch& batch, std::uint16_t rank, Nanos now, std::size_t path = 0);
    // Queues a ping to the peer's present address.
    void ping(std::uint16_t rank, std::size_t path = 0);
    [[nodiscard]] Replies take_replies(std::uint16_t rank, std::size_t path = 0);
    // The peer was found at another address: what is in flight to it is lost, and its path is a new one.
    void reroute(std::uint16_t rank, Nanos now, std::size_t path = 0);
    // The kernel of the peer's machine says that nobody listens at its present address; `quoted` is what that answers, as
    // far as it is quoted. A hint: see doubt.hpp.
    void refused(std::uint16_t rank, std::span<const std::byte> quoted, Nanos now);
    // How long an answer of the peer may take.
    [[nodiscard]] Nanos probe_timeout(std::uint16_t rank, std::size_t path = 0) const;

    // The next batch that may leave now; false when there is none. `transmitted` must follow, in any order.
    [[nodiscard]] bool transmit(Batch& batch, Nanos now);
    void transmitted(const Batch& batch, Nanos now);
    // While a path is held, `transmit` leaves it alone: its socket is full.
    void hold(std::size_t path, bool held) {
        if (socket_full_[path] && !held) peers_.clear_deferrals();
        socket_full_[path] = held;
    }
    // From now on, data to and from a peer of the same machine passes through shared memory. Throws std::invalid_argument
    // if the peer is not that process, or no longer.
    void connect(std::uint16_t rank, std::uint32_t incarnation, std::unique_ptr<SharedMemoryChannel> shared_memory,
                 Nanos now);
    // Gives all shared memory back; nothing passes any more.
    void disconnect();
    // While shut, peers send us datagrams instead.
    void pause_shared_memory(bool shut);
    // Memory for what goes to several peers of this machine; null as long as there is none.
    [[nodiscard]] const BroadcastMemory* broadcast_buffer() const {
        return broadcast_buffer_ ? &broadcast_buffer_->memory() : nullptr;
    }
    void set_broadcast_buffer(std::unique_ptr<BroadcastMemory> memory) {
        broadcast_buffer_ = std::make_unique<BroadcastBuffer>(std::move(memory));
    }
    // Takes and puts some of what is to pass through shared memory; true if there was anything.
    bool pass(Nanos now);
    // Peers with which memory is shared, in rising order.
    [[nodiscard]] const std::vector<std::uint16_t>& near() const { return same_host_peers_; }
    // Has peers ring when they pass something. False if they already have: then `pass` comes first.
    [[nodiscard]] bool may_sleep();
    // Calls `ring(rank)` for each peer that sleeps and has been passed something, or been given room.
    template <class Ring>
    void ring_doorbells(Ring&& ring);

    // When `tick` should be called at the latest, given that `transmit` has returned false.
    [[nodiscard]] Nanos next_timer();
    void tick(Nanos now);

    // An exchange that has ended, if any.
    using Finished = Exchanges::Finished;
    [[nodiscard]] std::optional<Finished> take_finished() { return exchanges_.take_finished(); }

    // The first chunk of each peer that has begun an exchange which was not posted here yet.
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
    // What the link to a peer has learned of its path, if that helps the next link to start.
    [[nodiscard]] std::optional<PathMetrics> path_metrics(std::uint16_t peer, std::size_t path = 0) const;
    // What an earlier link to the peer's host has learned: this one starts with it, unless it knows better.
    void recall(std::uint16_t peer, const PathMetrics& metrics, std::size_t path = 0);
    // The most that its line carried since the last call.
    [[nodiscard]] BottleneckPeaks::Peaks take_bottleneck_peaks() { return peaks_.take(); }
    // The paths to a peer, by number; none if it is ourselves.
    [[nodiscard]] std::vector<PathHealth> paths_to(std::uint16_t peer) const;
    // The largest datagram that all paths to a peer are known to carry.
    [[nodiscard]] std::size_t path_bytes(std::uint16_t peer) const;

    // Payload of a datagram of this size, in multiples of 16 bytes, so that no element is ever cut.
    static std::size_t chunk_bytes_for(std::size_t datagram_bytes, bool sealed);

private:
    // arrivals.cpp: what a datagram that came in changes
    void take_piece(Peer& peer, Link& link, Header header, std::uint64_t number, std::span<const std::byte> payload,
                    Nanos now, Nanos arrived_at);
    bool take_data(Peer& peer, const Header& header, std::span<const std::byte> payload, Nanos now);
    bool pool_chunk(Peer& peer, const Header& header, std::span<const std::byte> payload);
    enum class Carrier : std::uint8_t { datagram, memory };
    // False if the datagram should count as lost.
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

    // parity.cpp: how messages are coded, and what parity changes
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

    // membership.cpp: notes, and what a new view changes
    [[nodiscard]] Views& views(Nanos now);
    void on_views_changed(Nanos now);
    void apply_view(const View& view, Nanos now);
    void drop_non_members(Exchange& exchange);
    void drop_peer(Exchange& exchange, std::uint16_t peer);
    void take_view_message(Peer& peer, std::span<const std::byte> body, Nanos now);
    [[nodiscard]] Member member(std::uint16_t rank) const;
    [[nodiscard]] bool is_vacant(std::uint16_t rank) const;
    [[nodiscard]] Nanos views_timer() const { return views_ ? views_->next_timer() : never; }

    // departures.cpp: what is sent, to whom and when
    // What our datagrams over a path name as their source: one number for rank and path.
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
    // The path over which chunks of the message may leave now, and how many; null if none has room.
    [[nodiscard]] Link* choose(Peer& peer, const Outgoing& message, std::size_t& chunks, Nanos now);
    [[nodiscard]] bool fill_data(Batch& batch, Peer& peer, Nanos now);
    void request_loss_reports(Peer& peer);
    [[nodiscard]] std::size_t admit(Link& link, const Outgoing& message, Nanos now);
    void add_chunk(Batch& batch, Link& link, Outgoing& message, std::uint32_t chunk, std::uint8_t flags, Nanos now);
    void add_datagram(Batch& batch, Link& link, const Flight& flight, const Header& header,
                      std::span<const std::byte> payload, Nanos now, ChunkChecksums* checksums = nullptr);
    void share_bottleneck(Nanos now);

    // passages.cpp: what passes through shared memory
    bool take_records(std::uint16_t rank, std::size_t most, Nanos now);
    enum class Taken : std::uint8_t { yes, no_space, out_of_order };
    Taken take_record(Peer& peer, const Record& record, std::span<const std::byte> payload, Nanos now);
    [[nodiscard]] static bool is_in_order(Exchange& exchange, const Header& header);
    [[nodiscard]] bool awaits(std::uint16_t rank) const;
    bool put_records(std::uint16_t rank, Nanos now);
    void drop_broken_peer(Peer& peer, Nanos now);
    // Whether data to the peer takes this way now.
    [[nodiscard]] bool uses_shared_memory(std::uint16_t rank) const;
    // Whether the rate that is set lets nothing go to anybody now: a thousand peers need not be asked one by one.
    [[nodiscard]] bool shut() const {
        return rate_limited_paths_ != 0 && rate_limited_paths_ + 1 == 1U << shared_pacers_.size();
    }
    [[nodiscard]] std::size_t put_run(Outgoing& message, const RingWriter& ring, std::byte* space);
    [[nodiscard]] BroadcastBuffer::Item* put_in_broadcast_buffer(const Outgoing& message, const Record& record,
                                                                 std::uint32_t end);

    // endings.cpp: timers, and how exchanges come to their end
    void close(Exchange& exchange, Incoming& message, bool notify_sender);
    void close_stage(Exchange& exchange, bool second_stage);
    void abort_with_peer(Exchange& exchange, Peer& peer, Status status, FailureCause failure_cause);
    // Moves an exchange on after a change: the second stage sends what has become final, and the exchange ends if it is done.
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
    // Tests compare what the timers say with what a scan of all peers and messages finds.
    [[nodiscard]] Nanos scanned_timer() const;
    void check_quiet(Nanos now) const;
#endif

    // core.cpp: how exchanges and peers begin
    [[nodiscard]] std::unique_ptr<Peer> make_peer(std::uint16_t rank, std::size_t paths, Nanos now) const;
    [[nodiscard]] RateControl make_rate(Nanos now) const;
    [[nodiscard]] PathMtu make_path() const;
    // A receiver that waits says so at least this often, which also shows that it lives.
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
    std::optional<View> view_;                 // the latest that is usable
    bool inside_{};                            // whether this process is in it
    std::vector<std::uint32_t> member_since_;  // by rank: the view since which it is a member without a break
    std::vector<std::int64_t>
        member_incarnation_;                      // by rank: the incarnation that is a member of the latest view, or -1
    std::vector<std::uint16_t> newly_silent_;     // fell silent in this tick: what is in flight to them is lost
    std::vector<std::uint16_t> blocked_;          // answered in this tick, but get no data
    std::size_t next_rank_{};                     // whose turn it is to be sent to
    std::vector<Pacer> shared_pacers_;            // RateMode::fixed: by path
    unsigned rate_limited_paths_{};               // bits of those that refused in this transmit: they refuse every peer
    std::array<bool, most_paths> socket_full_{};  // paths whose sockets are full
    Nanos paced_until_{never};                    // the earliest time at which a link that pacing held back may send
    Nanos deferred_until_{never};                 // the same for the peer that was tried last
    bool retry_transmit_{};                       // transmit has more to look at although a peer had nothing to send
    std::vector<std::uint16_t> same_host_peers_;  // peers with which memory is shared
    Bitmap doorbells_;                            // peers whose bells must be rung
    std::unique_ptr<BroadcastBuffer> broadcast_buffer_;  // what goes to several of them
    bool shared_memory_paused_{};
    Nanos defer_until_{never};  // the earliest time at which a term that came before its turn is taken nevertheless
    bool draining_{};           // whatever is in the ring is taken
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
