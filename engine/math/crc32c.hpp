// Checksum of datagrams that are not sealed: CRC32C, as fast as the machine can compute it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace storm {

// CRC32C (Castagnoli), by the hardware instruction where there is one. Chain: crc32c(b, crc32c(a)) == crc32c(ab).
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0);
// The portable table version, for machines without the instruction and for tests.
[[nodiscard]] std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t seed = 0);

// Every version this machine can run, fastest first: crc32c is the first. For tests and benchmarks.
struct Crc32cVersion {
    const char* name;
    std::uint32_t (*run)(std::span<const std::byte> bytes, std::uint32_t seed);
};
[[nodiscard]] std::span<const Crc32cVersion> crc32c_versions();

}  // namespace storm
