// How a driver begins and ends, and the faults that all drivers of a process share; driver.cpp holds the rest of Driver.
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "driver.hpp"

namespace storm {
namespace {

// Every driver of the process, so that faults reach them all.
struct Registry {
    std::mutex mutex;
    std::set<Driver*> drivers;
    std::shared_ptr<const FaultSettings> settings;
};

Registry& registry() {
    static Registry all;
    return all;
}

void watch(const Descriptor& epoll, int fd, const std::string& what) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
        throw std::system_error(errno, std::generic_category(), what);
    }
}

}  // namespace

Driver::Driver(const std::string& host, std::uint16_t port, const SocketConfig& config)
    : socket_(Address(host, port), config), owner_(getpid()) {}

Driver::~Driver() {
    if (getpid() == owner_) {
        close(0);
        return;
    }
    // The parent's threads do not exist here. They may have held locks or waited when we were forked, so wait for neither.
    if (thread_.joinable()) thread_.detach();
    new (&changed_) std::condition_variable_any;
    // The engine's thread may have been in the middle of a change when we were forked, so nothing of this can be destroyed.
    (void)core_.release();
    (void)faults_.release();
    new (&ended_) decltype(ended_);
    new (&unsent_) decltype(unsent_);
    new (&near_) decltype(near_);
    const std::unique_lock guard(registry().mutex, std::try_to_lock);
    registry().drivers.erase(this);
}

void Driver::start(CoreConfig config, std::vector<Address> peers) {
    if (closed_) throw std::runtime_error("the engine is closed");
    if (core_) throw std::runtime_error("the engine is running already");
    if (peers.size() != config.world) throw std::invalid_argument("one address per rank is needed");
    const std::string rank = "rank " + std::to_string(config.rank);
    const std::string what = rank + ": the engine needs 6 more descriptors, see `ulimit -n`";
    // Do everything that may fail before this object changes; only the thread is started last.
    auto epoll = Descriptor::checked(epoll_create1(EPOLL_CLOEXEC), what.c_str());
    auto timer = Descriptor::checked(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), what.c_str());
    auto wakes = Descriptor::checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), what.c_str());
    auto nudges = Descriptor::checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), what.c_str());
    auto bell = Descriptor::checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), what.c_str());
    auto inputs = Descriptor::checked(epoll_create1(EPOLL_CLOEXEC), what.c_str());
    for (const int fd : {socket_.fd(), bell.get()}) watch(inputs, fd, rank + ": cannot watch a descriptor");
    for (const int fd : {timer.get(), wakes.get(), inputs.get()})
        watch(epoll, fd, rank + ": cannot watch a descriptor");
    auto faults = std::make_unique<FaultPath>(
        config.rank, config.secrets.checks_data ? max_datagram_bytes : header_bytes, config.lane);
    auto core = std::make_unique<Core>(std::move(config), clock_now());

    const std::lock_guard guard(registry().mutex);
    const Lock lock(door_);
    faults->set(registry().settings, clock_now());
    const auto registered = registry().drivers.insert(this).first;
    try {
        thread_ = std::thread([this] { run(); });  // waits at the door until we are done
    } catch (const std::system_error& error) {
        registry().drivers.erase(registered);
        throw std::system_error(error.code(), rank + ": the engine needs a thread, see `ulimit -u`");
    } catch (...) {
        registry().drivers.erase(registered);
        throw;
    }
    routes_.assign(std::move(peers));
    fault_settings_ = registry().settings;
    faults_ = std::move(faults);
    core_ = std::move(core);
    epoll_ = std::move(epoll);
    timer_ = std::move(timer);
    wake_ = std::move(wakes);
    nudge_ = std::move(nudges);
    bell_ = std::move(bell);
    inputs_ = std::move(inputs);
    core_->shut_passages(fault_settings_ != nullptr);
    for (std::uint16_t peer = 0; peer < core_->config().world; ++peer) recall_path(peer);
    listening_ = true;
}

void Driver::listen(bool own_thread) noexcept {
    if (listening_ == own_thread) return;
    listening_ = own_thread;
    try {
        if (own_thread) {
            watch(epoll_, inputs_.get(), "cannot watch the socket");
        } else {
            epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, inputs_.get(), nullptr);
        }
    } catch (...) {
        fail();
    }
}

void Driver::wake(const Descriptor& event) {
    const std::uint64_t one = 1;
    (void)!write(event.get(), &one, sizeof one);
}

void Driver::leave() {
    const Lock lock(door_);
    if (!core_ || over() || std::exchange(leaving_, true)) return;
    attempt([&] {
        core_->leave();
        for (int round = 0; round < 64 && flush(clock_now()); ++round) {
        }
    });
    rearm();
}

void Driver::close(Nanos linger) {
    {
        Lock lock(door_);
        if (std::exchange(closing_, true)) return;
        if (!core_) {
            closed_ = true;
            socket_.close();
            return;
        }
        try {
            if (!failure_) {
                for (std::uint16_t rank = 0; rank < core_->config().world; ++rank) keep_path(rank);
                say_goodbye(lock, linger);
            }
        } catch (...) {
            fail();  // it ends either way
        }
        closed_ = true;
        changed_.notify_all();
    }
    {
        const std::lock_guard guard(registry().mutex);
        registry().drivers.erase(this);
    }
    wake(wake_);
    wake(nudge_);
    thread_.join();
    // A caller that drives uses the descriptors until it sees that the driver is closed.
    Lock lock(door_);
    changed_.wait(lock, [&] { return !caller_drives_; });
    for (Descriptor* each : {&epoll_, &timer_, &wake_, &nudge_, &bell_, &inputs_}) each->close();
    near_.clear();
    core_->disconnect();
    socket_.close();
}

void Driver::say_goodbye(Lock& lock, Nanos linger) {
    const Nanos give_up_at = clock_now() + linger;
    if (!std::exchange(leaving_, true)) core_->leave();
    while (linger > 0 && !core_->gone() && clock_now() < give_up_at) {
        if (step()) {
            door_.give_way();
            continue;
        }
        lock.unlock();
        pollfd readable{.fd = socket_.fd(), .events = POLLIN, .revents = 0};
        poll(&readable, 1, 1);
        lock.lock();
    }
    // Everyone gets a goodbye, even if nobody waits for the answers.
    for (int round = 0; round < 64 && flush(clock_now()); ++round) {
    }
}

void Driver::keep_path(std::uint16_t peer) {
    const std::optional<PathFacts> facts = core_->path_facts(peer);
    if (facts) PathMemory::of_process().keep(routes_.present()[peer].host(), core_->config().lane, *facts, clock_now());
}

void Driver::recall_path(std::uint16_t peer) {
    const std::optional<PathFacts> facts =
        PathMemory::of_process().recall(routes_.present()[peer].host(), core_->config().lane, clock_now());
    if (facts) core_->recall(peer, *facts);
}

void Driver::set_faults(std::shared_ptr<const FaultSettings> settings) {
    if (settings) settings->validate();
    const std::lock_guard guard(registry().mutex);
    registry().settings = settings;
    for (Driver* driver : registry().drivers) {
        {
            const Lock lock(driver->door_);
            driver->fault_settings_ = settings;
            driver->apply_faults();
        }
        driver->wake(driver->wake_);
        driver->wake(driver->nudge_);
    }
}

void Driver::apply_faults() {
    faults_->set(fault_settings_, clock_now());
    // Faults happen to datagrams.
    if (core_) core_->shut_passages(fault_settings_ != nullptr);
}

}  // namespace storm
