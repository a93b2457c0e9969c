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

ShelfMemory::ShelfMemory()
    : file_(Descriptor::checked(memfd_create("stormtorch", MFD_CLOEXEC | MFD_ALLOW_SEALING),
                                "cannot make memory to share")) {
    allocate(file_, capacity);
    map(PROT_READ | PROT_WRITE);
    // Nobody else can write what others rely on, where the kernel knows this seal (since Linux 5.1).
    (void)fcntl(file_.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
    if (fcntl(file_.get(), F_ADD_SEALS, seals) == 0) return;
    munmap(bytes_, capacity);
    fail("cannot seal memory to share");
}

ShelfMemory::ShelfMemory(Descriptor file) : file_(std::move(file)) {
    struct stat status{};
    if (fstat(file_.get(), &status) != 0) fail("cannot look at shared memory");
    const int sealed = fcntl(file_.get(), F_GET_SEALS);
    if (sealed < 0 || (sealed & seals) != seals || status.st_size != static_cast<off_t>(capacity))
        throw std::invalid_argument("this descriptor is no shelf");
    map(PROT_READ);
}

void ShelfMemory::map(int protection) {
    void* got = mmap(nullptr, capacity, protection, MAP_SHARED, file_.get(), 0);
    if (got == MAP_FAILED) fail("cannot map memory to share");
    bytes_ = static_cast<std::byte*>(got);
    // A forked process has no part in the job, and must not keep the memory.
    (void)madvise(bytes_, capacity, MADV_DONTFORK);
}

ShelfMemory::~ShelfMemory() { munmap(bytes_, capacity); }

Shelf::Item* Shelf::find(const Outgoing& message, std::uint32_t chunk) {
    // What was put last is most often what another peer wants next.
    for (auto item = items_.rbegin(); item != items_.rend(); ++item) {
        if (item->data_ == message.checks && item->first_ <= chunk && chunk < item->end_) return &*item;
    }
    return nullptr;
}

Shelf::Item* Shelf::put(const Outgoing& message, std::uint32_t first, std::uint32_t end, std::uint32_t bytes,
                        const Read& read) {
    const std::uint32_t needed = (bytes + line - 1) / line * line;
    std::uint32_t place = 0;
    while (!items_.empty()) {
        const std::uint32_t oldest = items_.front().place_;
        place = items_.back().place_ + items_.back().bytes_;
        if (place > oldest) {
            if (place + needed <= ShelfMemory::capacity) break;
            place = 0;  // goes on at the beginning
        }
        if (place + needed <= oldest) break;
        if (!free_oldest(read)) return nullptr;
        place = 0;
    }
    if (place + needed > ShelfMemory::capacity) return nullptr;
    std::memcpy(memory_->bytes() + place, message.payload(first).data(), bytes);
    Item& item = items_.emplace_back();
    item.data_ = message.checks;
    item.place_ = place;
    item.bytes_ = needed;
    item.first_ = first;
    item.end_ = end;
    item.chunk_bytes_ = message.cut.chunk_bytes;
    return &item;
}

bool Shelf::free_oldest(const Read& read) {
    const auto& loans = items_.front().loans_;
    const bool free =
        std::all_of(loans.begin(), loans.end(), [&](const Item::Loan& loan) { return read(loan.rank) >= loan.until; });
    if (free) items_.pop_front();
    return free;
}

void Shelf::forget(std::uint16_t rank) {
    for (Item& item : items_) std::erase_if(item.loans_, [&](const Item::Loan& loan) { return loan.rank == rank; });
}

void Shelf::renew(std::uint16_t rank) {
    for (Item& item : items_) {
        for (Item::Loan& loan : item.loans_) {
            if (loan.rank == rank) loan.until = 1;
        }
    }
}

}  // namespace storm
