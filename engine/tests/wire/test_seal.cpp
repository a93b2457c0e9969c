// Checksums and encryption: CRC32C and AES-GCM against published values, and which datagrams a receiver accepts.
#include <algorithm>
#include <cstring>
#include <random>
#include <string_view>

#include "check.hpp"
#include "wire/seal.hpp"

using namespace storm;

namespace {

using Buffer = std::vector<std::byte>;

Buffer text(std::string_view from) {
    Buffer bytes(from.size());
    std::transform(from.begin(), from.end(), bytes.begin(), [](char c) { return static_cast<std::byte>(c); });
    return bytes;
}

Buffer hex(std::string_view digits) {
    Buffer bytes;
    for (std::size_t i = 0; i < digits.size(); i += 2)
        bytes.push_back(static_cast<std::byte>(std::stoi(std::string(digits.substr(i, 2)), nullptr, 16)));
    return bytes;
}

template <std::size_t size>
std::array<std::byte, size> fixed(std::string_view digits) {
    std::array<std::byte, size> bytes{};
    const Buffer from = hex(digits);
    CHECK_EQUAL(from.size(), size);
    std::copy(from.begin(), from.end(), bytes.begin());
    return bytes;
}

Buffer random_bytes(std::size_t size, unsigned seed) {
    std::mt19937 random(seed);
    Buffer bytes(size);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0xff);
    return bytes;
}

// The definition, one bit at a time: shares nothing with the engine.
std::uint32_t crc_by_definition(std::span<const std::byte> bytes, std::uint32_t seed) {
    std::uint32_t state = ~seed;
    for (std::byte byte : bytes) {
        state ^= std::to_integer<std::uint32_t>(byte);
        for (int bit = 0; bit < 8; ++bit) state = (state & 1U) != 0 ? state >> 1 ^ 0x82f63b78U : state >> 1;
    }
    return ~state;
}

}  // namespace

TEST(crc32c_gives_the_published_values_in_every_version) {
    Buffer rising(32), falling(32);
    for (unsigned i = 0; i < 32; ++i) rising[i] = falling[31 - i] = static_cast<std::byte>(i);
    // RFC 3720, B.4.
    const Buffer read_command =
        hex("01c00000000000000000000000000000140000000000040000000014000000182800000000000000"
            "0200000000000000");
    for (const Crc32cVersion& version : crc32c_versions()) {
        CHECK_EQUAL(version.run(text("123456789"), 0), 0xe3069283U);
        CHECK_EQUAL(version.run(Buffer(32), 0), 0x8a9136aaU);
        CHECK_EQUAL(version.run(Buffer(32, std::byte{0xff}), 0), 0x62a8ab43U);
        CHECK_EQUAL(version.run(rising, 0), 0x46dd794eU);
        CHECK_EQUAL(version.run(falling, 0), 0x113fdb5cU);
        CHECK_EQUAL(version.run(read_command, 0), 0xd9963a56U);
        CHECK_EQUAL(version.run({}, 0x12345678U), 0x12345678U);
    }
    CHECK_EQUAL(crc32c(text("123456789")), 0xe3069283U);
    CHECK_EQUAL(crc32c_portable(text("123456789")), 0xe3069283U);
    CHECK(crc32c_versions().back().run == crc32c_portable);
}

TEST(crc32c_versions_agree_at_every_length_and_alignment) {
    const Buffer source = random_bytes(66'000, 1);
    std::vector<std::size_t> lengths{1439, 1440, 1441, 1471, 2879, 12'287, 12'288, 12'289, 61'440, 65'507};
    for (std::size_t length = 0; length <= 1100; ++length) lengths.push_back(length);
    for (std::size_t length : lengths) {
        const std::size_t offset = length % 67;
        // A copy of just this size, so that a sanitizer sees any byte read beyond it.
        const Buffer exact(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(offset + length));
        const auto bytes = std::span(exact).subspan(offset);
        const auto seed = static_cast<std::uint32_t>(length * 2654435761U);
        const std::uint32_t expected = crc_by_definition(bytes, seed);
        for (const Crc32cVersion& version : crc32c_versions()) CHECK_EQUAL(version.run(bytes, seed), expected);
        CHECK_EQUAL(crc32c(bytes, seed), expected);
    }
}

TEST(crc32c_continues_where_it_stopped) {
    const Buffer bytes = random_bytes(3000, 2);
    const std::uint32_t whole = crc_by_definition(bytes, 7);
    for (const Crc32cVersion& version : crc32c_versions())
        for (std::size_t split = 0; split <= bytes.size(); split += 37)
            CHECK_EQUAL(version.run(std::span(bytes).subspan(split), version.run(std::span(bytes).first(split), 7)),
                        whole);
}

namespace {

std::unique_ptr<Aead> open_aead() {
    std::string why;
    auto aead = Aead::open(why);
    CHECK(aead != nullptr);
    CHECK(why.empty());
    return aead;
}

struct GcmCase {
    std::string_view key, nonce, associated, plain, sealed;
};

// Test cases 1, 2 and 4 of McGrew and Viega, "The Galois/Counter Mode of Operation".
constexpr GcmCase gcm_cases[] = {
    {"00000000000000000000000000000000", "000000000000000000000000", "", "", "58e2fccefa7e3061367f1d57a4e7455a"},
    {"00000000000000000000000000000000", "000000000000000000000000", "", "00000000000000000000000000000000",
     "0388dace60b6a392f328c2b971b2fe78ab6e47d42cec13bdf53a67b21257bddf"},
    {"feffe9928665731c6d6a8f9467308308", "cafebabefacedbaddecaf888", "feedfacedeadbeeffeedfacedeadbeefabaddad2",
     "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657b"
     "a63"
     "7b39",
     "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973"
     "d58"
     "e0915bc94fbc3221a5db94fae95ae7121a47"},
};

}  // namespace

TEST(aead_gives_the_published_ciphertexts_while_keys_alternate) {
    const auto aead = open_aead();
    for (int round = 0; round < 3; ++round)
        for (const GcmCase& c : gcm_cases) {
            const Key key =
                fixed<16>(c.key);  // always the same place on the stack: the content must decide, not the address
            const auto nonce = fixed<12>(c.nonce);
            const Buffer associated = hex(c.associated), plain = hex(c.plain), sealed = hex(c.sealed);
            Buffer out(plain.size() + tag_bytes);
            CHECK(aead->encrypt(key, nonce, associated, plain, out));
            CHECK(out == sealed);
            const auto opened = std::span(out).first(plain.size());
            CHECK(aead->decrypt(key, nonce, associated, out, opened));
            CHECK(std::equal(opened.begin(), opened.end(), plain.begin()));
            CHECK(!aead->decrypt(key, nonce, text("other"), sealed, opened));
            Buffer again(plain.size());
            CHECK(aead->decrypt(key, nonce, associated, sealed, again));  // a failure does not spoil what follows
            CHECK(again == plain);
        }
}

TEST(aead_refuses_outputs_too_small_and_inputs_without_a_tag) {
    const auto aead = open_aead();
    const Key key{};
    const std::array<std::byte, 12> nonce{};
    Buffer out(100);
    CHECK(!aead->encrypt(key, nonce, {}, std::span<const std::byte>(out).first(50), std::span(out).first(65)));
    CHECK(!aead->decrypt(key, nonce, {}, std::span<const std::byte>(out).first(15), out));
    CHECK(!aead->decrypt(key, nonce, {}, std::span<const std::byte>(out).first(50), std::span(out).first(33)));
}

TEST(a_missing_libcrypto_says_what_was_tried_and_what_to_install) {
    // The last one exists but lacks the functions.
    constexpr std::array names{"libcrypto-of-nowhere.so.9", "libm.so.6"};
    std::string why;
    CHECK(Aead::open(why, names) == nullptr);
    CHECK(why.find("libcrypto-of-nowhere.so.9") != std::string::npos);
    CHECK(why.find("EVP_CIPHER_CTX_new") != std::string::npos);
    CHECK(why.find("apt-get install libssl3") != std::string::npos);
}

namespace {

constexpr std::uint64_t cookie = 0x0123456789abcdefULL;
constexpr std::uint16_t sender = 1, receiver = 2;
constexpr std::uint64_t number = 0x500000007ULL;

// The key of a direction. The processes at its ends count: each has added a number of its own.
Key key_of(std::uint16_t source, std::uint16_t target, std::uint32_t source_process = 0,
           std::uint32_t target_process = 0) {
    Key key;
    key.fill(static_cast<std::byte>(0x40 + 4 * source + target));
    std::memcpy(key.data(), &source_process, sizeof source_process);
    std::memcpy(key.data() + 4, &target_process, sizeof target_process);
    return key;
}

Secrets secrets_of(std::uint16_t rank, bool sealed) {
    Secrets secrets{.cookie = cookie, .sealed = sealed, .links = {}};
    if (!sealed) return secrets;
    for (std::uint16_t peer = 0; peer < 4; ++peer) secrets.links.push_back({key_of(rank, peer), key_of(peer, rank)});
    return secrets;
}

Header header_of(std::uint16_t source) {
    Header header{.kind = Kind::data, .flags = flag_last, .source = source};
    header.check = 0xdeadbeef;  // whatever stood there must not matter
    header.cookie = static_cast<std::uint32_t>(cookie);
    header.number = static_cast<std::uint32_t>(number);
    header.seq = 9;
    header.message_bytes = 100;
    return header;
}

Buffer make_datagram(bool sealed, std::span<const std::byte> payload, std::uint16_t source = sender) {
    Seal seal(secrets_of(source, sealed), source);
    Buffer datagram(header_bytes + payload.size() + seal.overhead_bytes());
    const auto header = std::span(datagram).first<header_bytes>();
    const auto body = std::span(datagram).subspan(header_bytes);
    write_header(header_of(source), header);
    if (sealed) {
        seal.encrypt(header, payload, receiver, number, body);
    } else {
        std::copy(payload.begin(), payload.end(), body.begin());
        seal.protect(header, receiver, seal.payload_check(payload));
    }
    return datagram;
}

// What a receiver does with bytes off the wire.
std::optional<Buffer> receive(Seal& seal, Buffer datagram, std::uint64_t expected = number) {
    const auto header = parse_header(datagram);
    if (!header) return std::nullopt;
    const auto payload = seal.open(*header, widen_number(header->number, expected), datagram);
    if (!payload) return std::nullopt;
    CHECK(payload->data() == datagram.data() + header_bytes);  // in place
    return Buffer(payload->begin(), payload->end());
}

bool accepts(Secrets secrets, std::uint16_t rank, const Buffer& datagram, std::uint64_t expected = number) {
    Seal seal(std::move(secrets), rank);
    return receive(seal, datagram, expected).has_value();
}

}  // namespace

TEST(datagrams_of_any_size_come_through_both_ways) {
    for (bool sealed : {false, true}) {
        Seal seal(secrets_of(receiver, sealed), receiver);
        CHECK_EQUAL(seal.encrypts(), sealed);
        CHECK_EQUAL(seal.overhead_bytes(), sealed ? tag_bytes : 0);
        for (std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{1440}, max_datagram_bytes - 48}) {
            const Buffer payload = random_bytes(size, 3);
            for (std::uint16_t source = 0; source < 4; ++source)  // interleaved peers, each with its own key
                CHECK(receive(seal, make_datagram(sealed, payload, source)) == payload);
        }
    }
}

TEST(protect_writes_the_documented_check) {
    const Buffer payload = random_bytes(77, 4);
    Buffer datagram = make_datagram(false, payload);
    const std::uint32_t check = parse_header(datagram)->check;
    const std::uint32_t mark = receiver * 0xc2b2'ae35U;  // for whom it is; both are first processes
    std::memcpy(datagram.data() + check_offset, &mark, sizeof mark);
    const std::uint32_t of_payload = crc_by_definition(payload, static_cast<std::uint32_t>(cookie >> 32));
    CHECK_EQUAL(check, crc_by_definition(std::span(datagram).first(header_bytes), of_payload));
}

TEST(encrypt_writes_the_documented_nonce_and_associated_data) {
    const Buffer payload = random_bytes(77, 5), datagram = make_datagram(true, payload);
    const auto header = parse_header(datagram);
    CHECK_EQUAL(header->check, 0U);
    CHECK_EQUAL(header->flags, flag_last | flag_sealed);
    // target 2, source 1, number 0x500000007, all little-endian.
    const auto nonce = fixed<12>("020001000700000005000000");
    const auto bytes = std::span(datagram);
    Buffer opened(payload.size());
    CHECK(open_aead()->decrypt(key_of(sender, receiver), nonce, bytes.first(header_bytes), bytes.subspan(header_bytes),
                               opened));
    CHECK(opened == payload);
    CHECK(std::search(datagram.begin(), datagram.end(), payload.begin(), payload.begin() + 8) == datagram.end());
}

TEST(what_another_process_of_either_rank_sent_or_was_sent_is_rejected) {
    constexpr std::array<std::uint32_t, 5> processes{0, 1, 0xffff, 0x12345, 0xffff'ffff};
    const auto secrets = [](std::uint16_t rank, bool sealed, std::uint32_t of_sender, std::uint32_t of_receiver) {
        Secrets all = secrets_of(rank, sealed);
        all.incarnations = {0, 0, 0, 0};
        all.incarnations[sender] = of_sender;
        all.incarnations[receiver] = of_receiver;
        if (!sealed) return all;
        const Key key = key_of(sender, receiver, of_sender, of_receiver);
        if (rank == sender) all.links[receiver].sealing = key;
        if (rank == receiver) all.links[sender].opening = key;
        return all;
    };
    const Buffer payload = random_bytes(45, 6);
    for (const bool sealed : {false, true}) {
        for (const std::uint32_t from : processes) {
            for (const std::uint32_t to : processes) {
                Seal sending(secrets(sender, sealed, from, to), sender);
                Buffer datagram(header_bytes + payload.size() + sending.overhead_bytes());
                const auto header = std::span(datagram).first<header_bytes>();
                const auto body = std::span(datagram).subspan(header_bytes);
                write_header(header_of(sender), header);
                if (sealed) {
                    sending.encrypt(header, payload, receiver, number, body);
                } else {
                    std::copy(payload.begin(), payload.end(), body.begin());
                    sending.protect(header, receiver, sending.payload_check(payload));
                }
                for (const std::uint32_t its : processes) {
                    for (const std::uint32_t own : processes) {
                        CHECK_EQUAL(accepts(secrets(receiver, sealed, its, own), receiver, datagram),
                                    its == from && own == to);
                    }
                }
            }
        }
    }
}

TEST(seal_follows_a_peer_to_its_next_process) {
    const LinkKeys fresh{key_of(receiver, sender, 0, 3), key_of(sender, receiver, 3, 0)};
    for (const bool sealed : {false, true}) {
        Secrets next = secrets_of(sender, sealed);
        next.incarnations = {0, 3, 0, 0};
        if (sealed) next.links[receiver].sealing = fresh.opening;
        Seal sending(next, sender), opening(secrets_of(receiver, sealed), receiver);
        const Buffer payload = random_bytes(45, 7), old = make_datagram(sealed, payload);
        Buffer datagram(old.size());
        const auto header = std::span(datagram).first<header_bytes>();
        write_header(header_of(sender), header);
        if (sealed) {
            sending.encrypt(header, payload, receiver, number, std::span(datagram).subspan(header_bytes));
        } else {
            std::copy(payload.begin(), payload.end(), datagram.begin() + header_bytes);
            sending.protect(header, receiver, sending.payload_check(payload));
        }
        CHECK(receive(opening, old).has_value() && !receive(opening, datagram).has_value());
        opening.readmit(sender, 3, sealed ? std::optional(fresh) : std::nullopt);
        CHECK_EQUAL(opening.incarnation(sender), 3U);
        CHECK(!receive(opening, old).has_value() && receive(opening, datagram) == payload);
        bool refused = false;
        try {
            opening.readmit(sender, 4, sealed ? std::nullopt : std::optional(fresh));
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        CHECK(refused);
        CHECK_EQUAL(opening.incarnation(sender), 3U);
    }
}

TEST(every_flipped_bit_and_every_other_length_is_rejected) {
    for (bool sealed : {false, true}) {
        Seal seal(secrets_of(receiver, sealed), receiver);
        const Buffer good = make_datagram(sealed, random_bytes(45, 6));
        CHECK(receive(seal, good).has_value());
        for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
            Buffer bad = good;
            bad[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
            CHECK(!receive(seal, bad).has_value());
        }
        for (std::size_t size = 0; size < good.size(); ++size)
            CHECK(!receive(seal, Buffer(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size))).has_value());
        Buffer longer = good;
        longer.push_back(std::byte{});
        CHECK(!receive(seal, longer).has_value());
        CHECK(!receive(seal, Buffer(max_datagram_bytes + 1)).has_value());
        CHECK(receive(seal, good).has_value());
    }
}

TEST(where_data_is_not_checked_every_bit_of_the_header_and_of_all_other_kinds_still_is) {
    Secrets trusting = secrets_of(receiver, false);
    trusting.checks_data = false;
    Seal seal(std::move(trusting), receiver);
    for (const Kind kind : {Kind::data, Kind::report}) {
        const Buffer payload = random_bytes(45, 6);
        Buffer good(header_bytes + payload.size());
        const auto header = std::span(good).first<header_bytes>();
        Header fields = header_of(sender);
        fields.kind = kind;
        write_header(fields, header);
        std::copy(payload.begin(), payload.end(), good.begin() + header_bytes);
        seal.protect(header, receiver, kind == Kind::data ? seal.data_check(payload) : seal.payload_check(payload));
        CHECK(receive(seal, good) == payload);
        const std::size_t checked = kind == Kind::data ? header_bytes : good.size();
        for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
            Buffer bad = good;
            bad[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
            CHECK_EQUAL(receive(seal, bad).has_value(), bit / 8 >= checked);
        }
        // An endpoint that checks data rejects datagrams of one that does not, and the other way round.
        CHECK_EQUAL(accepts(secrets_of(receiver, false), receiver, good), kind != Kind::data);
    }
    CHECK(!receive(seal, make_datagram(false, random_bytes(45, 6))).has_value());
}

TEST(open_survives_a_header_that_is_not_the_datagrams) {
    for (bool sealed : {false, true}) {
        Seal seal(secrets_of(receiver, sealed), receiver);
        Header header = header_of(sender);
        header.flags = sealed ? flag_sealed : std::uint8_t{};
        for (std::size_t size = 0; size < header_bytes + tag_bytes; ++size) {
            Buffer datagram(size);
            CHECK(!seal.open(header, number, datagram).has_value());
        }
    }
}

TEST(either_half_of_another_jobs_cookie_is_rejected) {
    for (bool sealed : {false, true})
        for (std::uint64_t flip : {std::uint64_t{1}, std::uint64_t{1} << 40}) {
            Secrets other = secrets_of(receiver, sealed);
            other.cookie ^= flip;
            // A sealed job's hidden half is not used: its keys say more.
            CHECK_EQUAL(accepts(other, receiver, make_datagram(sealed, text("hello"))), sealed && flip > 1);
        }
}

TEST(a_datagram_of_the_other_mode_is_rejected) {
    const Buffer plain = make_datagram(false, random_bytes(64, 7)),
                 encrypted = make_datagram(true, random_bytes(64, 7));
    CHECK(accepts(secrets_of(receiver, false), receiver, plain));
    CHECK(accepts(secrets_of(receiver, true), receiver, encrypted));
    CHECK(!accepts(secrets_of(receiver, true), receiver, plain));
    CHECK(!accepts(secrets_of(receiver, false), receiver, encrypted));
}

TEST(a_right_check_or_tag_does_not_excuse_a_wrong_flag_number_or_length) {
    Seal plain(secrets_of(receiver, false), receiver), sealed(secrets_of(receiver, true), receiver);
    Buffer flagged(header_bytes + 40);
    Header header = header_of(sender);
    header.check = receiver * 0xc2b2'ae35U;
    header.flags = flag_sealed;
    write_header(header, std::span(flagged).first<header_bytes>());
    header.check = crc_by_definition(flagged, static_cast<std::uint32_t>(cookie >> 32));
    write_header(header, std::span(flagged).first<header_bytes>());
    CHECK(!receive(plain, flagged).has_value());

    Buffer unflagged(header_bytes + 40);
    header.check = 0;
    header.flags = 0;
    write_header(header, std::span(unflagged).first<header_bytes>());
    const auto body = std::span(unflagged).subspan(header_bytes);
    CHECK(open_aead()->encrypt(key_of(sender, receiver), fixed<12>("020001000700000005000000"),
                               std::span(unflagged).first(header_bytes), body.first(24), body));
    CHECK(!receive(sealed, unflagged).has_value());

    for (Seal* seal : {&plain, &sealed}) {
        Buffer good = make_datagram(seal->encrypts(), text("hello"));
        CHECK(!seal->open(*parse_header(good), number + 1, good).has_value());
        const std::size_t fits = max_datagram_bytes - header_bytes - seal->overhead_bytes();
        CHECK(receive(*seal, make_datagram(seal->encrypts(), Buffer(fits))).has_value());
        CHECK(!receive(*seal, make_datagram(seal->encrypts(), Buffer(fits + 1))).has_value());
    }
}

TEST(a_sealed_datagram_of_another_source_target_or_number_is_rejected) {
    const Buffer good = make_datagram(true, text("hello"));
    CHECK(!accepts(secrets_of(3, true), 3, good));                                       // not for this rank
    CHECK(!accepts(secrets_of(receiver, true), receiver, good, number + (1ULL << 32)));  // replayed 2^32 packets later
    for (std::uint16_t source : {std::uint16_t{0}, std::uint16_t{3}, std::uint16_t{4}, std::uint16_t{65'535}}) {
        Buffer claimed = good;
        std::memcpy(claimed.data() + 2, &source, sizeof source);
        CHECK(!accepts(secrets_of(receiver, true), receiver, claimed));
    }
    Secrets fewer = secrets_of(receiver, true);
    fewer.links.resize(sender);
    CHECK(!accepts(fewer, receiver, good));
}

TEST(encrypting_without_a_key_or_into_too_little_is_misuse) {
    std::array<std::byte, header_bytes> header{};
    Buffer out(20);
    const auto thrown = [&](bool sealed, std::size_t payload_bytes) {
        Seal seal(secrets_of(sender, sealed), sender);
        try {
            seal.encrypt(header, Buffer(payload_bytes), receiver, number, out);
        } catch (const std::exception& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(thrown(false, 4).find("job key") != std::string::npos);
    CHECK(thrown(true, 5).find("rank 1") != std::string::npos);
    CHECK(thrown(true, 4).empty());
}
