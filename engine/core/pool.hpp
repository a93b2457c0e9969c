// The pool of unexpected messages (MPI): chunks that arrived before their exchange was posted here. Each peer has an
// equal share of the memory and no more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "wire/wire.hpp"

namespace storm {

class Pool {
public:
    struct Entry {
        Header header;
        std::unique_ptr<std::byte[]> payload;
        std::size_t bytes{};
    };
    // The cost of an entry without its payload; counted, so that floods of empty chunks are bounded too.
    static constexpr std::size_t entry_overhead = 128;

    Pool(std::size_t total_bytes, std::size_t peers) : total_bytes_(total_bytes) { set_peers(peers); }

    // Divides the memory again. A source that holds more than its new share gets no more until it holds less.
    void set_peers(std::size_t peers) { share_bytes_ = peers == 0 ? 0 : total_bytes_ / peers; }

    // Keeps a copy; false when the source's share is used up.
    [[nodiscard]] bool keep(const Header& header, std::span<const std::byte> payload);
    // Keeps a copy, however much the source holds. The caller must check `exceeds_share` first.
    void force_keep(const Header& header, std::span<const std::byte> payload);
    // Whether a source holds more than this many shares.
    [[nodiscard]] bool exceeds_share(std::uint16_t source, std::size_t shares) const;
    // Removes and returns everything that waited for an exchange, in order of arrival.
    [[nodiscard]] std::vector<Entry> take(std::uint32_t channel, std::uint32_t seq);
    // A copy of the first chunk of each source's message to an exchange.
    struct First {
        std::uint16_t source{};
        std::vector<std::byte> payload;
    };
    [[nodiscard]] std::vector<First> peek(std::uint32_t channel, std::uint32_t seq) const;
    // Drops everything from a source.
    void forget(std::uint16_t source);
    [[nodiscard]] std::size_t bytes() const { return bytes_; }

private:
    std::size_t total_bytes_;
    std::size_t share_bytes_{};
    std::size_t bytes_{};
    std::unordered_map<std::uint16_t, std::size_t> bytes_by_source_;
    std::unordered_map<std::uint64_t, std::vector<Entry>> waiting_;
};

}  // namespace storm
