// Tracks which sequence numbers of each channel were posted here, in bounded memory.
//
// Numbers are posted once, in nearly rising order. So a channel remembers the next number and the few that were
// skipped, instead of every number ever used. In lanes other than 0, an exchange that has no part there never posts its
// number. So the oldest skipped numbers are forgotten, and then count as posted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <unordered_map>

namespace storm {

class Sequences {
public:
    // A channel may have at most this many numbers that were skipped and not posted yet.
    static constexpr std::size_t most_skipped = 1 << 16;
    // Where the oldest are forgotten, this many are remembered: more than are ever in progress at once.
    static constexpr std::size_t most_remembered = 1 << 12;

    explicit Sequences(bool forgets = false) : forgets_(forgets) {}

    // Marks a number as posted. Throws std::invalid_argument if it was posted before or lies too far ahead; nothing has
    // changed then.
    void post(std::uint32_t channel, std::uint32_t seq);
    [[nodiscard]] bool posted(std::uint32_t channel, std::uint32_t seq) const;

private:
    struct Channel {
        std::uint64_t next{};  // one more than the largest posted; 64 bits, as the largest may be 2^32 - 1
        std::set<std::uint32_t> skipped;
    };
    std::unordered_map<std::uint32_t, Channel> channels_;
    bool forgets_;
};

}  // namespace storm
