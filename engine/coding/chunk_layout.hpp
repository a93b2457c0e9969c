// How a message is split into chunks, and the order in which they are sent.
#pragma once

#include <cstddef>
#include <cstdint>

namespace storm {

// The chunks of a message. The short chunk is always the last one; an empty message is one empty chunk.
struct ChunkLayout {
    std::uint64_t bytes{};
    std::uint32_t chunk_bytes{}, chunks{}, start{};

    // Each exchange starts at another chunk, so that a deadline does not always lose the same ones.
    ChunkLayout(std::uint64_t message_bytes, std::size_t bytes_per_chunk, std::uint32_t channel, std::uint32_t seq);
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
    // How many chunks may be missing under a budget.
    [[nodiscard]] std::uint32_t allowed(double budget) const { return static_cast<std::uint32_t>(budget * chunks); }
};

}  // namespace storm
