// A set of ranks, as a value: which ranks are reachable, which have promised. Slots from 256 on cannot be in a view.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace storm {

class Ranks {
public:
    static constexpr std::size_t bits = 256, words = bits / 64;

    [[nodiscard]] bool has(std::size_t rank) const { return (words_[rank / 64] >> (rank % 64) & 1) != 0; }
    void add(std::size_t rank) { words_[rank / 64] |= 1ULL << (rank % 64); }
    void remove(std::size_t rank) { words_[rank / 64] &= ~(1ULL << (rank % 64)); }
    void set(std::size_t rank, bool in) { in ? add(rank) : remove(rank); }

    [[nodiscard]] std::size_t count() const {
        std::size_t sum = 0;
        for (const std::uint64_t word : words_) sum += static_cast<std::size_t>(std::popcount(word));
        return sum;
    }
    [[nodiscard]] bool empty() const { return *this == Ranks{}; }
    // The first rank that is in the set and not below `from`; `bits` if there is none.
    [[nodiscard]] std::size_t next(std::size_t from) const {
        while (from < bits) {
            const std::uint64_t word = words_[from / 64] >> (from % 64);
            if (word != 0) return from + static_cast<std::size_t>(std::countr_zero(word));
            from = (from / 64 + 1) * 64;
        }
        return bits;
    }
    [[nodiscard]] bool contains(const Ranks& other) const { return (other & *this) == other; }

    [[nodiscard]] Ranks operator&(const Ranks& other) const {
        return map(other, [](auto a, auto b) { return a & b; });
    }
    [[nodiscard]] Ranks operator|(const Ranks& other) const {
        return map(other, [](auto a, auto b) { return a | b; });
    }
    [[nodiscard]] Ranks operator-(const Ranks& other) const {
        return map(other, [](auto a, auto b) { return a & ~b; });
    }
    bool operator==(const Ranks&) const = default;

    // Iterates by rising rank: `for (const std::uint16_t rank : ranks)`.
    struct Iterator {
        const Ranks* set;
        std::size_t at;
        [[nodiscard]] std::uint16_t operator*() const { return static_cast<std::uint16_t>(at); }
        Iterator& operator++() {
            at = set->next(at + 1);
            return *this;
        }
        bool operator!=(const Iterator& other) const { return at != other.at; }
    };
    [[nodiscard]] Iterator begin() const { return {this, next(0)}; }
    [[nodiscard]] Iterator end() const { return {this, bits}; }

    [[nodiscard]] const std::array<std::uint64_t, words>& raw() const { return words_; }

private:
    template <class Combine>
    [[nodiscard]] Ranks map(const Ranks& other, Combine combine) const {
        Ranks result;
        for (std::size_t at = 0; at < words; ++at) result.words_[at] = combine(words_[at], other.words_[at]);
        return result;
    }

    std::array<std::uint64_t, words> words_{};
};

}  // namespace storm
