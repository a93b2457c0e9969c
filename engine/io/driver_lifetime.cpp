// Start, fork and close of a driver, and the faults that all drivers of a process share; driver.cpp holds the rest of
// Driver.
#include <poll.h>
#include <pthread.h>
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

#include "io/driver.hpp"

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

// A process that is forked from ours must not keep our ports: if ours dies, no process may listen there.
void lock_registry() { registry().mutex.lock(); }
void unlock_registry() { registry().mutex.unlock(); }

void watch(const Descriptor& epoll, int fd, const std::string& what) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
        throw std::system_error(errno, std::generic_category(), what);
    }
}

}  // namespace

Driver::Driver(const std::string& host, std::uint16_t port, const SocketConfig& config)
    : Driver(std::vector{host}, port, config) {}

Driver::Driver(const std::vector<std::string>& hosts, std::uint16_t port, const SocketConfig& config)
    : owner_(getpid()) {
    if (hosts.empty() || hosts.size() > most_paths)
        throw std::invalid_argument("an endpoint has 1 to " + std::to_string(most_paths) + " paths, got " +
                                    std::to_string(hosts.size()));
    SocketConfig own = config;
    own.own_interface = hosts.size() > 1;
    for (const std::string& host : hosts) {
        path_sockets_.push_back(std::make_unique<PathSocket>(Address(host, port), own));
        for (std::size_t i = 0; i < burst; ++i) free_.push_back(batches_.emplace_back(std::make_unique<Batch>()).get());
    }
}

Driver::~Driver() {
    if (getpid() == owner_) {
        close(0);
        return;
    }
    // The parent's threads do not exist here. They may have held locks or waited when we were forked, so wait for
    // neither.
    if (thread_.joinable()) thread_.detach();
    new (&changed_) std::condition_variable_any;
    new (&view_changed_) std::condition_variable_any;
    // The engine's thread may have been in the middle of a change when we were forked, so nothing of this can be
    // destroyed.
    (void)core_.release();
    (void)faults_.release();
    new (&ended_) decltype(ended_);
    new (&free_) decltype(free_);
    for (auto& path_socket : path_sockets_) {
        path_socket->socket.close();
        (void)path_socket.release();
    }
    new (&near_) decltype(near_);
    const std::unique_lock guard(registry().mutex, std::try_to_lock);
    registry().drivers.erase(this);
}

void Driver::drop_inherited() {
    for (Driver* driver : registry().drivers) {
        for (auto& path_socket : driver->path_sockets_) path_socket->socket.close();
    }
    unlock_registry();
}

void Driver::start(CoreConfig config, std::vector<Address> peers) {
    std::vector<std::vector<Address>> by_path;
    for (Address& each : peers) by_path.push_back({std::move(each)});
    start(std::move(config), by_path);
}

void Driver::start(CoreConfig config, const std::vector<std::vector<Address>>& peers) {
    if (closed_) throw std::runtime_error("the engine is closed");
    if (core_) throw std::runtime_error("the engine is running already");
    if (peers.size() != config.world) throw std::invalid_argument("one address per rank is needed");

    config.paths = static_cast<std::uint8_t>(path_sockets_.size());
    std::vector<std::vector<Address>> by_path(path_sockets_.size(), std::vector<Address>(peers.size()));
    for (std::size_t each = 0; each < peers.size(); ++each) {
        const std::size_t both = common_paths(peers[each]);
        config.peer_paths.push_back(static_cast<std::uint8_t>(both));
        for (std::size_t path = 0; path < both; ++path) by_path[path][each] = peers[each][path];
    }
    const std::string rank = "rank " + std::to_string(config.rank);
    const std::string what = rank + ": the engine needs 6 more descriptors, see `ulimit -n`";
    // Do everything that may fail before this object changes; only the thread is started last.
    auto epoll = Descriptor::checked(epoll_create1(EPOLL_CLOEXEC), what.c_str());
    auto timer = Descriptor::checked(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), what.c_str());
    auto wakes = Descriptor::checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), what.c_str());
    auto nudges = Descriptor::checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), what.c_str());
    auto doorbell = Descriptor::checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), what.c_str());
    auto inputs = Descriptor::checked(epoll_create1(EPOLL_CLOEXEC), what.c_str());
    watch(inputs, doorbell.get(), rank + ": cannot watch a descriptor");
    for (const auto& path_socket : path_sockets_)
        watch(inputs, path_socket->socket.fd(), rank + ": cannot watch a descriptor");
    for (const int fd : {timer.get(), wakes.get(), inputs.get()})
        watch(epoll, fd, rank + ": cannot watch a descriptor");
    auto faults = std::make_unique<FaultPath>(
        config.rank, config.secrets.checks_data ? max_datagram_bytes : header_bytes, config.lane);
    auto core = std::make_unique<Core>(std::move(config), clock_now());

    [[maybe_unused]] static const int once = pthread_atfork(lock_registry, unlock_registry, drop_inherited);
    const std::lock_guard guard(registry().mutex);
    const Lock lock(mutex_);
    faults->set(registry().settings, clock_now());
    const auto registered = registry().drivers.insert(this).first;
    try {
        thread_ = std::thread([this] { run(); });  // waits for the mutex until we are done
    } catch (const std::system_error& error) {
        registry().drivers.erase(registered);
        throw std::system_error(error.code(), rank + ": the engine needs a thread, see `ulimit -u`");
    } catch (...) {
        registry().drivers.erase(registered);
        throw;
    }
    for (std::size_t path = 0; path < by_path.size(); ++path)
        path_sockets_[path]->routes.assign(std::move(by_path[path]));
    fault_settings_ = registry().settings;
    faults_ = std::move(faults);
    core_ = std::move(core);
    epoll_ = std::move(epoll);
    timer_ = std::move(timer);
    thread_wake_ = std::move(wakes);
    caller_wake_ = std::move(nudges);
    doorbell_ = std::move(doorbell);
    inputs_ = std::move(inputs);
    core_->pause_shared_memory(fault_settings_ != nullptr);
    for (std::uint16_t peer = 0; peer < core_->config().world; ++peer) load_path_metrics(peer);
    listening_ = true;
}

std::size_t Driver::common_paths(const std::vector<Address>& addresses) const {
    const std::size_t most = std::min(addresses.size(), path_sockets_.size());
    std::size_t count = std::min<std::size_t>(most, 1);
    while (count < most && addresses[count].family() == path_sockets_[count]->socket.family()) ++count;
    return count;
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
    const Lock lock(mutex_);
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
        Lock lock(mutex_);
        if (std::exchange(closing_, true)) return;
        if (!core_) {
            closed_ = true;
            for (const auto& path_socket : path_sockets_) path_socket->socket.close();
            return;
        }
        try {
            if (!failure_) {
                for (std::uint16_t rank = 0; rank < core_->config().world; ++rank) store_path_metrics(rank);
                say_goodbye(lock, linger);
            }
        } catch (...) {
            fail();  // it ends either way
        }
        closed_ = true;
        changed_.notify_all();
        view_changed_.notify_all();
    }
    {
        const std::lock_guard guard(registry().mutex);
        registry().drivers.erase(this);
    }
    wake(thread_wake_);
    wake(caller_wake_);
    thread_.join();
    // A caller that drives uses the descriptors until it sees that the driver is closed.
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return !caller_drives_; });
    for (Descriptor* each : {&epoll_, &timer_, &thread_wake_, &caller_wake_, &doorbell_, &inputs_}) each->close();
    near_.clear();
    core_->disconnect();
    for (const auto& path_socket : path_sockets_) path_socket->socket.close();
}

void Driver::say_goodbye(Lock& lock, Nanos linger) {
    const Nanos timeout_at = clock_now() + linger;
    if (!std::exchange(leaving_, true)) core_->leave();
    while (linger > 0 && !core_->goodbye_acknowledged() && clock_now() < timeout_at) {
        if (step()) {
            mutex_.yield_to_waiters();
            continue;
        }
        lock.unlock();
        std::array<pollfd, most_paths> readable{};
        for (std::size_t path = 0; path < path_sockets_.size(); ++path)
            readable[path] = {.fd = path_sockets_[path]->socket.fd(), .events = POLLIN, .revents = 0};
        poll(readable.data(), path_sockets_.size(), 1);
        lock.lock();
    }
    // Every peer gets a goodbye, even if the answers are not waited for.
    for (int round = 0; round < 64 && flush(clock_now()); ++round) {
    }
}

void Driver::store_path_metrics(std::uint16_t peer) {
    for (std::size_t path = 0; path < path_sockets_.size(); ++path) {
        const std::optional<PathMetrics> metrics = core_->path_metrics(peer, path);
        if (!metrics) continue;
        const std::string host = path_sockets_[path]->routes.present()[peer].host();
        PathCache::of_process().store(host, core_->config().lane, *metrics, clock_now());
    }
}

void Driver::load_path_metrics(std::uint16_t peer) {
    for (std::size_t path = 0; path < path_sockets_.size(); ++path) {
        const std::string host = path_sockets_[path]->routes.present()[peer].host();
        const std::optional<PathMetrics> metrics =
            PathCache::of_process().recall(host, core_->config().lane, clock_now());
        if (metrics) core_->recall(peer, *metrics, path);
    }
}

void Driver::set_faults(std::shared_ptr<const FaultSettings> settings) {
    if (settings) settings->validate();
    const std::lock_guard guard(registry().mutex);
    registry().settings = settings;
    for (Driver* driver : registry().drivers) {
        {
            const Lock lock(driver->mutex_);
            driver->fault_settings_ = settings;
            driver->apply_faults();
        }
        driver->wake(driver->thread_wake_);
        driver->wake(driver->caller_wake_);
    }
}

void Driver::apply_faults() {
    faults_->set(fault_settings_, clock_now());
    // Faults apply to datagrams only, so shared memory is paused while there are any.
    if (core_) core_->pause_shared_memory(fault_settings_ != nullptr);
}

}  // namespace storm
