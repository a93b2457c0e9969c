// Forward error correction by a systematic erasure code (Cauchy Reed-Solomon): k chunks of data and m chunks of parity,
// any k of which restore the data.
//
// Parity i is the sum over the data chunks c of 1 / ((255 - i) + c) times chunk c, in the field of 256 elements: a
// Cauchy matrix, all of whose square parts can be inverted. The factors depend neither on k nor on m, so that more
// parity can follow at any time. Chunks have one length; a shorter one is padded with zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace storm {

// Chunks of data and parity of one block together.
inline constexpr std::size_t max_block_chunks = 255;

[[nodiscard]] std::uint8_t erasure_factor(std::size_t parity, std::size_t chunk);

// Computes parity `first`, `first + 1`, ... into `parity`, each of `bytes`. No chunk is longer than `bytes`, and
// data.size() + first + parity.size() <= max_block_chunks; misuse throws std::invalid_argument.
void encode_parity(std::span<const std::span<const std::byte>> data, std::size_t first,
                   std::span<std::byte* const> parity, std::size_t bytes);
// Adds chunks, each with its position in the block, to parity 0, 1, ..., which begins as zeros: `encode_parity`, step
// by step. The same bounds hold.
void add_to_parity(std::span<const std::span<const std::byte>> chunks, std::span<const std::size_t> positions,
                   std::span<std::byte* const> parity, std::size_t bytes);

// A chunk of parity that arrived.
struct Parity {
    std::size_t index;
    std::span<const std::byte> payload;
};

// Restores chunks of data that did not arrive. Scratch memory is kept between calls.
class ErasureDecoder {
public:
    struct Chunk {
        std::span<const std::byte> present;  // the payload, if it arrived
        std::span<std::byte> missing;        // where to write it, if it did not; may be empty in both cases
        bool arrived{};
    };
    // Fills in what is missing. False, and nothing is written, if that cannot be done: too little parity, an index
    // twice or out of range, parity shorter than a chunk, or too many chunks.
    [[nodiscard]] bool decode(std::span<const Chunk> data, std::span<const Parity> found, std::size_t bytes);

private:
    std::vector<std::byte> syndromes_, restored_;
};

}  // namespace storm
