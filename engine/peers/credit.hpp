// How much each peer may have in flight to us, so that all of them together do not overflow the socket's buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace storm {

class Credit {
public:
    // `buffer_bytes`: what the socket holds. `world`: ranks, with our own. All peers are there at first.
    Credit(std::size_t buffer_bytes, std::size_t world)
        : buffer_bytes_(buffer_bytes), open_messages_(world), absent_(world), peers_(world > 0 ? world - 1 : 0) {}

    // A peer is there from now on, or no longer: only those that are there share.
    void add_peer(std::uint16_t peer) {
        if (std::exchange(absent_[peer], 0) != 0) ++peers_;
    }
    void remove_peer(std::uint16_t peer) {
        if (std::exchange(absent_[peer], 1) == 0) --peers_;
    }
    [[nodiscard]] std::size_t peers() const { return peers_; }

    // A message from this peer is awaited, or no longer awaited. `open` returns whether the credit of others shrinks, as
    // this peer was not awaited before.
    bool open(std::uint16_t peer) {
        const bool first = open_messages_[peer]++ == 0;
        if (first) ++awaited_;
        return first;
    }
    void close(std::uint16_t peer) {
        if (--open_messages_[peer] == 0) --awaited_;
    }
    // Half of the buffer is divided among all peers, a quarter among those that we await: as they finish one after the
    // other the last ones get more, and a quarter is left for what was granted to those before.
    [[nodiscard]] std::uint64_t bytes(std::uint16_t peer) const {
        return share(open_messages_[peer] > 0 ? awaited_ : peers_);
    }
    // The credit of a peer that we do not await.
    [[nodiscard]] std::uint64_t idle_bytes() const { return share(peers_); }

private:
    [[nodiscard]] std::uint64_t share(std::size_t sharing) const {
        if (peers_ == 0) return buffer_bytes_;
        const std::size_t quarter = buffer_bytes_ / 4;
        return 2 * quarter / peers_ + quarter / sharing;
    }

    std::size_t buffer_bytes_;
    std::vector<std::uint32_t> open_messages_;  // by rank: messages that we await
    std::vector<std::uint8_t> absent_;          // by rank: not there
    std::size_t peers_;                         // that are there
    std::size_t awaited_{};                     // peers of which we await any
};

}  // namespace storm
