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
    // Releases ownership.
    [[nodiscard]] int release() { return std::exchange(fd_, -1); }

private:
    int fd_;
};

// Sets the size of a shared-memory file and allocates all of its pages now. Throws std::system_error if there is not
// enough memory. Without this, the process that first touches a page without memory would die of SIGBUS.
inline void allocate(const Descriptor& file, std::size_t bytes) {
    int problem = 0;
    do problem = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
    while (problem == EINTR);
    if (problem != 0) throw std::system_error(problem, std::generic_category(), "no space for shared memory");
}

}  // namespace storm
