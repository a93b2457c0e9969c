// Arithmetic on chunks directly in the receive buffer: any alignment, float32 accumulation, one rounding at the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace storm {

// Type of the elements of a message. `bytes` can only be copied; `int8` and `int4` come in blocks (grid.hpp).
enum class Dtype : std::uint8_t { bytes, float32, bfloat16, float16, int8, int4 };

// Throws std::invalid_argument for a type whose elements have no bytes of their own.
[[nodiscard]] std::size_t element_bytes(Dtype dtype);
// Elements in so many bytes of one chunk; of int4 the last may be unused.
[[nodiscard]] std::size_t elements_in(Dtype dtype, std::size_t chunk_bytes);

// out[i] = round(((in[0][i] + in[1][i]) + in[2][i] + ...) / divisor): the sum in the order given, so that it is the
// same whatever arrived first. All inputs are `wire`; `out` is `wire` or float32 and may be one of the inputs' memory.
// divisor == 1 leaves the float32 sum as it is; no inputs sum to zero. Memory that overlaps in any other way is misuse,
// as is a dtype that cannot be summed: the latter throws std::invalid_argument here and below. Types with grids have no
// such sum.
void sum_in_order(Dtype wire, std::span<const std::byte* const> inputs, std::size_t elements, float divisor,
                  Dtype out_dtype, std::byte* out);

// Copies bytes. A `large` destination, one that no near cache holds, is written past the caches where the machine can:
// the copy need not read what it overwrites, and the caches stay free for data that is still to arrive.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes, bool large);

// Copies elements and returns whether all of them are finite, in one pass over memory. Where `to` is `from`, it only
// looks.
[[nodiscard]] bool copy_finite(Dtype dtype, const std::byte* from, std::size_t elements, std::byte* to);

// sum[i] = a[i] (as float32).
void widen(Dtype wire, const std::byte* a, std::size_t elements, float* sum);
// sum[i] = a[i] + b[i]; `sum` may be a's memory where wire is float32.
void add_first(Dtype wire, const std::byte* a, const std::byte* b, std::size_t elements, float* sum);
// sum[i] += a[i].
void add(Dtype wire, const std::byte* a, std::size_t elements, float* sum);
// out[i] = round(sum[i] / divisor); `out` may be sum's memory where out_dtype is float32.
void divide_into(const float* sum, float divisor, std::size_t elements, Dtype out_dtype, std::byte* out);

// The instruction sets that the loops above can use on this machine, best first; the first is in use. All give the same
// bits; tests and benchmarks choose another by its index.
[[nodiscard]] std::span<const char* const> instruction_sets();
void use_instruction_set(std::size_t index);
[[nodiscard]] const char* instruction_set();

}  // namespace storm
