// One exchange as one endpoint sees it: to each peer at most one message per stage, from each peer at most one, and at
// most one reduction between the stages. Knows nothing of sockets, links or time-outs; core.hpp moves it along.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "bitmap.hpp"
#include "clock.hpp"
#include "reduction.hpp"
#include "wire.hpp"

namespace storm {

struct SendSpec {
    std::uint16_t peer{};
    bool second_stage{};      // sends the reduction's result, each chunk as soon as it is final
    const std::byte* data{};  // stays as it is until the exchange ends
    std::uint64_t bytes{};
};

struct ReceiveSpec {
    std::uint16_t peer{};
    bool second_stage{};
    bool reduce{};      // contributes to the reduction, in the order of these specs; else placed
    std::byte* into{};  // what is missing keeps its old value
    std::uint64_t bytes{};
};

// How much of each message may be missing when the stage ends, and when it ends at the latest.
struct StageSpec {
    double budget{};        // 0 is exact, 1 never repairs
    Nanos deadline{never};  // absolute
};

struct ExchangeSpec {
    std::uint32_t channel{}, seq{};
    std::vector<SendSpec> sends{};
    std::vector<ReceiveSpec> receives{};
    std::optional<ReductionSpec> reduction{};
    std::array<StageSpec, 2> stages{};
    Nanos timeout_at{never};  // absolute; passing it is an error, not a loss
};

// What one message brought.
struct Arrival {
    std::uint16_t peer{};
    bool second_stage{};
    std::uint32_t chunks{}, arrived{};
    std::uint64_t bytes{}, missing_bytes{};
    std::vector<std::uint64_t> mask;  // bit c: chunk c arrived
};

struct Outcome {
    Status status{Status::running};
    std::uint16_t peer{};                               // with whom the error was met
    Blame blame;                                        // whose fault it was: that peer's, or as the peer tells
    std::uint64_t missing_bytes{};                      // what that peer owed, or had not acknowledged
    std::uint64_t expected_bytes{}, announced_bytes{};  // size_mismatch
    std::uint32_t repaired{};                           // chunks that we sent again
    Nanos started{}, ended{};
    std::vector<Arrival> arrivals;
    std::vector<std::uint16_t> counts;  // the reduction's copies per chunk
};

// How a message is cut. The short chunk is always the last one; an empty message is one empty chunk.
struct Cut {
    std::uint64_t bytes{};
    std::uint32_t chunk_bytes{}, chunks{}, start{};

    // The order of sending is rotated by exchange, so that what a deadline cuts off differs each time.
    Cut(std::uint64_t message_bytes, std::size_t bytes_per_chunk, std::uint32_t channel, std::uint32_t seq);
    [[nodiscard]] std::uint32_t size(std::uint32_t chunk) const {
        return chunk + 1 < chunks ? chunk_bytes
                                  : static_cast<std::uint32_t>(bytes - std::uint64_t{chunks - 1} * chunk_bytes);
    }
    [[nodiscard]] std::uint32_t at(std::uint32_t ordinal) const {
        return static_cast<std::uint32_t>((std::uint64_t{start} + ordinal) % chunks);
    }
    [[nodiscard]] std::uint32_t ordinal(std::uint32_t chunk) const {
        return chunk >= start ? chunk - start : chunk + (chunks - start);
    }
    // The most chunks that a budget lets go.
    [[nodiscard]] std::uint32_t allowed(double budget) const { return static_cast<std::uint32_t>(budget * chunks); }
};

class Exchange;

// Checks of the chunks of a source that goes to several peers, so that each is computed once.
struct Checks {
    Bitmap known;
    std::vector<std::uint32_t> values;

    explicit Checks(std::uint32_t chunks) : known(chunks), values(chunks) {}
};

// A message to a peer.
struct Outgoing {
    Exchange* exchange{};
    std::uint16_t peer{};
    bool second_stage{};
    const std::byte* data{};
    Cut cut;
    std::uint32_t allowed{};             // chunks that may be missing in the end
    std::uint32_t reserved{};            // of those, what we ourselves may have missed of what we pass on
    const Reduction* source{};           // second stage: only its final chunks can be sent
    std::shared_ptr<Checks> checks;      // shared with other messages of the same data, if there are any
    std::uint32_t slot{}, generation{};  // how flights refer to it

    std::uint32_t cursor{};  // of the first pass
    std::uint32_t acked{}, given_up{}, repaired{};
    std::uint64_t eager_bytes{};  // of the first pass, as far as it went
    Bitmap acked_chunks;
    std::deque<std::uint32_t> repairs;
    unsigned pins{};    // batches that still point into `data`
    bool ready{};       // the receiver has posted: no eager limit
    bool parked{};      // the receiver had no room: hold until it is ready
    bool queued{};      // stands in its peer's queue
    bool wanted{true};  // false once nothing more need be sent
    bool released{};    // the caller's buffer is the caller's again

    explicit Outgoing(const Cut& c) : cut(c), acked_chunks(c.chunks) {}
    [[nodiscard]] bool first_pass_over() const { return cursor == cut.chunks; }
    // Chunks that could be sent now.
    [[nodiscard]] std::size_t waiting() const {
        return repairs.size() + (source != nullptr ? source->final_chunks().size() : cut.chunks) - cursor;
    }
    [[nodiscard]] bool sendable() const { return wanted && !parked && waiting() > 0; }
    // Of the first pass, in the order of sending.
    [[nodiscard]] std::uint32_t chunk_at(std::uint32_t ordinal) const {
        return source != nullptr ? source->final_chunks()[ordinal] : cut.at(ordinal);
    }
    [[nodiscard]] bool lossless() const { return allowed == 0; }
    [[nodiscard]] std::uint64_t unacked_bytes() const {
        return cut.bytes - std::min<std::uint64_t>(std::uint64_t{acked} * cut.chunk_bytes, cut.bytes);
    }
    [[nodiscard]] bool never_repaired() const { return allowed == cut.chunks; }
};

// A message from a peer.
struct Incoming {
    std::uint16_t peer{};
    bool second_stage{};
    Cut cut;
    std::uint32_t allowed{};
    std::byte* into{};
    Reduction* reduction{};
    std::uint32_t contributor{};

    Bitmap arrived, settled;
    std::uint32_t arrived_count{};
    std::uint64_t arrived_bytes{};
    std::uint32_t settled_upto{};  // ordinals below this are settled, in a message that is never repaired
    bool ended{};                  // the sender's first pass is over
    bool closed{};
    Nanos close_at{never};  // grace for reordered chunks after the end
    Nanos ask_at{never};    // when to tell the sender again that we wait
    Nanos ask_every{};

    explicit Incoming(const Cut& c) : cut(c), arrived(c.chunks), settled(c.chunks) {}
    [[nodiscard]] std::uint32_t missing() const { return cut.chunks - arrived_count; }
    // Takes a chunk whose size is right; false if it came too late or twice.
    bool accept(std::uint32_t chunk, std::span<const std::byte> payload);
    // Nothing more will be taken; the reduction goes on without the rest.
    void close();

private:
    void give_up(std::uint32_t chunk);
};

class Exchange {
public:
    Exchange(const ExchangeSpec& spec, std::size_t chunk_bytes, Blocks& blocks, Nanos now);

    [[nodiscard]] Incoming* incoming(std::uint16_t peer, bool second_stage);
    [[nodiscard]] const StageSpec& stage(bool second_stage) const { return stages_[second_stage ? 1 : 0]; }
    // Whether the stage may end with something missing: then a lost peer is loss, not an error.
    [[nodiscard]] bool lossy(bool second_stage) const {
        return stage(second_stage).budget > 0.0 || stage(second_stage).deadline != never;
    }
    [[nodiscard]] bool finished() const;
    [[nodiscard]] bool waits_for(std::uint16_t peer) const;
    // Whether a message goes to the peer or comes from it.
    [[nodiscard]] bool with(std::uint16_t peer) const;
    // Fills the arrivals of `outcome`.
    void conclude(Status status, Nanos now);
    // New final chunks since the last call: the second stage has more to send.
    [[nodiscard]] bool take_news();

    std::uint64_t id{};
    std::uint32_t channel, seq;
    Nanos timeout_at;
    std::vector<Outgoing> sends;  // never resized after construction: flights and queues point into it
    std::vector<Incoming> receives;
    std::unique_ptr<Reduction> reduction;
    Outcome outcome;

private:
    std::array<StageSpec, 2> stages_;
    std::size_t announced_{};
    std::vector<std::uint32_t> index_;  // of receives, plus one, by twice the peer plus the stage
};

}  // namespace storm
