#include "wire/wire.hpp"

#include <cstring>

namespace storm {
namespace {

template <class T>
T load(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
void store(std::byte* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

}  // namespace

std::optional<Header> parse_header(std::span<const std::byte> datagram) {
    if (datagram.size() < header_bytes) return std::nullopt;
    const std::byte* at = datagram.data();
    const auto first = load<std::uint8_t>(at);
    const auto kind = static_cast<std::uint8_t>(first & 0x0f);
    if (first >> 4 != wire_version || kind < 1 || kind > static_cast<std::uint8_t>(Kind::note)) return std::nullopt;
    Header header;
    header.kind = static_cast<Kind>(kind);
    header.flags = load<std::uint8_t>(at + 1);
    if ((header.flags & ~known_flags) != 0) return std::nullopt;
    header.source = load<std::uint16_t>(at + 2);
    header.check = load<std::uint32_t>(at + check_offset);
    header.cookie = load<std::uint32_t>(at + 8);
    header.number = load<std::uint32_t>(at + 12);
    header.channel = load<std::uint32_t>(at + 16);
    header.seq = load<std::uint32_t>(at + 20);
    header.chunk = load<std::uint32_t>(at + 24);
    header.message_bytes = load<std::uint32_t>(at + 28);
    return header;
}

void write_header(const Header& header, std::span<std::byte, header_bytes> out) {
    std::byte* at = out.data();
    store(at, static_cast<std::uint8_t>(wire_version << 4 | static_cast<std::uint8_t>(header.kind)));
    store(at + 1, header.flags);
    store(at + 2, header.source);
    store(at + check_offset, header.check);
    store(at + 8, header.cookie);
    store(at + 12, header.number);
    store(at + 16, header.channel);
    store(at + 20, header.seq);
    store(at + 24, header.chunk);
    store(at + 28, header.message_bytes);
}

std::optional<FailureCause> parse_failure_cause(const Header& header, std::uint16_t world) {
    if (header.message_bytes > static_cast<std::uint32_t>(Status::memory_broken)) return std::nullopt;
    const FailureCause failure_cause{static_cast<std::uint16_t>(header.chunk),
                                     static_cast<Status>(header.message_bytes)};
    switch (failure_cause.cause) {
        case Status::running:
            return header.kind == Kind::bye && header.chunk == 0 ? std::optional(failure_cause) : std::nullopt;
        case Status::timed_out:
        case Status::peer_silent:
        case Status::peer_left:
        case Status::size_mismatch:
        case Status::closed:
        case Status::path_blocked:
        case Status::memory_broken: return header.chunk < world ? std::optional(failure_cause) : std::nullopt;
        case Status::ok:
        case Status::peer_failed: break;
    }
    return std::nullopt;
}

void write_failure_cause(const FailureCause& failure_cause, Header& header) {
    header.chunk = failure_cause.culprit;
    header.message_bytes = static_cast<std::uint32_t>(failure_cause.cause);
}

std::optional<Report> parse_report(std::span<const std::byte> body) {
    if (body.size() < Report::fixed_bytes) return std::nullopt;
    Report report;
    const std::byte* at = body.data();
    report.largest = load<std::uint64_t>(at);
    report.credit_bytes = load<std::uint32_t>(at + 8);
    report.overflow = load<std::uint32_t>(at + 12);
    report.timed_back = load<std::uint32_t>(at + 16);
    report.timed_us = load<std::uint32_t>(at + 20);
    report.held_us = load<std::uint32_t>(at + 24);
    report.words = load<std::uint32_t>(at + 28);
    if (report.words == 0 || report.words > Report::max_words) return std::nullopt;
    if (body.size() != Report::fixed_bytes + 8 * std::size_t{report.words}) return std::nullopt;
    std::memcpy(report.arrived.data(), at + Report::fixed_bytes, 8 * std::size_t{report.words});
    return report;
}

std::size_t report_bytes(std::span<const std::byte> body) {
    if (body.size() < Report::fixed_bytes) return body.size();
    return Report::fixed_bytes + 8 * std::size_t{load<std::uint32_t>(body.data() + 28)};
}

std::size_t write_report(const Report& report, std::span<std::byte> out) {
    std::byte* at = out.data();
    store(at, report.largest);
    store(at + 8, report.credit_bytes);
    store(at + 12, report.overflow);
    store(at + 16, report.timed_back);
    store(at + 20, report.timed_us);
    store(at + 24, report.held_us);
    store(at + 28, report.words);
    std::memcpy(at + Report::fixed_bytes, report.arrived.data(), 8 * std::size_t{report.words});
    return Report::fixed_bytes + 8 * std::size_t{report.words};
}

std::uint64_t widen_number(std::uint32_t low, std::uint64_t expected) {
    constexpr std::uint64_t half = 1ULL << 31, whole = 1ULL << 32;
    const std::uint64_t candidate = (expected & ~(whole - 1)) | low;
    if (candidate + half <= expected) return candidate + whole;
    if (candidate > expected + half && candidate >= whole) return candidate - whole;
    return candidate;
}

}  // namespace storm
