// Reduction of one rank's shard, as in reduce-scatter: every rank's contribution, summed chunk by chunk.
//
// A chunk is final when each contributor's copy of it has arrived or was marked missing. Final chunks are listed in the
// order they became final, so that a second stage can send them on while others are still in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/block_pool.hpp"
#include "math/kernels.hpp"

namespace storm {

enum class Reduce : std::uint8_t {
    in_order,  // exact: the sum in the order of the contributors, whatever arrived first
    arrived,   // lossy: add as they arrive; the mean is over what arrived
    copy       // one contributor, nothing of our own: its bytes
};

struct ReductionSpec {
    Reduce mode{};
    Dtype wire{};
    Dtype out_dtype{};             // `wire` or float32
    const std::byte* own{};        // our own contribution; null in `copy`
    std::byte* out{};              // where the result goes; may be `own`
    std::uint64_t bytes{};         // of the shard, as on the wire
    std::uint32_t own_position{};  // how many contributors precede us in the order of summation
    bool average{};            // the mean; else the sum (`arrived`: where some are missing, the mean times the world)
    std::uint64_t seed{};      // int8 and int4: chooses the grids of the result
    std::uint64_t elements{};  // of the shard, as an odd number fills but half of int4's last byte; 0: all in `bytes`
};

class Reduction {
public:
    Reduction(const ReductionSpec& spec, std::uint32_t contributors, std::size_t chunk_bytes, BlockPool& blocks);
    ~Reduction();
    Reduction(const Reduction&) = delete;
    Reduction& operator=(const Reduction&) = delete;

    // Each (contributor, chunk) is settled once, by one of these two.
    void contribute(std::uint32_t contributor, std::uint32_t chunk, std::span<const std::byte> payload);
    void mark_missing(std::uint32_t contributor, std::uint32_t chunk);
    // True if a contribution is out of order: it must be kept until those before it have arrived, and would else be
    // added at once.
    [[nodiscard]] bool early(std::uint32_t contributor, std::uint32_t chunk) const {
        // 16-bit terms are kept in any case: see `is_next`.
        return spec_.mode == Reduce::in_order && spec_.wire == Dtype::float32 && pending_[chunk] > 1 &&
               !is_next(chunk, contributor);
    }

    [[nodiscard]] std::uint32_t chunks() const { return chunks_; }
    [[nodiscard]] const std::vector<std::uint32_t>& final_chunks() const { return final_; }
    // Copies of each chunk in the result, our own included.
    [[nodiscard]] const std::vector<std::uint16_t>& counts() const { return count_; }

private:
    [[nodiscard]] std::size_t wire_bytes(std::uint32_t chunk) const;
    [[nodiscard]] std::size_t elements(std::uint32_t chunk) const;
    void finish(std::uint32_t chunk);
    void settle(std::uint32_t chunk);
    [[nodiscard]] bool is_next(std::uint32_t chunk, std::uint32_t contributor) const;
    void fold(std::uint32_t chunk, std::uint32_t contributor, const std::byte* payload);
    [[nodiscard]] std::size_t first_element(std::uint32_t chunk) const {
        return chunk * elements_in(spec_.wire, chunk_bytes_);
    }
    [[nodiscard]] float divisor(std::uint32_t count) const;
    [[nodiscard]] std::byte* out_at(std::uint32_t chunk) const;
    [[nodiscard]] float* sum_at(std::uint32_t chunk);

    ReductionSpec spec_;
    std::uint32_t contributors_;
    std::uint32_t chunks_;
    std::size_t chunk_bytes_;
    BlockPool& blocks_;
    std::vector<std::uint16_t> pending_;  // contributors not settled yet, per chunk
    std::vector<std::uint16_t> count_;    // copies in the sum, per chunk
    // in_order: how many terms of a chunk are summed so far. The sum lies in a block until our own contribution is in
    // it, and then in `out`, which may be the memory of that contribution.
    struct Sum {
        std::uint32_t terms{};
        std::unique_ptr<std::byte[]> early;
    };
    std::vector<Sum> sums_;
    std::vector<std::unique_ptr<std::byte[]>> waiting_;  // copies that arrived out of order, [chunk][contributor]
    std::vector<bool> missing_;                          // those that will not arrive; empty as long as there are none
    std::unique_ptr<float[]> wide_sum_;                  // arrived: float32 sums where `out` is narrower
    std::vector<const std::byte*> inputs_;
    std::vector<std::uint32_t> final_;
};

}  // namespace storm
