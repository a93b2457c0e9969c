// A fixed number of bits: which chunks arrived, which were acknowledged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace storm {

class Bitmap {
public:
    Bitmap() = default;
    explicit Bitmap(std::size_t bits) : words_((bits + 63) / 64) {}

    [[nodiscard]] bool test(std::size_t bit) const { return (words_[bit / 64] >> (bit % 64) & 1) != 0; }
    // Sets the bit; true if it was clear.
    bool set(std::size_t bit) {
        std::uint64_t& word = words_[bit / 64];
        const std::uint64_t one = 1ULL << (bit % 64);
        if ((word & one) != 0) return false;
        word |= one;
        return true;
    }
    void clear(std::size_t bit) { words_[bit / 64] &= ~(1ULL << (bit % 64)); }
    [[nodiscard]] const std::vector<std::uint64_t>& words() const { return words_; }

private:
    std::vector<std::uint64_t> words_;
};

}  // namespace storm
