// The protocol without any input or output: datagrams and time go in; datagrams, timers and outcomes come out.
// One Core is one endpoint. It is used by one thread at a time.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "clock.hpp"
#include "exchange.hpp"
#include "link.hpp"
#include "pacer.hpp"
#include "pieces.hpp"
#include "pool.hpp"
#include "rate_control.hpp"
#include "seal.hpp"
#include "wire.hpp"

namespace storm {

struct CoreConfig {
    std::uint16_t rank{}, world{};
    std::size_t datagram_bytes{1472};     // the same on every rank of a job; a path that carries less gets pieces
    std::size_t least_path_bytes{512};    // a path that carries no datagram of this size is of no use
    std::size_t receive_buffer{1 << 20};  // what the socket can hold; the credit of all peers together
    std::size_t pool_bytes{64 << 20};     // chunks of exchanges not posted yet, all peers together
    std::size_t eager_bytes{256 << 10};   // of a message, before its receiver says that it has posted
    RateMode rate_mode{RateMode::unlimited};
    double bytes_per_s{};  // RateMode::fixed
    Nanos silence{10 * second};
    Secrets secrets;
};

struct Counters {
    std::uint64_t datagrams_sent{}, bytes_sent{}, datagrams_received{}, bytes_received{};
    std::uint64_t authenticated{};  // datagrams received whose check or seal was right: only peers send such
    std::uint64_t repaired{};       // chunks sent again
    std::uint64_t duplicates{};     // datagrams or chunks that were here already
    std::uint64_t late{};           // chunks of messages that were closed already
    std::uint64_t malformed{}, foreign{}, corrupt{}, unexpected{};
    std::uint64_t pooled{}, pool_refused{}, pool_bytes{}, pool_peak_bytes{};
    std::uint64_t reports{}, probes{}, asks{};
    std::uint64_t path_probes{}, path_changes{}, pieces{};  // paths that carry less: how often, and pieces sent
};

// Datagrams for one peer, ready for one system call: equal segments, of which the last may be shorter.
struct Batch {
    static constexpr std::size_t max_segments = 64;
    static constexpr std::size_t max_bytes = 65'000;

    std::uint16_t peer{};
    std::size_t segments{}, bytes{}, segment_bytes{};
    bool too_large{};  // the interface does not take datagrams of this size: they are lost
    std::size_t parts{};
    std::array<iovec, 2 * max_segments> iov{};
    std::array<std::array<std::byte, header_bytes>, max_segments> headers{};
    std::vector<std::byte> sealed;                                  // ciphertext, or the body of a control datagram
    std::optional<std::pair<std::uint32_t, std::uint32_t>> pinned;  // slot and generation of the message it points into
};

class Core {
public:
    Core(CoreConfig config, Nanos now);
    ~Core();

    // Begins an exchange and returns its id. On one channel every sequence number is posted once, in nearly rising order.
    std::uint64_t post(const ExchangeSpec& spec, Nanos now);
    // Ends an exchange that the caller no longer wants; its buffers are free when `Status::closed` comes out.
    void cancel(std::uint64_t id, Nanos now);
    // Tells every peer that we are leaving. `gone` is true when all have heard it, have left themselves or are lost.
    void leave();
    [[nodiscard]] bool gone() const;

    // A new process has taken the place of a peer, whatever became of the old one: the link to it begins anew, and its part
    // in what is under way ends as if it had fallen silent. `incarnation` is higher than that of any process of this rank
    // before; `key` opens what it sends, where datagrams are sealed. Throws std::invalid_argument.
    void readmit(std::uint16_t rank, std::uint16_t incarnation, const std::optional<Key>& key, Nanos now);

    // A datagram, whoever it came from. It may be decrypted in place.
    void receive(std::span<std::byte> datagram, Nanos now);
    // The next batch that may leave now; false when there is none. `transmitted` must follow, in any order.
    [[nodiscard]] bool transmit(Batch& batch, Nanos now);
    void transmitted(const Batch& batch, Nanos now);
    // When `tick` should be called at the latest, given that `transmit` has returned false.
    [[nodiscard]] Nanos next_timer() const;
    void tick(Nanos now);

    // An exchange that has ended, if any.
    struct Finished {
        std::uint64_t id{};
        Outcome outcome;
    };
    [[nodiscard]] std::optional<Finished> take_finished();

    // What has come of an exchange that was not posted here: the first chunk of each peer that has begun it.
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
    // The largest datagram that the path to a peer carries, as far as is known.
    [[nodiscard]] std::size_t path_bytes(std::uint16_t peer) const;

    // What fits one datagram of this size: whole 16-byte elements, so that no element is ever cut.
    static std::size_t chunk_bytes_for(std::size_t datagram_bytes, bool sealed);

private:
    struct Control {
        Kind kind{};
        std::uint8_t flags{};
        std::uint32_t channel{}, seq{};
        Blame blame{};
        bool operator==(const Control&) const = default;
    };
    // Which sequence numbers of a channel were posted: all below `next`, less those passed over.
    struct Posted {
        static constexpr std::uint32_t most_skipped = 1 << 16;
        std::uint64_t next{};  // one more than the largest, which may be the largest number there is
        std::set<std::uint32_t> skipped;
    };
    struct Peer;
    struct Slot {
        Outgoing* message{};
        std::uint32_t generation{};
    };

    // Arrivals
    void take_piece(Peer& peer, Header header, std::uint64_t number, std::span<const std::byte> payload, Nanos now);
    bool take_data(Peer& peer, const Header& header, std::span<const std::byte> payload, Nanos now);
    bool pool_chunk(Peer& peer, const Header& header, std::span<const std::byte> payload);
    void deliver(Exchange& exchange, Peer& peer, const Header& header, std::span<const std::byte> payload, Nanos now);
    void take_end(Exchange& exchange, Peer& peer, bool second_stage, Nanos now);
    void forgo(Exchange& exchange, Peer& peer, bool second_stage);
    void forgo_message(Peer& peer, const Header& header, std::uint8_t stage);
    void take_report(Peer& peer, std::span<const std::byte> body, Nanos now);
    void take_control(Peer& peer, const Header& header, Nanos now);
    void obey(Exchange& exchange, Peer& peer, const Header& header);
    void take_bye(Peer& peer, const Header& header, std::span<const std::byte> body, Nanos now);
    void take_failed(Peer& peer, const Header& header, Nanos now);
    // Why that exchange failed here; empty if it did not, or too long ago.
    [[nodiscard]] Blame blame_for(const Header& header) const;
    void answer_for_ended(Peer& peer, const Header& header);
    void abandon_peer(Exchange& exchange, Peer& peer, Status status, Blame blame);
    [[nodiscard]] Exchange* find(std::uint32_t channel, std::uint32_t seq);
    [[nodiscard]] bool is_over(std::uint32_t channel, std::uint32_t seq) const;

    // Departures
    [[nodiscard]] bool fill_control(Batch& batch, Peer& peer, Nanos now);
    [[nodiscard]] Outgoing* next_message(Peer& peer);
    [[nodiscard]] std::size_t admit(Peer& peer, const Outgoing& message, Nanos now);
    [[nodiscard]] bool fill_data(Batch& batch, Peer& peer, Nanos now);
    [[nodiscard]] bool fill_probe(Batch& batch, Peer& peer, Nanos now);
    // How a chunk travels to the peer; one piece if whole.
    [[nodiscard]] PieceCut cut_for(const Peer& peer, std::size_t chunk_bytes) const;
    void add_chunk(Batch& batch, Peer& peer, Outgoing& message, std::uint32_t chunk, std::uint8_t flags, Nanos now);
    void add_pieces(Batch& batch, Peer& peer, const Flight& flight, Header header, std::span<const std::byte> payload,
                    const PieceCut& cut, Nanos now);
    void end_message(Peer& peer, const Outgoing& message);
    void seal_segment(Batch& batch, Peer& peer, std::uint64_t number, Header header, std::span<const std::byte> payload,
                      Checks* checks);
    [[nodiscard]] static unsigned copies_of(Kind kind, const Peer& peer, bool urgent);
    [[nodiscard]] static bool probes_path(const Peer& peer);
    [[nodiscard]] static bool only_repairs(const Peer& peer);
    void control(Peer& peer, Control what);
    void enqueue(Outgoing& message);
    void share_line(Nanos now);
    [[nodiscard]] Outgoing* message_of(std::uint32_t slot, std::uint32_t generation);
    void on_acked(Peer& peer, const Flight& flight, Nanos now);
    void on_lost(Peer& peer, const Flight& flight, Nanos now);
    void release_if_done(Outgoing& message);
    void release(Outgoing& message);
    [[nodiscard]] std::uint64_t credit_bytes(const Peer* peer) const;
    [[nodiscard]] std::unique_ptr<Peer> make_peer(std::uint16_t rank, Nanos now) const;
    [[nodiscard]] RateControl make_rate(Nanos now) const;

    // Endings
    void close(Exchange& exchange, Incoming& message, bool tell);
    void stop_waiting(Peer& peer);
    void close_stage(Exchange& exchange, bool second_stage);
    void open_gates(Exchange& exchange);
    void finish_if_done(Exchange& exchange, Nanos now);
    void finish(Exchange& exchange, Status status, Nanos now);
    // Without a blame, the peer is to blame.
    void fail(Exchange& exchange, Status status, std::uint16_t peer, std::uint64_t missing_bytes, Blame blame = {});
    void fail_late(Exchange& exchange, Nanos now);
    void remember(const Exchange& exchange);
    [[nodiscard]] bool healed_by(const Exchange& exchange) const;
    void tick_peer(Peer& peer, Nanos now);
    void follow_path(Peer& peer, Nanos now);
    [[nodiscard]] Nanos blocked_at(const Outgoing& message, const Peer& peer) const;
    void tick_receives(Exchange& exchange, Nanos now);
    void tick_sends(Exchange& exchange, Nanos now);
    void validate(const ExchangeSpec& spec) const;
    void tick_exchange(Exchange& exchange, Nanos now);
    [[nodiscard]] Nanos silent_at(const Exchange& exchange, const Peer& peer) const;
    [[nodiscard]] Nanos wake_at(const Exchange& exchange, const Peer& peer) const;
    [[nodiscard]] Nanos exchange_timer(const Exchange& exchange) const;

    CoreConfig config_;
    std::size_t chunk_bytes_;
    Seal seal_;
    Blocks blocks_;
    Pool pool_;
    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null at our own
    std::size_t turn_{};                        // whose turn it is to be sent to
    std::optional<Pacer> shared_pacer_;         // RateMode::fixed
    LineMeter line_;
    Nanos share_at_{};          // not before this is the line shared out anew
    Nanos paced_until_{never};  // the earliest time at which a refused link may send

    std::unordered_map<std::uint64_t, std::unique_ptr<Exchange>> active_;  // by channel and seq
    std::unordered_map<std::uint64_t, std::uint64_t> key_of_;              // id to key
    std::unordered_map<std::uint32_t, Posted> posted_;                     // by channel
    // Keys of the latest exchanges that ended badly and whose fault it was, for peers that still ask.
    std::deque<std::pair<std::uint64_t, Blame>> failed_;
    Blame lost_;  // whose fault the last error was, unless it has healed: what a goodbye says
    Nanos lost_at_{};
    bool again_{};  // transmit has more to look at although a peer had nothing to send
    std::vector<std::unique_ptr<Exchange>> leaving_;  // ended, but a batch still points into their buffers
    std::deque<Finished> finished_;
    std::vector<Slot> slots_;
    std::vector<std::uint32_t> free_slots_;
    std::uint64_t next_id_{1};
    std::uint32_t overflow_{};
    std::size_t waited_for_{};  // peers that we wait for: how many share the credit
    Counters counters_;
};

}  // namespace storm
