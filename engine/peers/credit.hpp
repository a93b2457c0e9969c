// Flow control: how many bytes each peer may have in flight to us, so that all peers together do not overflow the
// socket's receive buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace storm {

class Credit {
public:
    // `buffer_bytes`: what the socket holds. `world`: number of ranks, ours included. At first, all peers are present.
    Credit(std::size_t buffer_bytes, std::size_t world)
        : buffer_bytes_(buffer_bytes), open_messages_(world), absent_(world), peers_(world > 0 ? world - 1 : 0) {}

    // A peer joined or left. Only present peers share the buffer.
    void add_peer(std::uint16_t peer) {
        if (std::exchange(absent_[peer], 0) != 0) ++peers_;
    }
    void remove_peer(std::uint16_t peer) {
        if (std::exchange(absent_[peer], 1) == 0) --peers_;
    }
    [[nodiscard]] std::size_t peers() const { return peers_; }

    // Begins or stops awaiting a message from this peer. `open` returns true if the credit of other peers shrinks, that
    // is, if nothing was awaited from this peer before.
    bool open(std::uint16_t peer) {
        const bool first = open_messages_[peer]++ == 0;
        if (first) ++awaited_;
        return first;
    }
    void close(std::uint16_t peer) {
        if (--open_messages_[peer] == 0) --awaited_;
    }
    // Half of the buffer is divided among all peers, and a quarter among the peers that we await: as they finish one by
    // one, the last ones get more. The remaining quarter covers what was granted to peers that have finished.
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
    std::vector<std::uint8_t> absent_;          // by rank: 1 if the peer is absent
    std::size_t peers_;                         // peers that are present
    std::size_t awaited_{};                     // peers from which we await a message
};

}  // namespace storm
