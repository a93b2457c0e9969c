#include "wire/pieces.hpp"

#include <algorithm>
#include <cstring>

namespace storm {
namespace {

// How many bytes of incomplete chunks one peer may occupy; at least two chunks, as two may be reordered.
constexpr std::size_t most_held_bytes = 256 << 10;

// Pieces are multiples of 16 bytes, so that no element is split.
constexpr std::size_t rounded(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

PieceLayout::PieceLayout(std::size_t chunk_size, std::size_t pieces)
    : chunk_bytes(chunk_size), count(pieces), bytes(pieces == 0 ? 0 : rounded((chunk_size + pieces - 1) / pieces)) {}

PieceLayout PieceLayout::for_datagram(std::size_t chunk_size, std::size_t datagram_bytes, std::size_t overhead) {
    const std::size_t taken = overhead + PiecePrefix::wire_bytes;
    const std::size_t capacity = datagram_bytes > taken ? (datagram_bytes - taken) / 16 * 16 : 0;
    if (capacity == 0) return {chunk_size, most_pieces};
    // The number of pieces for this size; rounding each piece up may make one of them unnecessary.
    const PieceLayout layout(chunk_size,
                             std::clamp<std::size_t>((chunk_size + capacity - 1) / capacity, 2, most_pieces));
    return {chunk_size,
            std::max<std::size_t>((chunk_size + layout.bytes - 1) / std::max<std::size_t>(layout.bytes, 1), 1)};
}

std::size_t PieceLayout::least_datagram(std::size_t chunk_size, std::size_t overhead) {
    return PieceLayout(chunk_size, most_pieces).bytes + overhead + PiecePrefix::wire_bytes;
}

std::optional<PiecePrefix> parse_piece(std::span<const std::byte> payload) {
    if (payload.size() < PiecePrefix::wire_bytes) return std::nullopt;
    PiecePrefix prefix;
    std::memcpy(&prefix.index, payload.data(), 2);
    std::memcpy(&prefix.count, payload.data() + 2, 2);
    std::memcpy(&prefix.chunk_bytes, payload.data() + 4, 4);
    return prefix;
}

void write_piece(const PiecePrefix& prefix, std::span<std::byte, PiecePrefix::wire_bytes> out) {
    std::memcpy(out.data(), &prefix.index, 2);
    std::memcpy(out.data() + 2, &prefix.count, 2);
    std::memcpy(out.data() + 4, &prefix.chunk_bytes, 4);
}

Pieces::Pieces(std::size_t chunk_bytes)
    : chunk_bytes_(chunk_bytes),
      most_(std::max<std::size_t>(most_held_bytes / std::max<std::size_t>(chunk_bytes, 1), 2)) {}

bool Pieces::holds(std::uint64_t number) const {
    return std::any_of(partial_.begin(), partial_.end(), [&](const Partial& partial) {
        return std::find(partial.numbers.begin(), partial.numbers.end(), number) != partial.numbers.end();
    });
}

Pieces::Taken Pieces::take(const Header& header, std::uint64_t number, std::span<const std::byte> payload) {
    const std::optional<PiecePrefix> prefix = parse_piece(payload);
    if (!prefix || prefix->chunk_bytes > chunk_bytes_) return Taken::malformed;
    const PieceLayout layout(prefix->chunk_bytes, prefix->count);
    const std::span<const std::byte> piece = payload.subspan(PiecePrefix::wire_bytes);
    if (!layout.valid() || prefix->index >= layout.count || piece.size() != layout.size(prefix->index))
        return Taken::malformed;

    const std::uint8_t stage = header.flags & flag_second_stage;
    const auto same_chunk = [&](const Partial& other) {
        return other.chunk == header.chunk && other.seq == header.seq && other.channel == header.channel &&
               other.stage == stage;
    };
    // Search from the newest: it is most often the one.
    auto found = std::find_if(partial_.rbegin(), partial_.rend(), same_chunk);
    if (found != partial_.rend() && (found->count != layout.count || found->bytes.size() != layout.chunk_bytes ||
                                     found->message_bytes != header.message_bytes)) {
        // The chunk was retransmitted with another layout: the old pieces do not fit the new ones.
        partial_.erase(std::next(found).base());
        found = partial_.rend();
    }
    if (found == partial_.rend()) {
        if (partial_.size() >= most_) partial_.pop_front();
        partial_.push_back({.channel = header.channel,
                            .seq = header.seq,
                            .chunk = header.chunk,
                            .message_bytes = header.message_bytes,
                            .stage = stage,
                            .count = layout.count,
                            .here = 0,
                            .bytes = std::vector<std::byte>(layout.chunk_bytes),
                            .numbers = {}});
        found = partial_.rbegin();
    }
    Partial& partial = *found;
    const std::uint64_t one = 1ULL << prefix->index;
    if ((partial.here & one) == 0) {
        std::copy(piece.begin(), piece.end(),
                  partial.bytes.begin() + static_cast<std::ptrdiff_t>(layout.begin(prefix->index)));
        partial.here |= one;
        partial.numbers.push_back(number);
    } else if (partial.numbers.size() < 2 * layout.count) {
        partial.numbers.push_back(number);  // retransmitted, and received before the rest of the first transmission
    }
    if (partial.here + 1 != (layout.count == 64 ? 0 : 1ULL << layout.count)) return Taken::kept;
    complete_ = std::move(partial);
    partial_.erase(std::next(found).base());
    return Taken::complete;
}

}  // namespace storm
