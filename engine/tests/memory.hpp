// Allocations that fail on purpose.
#pragma once

namespace storm::check {

// While an object exists, its thread gets `allocations` more pieces of memory from operator new, and then none.
class ScarceMemory {
public:
    explicit ScarceMemory(long allocations);
    ~ScarceMemory();
    ScarceMemory(const ScarceMemory&) = delete;
    ScarceMemory& operator=(const ScarceMemory&) = delete;
};

// While an object exists, all other threads together get `allocations` more pieces of memory, and then none. At most one
// such object may exist.
class ScarceMemoryElsewhere {
public:
    explicit ScarceMemoryElsewhere(long allocations);
    ~ScarceMemoryElsewhere();
    ScarceMemoryElsewhere(const ScarceMemoryElsewhere&) = delete;
    ScarceMemoryElsewhere& operator=(const ScarceMemoryElsewhere&) = delete;
};

}  // namespace storm::check
