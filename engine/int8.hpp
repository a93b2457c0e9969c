// Eight bits per element: numbers rounded to a grid of their own for each block, without bias.
//
//   block:  low (float32) | step (float32) | up to 1024 codes (uint8)        value = low + step * code
//
// The grid lies at a random place: `low` is the least value less a random part of a step. Rounding to the nearest point of
// such a grid is right in expectation, for every value by itself. A chunk is a whole number of blocks, the last one short,
// so that each chunk can be read without the others.
#pragma once

#include <cstddef>
#include <cstdint>

namespace storm {

// Elements in so many bytes of one chunk, and bytes of a message in chunks of `chunk_bytes` with so many elements.
[[nodiscard]] std::size_t int8_elements(std::size_t chunk_bytes);
[[nodiscard]] std::size_t int8_bytes(std::size_t elements, std::size_t chunk_bytes);

// One chunk, or less. The seed chooses where the grids lie. A block with an infinity or a NaN reads as all NaN.
void int8_encode(const float* from, std::size_t elements, float scale, std::uint64_t seed, std::byte* out);
// sum[i] = a[i] and sum[i] += a[i].
void int8_widen(const std::byte* a, std::size_t elements, float* sum);
void int8_add(const std::byte* a, std::size_t elements, float* sum);

// Whole messages.
void int8_encode_message(const float* from, std::size_t elements, std::size_t chunk_bytes, std::uint64_t seed,
                         std::byte* out);
void int8_decode_message(const std::byte* from, std::size_t elements, std::size_t chunk_bytes, float* out);

}  // namespace storm
