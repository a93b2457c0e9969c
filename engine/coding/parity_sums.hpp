// Parity of one stretch, accumulated as its chunks are sent: afterwards they are not read again, and their memory may
// change.
//
// A few chunks of each block are copied until they are added together, as each pass over the sums costs more than the
// copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace storm {

class ParitySums {
public:
    // Begins a stretch: so many blocks with `parity` chunks of parity each, of `bytes`. Forgets the one before.
    void begin(std::uint32_t blocks, std::uint32_t parity, std::size_t bytes);
    // A chunk is sent for the first time.
    void add(std::uint32_t block, std::uint32_t position, std::span<const std::byte> chunk);
    // A chunk of parity, once all chunks of its block were added. Valid until `begin` or `forget`.
    [[nodiscard]] std::span<const std::byte> parity(std::uint32_t block, std::uint32_t index);
    // Frees all memory.
    void forget();
    [[nodiscard]] std::size_t memory_bytes() const { return sums_.capacity() + copies_.capacity(); }

    static constexpr std::uint32_t together = 8;  // chunks of a block that are added at once

private:
    struct Waiting {
        std::size_t position, bytes;
    };
    void fold(std::uint32_t block);

    std::size_t bytes_{};
    std::uint32_t parity_{};
    std::vector<std::byte> sums_;                // [block][index]
    std::vector<std::byte> copies_;              // [block][at most `together`]
    std::vector<std::vector<Waiting>> waiting_;  // by block: what `copies_` holds
};

}  // namespace storm
