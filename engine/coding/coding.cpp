#include "coding/coding.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace storm {

CodeShape::CodeShape(const ChunkLayout& layout)
    : chunks(layout.chunks),
      stretches((layout.chunks + block_chunks * stretch_blocks - 1) / (block_chunks * stretch_blocks)),
      parity_bytes(layout.chunks == 1 ? layout.size(0) : layout.chunk_bytes) {}

CodeShape::BlockPosition CodeShape::locate(std::uint32_t ordinal) const {
    const std::uint32_t stretch = stretch_of(ordinal), inside = ordinal - begin(stretch), several = blocks(stretch);
    return {stretch, inside % several, inside / several};
}

// ---- the sender ----

Encoding::Encoding(const ChunkLayout& layout, std::uint32_t sent, bool exact, bool fleeting)
    : layout_(layout), shape_(layout), exact_(exact), fleeting_(fleeting), stretches_(shape_.stretches) {
    for (std::uint32_t stretch = 0; stretch < shape_.stretches && shape_.begin(stretch) < sent; ++stretch) {
        stretches_[stretch].coding_state = CodingState::plain;
    }
}

bool Encoding::undecided(std::uint32_t chunk) const {
    return stretches_[shape_.stretch_of(layout_.ordinal(chunk))].coding_state == CodingState::undecided;
}

bool Encoding::coded(std::uint32_t chunk) const {
    return stretches_[shape_.stretch_of(layout_.ordinal(chunk))].coding_state == CodingState::coded;
}

void Encoding::decide(std::uint32_t chunk, std::size_t parity_per_block) {
    const std::uint32_t at = shape_.stretch_of(layout_.ordinal(chunk));
    Stretch& stretch = stretches_[at];
    stretch.coding_state = parity_per_block == 0 ? CodingState::plain : CodingState::coded;
    // Parity is sent before the chunks of the next stretch, so the sums of the previous stretch are not needed any
    // more.
    if (fleeting_ && parity_per_block == 0) sums_.forget();
    if (parity_per_block == 0) return;
    const std::size_t most = max_block_chunks - shape_.block_size(at, 0);
    stretch.parity = static_cast<std::uint32_t>(std::min(parity_per_block, most));
    for (std::uint32_t block = 0; block < shape_.blocks(at); ++block) {
        stretch.blocks.push_back({.data = std::vector<State>(shape_.block_size(at, block), State::unsent),
                                  .parity = std::vector<State>(stretch.parity, State::unsent)});
    }
    if (fleeting_) sums_.begin(shape_.blocks(at), stretch.parity, shape_.parity_bytes);
}

Encoding::Block* Encoding::block_of(const CodeShape::BlockPosition& at) {
    Stretch& stretch = stretches_[at.stretch];
    return stretch.coding_state == CodingState::coded ? &stretch.blocks[at.block] : nullptr;
}

void Encoding::on_sent(std::uint32_t chunk, std::span<const std::byte> payload) {
    const CodeShape::BlockPosition at = locate(chunk);
    Block* block = block_of(at);
    if (block == nullptr) return;
    State& state = block->data[at.position];
    if (state == State::unsent) {
        state = State::flying;
        if (fleeting_) sums_.add(at.block, at.position, payload);
        Stretch& stretch = stretches_[at.stretch];
        if (++stretch.sent == shape_.size(at.stretch)) {
            stretch.due = true;
            for (Block& each : stretch.blocks) {
                if (exact_) drop_needless_parity(each);
                due_ += static_cast<std::size_t>(std::count(each.parity.begin(), each.parity.end(), State::unsent));
            }
        }
    } else if (state == State::lost) {
        state = State::flying;
    }
}

std::vector<std::uint32_t> Encoding::on_skipped(std::uint32_t chunk) { return stop_stretch(locate(chunk).stretch); }

void Encoding::on_acked(std::uint32_t chunk) {
    const CodeShape::BlockPosition at = locate(chunk);
    Block* block = block_of(at);
    if (block == nullptr || block->data[at.position] == State::arrived) return;
    block->data[at.position] = State::arrived;
    (void)settle(at.stretch, at.block);  // more arrived, so nothing more need be sent
}

void Encoding::on_parity_acked(std::uint32_t name) {
    const ParityName of = ParityName::unpack(name);
    Block* block = block_of({of.stretch, of.block, 0});
    if (block == nullptr) return;
    block->parity[of.index] = State::arrived;
    (void)settle(of.stretch, of.block);
}

std::vector<std::uint32_t> Encoding::on_lost(std::uint32_t chunk) {
    const CodeShape::BlockPosition at = locate(chunk);
    Block* block = block_of(at);
    if (block == nullptr) return {chunk};
    if (block->data[at.position] == State::arrived) return {};
    if (block->failed) return {chunk};
    // The first chunk announces the exchange to a receiver that has not posted it yet; parity cannot replace it.
    if (exact_ && chunk == 0) {
        block->data[at.position] = State::flying;
        return {chunk};
    }
    block->data[at.position] = State::lost;
    return settle(at.stretch, at.block);
}

std::vector<std::uint32_t> Encoding::on_parity_lost(std::uint32_t name) {
    const ParityName of = ParityName::unpack(name);
    Block* block = block_of({of.stretch, of.block, 0});
    if (block == nullptr || block->parity[of.index] == State::arrived) return {};
    block->parity[of.index] = State::lost;
    return settle(of.stretch, of.block);
}

std::vector<std::uint32_t> Encoding::take_lost_before_parity() {
    std::vector<std::uint32_t> again;
    for (std::uint32_t at = 0; exact_ && at < stretches_.size(); ++at) {
        Stretch& stretch = stretches_[at];
        if (stretch.due) continue;
        for (std::uint32_t number = 0; number < stretch.blocks.size(); ++number) {
            std::vector<State>& data = stretch.blocks[number].data;
            for (std::uint32_t i = 0; i < data.size(); ++i) {
                if (data[i] != State::lost) continue;
                data[i] = State::flying;
                again.push_back(chunk_at({at, number, i}));
            }
        }
    }
    return again;
}

// By the time the last chunk of a stretch is sent, the first ones are often acknowledged or lost. Parity then need only
// replace the lost ones, and those in flight that may be lost. The reserve for these is scaled by the square root of
// their share, which is on the safe side: the right factor lies between that and the share itself.
void Encoding::drop_needless_parity(Block& block) {
    const auto count = [&](State state) {
        return static_cast<double>(std::count(block.data.begin(), block.data.end(), state));
    };
    const double share = count(State::flying) / static_cast<double>(block.data.size());
    const double needed = count(State::lost) + std::ceil(static_cast<double>(block.parity.size()) * std::sqrt(share));
    for (std::size_t i = static_cast<std::size_t>(needed); i < block.parity.size(); ++i) block.parity[i] = State::lost;
}

void Encoding::forget_parity(Stretch& stretch, Block& block) {
    for (State& state : block.parity) {
        if (state != State::unsent) continue;
        state = State::lost;
        if (stretch.due) --due_;
    }
}

// Updates a block after a change. Returns the chunks to retransmit if what arrived and is in flight cannot decode it.
std::vector<std::uint32_t> Encoding::settle(std::uint32_t at, std::uint32_t number) {
    Stretch& stretch = stretches_[at];
    Block& block = stretch.blocks[number];
    const auto count = [&](State state) {
        return static_cast<std::size_t>(std::count(block.data.begin(), block.data.end(), state) +
                                        std::count(block.parity.begin(), block.parity.end(), state));
    };
    const std::size_t needed = block.data.size(), have = count(State::arrived);
    if (block.failed) return {};
    const auto presume = [&](std::uint32_t chunks) {
        presumed_ += chunks - block.presumed;
        block.presumed = chunks;
    };
    if (have >= needed) {
        const auto arrived = static_cast<std::size_t>(std::count(block.data.begin(), block.data.end(), State::arrived));
        presume(static_cast<std::uint32_t>(needed - arrived));
        // The last parity of a lossy message also announces its end, so it must be sent.
        if (exact_ && arrived == needed) forget_parity(stretch, block);
        if (!std::exchange(block.saved, true) && arrived < needed) ++block_counts_.saved;
        return {};
    }
    const std::size_t coming = count(State::unsent) + count(State::flying);
    block.failed = !exact_ && have + coming < needed;
    std::vector<std::uint32_t> again;
    for (std::uint32_t i = 0; i < block.data.size(); ++i) {
        if (!block.failed && have + coming + again.size() >= needed) break;
        if (block.data[i] != State::lost) continue;
        block.data[i] = State::flying;
        again.push_back(chunk_at({at, number, i}));
    }
    if (!again.empty() && !std::exchange(block.topped_up, true)) ++block_counts_.topped_up;
    return again;
}

// Stops coding a stretch. Returns its chunks that were sent and are neither acknowledged nor in flight.
std::vector<std::uint32_t> Encoding::stop_stretch(std::uint32_t at) {
    Stretch& stretch = stretches_[at];
    std::vector<std::uint32_t> again;
    if (stretch.coding_state == CodingState::coded) {
        for (std::uint32_t number = 0; number < stretch.blocks.size(); ++number) {
            Block& block = stretch.blocks[number];
            forget_parity(stretch, block);
            presumed_ -= block.presumed;
            for (std::uint32_t i = 0; i < block.data.size(); ++i) {
                if (block.data[i] == State::lost) again.push_back(chunk_at({at, number, i}));
            }
        }
        stretch.blocks.clear();
    }
    stretch.coding_state = CodingState::plain;
    return again;
}

std::vector<std::uint32_t> Encoding::stop() {
    sums_.forget();
    std::vector<std::uint32_t> all;
    for (std::uint32_t stretch = 0; stretch < shape_.stretches; ++stretch) {
        const std::vector<std::uint32_t> again = stop_stretch(stretch);
        all.insert(all.end(), again.begin(), again.end());
    }
    return all;
}

ParityName Encoding::next_name() {
    for (std::uint32_t at = 0; at < stretches_.size(); ++at) {
        Stretch& stretch = stretches_[at];
        if (!stretch.due || stretch.coding_state != CodingState::coded) continue;
        const auto several = static_cast<std::uint32_t>(stretch.blocks.size());
        for (; stretch.next < several * stretch.parity; ++stretch.next) {
            const ParityName name{at, stretch.next % several, stretch.next / several};
            State& state = stretch.blocks[name.block].parity[name.index];
            if (state != State::unsent) continue;
            state = State::flying;
            --due_;
            ++stretch.next;
            return name;
        }
    }
    throw std::logic_error("no parity is due");
}

Encoding::BlockCounts Encoding::take_block_counts() { return std::exchange(block_counts_, {}); }

// ---- the receiver ----

Decoding::Decoding(const ChunkLayout& layout, const std::byte* placed, std::uint16_t peer, CodingMemory& coding_memory)
    : layout_(layout), shape_(layout), placed_(placed), peer_(peer), coding_memory_(coding_memory) {}

Decoding::~Decoding() {
    for (auto& [key, block] : blocks_) drop(block);
}

void Decoding::drop(Block& block) {
    for (Memory& each : block.copies) coding_memory_.blocks().release(std::move(each));
    for (auto& [index, each] : block.parity) coding_memory_.blocks().release(std::move(each));
    coding_memory_.release(peer_, std::exchange(block.reserved, 0));
}

Decoding::Block& Decoding::open(const CodeShape::BlockPosition& at) {
    const auto [entry, is_new] = blocks_.try_emplace(key(at));
    Block& block = entry->second;
    if (is_new && placed_ == nullptr) {
        // Reserve memory for all copies of a block or for none: half a block is of no use.
        const std::size_t chunks = shape_.block_size(at.stretch, at.block), bytes = chunks * layout_.chunk_bytes;
        block.broken = !coding_memory_.reserve(peer_, bytes);
        if (!block.broken) {
            block.reserved = bytes;
            block.copies.resize(chunks);
        }
    }
    return block;
}

void Decoding::keep(std::uint32_t chunk, std::span<const std::byte> payload) {
    if (placed_ != nullptr) return;
    const CodeShape::BlockPosition at = shape_.locate(layout_.ordinal(chunk));
    Block& block = open(at);
    if (block.broken || block.copies[at.position]) return;
    Memory& copy = block.copies[at.position] = coding_memory_.blocks().take();
    if (!payload.empty()) std::memcpy(copy.get(), payload.data(), payload.size());
    if (++block.copied < block.copies.size()) return;
    drop(block);  // complete
    blocks_.erase(key(at));
}

Decoding::Taken Decoding::take_parity(std::uint32_t name, std::span<const std::byte> payload, const Bitmap& arrived,
                                      const Bitmap& settled) {
    const ParityName of = ParityName::unpack(name);
    if (of.stretch >= shape_.stretches || of.block >= shape_.blocks(of.stretch)) return Taken::malformed;
    const std::uint32_t chunks = shape_.block_size(of.stretch, of.block);
    if (payload.size() != shape_.parity_bytes || of.index >= max_block_chunks - chunks) return Taken::malformed;
    std::uint32_t missing = 0, awaited = 0;
    for (std::uint32_t i = 0; i < chunks; ++i) {
        const std::uint32_t chunk = layout_.at(shape_.ordinal({of.stretch, of.block, i}));
        if (!arrived.test(chunk)) ++missing;
        if (!settled.test(chunk)) ++awaited;
    }
    if (awaited == 0) return Taken::yes;
    Block& block = open({of.stretch, of.block, 0});
    // Chunks that were not kept, because they arrived another way or memory was full, cannot be recovered.
    if (placed_ == nullptr && block.copied + missing != chunks) block.broken = true;
    if (block.broken) return Taken::no_space;
    const auto same = [&](const auto& each) { return each.first == of.index; };
    if (block.parity.size() >= chunks || std::any_of(block.parity.begin(), block.parity.end(), same)) return Taken::yes;
    if (!coding_memory_.reserve(peer_, layout_.chunk_bytes)) return Taken::no_space;
    block.reserved += layout_.chunk_bytes;
    Memory copy = coding_memory_.blocks().take();
    if (!payload.empty()) std::memcpy(copy.get(), payload.data(), payload.size());
    block.parity.emplace_back(of.index, std::move(copy));
    return Taken::yes;
}

std::vector<Decoding::RestoredChunk> Decoding::restore(CodeShape::BlockPosition at, const Bitmap& arrived) {
    const auto entry = blocks_.find(key(at));
    if (entry == blocks_.end() || entry->second.broken || entry->second.parity.empty()) return {};
    Block& block = entry->second;
    const std::uint32_t chunks = shape_.block_size(at.stretch, at.block);
    std::vector<std::uint32_t> lost;
    for (at.position = 0; at.position < chunks; ++at.position) {
        const std::uint32_t chunk = layout_.at(shape_.ordinal(at));
        const bool here = arrived.test(chunk);
        if (!here) lost.push_back(chunk);
        if (here && placed_ == nullptr && !block.copies[at.position]) block.broken = true;
    }
    if (block.broken || lost.size() > block.parity.size()) return {};
    std::vector<RestoredChunk> found;
    if (!lost.empty()) {
        std::vector<ErasureDecoder::Chunk> data(chunks);
        std::vector<Parity> parity;
        restored_.resize(lost.size() * layout_.chunk_bytes);
        for (at.position = 0; at.position < chunks; ++at.position) {
            const std::uint32_t chunk = layout_.at(shape_.ordinal(at)), size = layout_.size(chunk);
            ErasureDecoder::Chunk& each = data[at.position];
            each.arrived = arrived.test(chunk);
            if (each.arrived) {
                const std::byte* from = placed_ != nullptr ? placed_ + std::size_t{chunk} * layout_.chunk_bytes
                                                           : block.copies[at.position].get();
                each.present = {from, size};
            } else {
                each.missing = {restored_.data() + found.size() * layout_.chunk_bytes, size};
                found.push_back({chunk, each.missing});
            }
        }
        for (const auto& [index, payload] : block.parity)
            parity.push_back({index, {payload.get(), shape_.parity_bytes}});
        if (!decoder_.decode(data, parity, shape_.parity_bytes)) found.clear();
    }
    drop(block);
    blocks_.erase(entry);
    return found;
}

void Decoding::forget_before(std::uint32_t stretch) {
    for (auto each = blocks_.begin(); each != blocks_.end();) {
        if (each->first / CodeShape::stretch_blocks >= stretch) {
            ++each;
            continue;
        }
        drop(each->second);
        each = blocks_.erase(each);
    }
}

}  // namespace storm
