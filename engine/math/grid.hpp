// Quantisation (quantization) to int8 or int4 by block: each block's numbers are rounded to a grid of its own, without bias.
//
//   block of int8:  low (float32) | step (float32) | up to 1,024 codes, a byte each          value = low + step * code
//   block of int4:  low (float32) | step (float32) | up to 128 codes, two in a byte
//
// The grid has as many steps between the least and the largest value as codes allow, and a random offset of up to half
// a step either way. Rounding to the nearest point of such a grid is unbiased for every value. A chunk is a whole
// number of blocks, the last one short, so that each chunk can be read without the others. Of n codes of int4, the
// first half (n / 2, rounded up) are the low halves of their bytes and the others the high ones, so that loops need not
// interleave; where n is odd, the last high half is unused.
//
// Blocks of int4 are shorter, as its steps are coarse where one value of a block is large. Rounding error and bytes of
// the weights and gradients of a small LLaMA (before, early and later in a training), with a bit for each halving of
// the error:
// 128 elements are better than 64 by 0.33 to 0.37 bits, than 256 by 0.05 to 0.14, and than 1,024 by 0.28 to 0.62.
#pragma once

#include <cstddef>
#include <cstdint>

#include "math/kernels.hpp"

namespace storm {

// Whether a type comes in blocks with grids. All other functions throw std::invalid_argument for a type that does not.
[[nodiscard]] constexpr bool has_grids(Dtype dtype) { return dtype == Dtype::int8 || dtype == Dtype::int4; }

// Elements in so many bytes of one chunk (of int4 the last may be unused), and bytes of a message in chunks of
// `chunk_bytes` with so many elements.
[[nodiscard]] std::size_t grid_elements(Dtype dtype, std::size_t chunk_bytes);
[[nodiscard]] std::size_t grid_bytes(Dtype dtype, std::size_t elements, std::size_t chunk_bytes);

// Encodes one chunk, or a part of it. The seed chooses the offsets. A block with an infinity or a NaN decodes to all
// NaN.
void grid_encode(Dtype dtype, const float* from, std::size_t elements, float scale, std::uint64_t seed, std::byte* out);
// sum[i] = a[i] and sum[i] += a[i]. Any bytes can be read: a grid that makes no sense gives numbers, infinities or
// NaNs.
void grid_widen(Dtype dtype, const std::byte* a, std::size_t elements, float* sum);
void grid_add(Dtype dtype, const std::byte* a, std::size_t elements, float* sum);

// Encode and decode whole messages, chunk by chunk.
void grid_encode_message(Dtype dtype, const float* from, std::size_t elements, std::size_t chunk_bytes,
                         std::uint64_t seed, std::byte* out);
void grid_decode_message(Dtype dtype, const std::byte* from, std::size_t elements, std::size_t chunk_bytes, float* out);

}  // namespace storm
