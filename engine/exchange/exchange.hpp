// One exchange as one endpoint sees it: to each peer at most one message per stage, from each peer at most one, and at
// most one reduction between the stages. Knows nothing of sockets or links; the core moves it along and sets its timers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "base/ranks.hpp"
#include "base/timers.hpp"
#include "exchange/exchange_spec.hpp"
#include "exchange/message.hpp"
#include "math/reduction.hpp"

namespace storm {

// Whether a patient exchange can end by what its peers still send. It matters to a caller that has another view: as long as
// all can end the exchange, all should, since a peer that has may be content and leave.
enum class CanComplete : std::uint8_t {
    good,     // every peer that it still needs takes part in it
    unclear,  // one of them has not been heard to
    none,     // one of them is gone or silent, or has given the exchange up
};

class Exchange {
public:
    Exchange(const ExchangeSpec& spec, std::size_t chunk_bytes, BlockPool& blocks, Nanos now);

    [[nodiscard]] Incoming* incoming(std::uint16_t peer, bool second_stage);
    [[nodiscard]] const StageSpec& stage(bool second_stage) const { return stages_[second_stage ? 1 : 0]; }
    // Whether the stage may end with something missing: then a lost peer is loss, not an error.
    [[nodiscard]] bool lossy(bool second_stage) const {
        return stage(second_stage).budget > 0.0 || stage(second_stage).deadline != never;
    }
    // Whether only a later view, its caller or a time-out ends its wait for a peer.
    [[nodiscard]] bool waits_across_views() const { return view != 0; }
    [[nodiscard]] bool finished() const;
    [[nodiscard]] bool waits_for(std::uint16_t peer) const;
    // Whether a message goes to the peer or comes from it.
    [[nodiscard]] bool involves(std::uint16_t peer) const;
    // Marks the exchange as failed, unless it already is. Without a blame, the peer is to blame.
    void fail(Status status, std::uint16_t peer, std::uint64_t missing_bytes, FailureCause failure_cause = {});
    [[nodiscard]] bool running() const { return outcome.status == Status::running; }
    // Whether a batch still points into a buffer of the exchange.
    [[nodiscard]] bool pinned() const;
    // Fills the arrivals of `outcome`.
    void conclude(Status status, Nanos now);
    // New final chunks since the last call: the second stage has more to send.
    [[nodiscard]] bool take_new_final_chunks();

    // Numbers of its timers: one for the time-out, one per message.
    static constexpr Timers::Owner timeout_timer = 0;
    [[nodiscard]] Timers::Owner timer_of(const Incoming& message) const {
        return static_cast<Timers::Owner>(1 + (&message - receives.data()));
    }
    [[nodiscard]] Timers::Owner timer_of(const Outgoing& message) const {
        return static_cast<Timers::Owner>(1 + receives.size() + static_cast<std::size_t>(&message - sends.data()));
    }
    // The message of a timer; null if it is of another kind.
    [[nodiscard]] Incoming* received_by(Timers::Owner timer);
    [[nodiscard]] Outgoing* sent_by(Timers::Owner timer);

    std::uint64_t id{};
    std::uint32_t slot{};  // number of its entry among the timers of all exchanges
    Timers timers;
    std::uint32_t channel, seq;
    Nanos timeout_at;
    const std::uint32_t view;
    bool dropped{};               // a peer that is in no later view
    Ranks posted_by;              // peers that are known to have posted it; only if it is patient
    Ranks aborted_by;             // peers that have ended it otherwise than well; only if it is patient
    std::vector<Outgoing> sends;  // never resized after construction: flights and queues point into it
    std::vector<Incoming> receives;
    std::unique_ptr<Reduction> reduction;
    Outcome outcome;

private:
    std::array<StageSpec, 2> stages_;
    std::size_t announced_final_{};
    std::vector<std::uint32_t> index_;  // of receives, plus one, by twice the peer plus the stage
};

}  // namespace storm
