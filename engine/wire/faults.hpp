// Fault injection: seeded models of loss, delay, reordering, duplication and corruption of datagrams, used by the
// receive path and by the simulated network alike.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/counters.hpp"
#include "wire/wire.hpp"

namespace storm {

inline constexpr std::uint32_t reorder_depth = 8;
// A reordered datagram waits no longer than this for later ones, so that the tail of a transfer is not held for ever.
inline constexpr Nanos reorder_timeout = 5 * millisecond;
inline constexpr Nanos max_fault_delay = 3600 * second;

// The faults of one directed link. Probabilities are per datagram.
struct LinkFaults {
    double loss{};
    // Mean length of a loss burst in datagrams. Exactly 1 is independent loss (Bernoulli, whose runs have the mean
    // length 1 / (1 - loss)); more is Gilbert-Elliott.
    double burst{1.0};
    // Mean duration of a loss burst. If it is 0, `burst` decides; otherwise `burst` must be 1. The link alternates
    // between a bad state that loses everything and a good state that loses nothing, for exponentially distributed
    // times. Time alone ends a burst, even if the sender pauses.
    Nanos burst_time{};
    // Chance that a chunk is lost at its source, and so for all its receivers; in addition to `loss`.
    double shared{};
    double duplicate{};
    double reorder{};  // chance that a datagram is held back behind up to `reorder_depth` later ones
    double corrupt{};  // chance that a bit of it is flipped
    Nanos delay{};
    Nanos jitter{};                     // uniform in [0, jitter], in addition to delay; so it reorders, too
    std::vector<std::uint8_t> trace{};  // replayed in a loop instead of `loss`: 1 is lost

    // Throws std::invalid_argument that names the knob, with `where` in front.
    void validate(std::string_view where = {}) const;
};

// What happens to one datagram. Both copies of a duplicate share `behind` and `delay`; only the first is corrupted.
struct Fate {
    bool lost{};
    std::uint8_t copies{1};  // 0 when lost
    bool corrupted{};
    std::uint32_t corrupt_bit{};  // which bit, to be taken modulo the datagram's bits
    std::uint32_t behind{};       // deliver after this many later datagrams of the same link
    Nanos delay{};

    bool operator==(const Fate&) const = default;
};

// The sequence of fates on a directed link: a pure function of (seed, source, target, count). Two losses are
// exceptions: shared loss depends on the chunk, so that receivers in different processes agree on it, and timed bursts
// on the time.
class FaultyLink {
public:
    // Throws std::invalid_argument as LinkFaults::validate does.
    FaultyLink(LinkFaults faults, std::uint64_t seed, std::uint16_t source, std::uint16_t target);
    // Shares faults that were validated before, so that a long trace is not copied for every link.
    FaultyLink(std::shared_ptr<const LinkFaults> faults, std::uint64_t seed, std::uint16_t source,
               std::uint16_t target);
    // The fate of a datagram that crosses the link at `now`; timed bursts begin with the first one. Shared loss needs
    // the header of a chunk's first transmission. For anything else (no header, a retransmission, a control datagram)
    // it is drawn for this link alone, at each attempt.
    [[nodiscard]] Fate next(Nanos now, const Header* header = nullptr);
    // Whether `next` needs headers.
    [[nodiscard]] bool shares() const { return faults_->shared > 0.0; }
    [[nodiscard]] std::uint64_t seen() const { return seen_; }
    [[nodiscard]] std::uint64_t lost() const { return lost_; }

private:
    std::uint64_t draw();
    double uniform();  // in [0, 1)
    bool next_is_lost(double u, Nanos now);
    bool in_burst_at(Nanos now);
    double timed_uniform();  // in [0, 1)
    Nanos time_in_state();
    [[nodiscard]] bool is_lost_at_source(const Header* header) const;

    std::shared_ptr<const LinkFaults> faults_;
    std::uint64_t seed_;
    std::uint16_t source_, target_;
    std::uint64_t state_[4];
    std::uint64_t seen_{}, lost_{};
    double enter_burst_{}, leave_burst_{};  // Gilbert-Elliott: chances per datagram
    bool in_burst_{};
    std::uint64_t timed_state_;  // random numbers of timed bursts, apart from those of every datagram
    Nanos state_ends_{};         // of in_burst_, in timed bursts
    std::size_t trace_at_{};
};

// The faults of all links of a job.
struct FaultSettings {
    std::uint64_t seed{};
    LinkFaults default_link{};
    std::map<std::pair<std::uint16_t, std::uint16_t>, LinkFaults> links{};  // (source, target): instead of the default

    [[nodiscard]] const LinkFaults& link(std::uint16_t source, std::uint16_t target) const;
    // Throws std::invalid_argument that names the link and the knob.
    void validate() const;
};

// Datagrams since the endpoint was made. `seen + duplicated` are `lost + dropped`, delivered, or still held.
struct FaultCounters {
    std::uint64_t seen{};
    std::uint64_t lost{};
    std::uint64_t duplicated{};  // second copies
    std::uint64_t reordered{};
    std::uint64_t corrupted{};
    std::uint64_t held{};     // copied and kept for later, each copy of a duplicate for itself
    std::uint64_t dropped{};  // could not be held: the bound was reached
};
inline constexpr auto fault_names = std::to_array<Named<FaultCounters>>({
    {"seen", &FaultCounters::seen},
    {"lost", &FaultCounters::lost},
    {"duplicated", &FaultCounters::duplicated},
    {"reordered", &FaultCounters::reordered},
    {"corrupted", &FaultCounters::corrupted},
    {"held", &FaultCounters::held},
    {"dropped", &FaultCounters::dropped},
});
static_assert(names_all(fault_names), "a counter is missing from the list, or in it twice");

// The faults of one endpoint's receive path, between the socket (or the simulated wire) and the core. Held datagrams
// pass two stages: first they wait for later ones of their link (reordering), then for their delay. One thread owns it,
// and `deliver` must not call back into it. `deliver` takes a std::span<std::byte> that it may overwrite.
class FaultPath {
public:
    static constexpr std::size_t max_held_datagrams = 4096;
    static constexpr std::size_t max_held_bytes = std::size_t{64} << 20;

    // `corruptible_bytes`: only so many bytes of each datagram are ever corrupted. Bytes that no checksum covers must
    // stay intact, as their corruption would go undetected. Each lane of an endpoint draws its own fates.
    explicit FaultPath(std::uint16_t rank, std::size_t corruptible_bytes = max_datagram_bytes, std::uint16_t lane = 0)
        : rank_(rank), lane_(lane), corruptible_bytes_(corruptible_bytes) {}

    // Null turns faults off. Every change restarts the links' random sequences, and the next `release` delivers all
    // that the old settings held back, in order of arrival. Setting the same settings again has no effect. Throws
    // std::invalid_argument, and changes nothing, if the settings are invalid.
    void set(std::shared_ptr<const FaultSettings> settings, Nanos now);

    // Delivers at once what the faults let through: this datagram, in place, and reordered ones that are due.
    // The buffer may be reused on return.
    template <class Deliver>
    void receive(std::uint16_t source, std::span<std::byte> datagram, Nanos now, Deliver&& deliver) {
        if (settings_ == nullptr) [[likely]] {
            deliver(datagram);
            return;
        }
        apply_faults(source, datagram, now, Sink(std::ref(deliver)));
    }

    // Delivers datagrams that have been held long enough.
    template <class Deliver>
    void release(Nanos now, Deliver&& deliver) {
        if (held_datagrams_ == 0) [[likely]]
            return;
        release_due(now, Sink(std::ref(deliver)));
    }

    // When `release` has something to deliver or to move on; `never` while nothing is held.
    [[nodiscard]] Nanos next_release_at() const {
        const Nanos waiting = waiting_.empty() ? never : waiting_.front().expires;
        const Nanos delayed = delayed_.empty() ? never : delayed_.begin()->first.first;
        return std::min(waiting, delayed);
    }

    [[nodiscard]] const FaultCounters& counters() const { return counters_; }
    [[nodiscard]] std::size_t held_datagrams() const { return held_datagrams_; }
    [[nodiscard]] std::size_t held_bytes() const { return held_bytes_; }

private:
    // Made from a reference, it allocates nothing.
    using Sink = std::function<void(std::span<std::byte>)>;

    struct HeldDatagram {
        std::vector<std::byte> bytes;
        std::uint64_t arrival{};      // its position among all held datagrams
        std::uint64_t leaves_with{};  // the arrival of its link that ends its wait
        std::uint16_t source{};
        Nanos expires{};
        Nanos delay{};
    };
    struct SourceState {
        FaultyLink fates;
        std::uint64_t arrived{};                                   // datagrams that arrived, lost ones not counted
        std::vector<std::list<HeldDatagram>::iterator> waiting{};  // its part of waiting_: at most 2 * reorder_depth
    };

    SourceState& link_from(std::uint16_t source);
    void apply_faults(std::uint16_t source, std::span<std::byte> datagram, Nanos now, const Sink& deliver);
    void pass_or_hold(std::uint16_t source, SourceState& link, std::span<std::byte> datagram, const Fate& fate,
                      Nanos now, const Sink& deliver);
    void deliver_held(HeldDatagram held, const Sink& deliver);
    void delay_until(Nanos due, HeldDatagram held) { delayed_.emplace(std::pair(due, ++order_), std::move(held)); }
    void release_due(Nanos now, const Sink& deliver);

    std::uint16_t rank_, lane_;
    std::size_t corruptible_bytes_;
    std::shared_ptr<const FaultSettings> settings_;
    std::vector<std::unique_ptr<SourceState>> links_;  // by source; forged datagrams can make 65,536 at most
    std::list<HeldDatagram> waiting_;                  // for later ones; in order of arrival, so of expiry
    std::map<std::pair<Nanos, std::uint64_t>, HeldDatagram> delayed_;  // by (due, order of entry)
    std::vector<std::byte> copy_;                                      // a duplicate's bytes; kept to save allocations
    std::uint64_t order_{};
    std::size_t held_datagrams_{}, held_bytes_{};
    FaultCounters counters_;
};

}  // namespace storm
