// Fuzz target: any bytes as int8 and int4 messages, and any numbers encoded as such. Reading and writing stay within
// their memory, infinities and NaNs decode to NaN, and forged contributions are summed without harm.
#include "math/grid.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "math/reduction.hpp"
#include "program.hpp"

using namespace storm;
using namespace storm::fuzz;

namespace {

// A heap block of exactly this size: one element too far is seen.
template <class Element>
std::unique_ptr<Element[]> block(std::size_t size) {
    return std::make_unique<Element[]>(size);
}

void fill(Program& program, std::byte* to, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(program.byte() + 41 * (i / 4));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Program program{{data, size}};
    const Dtype dtype = program.byte() % 2 == 0 ? Dtype::int8 : Dtype::int4;
    const std::size_t elements = program.byte() * 11U + program.byte(), chunk_bytes = 9 + program.byte() * 6U;
    const std::size_t bytes = grid_bytes(dtype, elements, chunk_bytes);

    // A forged message, decoded and summed with one of our own.
    const auto forged = block<std::byte>(bytes), own = block<std::byte>(bytes);
    const auto values = block<float>(elements), sums = block<float>(elements);
    fill(program, forged.get(), bytes);
    grid_decode_message(dtype, forged.get(), elements, chunk_bytes, sums.get());
    fill(program, reinterpret_cast<std::byte*>(values.get()), elements * sizeof(float));
    grid_encode_message(dtype, values.get(), elements, chunk_bytes, program.byte(), own.get());
    grid_decode_message(dtype, own.get(), elements, chunk_bytes, sums.get());
    for (std::size_t i = 0; i < elements; ++i) {
        // A block that holds a NaN decodes to NaN.
        REQUIRE(std::isfinite(values[i]) || std::isnan(sums[i]));
    }
    if (elements == 0) return 0;
    BlockPool blocks(chunk_bytes, 1 << 20);
    const bool as_sent = program.byte() % 2 == 0;
    Reduction reduction({.mode = Reduce::arrived,
                         .wire = dtype,
                         .out_dtype = as_sent ? dtype : Dtype::float32,
                         .own = own.get(),
                         .out = as_sent ? own.get() : reinterpret_cast<std::byte*>(sums.get()),
                         .bytes = bytes,
                         .average = true,
                         .elements = elements},
                        1, chunk_bytes, blocks);
    for (std::uint32_t chunk = 0; chunk < reduction.chunks(); ++chunk) {
        if (program.byte() % 4 == 0) {
            reduction.mark_missing(0, chunk);
        } else {
            const std::size_t first = chunk * chunk_bytes;
            reduction.contribute(0, chunk, {forged.get() + first, std::min(chunk_bytes, bytes - first)});
        }
    }
    REQUIRE(reduction.final_chunks().size() == reduction.chunks());
    return 0;
}
