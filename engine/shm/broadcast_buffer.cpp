#include "shm/broadcast_buffer.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace storm {
namespace {

#ifndef F_SEAL_FUTURE_WRITE
constexpr int F_SEAL_FUTURE_WRITE = 0x0010;
#endif
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// Payloads begin on cache lines.
constexpr std::uint32_t line = 64;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

BroadcastMemory::BroadcastMemory()
    : file_(Descriptor::checked(memfd_create("stormtorch", MFD_CLOEXEC | MFD_ALLOW_SEALING),
                                "cannot make memory to share")) {
    allocate(file_, capacity);
    map(PROT_READ | PROT_WRITE);
    // No other process can write to it, where the kernel knows this seal (since Linux 5.1).
    (void)fcntl(file_.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
    if (fcntl(file_.get(), F_ADD_SEALS, seals) == 0) return;
    munmap(bytes_, capacity);
    fail("cannot seal memory to share");
}

BroadcastMemory::BroadcastMemory(Descriptor file) : file_(std::move(file)) {
    struct stat status{};
    if (fstat(file_.get(), &status) != 0) fail("cannot look at shared memory");
    const int sealed = fcntl(file_.get(), F_GET_SEALS);
    if (sealed < 0 || (sealed & seals) != seals || status.st_size != static_cast<off_t>(capacity))
        throw std::invalid_argument("this descriptor is no broadcast buffer");
    map(PROT_READ);
}

void BroadcastMemory::map(int protection) {
    void* got = mmap(nullptr, capacity, protection, MAP_SHARED, file_.get(), 0);
    if (got == MAP_FAILED) fail("cannot map memory to share");
    bytes_ = static_cast<std::byte*>(got);
    // A forked process is no member of the job, and must not keep the memory.
    (void)madvise(bytes_, capacity, MADV_DONTFORK);
}

BroadcastMemory::~BroadcastMemory() { munmap(bytes_, capacity); }

BroadcastBuffer::Item* BroadcastBuffer::find(const Outgoing& message, std::uint32_t chunk) {
    // What was put last is most often what is sent to the next peer.
    for (auto item = items_.rbegin(); item != items_.rend(); ++item) {
        if (item->data_ == message.checksums && item->first_ <= chunk && chunk < item->end_) return &*item;
    }
    return nullptr;
}

BroadcastBuffer::Item* BroadcastBuffer::put(const Outgoing& message, std::uint32_t first, std::uint32_t end,
                                            std::uint32_t bytes, const Read& read) {
    const std::uint32_t needed = (bytes + line - 1) / line * line;
    std::uint32_t position = 0;
    while (!items_.empty()) {
        const std::uint32_t oldest = items_.front().position_;
        position = items_.back().position_ + items_.back().bytes_;
        if (position > oldest) {
            if (position + needed <= BroadcastMemory::capacity) break;
            position = 0;  // goes on at the beginning
        }
        if (position + needed <= oldest) break;
        if (!free_oldest(read)) return nullptr;
        position = 0;
    }
    if (position + needed > BroadcastMemory::capacity) return nullptr;
    std::memcpy(memory_->bytes() + position, message.payload(first).data(), bytes);
    Item& item = items_.emplace_back();
    item.data_ = message.checksums;
    item.position_ = position;
    item.bytes_ = needed;
    item.first_ = first;
    item.end_ = end;
    item.chunk_bytes_ = message.layout.chunk_bytes;
    return &item;
}

bool BroadcastBuffer::free_oldest(const Read& read) {
    const auto& readers = items_.front().readers_;
    const bool free = std::all_of(readers.begin(), readers.end(),
                                  [&](const Item::Reader& reader) { return read(reader.rank) >= reader.until; });
    if (free) items_.pop_front();
    return free;
}

void BroadcastBuffer::forget(std::uint16_t rank) {
    for (Item& item : items_)
        std::erase_if(item.readers_, [&](const Item::Reader& reader) { return reader.rank == rank; });
}

void BroadcastBuffer::renew(std::uint16_t rank) {
    for (Item& item : items_) {
        for (Item::Reader& reader : item.readers_) {
            if (reader.rank == rank) reader.until = 1;
        }
    }
}

}  // namespace storm
