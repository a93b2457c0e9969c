// Batch: which datagrams one system call takes, what is copied, and checksums that several messages share.
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "exchange/batch.hpp"
#include "exchange/message.hpp"
#include "wire/seal.hpp"

using namespace storm;

namespace {

Secrets secrets_of(bool sealed) {
    Secrets secrets;
    secrets.cookie = 0x5eed'c0de'1234'5678ULL;
    secrets.sealed = sealed;
    if (sealed) secrets.links.resize(2);
    return secrets;
}

Header header_of(Kind kind, const Seal& seal) { return {.kind = kind, .source = 0, .cookie = seal.visible_cookie()}; }

std::vector<std::byte> joined(const Batch& batch) {
    std::vector<std::byte> bytes;
    for (const iovec& part : batch.parts()) {
        const auto* from = static_cast<const std::byte*>(part.iov_base);
        bytes.insert(bytes.end(), from, from + part.iov_len);
    }
    return bytes;
}

template <class Work>
bool throws(Work&& work) {
    try {
        work();
    } catch (const std::logic_error&) {
        return true;
    }
    return false;
}

}  // namespace

TEST(batch_holds_equal_datagrams_that_their_receiver_can_open) {
    for (const bool sealed : {false, true}) {
        Seal seal(secrets_of(sealed), 0), other(secrets_of(sealed), 1);
        const std::vector<std::byte> data(100, std::byte{7});
        Batch batch;
        batch.begin(1, sealed ? 10'000 : 0);
        for (std::uint64_t number = 1; number <= 5; ++number)
            batch.add(seal, number, header_of(Kind::data, seal), data);
        CHECK_EQUAL(batch.segments(), 5U);
        CHECK_EQUAL(batch.segment_bytes(), header_bytes + data.size() + seal.overhead_bytes());
        std::vector<std::byte> bytes = joined(batch);
        CHECK_EQUAL(bytes.size(), batch.bytes());
        for (std::size_t k = 0; k < 5; ++k) {
            const std::span<std::byte> datagram(bytes.data() + k * batch.segment_bytes(), batch.segment_bytes());
            const auto header = parse_header(datagram);
            CHECK(header.has_value());
            CHECK_EQUAL(header->number, k + 1);
            const auto payload = other.open(*header, k + 1, datagram);
            CHECK(payload.has_value() && std::equal(payload->begin(), payload->end(), data.begin(), data.end()));
        }
    }
}

TEST(data_that_is_not_sealed_is_not_copied_and_all_else_is) {
    Seal seal(secrets_of(false), 0);
    const std::vector<std::byte> data(50, std::byte{1});
    Batch batch;
    batch.begin(1, 0);
    batch.add(seal, 1, header_of(Kind::data, seal), data);
    CHECK(batch.parts()[1].iov_base == data.data());
    CHECK(throws([&] { batch.add(seal, 2, header_of(Kind::ping, seal), data); }));  // no space was reserved
    batch.begin(1, data.size());
    batch.add(seal, 2, header_of(Kind::ping, seal), data);
    CHECK(batch.parts()[1].iov_base != data.data());
}

TEST(nothing_follows_a_shorter_datagram_and_nothing_is_longer_than_the_first) {
    Seal seal(secrets_of(false), 0);
    const std::vector<std::byte> data(50);
    const std::span<const std::byte> all(data);
    Batch batch;
    batch.begin(1, 0);
    CHECK(batch.takes(5000));
    batch.add(seal, 1, header_of(Kind::data, seal), all.first(40));
    CHECK(!batch.takes(header_bytes + 41) && batch.takes(header_bytes + 40) && batch.takes(header_bytes + 10));
    CHECK(throws([&] { batch.add(seal, 2, header_of(Kind::data, seal), all); }));
    batch.add(seal, 2, header_of(Kind::data, seal), all.first(10));
    CHECK(batch.ended() && !batch.takes(header_bytes + 10));
    CHECK(throws([&] { batch.add(seal, 3, header_of(Kind::data, seal), all.first(10)); }));
}

TEST(batch_is_bounded_and_begins_anew_empty) {
    Seal seal(secrets_of(false), 0);
    const std::vector<std::byte> data(8);
    Batch batch;
    batch.begin(3, 0);
    for (std::uint64_t number = 1; number <= Batch::max_segments; ++number)
        batch.add(seal, number, header_of(Kind::data, seal), data);
    CHECK(throws([&] { batch.add(seal, 99, header_of(Kind::data, seal), data); }));
    batch.pin({.slot = 1, .generation = 2});
    batch.mark_too_large();
    CHECK(batch.pinned() == (SlotRef{.slot = 1, .generation = 2}));
    batch.begin(4, 0);
    CHECK(batch.segments() == 0 && batch.bytes() == 0 && batch.parts().empty() && !batch.pinned());
    CHECK(!batch.too_large());
    CHECK_EQUAL(batch.peer(), 4U);
}

TEST(checksum_of_a_chunk_that_goes_to_several_peers_is_computed_once) {
    Seal seal(secrets_of(false), 0), other(secrets_of(false), 1);
    std::vector<std::byte> data(50, std::byte{3});
    ChunkChecksums checksums(1);
    Batch batch;
    batch.begin(1, 0);
    batch.add(seal, 1, header_of(Kind::data, seal), data, &checksums);
    CHECK(checksums.known.test(0));
    CHECK_EQUAL(checksums.values[0], seal.data_check(data));
    checksums.values[0] ^= 1U;  // a wrong one is used as it is
    batch.begin(1, 0);
    batch.add(seal, 1, header_of(Kind::data, seal), data, &checksums);
    std::vector<std::byte> bytes = joined(batch);
    CHECK(!other.open(*parse_header(bytes), 1, bytes).has_value());
}
