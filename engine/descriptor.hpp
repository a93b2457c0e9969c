// A file descriptor that closes itself.
#pragma once

#include <unistd.h>

#include <cerrno>
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

}  // namespace storm
