// A mutex whose holder can yield to waiting threads. A thread that releases a plain mutex and locks it again at once
// mostly gets it back before a waiting thread has woken up, so a busy thread would starve all others.
#pragma once

#include <atomic>
#include <mutex>

namespace storm {

class FairMutex {
public:
    void lock() {
        waiting_.fetch_add(1);
        mutex_.lock();
        waiting_.fetch_sub(1);
        waiting_.notify_all();  // a system call only if a holder is yielding
    }
    void unlock() { mutex_.unlock(); }

    // Called by the holder: lets one waiting thread go first, if there is one.
    void yield_to_waiters() {
        const int waiting = waiting_.load();
        if (waiting == 0) return;
        mutex_.unlock();
        waiting_.wait(waiting);  // until one has the lock, or one more waits
        lock();
    }

private:
    std::mutex mutex_;
    std::atomic<int> waiting_{};
};

}  // namespace storm
