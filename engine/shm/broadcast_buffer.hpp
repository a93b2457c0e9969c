// Broadcast buffer: bytes for several endpoints of one machine, written once into shared memory that all of them read.
//
// A record in a peer's ring then names the position of the bytes instead of holding them. The peer has read the bytes
// once it has read the record: an item is kept until every ring that names it is read that far. So the argument about
// memory order in ring.hpp covers these bytes, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "base/descriptor.hpp"
#include "exchange/message.hpp"

namespace storm {

// Memory of one broadcast buffer. Its owner writes, others may only read. Lives as long as a process holds it, as
// RingMemory does.
class BroadcastMemory {
public:
    // Large enough for the slowest of many readers; what is read soon is still in a cache.
    static constexpr std::size_t capacity = 4 << 20;

    // Makes a broadcast buffer. Throws std::system_error.
    BroadcastMemory();
    // Opens a broadcast buffer that another process made. Throws std::system_error or std::invalid_argument: the
    // descriptor may be anything.
    explicit BroadcastMemory(Descriptor file);
    ~BroadcastMemory();
    BroadcastMemory(const BroadcastMemory&) = delete;
    BroadcastMemory& operator=(const BroadcastMemory&) = delete;

    [[nodiscard]] int file() const { return file_.get(); }
    // Closes the descriptor; the memory stays mapped.
    void close_file() { file_.close(); }
    [[nodiscard]] std::byte* bytes() const { return bytes_; }

private:
    void map(int protection);

    Descriptor file_;
    std::byte* bytes_{};
};

// The owner's side of a broadcast buffer.
class BroadcastBuffer {
public:
    // How far a rank has read its ring.
    using Read = std::function<std::uint64_t(std::uint16_t)>;

    explicit BroadcastBuffer(std::unique_ptr<BroadcastMemory> memory) : memory_(std::move(memory)) {}
    [[nodiscard]] const BroadcastMemory& memory() const { return *memory_; }

    // A run of consecutive chunks of some data.
    class Item {
    public:
        // Where a chunk of the run begins.
        [[nodiscard]] std::uint32_t position(std::uint32_t chunk) const {
            return position_ + (chunk - first_) * chunk_bytes_;
        }
        [[nodiscard]] std::uint32_t end() const { return end_; }
        // The rank reads it with the record that ends at `until` in its ring.
        void add_reader(std::uint16_t rank, std::uint64_t until) { readers_.push_back({rank, until}); }

    private:
        friend class BroadcastBuffer;
        struct Reader {
            std::uint16_t rank{};
            std::uint64_t until{};
        };
        std::shared_ptr<const ChunkChecksums>
            data_;  // what all messages of the same data share; kept, so that it stays unique
        std::uint32_t position_{}, bytes_{}, first_{}, end_{}, chunk_bytes_{};
        std::vector<Reader> readers_;
    };
    // The item that holds a chunk of a message's data; null if there is none.
    [[nodiscard]] Item* find(const Outgoing& message, std::uint32_t chunk);
    // Copies chunks [first, end) of a message, `bytes` in all; null if there is no space.
    [[nodiscard]] Item* put(const Outgoing& message, std::uint32_t first, std::uint32_t end, std::uint32_t bytes,
                            const Read& read);
    // Drops a rank that is gone as a reader.
    void forget(std::uint16_t rank);
    // A rank has another ring from now on. It may still read items that its old ring named, until it reads the new one.
    void renew(std::uint16_t rank);

private:
    [[nodiscard]] bool free_oldest(const Read& read);

    std::unique_ptr<BroadcastMemory> memory_;
    std::deque<Item> items_;  // the oldest first; each lies behind the one before it, or at the beginning
};

}  // namespace storm
