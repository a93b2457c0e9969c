// A memory pool of equal blocks, for chunks that must wait. Released blocks are kept for the next exchange, because
// touching fresh pages costs more than the copy into them.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace storm {

class BlockPool {
public:
    BlockPool(std::size_t block_bytes, std::size_t keep_bytes) : block_bytes_(block_bytes), keep_bytes_(keep_bytes) {}

    [[nodiscard]] std::unique_ptr<std::byte[]> take() {
        if (free_.empty()) return std::make_unique_for_overwrite<std::byte[]>(block_bytes_);
        auto block = std::move(free_.back());
        free_.pop_back();
        return block;
    }
    void release(std::unique_ptr<std::byte[]> block) {
        if (block && free_.size() * block_bytes_ < keep_bytes_) free_.push_back(std::move(block));
    }

private:
    std::size_t block_bytes_, keep_bytes_;
    std::vector<std::unique_ptr<std::byte[]>> free_;
};

}  // namespace storm
