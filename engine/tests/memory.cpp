// Stands in its own file: a compiler that sees the replaced operators beside their users reports a mismatch.
#include "memory.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace storm::check {
namespace {

constexpr long unlimited = -1;
thread_local long own = unlimited;
thread_local bool spared = false;  // from what happens elsewhere
std::atomic<long> elsewhere{unlimited};

bool fails() {
    if (own == 0) return true;
    if (own > 0) --own;
    if (spared) return false;
    for (long left = elsewhere.load(); left != unlimited;) {
        if (left == 0) return true;
        if (elsewhere.compare_exchange_weak(left, left - 1)) return false;
    }
    return false;
}

}  // namespace

ScarceMemory::ScarceMemory(long allocations) { own = allocations; }
ScarceMemory::~ScarceMemory() { own = unlimited; }

ScarceMemoryElsewhere::ScarceMemoryElsewhere(long allocations) {
    spared = true;
    elsewhere = allocations;
}
ScarceMemoryElsewhere::~ScarceMemoryElsewhere() {
    elsewhere = unlimited;
    spared = false;
}

}  // namespace storm::check

// Replaced for the whole executable. The forms for arrays call these.
void* operator new(std::size_t bytes) {
    void* memory = storm::check::fails() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
