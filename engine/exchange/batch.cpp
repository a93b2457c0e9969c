#include "exchange/batch.hpp"

#include <algorithm>
#include <stdexcept>

#include "exchange/message.hpp"
#include "wire/seal.hpp"

namespace storm {

void Batch::begin(std::uint16_t peer, std::size_t copied_bytes, std::uint8_t path) {
    peer_ = peer;
    path_ = path;
    segments_ = bytes_ = segment_bytes_ = parts_ = 0;
    too_large_ = false;
    copied_.clear();
    copied_.reserve(copied_bytes);
    pinned_.reset();
}

void Batch::add_part(const void* data, std::size_t bytes) {
    // The kernel only reads what it sends, but an iovec serves both ways.
    if (bytes > 0) iov_[parts_++] = {.iov_base = const_cast<void*>(data), .iov_len = bytes};
    bytes_ += bytes;
}

std::size_t Batch::add(Seal& seal, std::uint64_t number, Header header, std::span<const std::byte> payload,
                       ChunkChecksums* checksums) {
    const std::size_t size = header_bytes + payload.size() + seal.overhead_bytes();
    if (segments_ == max_segments || !takes(size)) throw std::logic_error("a batch holds 64 equal segments at most");
    header.number = static_cast<std::uint32_t>(number);
    if (seal.encrypts()) header.flags |= flag_sealed;
    const std::span<std::byte, header_bytes> wire_header(headers_[segments_]);
    write_header(header, wire_header);
    add_part(wire_header.data(), header_bytes);
    // Pieces and parity are computed, so they are not in the caller's buffer.
    const bool computed = header.kind == Kind::data && (header.has(flag_piece) || header.has(flag_parity));
    if (seal.encrypts() || header.kind != Kind::data || computed) {
        const std::size_t at = copied_.size(), added = payload.size() + seal.overhead_bytes();
        if (at + added > copied_.capacity()) throw std::logic_error("a batch has no space for another copy");
        copied_.resize(at + added);
        const std::span<std::byte> out(copied_.data() + at, added);
        if (seal.encrypts()) {
            seal.encrypt(wire_header, payload, peer_, number, out);
        } else {
            seal.protect(wire_header, peer_, computed ? seal.data_check(payload) : seal.payload_check(payload));
            std::copy(payload.begin(), payload.end(), out.begin());
        }
        add_part(out.data(), out.size());
    } else {
        std::uint32_t check = 0;
        if (checksums == nullptr) {
            check = seal.data_check(payload);
        } else {
            if (checksums->known.set(header.chunk)) checksums->values[header.chunk] = seal.data_check(payload);
            check = checksums->values[header.chunk];
        }
        seal.protect(wire_header, peer_, check);
        add_part(payload.data(), payload.size());
    }
    if (segments_++ == 0) segment_bytes_ = size;
    return size;
}

}  // namespace storm
