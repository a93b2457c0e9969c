// Ring buffer in shared memory between two processes of one machine: one writes records, the other reads them.
//
// Memory order. `tail` says how far the writer has written, `head` how far the reader has read. Each is stored by one
// side with release and loaded by the other with acquire: a side that sees an index sees all that was done before it
// was stored. Reading and writing need no more than that, on ARM too. Sleep does: a side that is about to sleep stores
// a flag and then loads the other's index, and the other stores its index and then loads the flag. One of the two must
// see the other's store, or the sleeper is never woken. So these four are sequentially consistent.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "base/descriptor.hpp"

namespace storm {

// Memory of one ring: an anonymous file, which another process gets as a descriptor. It ends with the last process that
// holds it, even if that process crashes.
class RingMemory {
public:
    // Capacity of a ring. The rings of all neighbours together are small enough to stay in a core's cache.
    static constexpr std::size_t most_bytes = 512 << 10, least_bytes = 128 << 10;
    [[nodiscard]] static constexpr std::size_t bytes_for(std::size_t neighbours) {
        return neighbours < 8 ? most_bytes : least_bytes;
    }

    // Makes a ring for one of `neighbours` peers. Throws std::system_error.
    explicit RingMemory(std::size_t neighbours);
    // Opens a ring that another process made. Throws std::system_error or std::invalid_argument: the descriptor may be
    // anything.
    explicit RingMemory(Descriptor file);
    ~RingMemory();
    RingMemory(const RingMemory&) = delete;
    RingMemory& operator=(const RingMemory&) = delete;

    [[nodiscard]] int file() const { return file_.get(); }
    // Closes the descriptor; the memory stays mapped.
    void close_file() { file_.close(); }

    struct Shared {
        alignas(64) std::atomic<std::uint64_t> tail;
        std::atomic<std::uint32_t> writer_waits;  // the writer found the ring full
        alignas(64) std::atomic<std::uint64_t> head;
        std::atomic<std::uint32_t> reader_waits;      // the reader sleeps, or is about to
        alignas(64) std::atomic<std::uint32_t> shut;  // the reader wants datagrams instead, for now
    };
    [[nodiscard]] Shared& shared() const { return *shared_; }
    // The ring's bytes lie in memory twice, one copy behind the other, so that no record is ever in two parts.
    [[nodiscard]] std::byte* at(std::uint64_t index) const { return bytes_ + index % capacity_; }
    [[nodiscard]] std::size_t capacity() const { return capacity_; }

private:
    void map();

    Descriptor file_;
    std::size_t capacity_;
    std::byte* base_{};
    Shared* shared_{};
    std::byte* bytes_{};
};

class RingWriter {
public:
    explicit RingWriter(std::unique_ptr<RingMemory> memory) : memory_(std::move(memory)) {}

    // Space for a record of `bytes`; null if there is not enough. Then the reader rings the doorbell once there is.
    [[nodiscard]] std::byte* space(std::size_t bytes);
    // Publishes what was written to the reader. True if the reader sleeps, so that its doorbell must be rung.
    [[nodiscard]] bool publish(std::size_t bytes);
    [[nodiscard]] std::size_t capacity() const { return memory_->capacity(); }
    // Index behind the last record that was published, and behind the last one that was read.
    [[nodiscard]] std::uint64_t written() const { return tail_; }
    [[nodiscard]] std::uint64_t read();
    [[nodiscard]] bool shut() const { return memory_->shared().shut.load(std::memory_order_acquire) != 0; }
    // True if the reader's index was invalid: from then on there is no space.
    [[nodiscard]] bool broken() const { return broken_; }

private:
    [[nodiscard]] std::size_t free_bytes() const;

    std::unique_ptr<RingMemory> memory_;
    std::uint64_t tail_{}, head_{};  // `head_`: the reader's, as last loaded
    bool broken_{};
};

class RingReader {
public:
    explicit RingReader(std::unique_ptr<RingMemory> memory) : memory_(std::move(memory)) {}

    // All that can be read.
    [[nodiscard]] std::span<const std::byte> front();
    // Frees what was read. True if the writer waits for space and now has enough, so that its doorbell must be rung.
    [[nodiscard]] bool pop(std::size_t bytes);
    // Requests the doorbell for when the writer has written something. False if it already has.
    [[nodiscard]] bool may_sleep();
    void set_shut(bool shut) { memory_->shared().shut.store(shut ? 1 : 0, std::memory_order_release); }
    // True if the writer's index or data was invalid: from then on there is nothing to read.
    [[nodiscard]] bool broken() const { return broken_; }
    // For a reader of records that finds an invalid one.
    void set_broken() { broken_ = true; }

private:
    std::unique_ptr<RingMemory> memory_;
    std::uint64_t head_{}, tail_{};  // `tail_`: the writer's, as last loaded
    bool broken_{};
};

}  // namespace storm
