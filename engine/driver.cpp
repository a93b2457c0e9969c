#include "driver.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace storm {
namespace {

// How often timers are looked at while there is always something to read.
constexpr Nanos tick_every = 200 * microsecond;

timespec to_timespec(Nanos t) { return {.tv_sec = t / second, .tv_nsec = t % second}; }

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

int checked(int fd, const char* what) {
    if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
    return fd;
}

}  // namespace

Nanos clock_now() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * second + now.tv_nsec;
}

Driver::Driver(const std::string& host, std::uint16_t port, const SocketConfig& config)
    : socket_(Address(host, port), config) {}

Driver::~Driver() { close(0); }

void Driver::start(CoreConfig config, std::vector<Address> peers) {
    if (core_) throw std::runtime_error("the engine is running already");
    if (peers.size() != config.world) throw std::invalid_argument("one address per rank is needed");
    socket_.set_peers(std::move(peers));
    faults_ = std::make_unique<FaultPath>(config.rank, config.secrets.checks_data ? max_datagram_bytes : header_bytes);
    core_ = std::make_unique<Core>(std::move(config), clock_now());
    epoll_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll");
    timer_ = checked(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), "timerfd");
    wake_ = checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "eventfd");
    nudge_ = checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "eventfd");
    for (const int fd : {timer_, wake_}) {
        epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
        epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
    }
    listen(true);
    {
        const std::lock_guard guard(registry().mutex);
        registry().drivers.insert(this);
        const Lock lock(mutex_);
        fault_settings_ = registry().settings;
        apply_faults();
    }
    thread_ = std::thread([this] { run(); });
}

std::uint64_t Driver::post(ExchangeSpec spec) {
    const Lock lock(mutex_);
    if (!core_ || closed_) throw std::runtime_error("the engine is closed");
    const Nanos now = clock_now();
    for (StageSpec& stage : spec.stages) {
        if (stage.deadline != never) stage.deadline += now;
    }
    if (spec.timeout_at != never) spec.timeout_at += now;
    const std::uint64_t id = core_->post(spec, now);
    // Bounded: without a word from a receiver no more than the eager bytes may leave.
    while (flush(now)) {
    }
    collect();
    // Whoever sleeps must wake for a timer that this exchange brought.
    if (caller_drives_) {
        if (next_timer() < sleeping_until_) wake(nudge_);
    } else {
        arm();
    }
    return id;
}

bool Driver::wait(std::uint64_t id, Nanos timeout, Outcome& outcome) {
    Lock lock(mutex_);
    const Nanos give_up_at = timeout == never ? never : clock_now() + timeout;
    const auto ready = [&] { return ended_.contains(id); };
    while (!ready()) {
        if (!core_ || closed_) throw std::runtime_error("the engine is closed");
        if (clock_now() >= give_up_at) return false;
        if (caller_drives_) {
            const auto woken = [&] { return ready() || !caller_drives_ || closed_; };
            if (give_up_at == never) {
                changed_.wait(lock, woken);
            } else {
                changed_.wait_for(lock, std::chrono::nanoseconds(std::max<Nanos>(give_up_at - clock_now(), 0)), woken);
            }
            continue;
        }
        caller_drives_ = true;
        listen(false);
        while (!ready() && !closed_) {
            if (step()) continue;
            const Nanos now = clock_now();
            if (now >= give_up_at) break;
            const Nanos until = std::min(next_timer(), give_up_at);
            sleeping_until_ = until;
            const timespec remaining = to_timespec(std::max<Nanos>(until - now, 0));
            const bool full = !unsent_.empty();
            lock.unlock();
            std::array<pollfd, 2> waits{
                {{.fd = socket_.fd(), .events = static_cast<short>(full ? POLLIN | POLLOUT : POLLIN), .revents = 0},
                 {.fd = nudge_, .events = POLLIN, .revents = 0}}};
            ppoll(waits.data(), waits.size(), until == never ? nullptr : &remaining, nullptr);
            std::uint64_t drained = 0;
            if (waits[1].revents != 0) (void)!read(nudge_, &drained, sizeof drained);
            lock.lock();
            sleeping_until_ = 0;
        }
        caller_drives_ = false;
        if (!closed_) {
            listen(true);
            arm();
        }
        changed_.notify_all();
    }
    const auto found = ended_.find(id);
    outcome = std::move(found->second);
    ended_.erase(found);
    return true;
}

bool Driver::ended(std::uint64_t id) {
    const Lock lock(mutex_);
    return ended_.contains(id);
}

void Driver::cancel(std::uint64_t id) {
    const Lock lock(mutex_);
    if (!core_ || closed_) return;
    core_->cancel(id, clock_now());
    flush(clock_now());
    collect();
}

void Driver::readmit(std::uint16_t peer, const Address& address, std::uint16_t incarnation,
                     const std::optional<Key>& key) {
    const Lock lock(mutex_);
    if (!core_ || closed_) throw std::runtime_error("the engine is closed");
    core_->readmit(peer, incarnation, key, clock_now());
    socket_.set_peer(peer, address);
    flush(clock_now());
    collect();
    // Exchanges may have ended, among them one that a driving caller waits for.
    if (caller_drives_) {
        wake(nudge_);
    } else {
        arm();
    }
}

void Driver::run() {
    Lock lock(mutex_);
    while (!closed_) {
        if (!caller_drives_) {
            if (step()) {
                // Let a caller post, or take over.
                lock.unlock();
                lock.lock();
                continue;
            }
            arm();
        }
        lock.unlock();
        std::array<epoll_event, 4> events;
        const int count = epoll_wait(epoll_, events.data(), events.size(), -1);
        for (int i = 0; i < count; ++i) {
            std::uint64_t drained = 0;
            const int fd = events[static_cast<std::size_t>(i)].data.fd;
            if (fd != socket_.fd()) (void)!read(fd, &drained, sizeof drained);
        }
        lock.lock();
        armed_at_ = never;
    }
}

bool Driver::step() {
    // Delays are found from when things left and came, and the least of them counts. So what arrives is stamped after the
    // system call that fetched it, and what leaves right before the one that sends it: an error then only adds.
    Nanos now = clock_now();
    const auto take = [&](std::span<std::byte> datagram) { core_->receive(datagram, now); };
    faults_->release(now, take);
    bool first = true;
    const std::size_t received = socket_.receive([&](std::span<std::byte> datagram) {
        if (std::exchange(first, false)) now = clock_now();
        // Faults are by link, so they must know the source before anything is checked.
        const auto header = fault_settings_ ? parse_header(datagram) : std::nullopt;
        faults_->receive(header ? header->source : std::uint16_t{0xffff}, datagram, now, take);
    });
    if (received > 0) {
        core_->set_overflow(socket_.overflow());
        now = clock_now();
    }
    if (received == 0 || now - ticked_at_ >= tick_every) {
        core_->tick(now);
        ticked_at_ = now;
    }
    const bool sent = flush(now);
    collect();
    return received > 0 || sent;
}

bool Driver::flush(Nanos now) {
    if (unsent_.empty()) {
        for (Batch& batch : batches_) {
            if (!core_->transmit(batch, now)) break;
            unsent_.push_back(&batch);
        }
    }
    if (unsent_.empty()) return false;
    const std::size_t sent = socket_.send(unsent_);
    for (std::size_t i = 0; i < sent; ++i) core_->transmitted(*unsent_[i], now);
    unsent_.erase(unsent_.begin(), unsent_.begin() + static_cast<std::ptrdiff_t>(sent));
    return sent > 0;
}

void Driver::collect() {
    bool any = false;
    while (auto finished = core_->take_finished()) {
        ended_.emplace(finished->id, std::move(finished->outcome));
        any = true;
    }
    if (any) changed_.notify_all();
}

Nanos Driver::next_timer() const { return std::min(core_->next_timer(), faults_->next_release_at()); }

void Driver::listen(bool own_thread) {
    if (listening_ == own_thread) return;
    listening_ = own_thread;
    epoll_event event{.events = EPOLLIN, .data = {.fd = socket_.fd()}};
    epoll_ctl(epoll_, own_thread ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, socket_.fd(), &event);
}

void Driver::arm() {
    // A full socket is tried again soon rather than watched: it drains in microseconds.
    const Nanos at = unsent_.empty() ? next_timer() : std::min(next_timer(), clock_now() + 100 * microsecond);
    if (at == armed_at_) return;
    armed_at_ = at;
    itimerspec when{};
    if (at != never) when.it_value = to_timespec(std::max<Nanos>(at, 1));
    timerfd_settime(timer_, TFD_TIMER_ABSTIME, &when, nullptr);
}

void Driver::wake(int fd) const {
    const std::uint64_t one = 1;
    (void)!write(fd, &one, sizeof one);
}

void Driver::close(Nanos linger) {
    if (!core_) {
        socket_.close();
        return;
    }
    {
        Lock lock(mutex_);
        if (closed_) return;
        const Nanos give_up_at = clock_now() + linger;
        core_->leave(clock_now());
        while (linger > 0 && !core_->gone() && clock_now() < give_up_at) {
            if (step()) continue;
            lock.unlock();
            pollfd readable{.fd = socket_.fd(), .events = POLLIN, .revents = 0};
            poll(&readable, 1, 1);
            lock.lock();
        }
        // Everyone gets a goodbye, even if nobody waits for the answers.
        for (int round = 0; round < 64 && flush(clock_now()); ++round) {
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
    // A caller that was driving needs its descriptor until it has seen that all is over.
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return !caller_drives_; });
    for (const int fd : {epoll_, timer_, wake_, nudge_}) ::close(fd);
    socket_.close();
}

Driver::Health Driver::health() {
    const Lock lock(mutex_);
    Health health;
    health.overflow = socket_.overflow();
    health.segments = socket_.segments();
    health.coalesces = socket_.coalesces();
    if (core_) {
        health.counters = core_->counters();
        health.faults = faults_->counters();
    }
    return health;
}

Driver::LinkHealth Driver::link(std::uint16_t peer) {
    const Lock lock(mutex_);
    if (!core_) return {};
    return {.round_trip = core_->round_trip(peer),
            .loss = core_->loss_from(peer),
            .bytes_per_s = core_->rate_to(peer),
            .path_bytes = core_->path_bytes(peer)};
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
        driver->wake(driver->wake_);
        driver->wake(driver->nudge_);
    }
}

void Driver::apply_faults() { faults_->set(fault_settings_, clock_now()); }

}  // namespace storm
