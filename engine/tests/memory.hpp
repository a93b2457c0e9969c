// Allocations that fail on purpose.
#pragma once

namespace storm::check {

// While it lives, the thread that made it gets `allocations` more pieces of memory from operator new, and then none.
class ScarceMemory {
public:
    explicit ScarceMemory(long allocations);
    ~ScarceMemory();
    ScarceMemory(const ScarceMemory&) = delete;
    ScarceMemory& operator=(const ScarceMemory&) = delete;
};

// The same for all other threads together; one of these at a time.
class ScarceMemoryElsewhere {
public:
    explicit ScarceMemoryElsewhere(long allocations);
    ~ScarceMemoryElsewhere();
    ScarceMemoryElsewhere(const ScarceMemoryElsewhere&) = delete;
    ScarceMemoryElsewhere& operator=(const ScarceMemoryElsewhere&) = delete;
};

}  // namespace storm::check
