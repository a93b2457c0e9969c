// Fuzz target: untrusted bytes into everything that reads them before authentication: header, report, seal. What parses
// must be the same when written again, and no input may be accepted that was not made with the secrets.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "wire/seal.hpp"
#include "wire/wire.hpp"

using namespace storm;

namespace {

void require(bool holds) {
    if (!holds) std::abort();
}

std::unique_ptr<Seal> make_seal(bool sealed) {
    Secrets secrets{.cookie = 0x5eed'c0de'1234'5678ULL, .sealed = sealed, .links = {}};
    if (sealed) {
        Key key;
        key.fill(std::byte{7});
        secrets.links.assign(4, {.sealing = key, .opening = key});
    }
    std::string why;
    if (sealed && !Aead::open(why)) return nullptr;
    return std::make_unique<Seal>(secrets, std::uint16_t{1});
}

void check_header(const Header& header, std::span<const std::byte> bytes) {
    std::array<std::byte, header_bytes> written;
    write_header(header, written);
    require(std::equal(written.begin(), written.end(), bytes.begin()));
    require(widen_number(header.number, 0) == header.number);
    if (const auto failure_cause = parse_failure_cause(header, 4)) {
        require(failure_cause->culprit < 4 && (*failure_cause || header.kind == Kind::bye));
        Header same = header;
        write_failure_cause(*failure_cause, same);
        require(same == header);
    }
    for (const std::uint64_t expected : {std::uint64_t{1}, std::uint64_t{header.seq} << 16, ~std::uint64_t{0} >> 1}) {
        const std::uint64_t number = widen_number(header.number, expected);
        require(static_cast<std::uint32_t>(number) == header.number);
        const std::uint64_t apart = number > expected ? number - expected : expected - number;
        require(apart <= 1ULL << 31 || number < 1ULL << 32);
    }
}

void check_report(std::span<const std::byte> body) {
    const auto report = parse_report(body);
    if (!report) return;
    require(report->words >= 1 && report->words <= Report::max_words);
    std::array<std::byte, Report::fixed_bytes + 8 * Report::max_words> written;
    require(write_report(*report, written) == body.size());
    require(std::equal(body.begin(), body.end(), written.begin()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const std::unique_ptr<Seal> open_seal = make_seal(false), secret_seal = make_seal(true);
    // A heap block of exactly this size: one byte too far is seen.
    const auto bytes = std::make_unique<std::byte[]>(size);
    if (size > 0) std::memcpy(bytes.get(), data, size);
    const std::span<std::byte> datagram(bytes.get(), size);

    check_report(datagram);
    const auto header = parse_header(datagram);
    if (!header) return 0;
    check_header(*header, datagram);
    const std::span<std::byte> body = datagram.subspan(header_bytes);
    check_report(body);

    // 2^-32 against a CRC: luck that a fuzzer does not have without the cookie. If it is accepted, it must be right.
    if (const auto payload = open_seal->open(*header, header->number, datagram)) {
        require(payload->size() == body.size() && (header->flags & flag_sealed) == 0);
    }
    if (secret_seal) require(!secret_seal->open(*header, header->number, datagram));

    // What we make ourselves is accepted; with one bit flipped it is not.
    const std::span<std::byte, header_bytes> wire(datagram.data(), header_bytes);
    Header ours = *header;
    ours.cookie = open_seal->visible_cookie();
    write_header(ours, wire);
    open_seal->protect(wire, 1, open_seal->payload_check(body));
    const auto made = parse_header(datagram);
    require(made && open_seal->open(*made, made->number, datagram));
    const std::size_t bit = header->check % (8 * size);
    datagram[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    const auto bent = parse_header(datagram);
    require(!bent || !open_seal->open(*bent, bent->number, datagram));
    return 0;
}
