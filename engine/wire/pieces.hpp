// Fragmentation and reassembly: chunks travel in pieces over paths whose MTU does not carry a whole chunk.
//
// A chunk arrives whole or not at all: the packet numbers of its pieces are acknowledged together, once the last piece
// has arrived. So a chunk behaves like one datagram to the sender, and a receiver may drop an incomplete chunk at any
// time.
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

// How a chunk is fragmented: `count` pieces of `bytes` each, of which the last may be shorter.
struct PieceLayout {
    static constexpr std::size_t most_pieces = 64;

    std::size_t chunk_bytes{}, count{}, bytes{};

    PieceLayout(std::size_t chunk_size, std::size_t pieces);
    [[nodiscard]] std::size_t begin(std::size_t piece) const { return piece * bytes; }
    [[nodiscard]] std::size_t size(std::size_t piece) const {
        return piece + 1 < count ? bytes : chunk_bytes - (count - 1) * bytes;
    }
    // True if every piece holds at least a byte. A layout sent by a peer may be invalid.
    [[nodiscard]] bool valid() const { return count >= 2 && count <= most_pieces && (count - 1) * bytes < chunk_bytes; }
    // The layout with the fewest pieces that fit `datagram_bytes` each, with `overhead`.
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

// Reassembly buffer: the incomplete chunks of one peer. Bounded: the oldest is dropped for the newest.
class Pieces {
public:
    enum class Taken : std::uint8_t { malformed, kept, complete };

    // `chunk_bytes`: no chunk is larger.
    explicit Pieces(std::size_t chunk_bytes);

    // Takes the payload of a datagram that holds a piece. If the chunk is now complete, `whole()` and `numbers()` are
    // its bytes and the packet numbers of its pieces, until the next call.
    [[nodiscard]] Taken take(const Header& header, std::uint64_t number, std::span<const std::byte> payload);
    // True if a piece with this packet number is buffered. It is not acknowledged yet, so only this identifies a
    // duplicate.
    [[nodiscard]] bool holds(std::uint64_t number) const;
    [[nodiscard]] std::span<const std::byte> whole() const { return complete_.bytes; }
    [[nodiscard]] std::span<const std::uint64_t> numbers() const { return complete_.numbers; }

private:
    struct Partial {
        std::uint32_t channel{}, seq{}, chunk{}, message_bytes{};
        std::uint8_t stage{};
        std::size_t count{};
        std::uint64_t here{};  // bit i: piece i has arrived
        std::vector<std::byte> bytes;
        std::vector<std::uint64_t> numbers;
    };

    std::size_t chunk_bytes_, most_;
    std::deque<Partial> partial_;  // oldest first
    Partial complete_;
};

}  // namespace storm
