#include "shm/ring.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace storm {
namespace {

// The indices have pages of their own, before the bytes. 64 KiB is a multiple of every page size that Linux has.
constexpr std::size_t index_bytes = 64 << 10;
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "a lock would not be shared between processes");

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

void* map_at(void* place, std::size_t bytes, int flags, int file, std::size_t offset) {
    void* got = mmap(place, bytes, PROT_READ | PROT_WRITE, flags, file, static_cast<off_t>(offset));
    if (got == MAP_FAILED) fail("cannot map memory to share");
    return got;
}

}  // namespace

RingMemory::RingMemory(std::size_t neighbours)
    : file_(Descriptor::checked(memfd_create("stormtorch", MFD_CLOEXEC | MFD_ALLOW_SEALING),
                                "cannot make memory to share")),
      capacity_(bytes_for(neighbours)) {
    allocate(file_, index_bytes + capacity_);
    // Neither side can truncate the file under the other, which would end that process with SIGBUS.
    if (fcntl(file_.get(), F_ADD_SEALS, seals) != 0) fail("cannot seal memory to share");
    map();
}

RingMemory::RingMemory(Descriptor file) : file_(std::move(file)), capacity_(most_bytes) {
    struct stat status{};
    if (fstat(file_.get(), &status) != 0) fail("cannot look at shared memory");
    const int sealed = fcntl(file_.get(), F_GET_SEALS);
    // The process that made it chose between two sizes.
    if (status.st_size == static_cast<off_t>(index_bytes + least_bytes)) capacity_ = least_bytes;
    if (sealed < 0 || (sealed & seals) != seals || status.st_size != static_cast<off_t>(index_bytes + capacity_))
        throw std::invalid_argument("this descriptor is no ring");
    map();
}

void RingMemory::map() {
    const std::size_t file_bytes = index_bytes + capacity_, mapped_bytes = file_bytes + capacity_;
    // Reserve address space for all of it first, so that the second copy of the bytes lies right behind the first.
    base_ = static_cast<std::byte*>(map_at(nullptr, mapped_bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    try {
        map_at(base_, file_bytes, MAP_SHARED | MAP_FIXED, file_.get(), 0);
        map_at(base_ + file_bytes, capacity_, MAP_SHARED | MAP_FIXED, file_.get(), index_bytes);
    } catch (...) {
        munmap(base_, mapped_bytes);
        throw;
    }
    // A forked process is no member of the job, and must not keep the memory.
    (void)madvise(base_, mapped_bytes, MADV_DONTFORK);
    shared_ = std::launder(reinterpret_cast<Shared*>(base_));
    bytes_ = base_ + index_bytes;
}

RingMemory::~RingMemory() { munmap(base_, index_bytes + 2 * capacity_); }

std::size_t RingWriter::free_bytes() const { return memory_->capacity() - static_cast<std::size_t>(tail_ - head_); }

std::uint64_t RingWriter::read() {
    head_ = memory_->shared().head.load(std::memory_order_acquire);
    if (tail_ - head_ > memory_->capacity()) broken_ = true;
    return head_;
}

std::byte* RingWriter::space(std::size_t bytes) {
    if (free_bytes() < bytes) {
        RingMemory::Shared& shared = memory_->shared();
        head_ = shared.head.load(std::memory_order_acquire);
        if (free_bytes() < bytes) {
            shared.writer_waits.store(1, std::memory_order_seq_cst);
            head_ = shared.head.load(std::memory_order_seq_cst);
        }
        // An index that moves backwards would free space that is still in use.
        if (tail_ - head_ > memory_->capacity()) broken_ = true;
    }
    return broken_ || free_bytes() < bytes ? nullptr : memory_->at(tail_);
}

bool RingWriter::publish(std::size_t bytes) {
    tail_ += bytes;
    RingMemory::Shared& shared = memory_->shared();
    shared.tail.store(tail_, std::memory_order_seq_cst);
    return shared.reader_waits.load(std::memory_order_seq_cst) != 0 &&
           shared.reader_waits.exchange(0, std::memory_order_relaxed) != 0;
}

std::span<const std::byte> RingReader::front() {
    if (tail_ == head_) tail_ = memory_->shared().tail.load(std::memory_order_acquire);
    if (tail_ - head_ > memory_->capacity()) broken_ = true;
    if (broken_) return {};
    return {memory_->at(head_), static_cast<std::size_t>(tail_ - head_)};
}

bool RingReader::pop(std::size_t bytes) {
    head_ += bytes;
    RingMemory::Shared& shared = memory_->shared();
    shared.head.store(head_, std::memory_order_seq_cst);
    if (shared.writer_waits.load(std::memory_order_seq_cst) == 0) return false;
    // Wait for half of the ring, or for all that was there: waking the writer for every record would cost more than the
    // record.
    if (shared.tail.load(std::memory_order_acquire) - head_ > memory_->capacity() / 2) return false;
    return shared.writer_waits.exchange(0, std::memory_order_relaxed) != 0;
}

bool RingReader::may_sleep() {
    RingMemory::Shared& shared = memory_->shared();
    shared.reader_waits.store(1, std::memory_order_seq_cst);
    return shared.tail.load(std::memory_order_seq_cst) == head_;
}

}  // namespace storm
