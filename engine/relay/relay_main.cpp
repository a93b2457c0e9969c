// stormtorch-relay: connects network namespaces through TUN devices; a Relay delays, drops or delivers each packet.
// Commands are lines on stdin, one line of answer each on stdout (relay_commands.hpp). It ends with its stdin, and the
// devices end with it.
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "base/descriptor.hpp"
#include "relay/relay.hpp"
#include "relay/relay_commands.hpp"

namespace storm {
namespace {

// On a busy network the relay wakes only this often, so that many packets share one wake-up. A packet may be late by
// this much twice: when it is read, and when it is due.
constexpr Nanos moderation = 100 * microsecond;
// Busy is more than 2000 rounds a second. Light traffic is served at once: its delays are exact to some 20 us.
constexpr Nanos free_round_every = 500 * microsecond;
constexpr Nanos free_rounds_burst = 10 * millisecond;
constexpr int batch_packets = 64;  // read from one host before the others and before due packets
constexpr std::size_t max_line_bytes = 1 << 20;
constexpr std::uint32_t stdin_tag = Relay::max_hosts;

Nanos clock_now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return Nanos{time.tv_sec} * second + time.tv_nsec;
}

timespec to_timespec(Nanos time) { return {.tv_sec = time / second, .tv_nsec = time % second}; }

[[noreturn]] void fail(const std::string& what, int error) {
    throw std::runtime_error(what + ": " + std::strerror(error));
}

// Guard: while it exists, this thread is in another network namespace.
class Visit {
public:
    Visit(const std::string& netns_path, const Descriptor& home) : home_(home) {
        const Descriptor there(open(netns_path.c_str(), O_RDONLY | O_CLOEXEC));
        if (there.get() < 0) fail("cannot open the network namespace " + netns_path, errno);
        if (setns(there.get(), CLONE_NEWNET) != 0) {
            const int error = errno;
            fail("cannot enter the network namespace " + netns_path +
                     (error == EPERM ? " (needs root, or the user namespace it belongs to)" : ""),
                 error);
        }
    }
    ~Visit() {
        // A thread stuck in a foreign namespace would make every later host in the wrong place.
        if (setns(home_.get(), CLONE_NEWNET) != 0) std::abort();
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

private:
    const Descriptor& home_;
};

// A TUN device belongs to the namespace in which /dev/net/tun was opened, wherever its descriptor is used.
Descriptor open_tun(const RelayHostRequest& request, const Descriptor& home) {
    if (request.device.size() >= IFNAMSIZ)
        throw std::runtime_error("a device's name has at most 15 characters, got '" + request.device + "'");
    const Visit visit(request.netns_path, home);
    Descriptor tun(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
    if (tun.get() < 0) {
        const int error = errno;
        if (error == ENOENT || error == ENODEV)
            fail("no /dev/net/tun (load the kernel's module tun, or give the container this device)", error);
        fail("cannot open /dev/net/tun", error);
    }
    ifreq wanted{};
    wanted.ifr_flags = IFF_TUN | IFF_NO_PI;
    std::memcpy(wanted.ifr_name, request.device.data(), request.device.size());
    if (ioctl(tun.get(), TUNSETIFF, &wanted) != 0)
        fail("cannot make the device " + request.device + " in " + request.netns_path, errno);
    return tun;
}

class Program {
public:
    Program()
        : home_(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)),
          poll_(epoll_create1(EPOLL_CLOEXEC)),
          relay_([this](std::uint16_t host, std::span<const std::byte> packet) {
              return write(tuns_[host].get(), packet.data(), packet.size()) >= 0;
          }),
          commands_(relay_, [this](const RelayHostRequest& request) { join(request); }) {
        if (home_.get() < 0) fail("cannot open /proc/self/ns/net", errno);
        if (poll_.get() < 0) fail("cannot make an epoll descriptor", errno);
        listen(STDIN_FILENO, stdin_tag);
    }

    void run() {
        std::array<epoll_event, Relay::max_hosts + 1> ready;
        while (!ended_) {
            const int count = wait(ready);
            const Nanos now = clock_now();
            bool busy = relay_.next_at() <= now, more = false;
            for (int i = 0; i < count; ++i) {
                const std::uint32_t tag = ready[static_cast<std::size_t>(i)].data.u32;
                if (tag == stdin_tag) {
                    obey();
                } else {
                    more |= receive(static_cast<std::uint16_t>(tag), now);
                    busy = true;
                }
            }
            relay_.advance(now);
            if (!busy || more || ended_) continue;
            // A token bucket of rounds, kept as the time at which it will be full.
            if (full_at_ < now + free_rounds_burst) {
                full_at_ = std::max(full_at_, now) + free_round_every;
                continue;
            }
            const timespec until = to_timespec(now + moderation);
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
        }
    }

private:
    void listen(int fd, std::uint32_t tag) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u32 = tag;
        if (epoll_ctl(poll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
            fail(tag == stdin_tag ? "stdin must be a pipe, a socket or a terminal" : "cannot listen to a TUN device",
                 errno);
    }

    void join(const RelayHostRequest& request) {
        Descriptor tun = open_tun(request, home_);
        listen(tun.get(), request.host);
        tuns_[request.host] = std::move(tun);
    }

    int wait(std::span<epoll_event> ready) {
        const Nanos at = relay_.next_at();
        const timespec timeout = to_timespec(at == never ? 0 : std::max<Nanos>(at - clock_now(), 0));
        // By its number, the same on all architectures: glibc knows epoll_pwait2 since 2.35, the kernel since 5.11.
        const auto count = static_cast<int>(syscall(441, poll_.get(), ready.data(), static_cast<int>(ready.size()),
                                                    at == never ? nullptr : &timeout, nullptr, std::size_t{0}));
        if (count < 0 && errno != EINTR) fail("cannot wait for packets", errno);
        return std::max(count, 0);
    }

    // True when there may be more to read.
    bool receive(std::uint16_t host, Nanos now) {
        for (int i = 0; i < batch_packets; ++i) {
            const std::span<std::byte> buffer = relay_.buffer();
            const ssize_t length = read(tuns_[host].get(), buffer.data(), buffer.size());
            if (length >= 0) {
                relay_.receive(host, static_cast<std::size_t>(length), now);
                continue;
            }
            if (errno == EAGAIN || errno == EINTR) return false;
            if (errno == EFAULT) {  // longer than the buffer: the kernel has dropped it
                relay_.receive(host, 0, now);
                continue;
            }
            // The device is gone, with its namespace perhaps. Its descriptor would be reported as ready for ever.
            epoll_ctl(poll_.get(), EPOLL_CTL_DEL, tuns_[host].get(), nullptr);
            return false;
        }
        return true;
    }

    void obey() {
        std::array<char, 65'536> chunk;
        const ssize_t count = read(STDIN_FILENO, chunk.data(), chunk.size());
        if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
        if (count <= 0) {
            ended_ = true;
            return;
        }
        const std::string_view text(chunk.data(), static_cast<std::size_t>(count));
        for (std::size_t at = 0; at < text.size() && !ended_;) {
            const std::size_t newline = text.find('\n', at);
            // One byte more than allowed is enough to know that a line is too long; the rest need not be kept.
            const std::string_view part = text.substr(at, newline == std::string_view::npos ? newline : newline - at);
            line_.append(part.substr(0, max_line_bytes + 1 - line_.size()));
            if (newline == std::string_view::npos) return;
            answer(line_.size() > max_line_bytes ? "error line too long" : commands_.execute(line_, clock_now()));
            line_.clear();
            at = newline + 1;
        }
    }

    void answer(std::string line) {
        line += '\n';
        for (std::string_view left = line; !left.empty();) {
            const ssize_t count = write(STDOUT_FILENO, left.data(), left.size());
            if (count < 0 && errno == EINTR) continue;
            if (count <= 0) {  // no reader any more
                ended_ = true;
                return;
            }
            left.remove_prefix(static_cast<std::size_t>(count));
        }
    }

    Descriptor home_, poll_;
    std::array<Descriptor, Relay::max_hosts> tuns_;
    Relay relay_;
    RelayCommands commands_;
    std::string line_;
    Nanos full_at_{};
    bool ended_{};
};

// The relay emulates a network, which must not wait behind the hosts' work: raise its priority. Without permission it
// runs like any other process, and late_max_us in the statistics shows the effect.
void be_prompt() {
    prctl(PR_SET_TIMERSLACK, 1UL);  // the default rounds every sleep up by 50 us
    const sched_param lowest{.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR, &lowest) != 0) setpriority(PRIO_PROCESS, 0, -15);
}

}  // namespace
}  // namespace storm

int main(int argc, char**) {
    if (argc > 1) {
        std::fputs("stormtorch-relay takes no arguments: commands are lines on stdin\n", stderr);
        return 2;
    }
    std::signal(SIGPIPE, SIG_IGN);
    try {
        storm::be_prompt();
        storm::Program().run();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "stormtorch-relay: %s\n", error.what());
        return 1;
    }
    return 0;
}
