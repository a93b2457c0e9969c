// A bit set of fixed size: which chunks arrived, which peers have something to send.
#pragma once

#include <bit>
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
    // The first set bit that is not below `from`; the number of bits, rounded up to 64, if there is none.
    [[nodiscard]] std::size_t next(std::size_t from) const {
        std::size_t at = from / 64;
        if (at >= words_.size()) return 64 * words_.size();
        std::uint64_t word = words_[at] >> (from % 64) << (from % 64);
        while (word == 0 && ++at < words_.size()) word = words_[at];
        return word == 0 ? 64 * words_.size() : 64 * at + static_cast<std::size_t>(std::countr_zero(word));
    }
    // Sets every bit that is set in `other`, a bitmap of the same size.
    void add(const Bitmap& other) {
        for (std::size_t at = 0; at < words_.size(); ++at) words_[at] |= other.words_[at];
    }
    void clear(std::size_t bit) { words_[bit / 64] &= ~(1ULL << (bit % 64)); }
    [[nodiscard]] const std::vector<std::uint64_t>& words() const { return words_; }

private:
    std::vector<std::uint64_t> words_;
};

}  // namespace storm
