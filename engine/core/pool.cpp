#include "core/pool.hpp"

#include <cstring>
#include <iterator>
#include <utility>

namespace storm {

bool Pool::keep(const Header& header, std::span<const std::byte> payload) {
    if (bytes_by_source_[header.source] + payload.size() + entry_overhead > share_bytes_) return false;
    force_keep(header, payload);
    return true;
}

bool Pool::exceeds_share(std::uint16_t source, std::size_t shares) const {
    const auto held = bytes_by_source_.find(source);
    return held != bytes_by_source_.end() && held->second > shares * share_bytes_;
}

void Pool::force_keep(const Header& header, std::span<const std::byte> payload) {
    const std::size_t cost = payload.size() + entry_overhead;
    Entry entry{.header = header, .payload = nullptr, .bytes = payload.size()};
    if (!payload.empty()) {
        entry.payload = std::make_unique_for_overwrite<std::byte[]>(payload.size());
        std::memcpy(entry.payload.get(), payload.data(), payload.size());
    }
    bytes_by_source_[header.source] += cost;
    bytes_ += cost;
    waiting_[exchange_key(header.channel, header.seq)].push_back(std::move(entry));
}

std::vector<Pool::Entry> Pool::take(std::uint32_t channel, std::uint32_t seq) {
    const auto found = waiting_.find(exchange_key(channel, seq));
    if (found == waiting_.end()) return {};
    std::vector<Entry> entries = std::move(found->second);
    waiting_.erase(found);
    for (const Entry& entry : entries) {
        const std::size_t cost = entry.bytes + entry_overhead;
        bytes_by_source_[entry.header.source] -= cost;
        bytes_ -= cost;
    }
    return entries;
}

std::vector<Pool::First> Pool::peek(std::uint32_t channel, std::uint32_t seq) const {
    const auto found = waiting_.find(exchange_key(channel, seq));
    if (found == waiting_.end()) return {};
    std::vector<First> firsts;
    for (const Entry& entry : found->second) {
        if (entry.header.kind != Kind::data || entry.header.chunk != 0) continue;
        if ((entry.header.flags & (flag_second_stage | flag_parity)) != 0) continue;
        firsts.push_back(
            {.source = entry.header.source, .payload = {entry.payload.get(), entry.payload.get() + entry.bytes}});
    }
    return firsts;
}

void Pool::forget(std::uint16_t source) {
    for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
        std::erase_if(waiting->second, [&](const Entry& entry) { return entry.header.source == source; });
        waiting = waiting->second.empty() ? waiting_.erase(waiting) : std::next(waiting);
    }
    bytes_ -= std::exchange(bytes_by_source_[source], 0);
}

}  // namespace storm
