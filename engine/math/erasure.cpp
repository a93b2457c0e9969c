#include "math/erasure.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "math/galois.hpp"

namespace storm {
namespace {

// Adds factors x chunks to `outs`. All chunks of full length go through the field's kernels at once. A shorter one, of
// which a message has at most one, is added separately.
void add_products(std::span<const std::span<const std::byte>> chunks, std::span<const std::size_t> columns,
                  std::span<const std::size_t> rows, std::span<std::byte* const> outs, std::size_t bytes, bool fresh) {
    std::vector<const std::byte*> sources;
    std::vector<std::uint8_t> factors;
    sources.reserve(chunks.size());
    factors.reserve(rows.size() * chunks.size());
    for (const auto& chunk : chunks) {
        if (chunk.size() == bytes) sources.push_back(chunk.data());
    }
    for (const std::size_t row : rows) {
        for (std::size_t i = 0; i < chunks.size(); ++i) {
            if (chunks[i].size() == bytes) factors.push_back(erasure_factor(row, columns[i]));
        }
    }
    galois_sums(sources, outs, factors, bytes, fresh);
    for (std::size_t i = 0; i < chunks.size(); ++i) {
        if (chunks[i].size() == bytes || chunks[i].empty()) continue;
        factors.clear();
        for (const std::size_t row : rows) factors.push_back(erasure_factor(row, columns[i]));
        const std::byte* source = chunks[i].data();
        galois_sums(std::span(&source, 1), outs, factors, chunks[i].size(), false);
    }
}

// Gauss and Jordan: turns a square part of the Cauchy matrix, [row][column], into its inverse. No pivot is ever zero,
// as all leading parts of a Cauchy matrix can be inverted too.
std::vector<std::uint8_t> inverted(std::span<const std::size_t> rows, std::span<const std::size_t> columns) {
    const std::size_t size = rows.size();
    std::vector<std::uint8_t> left(size * size), right(size * size);
    for (std::size_t r = 0; r < size; ++r) {
        for (std::size_t c = 0; c < size; ++c) left[r * size + c] = erasure_factor(rows[r], columns[c]);
        right[r * size + r] = 1;
    }
    for (std::size_t pivot = 0; pivot < size; ++pivot) {
        const std::uint8_t by = galois_inverse(left[pivot * size + pivot]);
        for (std::size_t c = 0; c < size; ++c) {
            left[pivot * size + c] = galois_product(left[pivot * size + c], by);
            right[pivot * size + c] = galois_product(right[pivot * size + c], by);
        }
        for (std::size_t r = 0; r < size; ++r) {
            const std::uint8_t factor = left[r * size + pivot];
            if (r == pivot || factor == 0) continue;
            for (std::size_t c = 0; c < size; ++c) {
                left[r * size + c] ^= galois_product(factor, left[pivot * size + c]);
                right[r * size + c] ^= galois_product(factor, right[pivot * size + c]);
            }
        }
    }
    return right;
}

std::vector<std::byte*> cut_up(std::vector<std::byte>& memory, std::size_t count, std::size_t bytes) {
    memory.resize(count * bytes);
    std::vector<std::byte*> parts(count);
    for (std::size_t i = 0; i < count; ++i) parts[i] = memory.data() + i * bytes;
    return parts;
}

}  // namespace

std::uint8_t erasure_factor(std::size_t parity, std::size_t chunk) {
    return galois_inverse(static_cast<std::uint8_t>((255 - parity) ^ chunk));
}

void encode_parity(std::span<const std::span<const std::byte>> data, std::size_t first,
                   std::span<std::byte* const> parity, std::size_t bytes) {
    if (data.empty() || data.size() + first + parity.size() > max_block_chunks)
        throw std::invalid_argument("a block has at least one chunk, and at most 255 with its parity");
    if (std::any_of(data.begin(), data.end(), [&](const auto& chunk) { return chunk.size() > bytes; }))
        throw std::invalid_argument("a chunk is longer than its parity");
    std::array<std::size_t, max_block_chunks> columns, rows;
    for (std::size_t c = 0; c < data.size(); ++c) columns[c] = c;
    for (std::size_t r = 0; r < parity.size(); ++r) rows[r] = first + r;
    add_products(data, std::span(columns).first(data.size()), std::span(rows).first(parity.size()), parity, bytes,
                 true);
}

void add_to_parity(std::span<const std::span<const std::byte>> chunks, std::span<const std::size_t> positions,
                   std::span<std::byte* const> parity, std::size_t bytes) {
    for (std::size_t i = 0; i < chunks.size(); ++i) {
        if (chunks[i].size() > bytes) throw std::invalid_argument("a chunk is longer than its parity");
        if (positions[i] + parity.size() >= max_block_chunks)
            throw std::invalid_argument("a block has at most 255 chunks with its parity");
    }
    std::array<std::size_t, max_block_chunks> rows;
    for (std::size_t r = 0; r < parity.size(); ++r) rows[r] = r;
    add_products(chunks, positions, std::span(rows).first(parity.size()), parity, bytes, false);
}

bool ErasureDecoder::decode(std::span<const Chunk> data, std::span<const Parity> found, std::size_t bytes) {
    std::vector<std::span<const std::byte>> present;
    std::vector<std::size_t> present_columns, columns, rows;
    if (data.empty() || data.size() > max_block_chunks) return false;
    for (std::size_t c = 0; c < data.size(); ++c) {
        if (data[c].present.size() > bytes || data[c].missing.size() > bytes) return false;
        if (data[c].arrived) {
            present.push_back(data[c].present);
            present_columns.push_back(c);
        } else {
            columns.push_back(c);
        }
    }
    if (columns.empty()) return true;
    if (found.size() < columns.size()) return false;
    std::array<bool, max_block_chunks> used{};
    for (const Parity& each : found.first(columns.size())) {
        if (each.index >= max_block_chunks - data.size() || each.payload.size() != bytes) return false;
        if (std::exchange(used[each.index], true)) return false;
        rows.push_back(each.index);
    }
    // A syndrome is what the missing chunks alone add to a chunk of parity.
    const std::vector<std::byte*> syndromes = cut_up(syndromes_, columns.size(), bytes);
    for (std::size_t i = 0; i < columns.size(); ++i) {
        if (bytes > 0) std::memcpy(syndromes[i], found[i].payload.data(), bytes);
    }
    add_products(present, present_columns, rows, syndromes, bytes, false);
    const std::vector<std::uint8_t> inverse = inverted(rows, columns);
    const std::vector<std::byte*> restored = cut_up(restored_, columns.size(), bytes);
    const std::vector<const std::byte*> sources(syndromes.begin(), syndromes.end());
    galois_sums(sources, restored, inverse, bytes, true);
    for (std::size_t i = 0; i < columns.size(); ++i) {
        const std::span<std::byte> into = data[columns[i]].missing;
        if (!into.empty()) std::memcpy(into.data(), restored[i], into.size());
    }
    return true;
}

}  // namespace storm
