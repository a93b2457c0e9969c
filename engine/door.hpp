// A mutex whose holder can let others in. Who releases a plain mutex and takes it again at once mostly wins it back before
// a thread that waits for it has woken up; a thread that is always busy would keep all others out for as long.
#pragma once

#include <atomic>
#include <mutex>

namespace storm {

class Door {
public:
    void lock() {
        waiting_.fetch_add(1);
        mutex_.lock();
        waiting_.fetch_sub(1);
        waiting_.notify_all();  // a system call only if somebody gives way
    }
    void unlock() { mutex_.unlock(); }

    // For the holder: lets one of those that wait go first, if there are any.
    void give_way() {
        const int waiting = waiting_.load();
        if (waiting == 0) return;
        mutex_.unlock();
        waiting_.wait(waiting);  // until one is in, or one more has come
        lock();
    }

private:
    std::mutex mutex_;
    std::atomic<int> waiting_{};
};

}  // namespace storm
