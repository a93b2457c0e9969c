// A file descriptor that closes itself.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <system_error>
#include <utility>

namespace storm {

class Descriptor {
public:
    // Takes ownership; a negative number means no descriptor.
    explicit Descriptor(int fd = -1) : fd_(fd) {}
    // Takes the result of a system call; throws std::system_error with errno if the call failed.
    static Descriptor checked(int fd, const char* what) {
        if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
        return Descriptor(fd);
    }
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        if (this != &other) {
            close();
            fd_ = std::exchange(other.fd_, -1);
        }
        return *this;
    }
    ~Descriptor() { close(); }

    void close() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }
    [[nodiscard]] int get() const { return fd_; }
    // Gives ownership up.
    [[nodiscard]] int release() { return std::exchange(fd_, -1); }

private:
    int fd_;
};

// Gives a file of shared memory its size, and all of its pages at once. Where there is no memory for one later, as under
// strict overcommit, whoever touches it would end by SIGBUS; now it is a std::system_error.
inline void allocate(const Descriptor& file, std::size_t bytes) {
    int problem = 0;
    do problem = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
    while (problem == EINTR);
    if (problem != 0) throw std::system_error(problem, std::generic_category(), "no room for memory to share");
}

}  // namespace storm
