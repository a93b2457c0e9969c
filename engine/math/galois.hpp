// Arithmetic in the field of 256 elements: products of whole buffers, summed, for the erasure code.
//
// Elements are bytes; a sum is an exclusive or, a product is that of polynomials modulo x^8 + x^4 + x^3 + x^2 + 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace storm {

[[nodiscard]] std::uint8_t galois_product(std::uint8_t a, std::uint8_t b);
// The multiplicative inverse of `a`; zero for zero, which has none.
[[nodiscard]] std::uint8_t galois_inverse(std::uint8_t a);

// outs[o][i] ^= sum over s of factors[o * sources.size() + s] * sources[s][i], for all i below `bytes`; with `fresh`,
// outs are overwritten instead. Every source is read once for several outs. Buffers start at any address; at most
// `max_galois_sources` sources, and no out may overlap a source or another out.
inline constexpr std::size_t max_galois_sources = 256;
void galois_sums(std::span<const std::byte* const> sources, std::span<std::byte* const> outs,
                 std::span<const std::uint8_t> factors, std::size_t bytes, bool fresh);

// Every version of `galois_sums` that this machine can run, fastest first; the first is used. For tests and benchmarks.
struct GaloisVersion {
    const char* name;
    std::size_t column;        // bytes of a buffer that are computed at once; what is left over is padded to this
    std::size_t outs_at_once;  // outs whose sums stay in registers
    // Computes whole columns: `bytes` is a multiple of `column`, and there are 1 to `outs_at_once` outs.
    void (*run)(const std::byte* const* sources, std::size_t count, std::byte* const* outs, std::size_t out_count,
                const std::uint8_t* factors, std::size_t bytes, bool fresh);
};
[[nodiscard]] std::span<const GaloisVersion> galois_versions();
void galois_sums(const GaloisVersion& version, std::span<const std::byte* const> sources,
                 std::span<std::byte* const> outs, std::span<const std::uint8_t> factors, std::size_t bytes,
                 bool fresh);

}  // namespace storm
