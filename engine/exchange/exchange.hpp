// One exchange as one endpoint sees it: at most one message per stage to each peer and from each peer, and at most one
// reduction between the stages. Depends on no sockets or links; the core drives it and sets its timers.
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

// Whether an exchange that waits across views can still complete. A caller that has a newer view decides by it: as long
// as all ranks can complete the exchange, all should, because a peer whose exchange is complete may exit.
enum class CanComplete : std::uint8_t {
    good,     // every peer that it still needs has posted it
    unclear,  // a peer that it still needs may not have posted it
    none,     // a peer that it still needs has left, is silent or blocked, or has aborted it
};

class Exchange {
public:
    Exchange(const ExchangeSpec& spec, std::size_t chunk_bytes, BlockPool& blocks, Nanos now);

    [[nodiscard]] Incoming* incoming(std::uint16_t peer, bool second_stage);
    [[nodiscard]] const StageSpec& stage(bool second_stage) const { return stages_[second_stage ? 1 : 0]; }
    // Whether the stage may end with something missing. Then a lost peer counts as loss, not as an error.
    [[nodiscard]] bool lossy(bool second_stage) const {
        return stage(second_stage).budget > 0.0 || stage(second_stage).deadline != never;
    }
    // Whether it waits across views: only a later view, its caller or its timeout ends the wait for a peer.
    [[nodiscard]] bool waits_across_views() const { return view != 0; }
    [[nodiscard]] bool finished() const;
    [[nodiscard]] bool waits_for(std::uint16_t peer) const;
    // Whether a message goes to the peer or comes from it.
    [[nodiscard]] bool involves(std::uint16_t peer) const;
    // Marks the exchange as failed, unless it already is. Without a `failure_cause`, the cause is the peer.
    void fail(Status status, std::uint16_t peer, std::uint64_t missing_bytes, FailureCause failure_cause = {});
    [[nodiscard]] bool running() const { return outcome.status == Status::running; }
    // Whether a batch still points into a buffer of the exchange.
    [[nodiscard]] bool pinned() const;
    // Fills the arrivals of `outcome`.
    void conclude(Status status, Nanos now);
    // Whether chunks became final since the last call, so that the second stage has more to send.
    [[nodiscard]] bool take_new_final_chunks();

    // Its timers by number: one for the timeout, then one per message.
    static constexpr Timers::Owner timeout_timer = 0;
    [[nodiscard]] Timers::Owner timer_of(const Incoming& message) const {
        return static_cast<Timers::Owner>(1 + (&message - receives.data()));
    }
    [[nodiscard]] Timers::Owner timer_of(const Outgoing& message) const {
        return static_cast<Timers::Owner>(1 + receives.size() + static_cast<std::size_t>(&message - sends.data()));
    }
    // The incoming or outgoing message that a timer belongs to; null if it belongs to none of that kind.
    [[nodiscard]] Incoming* received_by(Timers::Owner timer);
    [[nodiscard]] Outgoing* sent_by(Timers::Owner timer);

    std::uint64_t id{};
    std::uint32_t slot{};  // its index in `Exchanges`, also among the timers of all exchanges
    Timers timers;
    std::uint32_t channel, seq;
    Nanos timeout_at;
    const std::uint32_t view;
    bool dropped{};               // a peer was dropped, because it is not in a later view
    Ranks posted_by;              // peers that are known to have posted it; only if it waits across views
    Ranks aborted_by;             // peers that have failed or cancelled it; only if it waits across views
    std::vector<Outgoing> sends;  // never resized after construction: flights and queues point into it
    std::vector<Incoming> receives;
    std::unique_ptr<Reduction> reduction;
    Outcome outcome;

private:
    std::array<StageSpec, 2> stages_;
    std::size_t announced_final_{};
    std::vector<std::uint32_t> index_;  // at 2 * peer + stage: the index of the receive plus one, or 0
};

}  // namespace storm
