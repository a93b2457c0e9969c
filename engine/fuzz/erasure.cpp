// Fuzz target: blocks of any shape, with any part missing, corrupted or forged, into the decoder of the erasure code.
// It never touches memory that is not its own; what it restores from honest parity is what was lost.
#include "math/erasure.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "program.hpp"

using namespace storm;
using namespace storm::fuzz;

namespace {

// A heap block of exactly this size: one byte too far is seen.
struct Buffer {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes{};

    explicit Buffer(std::size_t size) : memory(std::make_unique<std::byte[]>(size)), bytes(size) {}
    [[nodiscard]] std::span<std::byte> span() const { return {memory.get(), bytes}; }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static ErasureDecoder decoder;
    Program program{{data, size}};
    const std::size_t bytes = program.byte() % 80, k = 1 + program.byte() % 24, m = program.byte() % 12;
    const std::size_t short_one = program.byte() % (k + 2), short_bytes = program.byte() % (bytes + 1);
    std::vector<Buffer> chunks, parities;
    std::vector<std::span<const std::byte>> present;
    for (std::size_t c = 0; c < k; ++c) {
        chunks.emplace_back(c == short_one ? short_bytes : bytes);
        for (std::byte& each : chunks.back().span()) each = static_cast<std::byte>(program.byte() + 31 * c);
        present.push_back(chunks.back().span());
    }
    std::vector<std::byte*> outs;
    for (std::size_t i = 0; i < m; ++i) {
        parities.emplace_back(bytes);
        outs.push_back(parities.back().memory.get());
    }
    encode_parity(present, 0, outs, bytes);

    std::vector<Buffer> restored;
    std::vector<ErasureDecoder::Chunk> block;
    bool honest = true;
    std::size_t missing = 0;
    for (std::size_t c = 0; c < k; ++c) {
        // Now and then a length that does not belong here.
        const std::uint8_t fate = program.byte();
        restored.emplace_back(fate == 255 ? chunks[c].bytes + 1 : chunks[c].bytes);
        honest = honest && fate != 255;
        if (fate % 3 == 0 || fate == 255) {
            block.push_back({.present = {}, .missing = restored.back().span(), .arrived = false});
            ++missing;
        } else {
            block.push_back({.present = present[c], .missing = {}, .arrived = true});
        }
    }
    std::vector<Buffer> forged;
    std::vector<Parity> found;
    const std::size_t claims = program.byte() % 14;
    std::vector<bool> used(256);
    for (std::size_t i = 0; i < claims; ++i) {
        const std::uint8_t kind = program.byte();
        const std::size_t index = program.byte();
        if (kind % 4 != 0 && m > 0 && !used[index % m]) {
            used[index % m] = true;
            found.push_back({index % m, parities[index % m].span()});
        } else if (kind % 16 == 0) {
            forged.emplace_back(program.byte() % 90);
            for (std::byte& each : forged.back().span()) each = static_cast<std::byte>(program.byte());
            found.push_back({index, forged.back().span()});
            honest = false;
        }
    }
    const bool decoded = decoder.decode(block, found, bytes);
    if (found.size() < missing) REQUIRE(!decoded);
    if (honest) {
        REQUIRE(decoded == (found.size() >= missing));
        for (std::size_t c = 0; decoded && c < k; ++c) {
            if (block[c].arrived) continue;
            REQUIRE(std::equal(restored[c].span().begin(), restored[c].span().end(), chunks[c].span().begin()));
        }
    }
    return 0;
}
