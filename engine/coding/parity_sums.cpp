#include "coding/parity_sums.hpp"

#include <algorithm>
#include <array>

#include "math/erasure.hpp"

namespace storm {

void ParitySums::begin(std::uint32_t blocks, std::uint32_t parity, std::size_t bytes) {
    bytes_ = bytes;
    parity_ = parity;
    sums_.assign(std::size_t{blocks} * parity * bytes, std::byte{});
    copies_.resize(std::size_t{blocks} * together * bytes);
    waiting_.assign(blocks, {});
}

void ParitySums::add(std::uint32_t block, std::uint32_t position, std::span<const std::byte> chunk) {
    std::vector<Waiting>& waiting = waiting_[block];
    const std::size_t at = (std::size_t{block} * together + waiting.size()) * bytes_;
    std::copy(chunk.begin(), chunk.end(), copies_.begin() + static_cast<std::ptrdiff_t>(at));
    waiting.push_back({position, chunk.size()});
    if (waiting.size() == together) fold(block);
}

std::span<const std::byte> ParitySums::parity(std::uint32_t block, std::uint32_t index) {
    fold(block);
    return std::span(sums_).subspan((std::size_t{block} * parity_ + index) * bytes_, bytes_);
}

void ParitySums::forget() {
    std::vector<std::byte>().swap(sums_);
    std::vector<std::byte>().swap(copies_);
    waiting_.clear();
}

void ParitySums::fold(std::uint32_t block) {
    std::vector<Waiting>& waiting = waiting_[block];
    if (waiting.empty()) return;
    std::array<std::span<const std::byte>, together> chunks;
    std::array<std::size_t, together> positions{};
    for (std::size_t i = 0; i < waiting.size(); ++i) {
        chunks[i] = std::span(copies_).subspan((std::size_t{block} * together + i) * bytes_, waiting[i].bytes);
        positions[i] = waiting[i].position;
    }
    std::array<std::byte*, max_block_chunks> outs{};
    for (std::uint32_t i = 0; i < parity_; ++i) outs[i] = sums_.data() + (std::size_t{block} * parity_ + i) * bytes_;
    add_to_parity(std::span(chunks).first(waiting.size()), std::span(positions).first(waiting.size()),
                  std::span(outs).first(parity_), bytes_);
    waiting.clear();
}

}  // namespace storm
