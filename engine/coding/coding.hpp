// Forward error correction (FEC) of messages: which chunks form a block, how a sender tracks each block and its parity, and
// how a receiver restores missing chunks. The code itself is in erasure.hpp, and how much parity pays in
// coding_model.hpp.
//
// Chunks are counted in the order of sending. A message is divided into stretches, and a stretch into interleaved
// blocks, so that a burst of losses spreads over all of them. The shape follows from the number of chunks, so both
// sides know it. The parity of a stretch follows its last chunk.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/bitmap.hpp"
#include "base/block_pool.hpp"
#include "coding/chunk_layout.hpp"
#include "coding/parity_sums.hpp"
#include "math/erasure.hpp"

namespace storm {

struct CodeShape {
    static constexpr std::uint32_t block_chunks = 128, stretch_blocks = 4;

    std::uint32_t chunks, stretches, parity_bytes;

    explicit CodeShape(const ChunkLayout& layout);
    [[nodiscard]] std::uint32_t begin(std::uint32_t stretch) const {
        return static_cast<std::uint32_t>(std::uint64_t{stretch} * chunks / stretches);
    }
    [[nodiscard]] std::uint32_t size(std::uint32_t stretch) const { return begin(stretch + 1) - begin(stretch); }
    [[nodiscard]] std::uint32_t stretch_of(std::uint32_t ordinal) const {
        return static_cast<std::uint32_t>(((std::uint64_t{ordinal} + 1) * stretches - 1) / chunks);
    }
    [[nodiscard]] std::uint32_t blocks(std::uint32_t stretch) const {
        return (size(stretch) + block_chunks - 1) / block_chunks;
    }
    [[nodiscard]] std::uint32_t block_size(std::uint32_t stretch, std::uint32_t block) const {
        const std::uint32_t several = blocks(stretch);
        return (size(stretch) - block + several - 1) / several;
    }
    // Position of a chunk, and the inverse.
    struct BlockPosition {
        std::uint32_t stretch, block, position;
    };
    [[nodiscard]] BlockPosition locate(std::uint32_t ordinal) const;
    [[nodiscard]] std::uint32_t ordinal(const BlockPosition& at) const {
        return begin(at.stretch) + at.block + at.position * blocks(at.stretch);
    }
};

// The name of a chunk of parity on the wire: its block, counted over the message, and its index there.
struct ParityName {
    std::uint32_t stretch{}, block{}, index{};

    [[nodiscard]] std::uint32_t pack() const { return (stretch * CodeShape::stretch_blocks + block) << 8 | index; }
    [[nodiscard]] static ParityName unpack(std::uint32_t chunk) {
        return {chunk >> 8 >> 2, chunk >> 8 & 3, chunk & 255};
    }
};

// The parity of one outgoing message. Chunks are named by their numbers in the message.
class Encoding {
public:
    // `sent`: chunks of the first pass that were sent already; a stretch that contains one gets no parity. `exact`: a
    // block that cannot be decoded is topped up by as many retransmissions as it lacks; otherwise its chunks are from
    // then on repaired or not, one by one. `fleeting`: a chunk may be overwritten once the receiver has it, so its
    // parity is computed as it is sent. Such chunks are sent in the order of the layout.
    Encoding(const ChunkLayout& layout, std::uint32_t sent, bool exact, bool fleeting);

    [[nodiscard]] const CodeShape& shape() const { return shape_; }
    // True if it is undecided how much parity the stretch of this chunk gets: call `decide` before the chunk is sent.
    [[nodiscard]] bool undecided(std::uint32_t chunk) const;
    void decide(std::uint32_t chunk, std::size_t parity_per_block);
    [[nodiscard]] bool coded(std::uint32_t chunk) const;

    // A chunk of the first pass was sent, or is skipped because it never reached us. A skipped chunk leaves its stretch
    // without parity; `on_skipped` returns the chunks to retransmit.
    void on_sent(std::uint32_t chunk, std::span<const std::byte> payload);
    [[nodiscard]] std::vector<std::uint32_t> on_skipped(std::uint32_t chunk);
    void on_acked(std::uint32_t chunk);
    void on_parity_acked(std::uint32_t name);
    // A datagram was lost. Returns the chunks to retransmit: none as long as what is in flight may suffice.
    [[nodiscard]] std::vector<std::uint32_t> on_lost(std::uint32_t chunk);
    [[nodiscard]] std::vector<std::uint32_t> on_parity_lost(std::uint32_t name);
    // Call it when nothing else can be sent while a stretch waits for its last chunks before its parity. Returns the
    // lost chunks of that stretch, which need not wait.
    [[nodiscard]] std::vector<std::uint32_t> take_lost_before_parity();
    // Stops coding: the receiver still waits although it should have been able to decode, or parity cannot be sent any
    // more. Returns the unacknowledged chunks that parity was to replace.
    [[nodiscard]] std::vector<std::uint32_t> stop();

    // Chunks of parity that can be sent now, and the next of them. `payload(chunk)` returns a chunk's bytes in place.
    [[nodiscard]] std::size_t due() const { return due_; }
    struct Ready {
        std::uint32_t name;
        std::span<const std::byte> payload;  // valid until the next call
    };
    template <class Payload>
    [[nodiscard]] Ready take(Payload&& payload);

    // Chunks that were not acknowledged but can presumably be decoded.
    [[nodiscard]] std::uint32_t presumed() const { return presumed_; }
    [[nodiscard]] bool relied_upon() const { return presumed_ > 0; }
    // Blocks since the last call that parity saved, or that had to be topped up.
    struct BlockCounts {
        std::uint32_t saved, topped_up;
    };
    [[nodiscard]] BlockCounts take_block_counts();
    // Memory that it holds for parity.
    [[nodiscard]] std::size_t memory_bytes() const { return computed_.capacity() + sums_.memory_bytes(); }

private:
    enum class State : std::uint8_t { unsent, flying, lost, arrived };
    struct Block {
        std::vector<State> data, parity;
        std::uint32_t presumed{};
        bool saved{}, topped_up{}, failed{};
    };
    enum class CodingState : std::uint8_t { undecided, plain, coded };
    struct Stretch {
        CodingState coding_state{CodingState::undecided};
        bool due{};
        std::uint32_t sent{}, next{}, parity{};
        std::vector<Block> blocks;
    };
    static constexpr std::uint32_t at_once = 8;  // chunks of parity of a block that are computed together

    [[nodiscard]] CodeShape::BlockPosition locate(std::uint32_t chunk) const {
        return shape_.locate(layout_.ordinal(chunk));
    }
    [[nodiscard]] std::uint32_t chunk_at(const CodeShape::BlockPosition& at) const {
        return layout_.at(shape_.ordinal(at));
    }
    [[nodiscard]] Block* block_of(const CodeShape::BlockPosition& at);
    [[nodiscard]] std::vector<std::uint32_t> settle(std::uint32_t stretch, std::uint32_t block);
    static void drop_needless_parity(Block& block);
    void forget_parity(Stretch& stretch, Block& block);
    [[nodiscard]] std::vector<std::uint32_t> stop_stretch(std::uint32_t stretch);
    // The next chunk of parity to send; moves on over those that are no longer wanted.
    [[nodiscard]] ParityName next_name();

    ChunkLayout layout_;
    CodeShape shape_;
    bool exact_, fleeting_;
    std::vector<Stretch> stretches_;
    std::size_t due_{};
    std::uint32_t presumed_{};
    BlockCounts block_counts_{};
    std::vector<std::byte> computed_;  // parity of all blocks of one stretch, `at_once` each
    std::uint32_t computed_stretch_{~0U}, computed_group_{~0U};
    ParitySums sums_;  // of the stretch that is being sent, where chunks are fleeting
};

// Memory for what receivers keep until a block can be decoded: no peer gets more than its share.
class CodingMemory {
public:
    CodingMemory(BlockPool& blocks, std::size_t total_bytes, std::size_t world)
        : blocks_(blocks), total_bytes_(total_bytes), used_(world) {}

    void set_peers(std::size_t peers) { peers_ = peers == 0 ? 1 : peers; }
    [[nodiscard]] bool reserve(std::uint16_t peer, std::size_t bytes) {
        if (used_[peer] + bytes > total_bytes_ / peers_) return false;
        used_[peer] += bytes;
        return true;
    }
    void release(std::uint16_t peer, std::size_t bytes) { used_[peer] -= bytes; }
    [[nodiscard]] std::size_t used(std::uint16_t peer) const { return used_[peer]; }
    [[nodiscard]] BlockPool& blocks() { return blocks_; }

private:
    BlockPool& blocks_;
    std::size_t total_bytes_, peers_{1};
    std::vector<std::size_t> used_;
};

// The receiver of a coded message: keeps parity, and copies of chunks where needed, until each block is complete.
class Decoding {
public:
    // `placed`: where received chunks are stored; null if they are summed, so that copies must be kept.
    Decoding(const ChunkLayout& layout, const std::byte* placed, std::uint16_t peer, CodingMemory& coding_memory);
    ~Decoding();
    Decoding(const Decoding&) = delete;
    Decoding& operator=(const Decoding&) = delete;

    [[nodiscard]] const CodeShape& shape() const { return shape_; }
    // A chunk of a coded stretch arrived. Call it before the chunk is summed.
    void keep(std::uint32_t chunk, std::span<const std::byte> payload);
    enum class Taken : std::uint8_t { yes, malformed, no_space };
    // `settled`: chunks that arrived or were marked missing.
    [[nodiscard]] Taken take_parity(std::uint32_t name, std::span<const std::byte> payload, const Bitmap& arrived,
                                    const Bitmap& settled);
    // Restores the missing chunks of a chunk's or a parity's block, if possible, and calls `restored(chunk, payload)`
    // for each.
    template <class Restored>
    void restore_block_of(std::uint32_t chunk, const Bitmap& arrived, Restored&& restored);
    template <class Restored>
    void restore_block_named(std::uint32_t name, const Bitmap& arrived, Restored&& restored);
    // Drops stretches below this one, of which nothing is awaited any more.
    void forget_before(std::uint32_t stretch);

private:
    using Memory = std::unique_ptr<std::byte[]>;
    struct Block {
        std::vector<Memory> copies;  // by position, where chunks are not placed
        std::uint32_t copied{};
        std::vector<std::pair<std::uint32_t, Memory>> parity;
        std::size_t reserved{};
        bool broken{};  // a copy is missing, so that it cannot be decoded
    };
    struct RestoredChunk {
        std::uint32_t chunk;
        std::span<const std::byte> payload;
    };
    [[nodiscard]] static std::uint32_t key(const CodeShape::BlockPosition& at) {
        return at.stretch * CodeShape::stretch_blocks + at.block;
    }
    [[nodiscard]] Block& open(const CodeShape::BlockPosition& at);
    [[nodiscard]] std::vector<RestoredChunk> restore(CodeShape::BlockPosition at, const Bitmap& arrived);
    void drop(Block& block);

    ChunkLayout layout_;
    CodeShape shape_;
    const std::byte* placed_;
    std::uint16_t peer_;
    CodingMemory& coding_memory_;
    std::unordered_map<std::uint32_t, Block> blocks_;
    ErasureDecoder decoder_;
    std::vector<std::byte> restored_;
};

template <class Payload>
Encoding::Ready Encoding::take(Payload&& payload) {
    const ParityName name = next_name();
    if (fleeting_) return {.name = name.pack(), .payload = sums_.parity(name.block, name.index)};
    Stretch& stretch = stretches_[name.stretch];
    const std::uint32_t group = name.index / at_once, bytes = shape_.parity_bytes;
    if (computed_stretch_ != name.stretch || computed_group_ != group) {
        computed_stretch_ = name.stretch;
        computed_group_ = group;
        computed_.resize(stretch.blocks.size() * at_once * bytes);
        for (std::uint32_t block = 0; block < stretch.blocks.size(); ++block) {
            std::vector<std::span<const std::byte>> data;
            for (std::uint32_t i = 0; i < shape_.block_size(name.stretch, block); ++i) {
                data.push_back(payload(chunk_at({name.stretch, block, i})));
            }
            std::vector<std::byte*> outs;
            for (std::uint32_t i = 0; i < at_once && group * at_once + i < stretch.parity; ++i) {
                outs.push_back(computed_.data() + (block * at_once + i) * std::size_t{bytes});
            }
            encode_parity(data, std::size_t{group} * at_once, outs, bytes);
        }
    }
    const std::size_t at = (std::size_t{name.block} * at_once + name.index % at_once) * bytes;
    return {.name = name.pack(), .payload = {computed_.data() + at, bytes}};
}

template <class Restored>
void Decoding::restore_block_of(std::uint32_t chunk, const Bitmap& arrived, Restored&& restored) {
    for (const RestoredChunk& each : restore(shape_.locate(layout_.ordinal(chunk)), arrived))
        restored(each.chunk, each.payload);
}

template <class Restored>
void Decoding::restore_block_named(std::uint32_t name, const Bitmap& arrived, Restored&& restored) {
    const ParityName of = ParityName::unpack(name);
    for (const RestoredChunk& each : restore({of.stretch, of.block, 0}, arrived)) restored(each.chunk, each.payload);
}

}  // namespace storm
