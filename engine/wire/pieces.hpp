// Chunks in pieces, for paths that do not carry a whole one: how they are cut, and how a receiver puts them together.
//
// A chunk arrives whole or not at all: the numbers of its pieces are reported together, when the last one is here. To
// the sender a chunk thus behaves like one datagram, and a receiver may drop an incomplete chunk at any time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "wire/wire.hpp"

namespace storm {

// How a chunk is cut: `count` pieces of `bytes` each, of which the last may be shorter.
struct PieceLayout {
    static constexpr std::size_t most_pieces = 64;

    std::size_t chunk_bytes{}, count{}, bytes{};

    PieceLayout(std::size_t chunk_size, std::size_t pieces);
    [[nodiscard]] std::size_t begin(std::size_t piece) const { return piece * bytes; }
    [[nodiscard]] std::size_t size(std::size_t piece) const {
        return piece + 1 < count ? bytes : chunk_bytes - (count - 1) * bytes;
    }
    // Whether every piece holds at least a byte; a cut sent by a peer may be wrong.
    [[nodiscard]] bool valid() const { return count >= 2 && count <= most_pieces && (count - 1) * bytes < chunk_bytes; }
    // The cut into the fewest pieces that fit `datagram_bytes` each, with `overhead`.
    static PieceLayout for_datagram(std::size_t chunk_size, std::size_t datagram_bytes, std::size_t overhead);
    // The smallest datagram in which a piece of such a chunk fits.
    static std::size_t least_datagram(std::size_t chunk_size, std::size_t overhead);
};

// The prefix of a piece: which piece of how many, and the size of the whole chunk.
struct PiecePrefix {
    static constexpr std::size_t wire_bytes = 8;

    std::uint16_t index{}, count{};
    std::uint32_t chunk_bytes{};
};
[[nodiscard]] std::optional<PiecePrefix> parse_piece(std::span<const std::byte> payload);
void write_piece(const PiecePrefix& prefix, std::span<std::byte, PiecePrefix::wire_bytes> out);

// The chunks of one peer that are not complete. Bounded: the oldest makes room for the newest.
class Pieces {
public:
    enum class Taken : std::uint8_t { malformed, kept, complete };

    // `chunk_bytes`: no chunk is larger.
    explicit Pieces(std::size_t chunk_bytes);

    // Takes the payload of a datagram that holds a piece. If the chunk is now complete, `whole()` and `numbers()` are its
    // bytes and the packet numbers of its pieces, until the next call.
    [[nodiscard]] Taken take(const Header& header, std::uint64_t number, std::span<const std::byte> payload);
    // Whether a piece with this packet number waits here. It is not reported yet, so only this shows that it is a duplicate.
    [[nodiscard]] bool holds(std::uint64_t number) const;
    [[nodiscard]] std::span<const std::byte> whole() const { return complete_.bytes; }
    [[nodiscard]] std::span<const std::uint64_t> numbers() const { return complete_.numbers; }

private:
    struct Partial {
        std::uint32_t channel{}, seq{}, chunk{}, message_bytes{};
        std::uint8_t stage{};
        std::size_t count{};
        std::uint64_t here{};  // bit i: piece i is here
        std::vector<std::byte> bytes;
        std::vector<std::uint64_t> numbers;
    };

    std::size_t chunk_bytes_, most_;
    std::deque<Partial> partial_;  // oldest first
    Partial complete_;
};

}  // namespace storm
