// Eight bits per element: numbers rounded to a grid of their own for each block, without bias.
//
//   block:  low (float32) | step (float32) | up to 1024 codes (uint8)        value = low + step * code
//
// The grid has a random offset: `low` is the least value minus a random part of a step. Rounding to the nearest point of
// such a grid is unbiased for every value. A chunk is a whole number of blocks, the last one short,
// so that each chunk can be read without the others.
#pragma once

#include <cstddef>
#include <cstdint>

namespace storm {

// Elements in so many bytes of one chunk, and bytes of a message in chunks of `chunk_bytes` with so many elements.
[[nodiscard]] std::size_t int8_elements(std::size_t chunk_bytes);
[[nodiscard]] std::size_t int8_bytes(std::size_t elements, std::size_t chunk_bytes);

// Encodes one chunk, or a part of it. The seed chooses the offsets. A block with an infinity or a NaN decodes to all NaN.
void int8_encode(const float* from, std::size_t elements, float scale, std::uint64_t seed, std::byte* out);
// sum[i] = a[i] and sum[i] += a[i].
void int8_widen(const std::byte* a, std::size_t elements, float* sum);
void int8_add(const std::byte* a, std::size_t elements, float* sum);

// Encode and decode whole messages, chunk by chunk.
void int8_encode_message(const float* from, std::size_t elements, std::size_t chunk_bytes, std::uint64_t seed,
                         std::byte* out);
void int8_decode_message(const std::byte* from, std::size_t elements, std::size_t chunk_bytes, float* out);

}  // namespace storm
