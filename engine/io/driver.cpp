#include "io/driver.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace storm {
namespace {

// How often timers are checked while there is always something to read.
constexpr Nanos tick_every = 200 * microsecond;
// How often the socket is read while there is always something in shared memory.
constexpr Nanos read_every = 50 * microsecond;
// How long a caller polls shared memory before it sleeps: a wake-up takes about as long.
constexpr Nanos longest_linger = 50 * microsecond;
// Rounds over shared memory in a call that only begins something: peers may go on writing for as long as we read.
constexpr int most_rounds = 8;

// How often to look for ICMP refusals if no call has returned one: the kernel may have reported it to a call that had
// sent something.
constexpr Nanos refusals_every = millisecond;
// How long a datagram may wait to be read for its time stamp to be believed.
constexpr Nanos longest_buffered = 100 * millisecond;

timespec to_timespec(Nanos t) { return {.tv_sec = t / second, .tv_nsec = t % second}; }

}  // namespace

Nanos clock_now(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return now.tv_sec * second + now.tv_nsec;
}

bool Driver::drive() {
    try {
        return more_ = step();
    } catch (...) {
        fail();
        throw;
    }
}

void Driver::fail() noexcept {
    if (!failure_) failure_ = std::current_exception();
    changed_.notify_all();
    view_changed_.notify_all();
    wake(thread_wake_);
    wake(caller_wake_);
}

void Driver::check_open() const {
    if (!core_ || closed_) throw std::runtime_error("the engine is closed");
    if (!failure_) return;
    std::string why = "for an unknown reason";
    try {
        std::rethrow_exception(failure_);
    } catch (const std::exception& error) {
        why = error.what();
    } catch (...) {
    }
    throw std::runtime_error("the engine has failed and can only be closed: " + why);
}

std::uint64_t Driver::post(ExchangeSpec spec, bool by_thread) {
    const Lock lock(mutex_);
    check_open();
    const Nanos now = clock_now();
    for (StageSpec& stage : spec.stages) {
        if (stage.deadline != never) stage.deadline += now;
    }
    if (spec.timeout_at != never) spec.timeout_at += now;
    const std::uint64_t id = attempt([&] {
        const std::uint64_t posted = core_->post(spec, now);
        if (by_thread) {
            more_ = true;
            wake(caller_drives_ ? caller_wake_ : thread_wake_);
            return posted;
        }
        pass_some();
        // The loop ends: until receivers answer, no more than the eager bytes may be sent.
        while (flush(now)) {
        }
        collect();
        return posted;
    });
    // The exchange may have brought an earlier timer.
    if (!by_thread) rearm();
    return id;
}

// Guard: the caller drives while it exists, and the engine's own thread takes over again, however the caller leaves.
class Driver::CallerDrives {
public:
    explicit CallerDrives(Driver& driver) : driver_(driver) {
        driver_.caller_drives_ = true;
        driver_.listen(false);
    }
    ~CallerDrives() {
        driver_.caller_drives_ = false;
        driver_.sleeping_until_ = 0;
        if (!driver_.over()) {
            driver_.listen(true);
            driver_.arm();
            // The engine's own thread is asleep: wake it to go on with what is left. Peers ring its doorbell from now
            // on.
            if (driver_.more_ || !driver_.core_->may_sleep()) wake(driver_.thread_wake_);
        }
        driver_.changed_.notify_all();
    }
    CallerDrives(const CallerDrives&) = delete;
    CallerDrives& operator=(const CallerDrives&) = delete;

private:
    Driver& driver_;
};

bool Driver::wait(std::uint64_t id, Nanos timeout, Outcome& outcome) {
    Lock lock(mutex_);
    const Nanos timeout_at = timeout == never ? never : clock_now() + timeout;
    const auto ready = [&] { return ended_.contains(id); };
    while (!ready()) {
        check_open();
        if (clock_now() >= timeout_at) return false;
        if (caller_drives_) {
            const auto woken = [&] { return ready() || !caller_drives_ || over(); };
            if (timeout_at == never) {
                changed_.wait(lock, woken);
            } else {
                changed_.wait_for(lock, std::chrono::nanoseconds(std::max<Nanos>(timeout_at - clock_now(), 0)), woken);
            }
            continue;
        }
        const CallerDrives turn(*this);
        while (!ready() && !over()) {
            const bool busy = drive();
            // It may have ended by a timer, or by what arrived while this thread lingered.
            if (ready()) break;
            const Nanos now = clock_now();
            if (now >= timeout_at) break;
            if (busy) {
                // This may go on for long: let other threads post or cancel in between.
                mutex_.yield_to_waiters();
                continue;
            }
            // Meanwhile, another thread may have ended what this one waits for; it wakes sleeping threads only.
            if (linger(lock) || ready() || over() || !core_->may_sleep()) continue;
            const Nanos until = std::min(next_timer(), timeout_at);
            sleeping_until_ = until;
            const timespec remaining = to_timespec(std::max<Nanos>(until - clock_now(), 0));
            Polled waits = to_poll();
            lock.unlock();
            ppoll(waits.all.data(), waits.count, until == never ? nullptr : &remaining, nullptr);
            std::uint64_t drained = 0;
            if (waits.all[0].revents != 0) (void)!read(caller_wake_.get(), &drained, sizeof drained);
            if (waits.all[1].revents != 0) (void)!read(doorbell_.get(), &drained, sizeof drained);
            lock.lock();
            sleeping_until_ = 0;
        }
    }
    const auto found = ended_.find(id);
    outcome = std::move(found->second);
    ended_.erase(found);
    return true;
}

bool Driver::ended(std::uint64_t id) {
    const Lock lock(mutex_);
    return failure_ || ended_.contains(id);
}

bool Driver::failed() {
    const Lock lock(mutex_);
    return failure_ != nullptr;
}

std::optional<Driver::EndStatus> Driver::end_status(std::uint64_t id) {
    const Lock lock(mutex_);
    const auto found = ended_.find(id);
    if (found == ended_.end()) return std::nullopt;
    const Outcome& outcome = found->second;
    return EndStatus{.status = outcome.status, .peer = outcome.peer, .failure_cause = outcome.failure_cause};
}

std::vector<Pool::First> Driver::peek(std::uint32_t channel, std::uint32_t seq) {
    const Lock lock(mutex_);
    return core_ && !closed_ ? core_->peek(channel, seq) : std::vector<Pool::First>{};
}

void Driver::cancel(std::uint64_t id) {
    end_by([id](Core& core, Nanos now) { core.cancel(id, now); });
}

void Driver::fail(std::uint64_t id, const EndStatus& why) {
    end_by([id, &why](Core& core, Nanos now) { core.fail(id, why.status, why.peer, why.failure_cause, now); });
}

template <class End>
void Driver::end_by(End&& end) {
    const Lock lock(mutex_);
    if (!core_ || over()) return;
    attempt([&] {
        end(*core_, clock_now());
        while (flush(clock_now())) {
        }
        collect();
        // The thread that drives may be waiting for this exchange.
        if (caller_drives_) {
            wake(caller_wake_);
        } else {
            arm();
        }
    });
}

void Driver::readmit(std::uint16_t peer, const std::vector<Address>& addresses, std::uint32_t incarnation,
                     const std::optional<LinkKeys>& keys) {
    const Lock lock(mutex_);
    check_open();
    if (addresses.empty()) throw std::invalid_argument("a process has at least one address");
    attempt([&] {
        const std::size_t paths = common_paths(addresses);
        store_path_metrics(peer);
        core_->readmit(peer, incarnation, keys, clock_now(), paths);
        for (std::size_t path = 0; path < paths; ++path) path_sockets_[path]->routes.assign(peer, addresses[path]);
        load_path_metrics(peer);
        near_.erase(peer);
        pass_some();
        flush(clock_now());
        collect();
    });
    // Exchanges may have ended, among them one that a driving caller waits for.
    if (caller_drives_) {
        wake(caller_wake_);
    } else {
        arm();
    }
}

Driver::SharedMemoryOffer Driver::offer_shared_memory(std::uint16_t peer, std::size_t neighbours) {
    auto ring = std::make_unique<RingMemory>(neighbours);
    ring->shared().shut.store(1, std::memory_order_release);  // until we read
    const Lock lock(mutex_);
    check_open();
    const auto copy = [](int fd) {
        return Descriptor::checked(fcntl(fd, F_DUPFD_CLOEXEC, 0),
                                   "shared memory needs more descriptors, see `ulimit -n`");
    };
    if (core_->broadcast_buffer() == nullptr) core_->set_broadcast_buffer(std::make_unique<BroadcastMemory>());
    SharedMemoryOffer offer{.ring = copy(ring->file()),
                            .doorbell = copy(doorbell_.get()),
                            .broadcast_buffer = copy(core_->broadcast_buffer()->file())};
    ring->close_file();
    near_[peer].from_it = std::move(ring);
    return offer;
}

void Driver::accept_shared_memory(std::uint16_t peer, SharedMemoryOffer offer) {
    auto memory = std::make_unique<RingMemory>(std::move(offer.ring));
    memory->close_file();
    auto broadcast_buffer = std::make_unique<BroadcastMemory>(std::move(offer.broadcast_buffer));
    broadcast_buffer->close_file();
    const int flags = fcntl(offer.doorbell.get(), F_GETFL);
    if (flags < 0 || (flags & O_NONBLOCK) == 0)
        throw std::invalid_argument("this descriptor is no doorbell (a nonblocking eventfd)");
    const Lock lock(mutex_);
    check_open();
    near_[peer].to_it = std::move(memory);
    near_[peer].peer_broadcast_memory = std::move(broadcast_buffer);
    near_[peer].doorbell = std::move(offer.doorbell);
}

void Driver::use_shared_memory(std::uint16_t peer, std::uint32_t incarnation) {
    const Lock lock(mutex_);
    check_open();
    Near& near = near_[peer];
    if (!near.from_it || !near.to_it) throw std::invalid_argument("no memory was shared with this rank");
    const auto go_on = [&] {
        collect();
        // The peer may have written something already.
        wake(thread_wake_);
        wake(caller_wake_);
    };
    try {
        attempt([&] {
            auto shared_memory = std::make_unique<SharedMemoryChannel>(std::move(near.to_it), std::move(near.from_it),
                                                                       std::move(near.peer_broadcast_memory));
            core_->connect(peer, incarnation, std::move(shared_memory), clock_now());
        });
    } catch (const std::invalid_argument&) {
        go_on();  // what an earlier shared-memory channel held may have ended exchanges
        throw;
    }
    attempt(go_on);
}

std::vector<std::uint16_t> Driver::near() {
    const Lock lock(mutex_);
    return core_ && !closed_ ? core_->near() : std::vector<std::uint16_t>{};
}

// Something was posted or changed: the sleeping thread may have to wake earlier.
void Driver::rearm() {
    if (!caller_drives_) {
        arm();
    } else if (sleeping_until_ != 0 && (full() || next_timer() < sleeping_until_)) {
        // A caller that fell asleep before the socket was full does not notice when it has space again.
        wake(caller_wake_);
    }
}

bool Driver::wait_view(std::uint32_t above, Nanos timeout) {
    Lock lock(mutex_);
    check_open();
    const auto woken = [&] { return over() || core_->view_number() > above; };
    if (timeout == never) {
        view_changed_.wait(lock, woken);
    } else {
        view_changed_.wait_for(lock, std::chrono::nanoseconds(timeout), woken);
    }
    check_open();
    return core_->view_number() > above;
}

void Driver::on_view(std::function<void(const View&, bool)> callback) {
    const Lock lock(mutex_);
    on_view_ = std::move(callback);
}

void Driver::follow(const View& view, bool inside) {
    const Lock lock(mutex_);
    if (!core_ || over()) return;
    attempt([&] {
        core_->follow(view, inside, clock_now());
        collect();
    });
    wake(caller_drives_ ? caller_wake_ : thread_wake_);
}

CanComplete Driver::can_complete(std::uint64_t id) {
    const Lock lock(mutex_);
    return core_ && !over() ? core_->can_complete(id, clock_now()) : CanComplete::none;
}

std::vector<std::uint16_t> Driver::unreachable_peers(std::uint64_t id) {
    const Lock lock(mutex_);
    return core_ && !over() ? core_->unreachable_peers(id, clock_now()) : std::vector<std::uint16_t>{};
}

void Driver::run() {
    Lock lock(mutex_);
    while (!over()) {
        if (!caller_drives_) {
            bool busy = false;
            try {
                busy = drive();
            } catch (...) {
                return;  // no caller to report to; waiting threads were woken and find the failure
            }
            if (busy) {
                // Let a caller post, or take over.
                mutex_.yield_to_waiters();
                continue;
            }
            if (!core_->may_sleep()) continue;
            arm();
        }
        lock.unlock();
        std::array<epoll_event, 4> events;
        const int count = epoll_wait(epoll_.get(), events.data(), events.size(), -1);
        for (int i = 0; i < count; ++i) {
            std::uint64_t drained = 0;
            const int fd = events[static_cast<std::size_t>(i)].data.fd;
            if (fd != inputs_.get()) (void)!read(fd, &drained, sizeof drained);
        }
        lock.lock();
        // Only the driving thread may reset the doorbell: it may ring for a caller that has taken over meanwhile.
        std::uint64_t rung = 0;
        if (!caller_drives_) (void)!read(doorbell_.get(), &rung, sizeof rung);
        armed_at_ = never;
    }
}

bool Driver::pass() {
    const bool any = core_->pass(clock_now());
    core_->ring_doorbells([&](std::uint16_t peer) { wake(near_.at(peer).doorbell); });
    return any;
}

void Driver::pass_some() {
    for (int round = 0; round < most_rounds; ++round) {
        if (!pass()) return;
    }
    wake(caller_drives_ ? caller_wake_ : thread_wake_);
}

bool Driver::linger(Lock& lock) {
    if (core_->near().empty()) return false;
    const Nanos until = clock_now() + longest_linger;
    do {
        lock.unlock();
        // Another rank may want this core, perhaps the one that we wait for.
        sched_yield();
        lock.lock();
        if (over() || pass()) return true;
    } while (clock_now() < until);
    return false;
}

bool Driver::step() {
    const bool passed = pass();
    if (passed && clock_now() - read_at_ < read_every) {
        flush(clock_now());
        collect();
        return true;
    }
    // Delays are differences of time stamps, and rate control uses the least of them. So arrivals are stamped by the
    // kernel, or after the system call that fetched them, departures right before the one that sends them: errors then
    // only lengthen a delay.
    Nanos now = clock_now(), arrived_at = now, behind = 0;
    std::size_t path = 0;
    const Address* source = nullptr;  // unknown of datagrams that faults have held back
    const auto take = [&](std::span<std::byte> datagram) {
        core_->receive(datagram, now, arrived_at);
        if (source != nullptr) on_source_address(path, *source, now);
    };
    faults_->release(now, take);
    bool first = true;
    Socket::Read got;
    const auto take_from = [&](std::span<std::byte> datagram, Nanos stamp, const Address& from) {
        source = fault_settings_ ? nullptr : &from;
        if (std::exchange(first, false)) {
            // In this order: a pause between the two makes a datagram late rather than early.
            const Nanos stamped = clock_now(CLOCK_REALTIME);
            now = clock_now();
            behind = stamped - now;
        }
        // The clock of stamps may be set while a datagram waits.
        const Nanos waited = now - (stamp - behind);
        arrived_at = waited > 0 && waited < longest_buffered ? now - waited : now;
        // Faults depend on the link, so the source must be known before the datagram is checked.
        const auto header = fault_settings_ ? parse_header(datagram) : std::nullopt;
        const auto rank = static_cast<std::uint16_t>(header ? header->source % core_->config().world : 0xffff);
        faults_->receive(rank, datagram, now, take);
    };
    std::uint32_t overflow = 0;
    for (; path < path_sockets_.size(); ++path) {
        const Socket::Read read = path_sockets_[path]->socket.receive(take_from);
        got.datagrams += read.datagrams;
        got.more = got.more || read.more;
        overflow += path_sockets_[path]->socket.overflow();
    }
    read_at_ = now;
    if (got.datagrams > 0) {
        core_->set_overflow(overflow);
        now = clock_now();
    }
    // After reading: a datagram shows that its sender is alive.
    const bool look = got.datagrams == 0 && now - refusals_at_ >= refusals_every;
    if (look) refusals_at_ = now;
    for (path = 0; path < path_sockets_.size(); ++path) {
        if (look || path_sockets_[path]->socket.refused()) on_refusals(path, now);
    }
    if (!got.more || now - ticked_at_ >= tick_every) {
        core_->tick(now);
        ticked_at_ = now;
    }
    for (path = 0; path < path_sockets_.size(); ++path) {
        if (now >= path_sockets_[path]->routes.next_timer()) probe_addresses(path, now);
    }
    // A second look costs no system call if there is nothing more to send; then the next one is the sleep.
    bool sent = flush(now);
    if (sent && !got.more) sent = flush(now);
    // A datagram may have unblocked data in shared memory.
    const bool passed_on = pass();
    collect();
    return got.more || sent || passed || passed_on;
}

void Driver::on_source_address(std::size_t path, const Address& from, Nanos now) {
    const std::optional<Core::Heard>& heard = core_->heard();
    if (!heard || heard->path != path) return;  // a datagram on another path's socket says nothing about either
    PathSocket& path_socket = *path_sockets_[path];
    if (path_socket.routes.heard(heard->rank, from, heard->newest, now)) {
        core_->report(reply_, heard->rank, now, path);
        (void)path_socket.socket.send_to(from, reply_);
    }
    path_socket.routes.answered(heard->rank, core_->take_replies(heard->rank, path),
                                core_->probe_timeout(heard->rank, path), now);
}

void Driver::on_refusals(std::size_t path, Nanos now) {
    PathSocket& path_socket = *path_sockets_[path];
    path_socket.socket.read_refusals([&](const Address& from, std::span<const std::byte> quoted) {
        const std::span<const Address> present = path_socket.routes.present();
        for (std::uint16_t rank = 0; rank < present.size(); ++rank) {
            // Only an address from a card that has answered counts: a learned one is a NAT mapping, which may expire,
            // and one that has never answered may belong to another network.
            const Routes::Route route = path_socket.routes.look(rank);
            if (route.address == from && route.answers && !route.learned) core_->refused(rank, quoted, now);
        }
    });
}

void Driver::probe_addresses(std::size_t path, Nanos now) {
    PathSocket& path_socket = *path_sockets_[path];
    path_socket.routes.tick(
        now,
        [&](const Routes::Challenge& each) {
            // If the socket is full, this one is lost: others follow.
            if (core_->challenge(reply_, each.rank, each.id, now, path))
                (void)path_socket.socket.send_to(each.to, reply_);
        },
        [&](std::uint16_t rank) { core_->ping(rank, path); },
        [&](std::uint16_t rank) { core_->reroute(rank, now, path); });
}

void Driver::offer(std::uint16_t peer, const Address& address) {
    const Lock lock(mutex_);
    check_open();
    if (peer >= core_->config().world || peer == core_->config().rank)
        throw std::invalid_argument("a peer must be another rank of the world");
    if (address.family() != path_sockets_[0]->socket.family()) return;  // this socket does not reach it
    path_sockets_[0]->routes.offer(peer, address, clock_now());
    rearm();
}

void Driver::rebind(std::size_t path, const std::string& host) {
    const Lock lock(mutex_);
    check_open();
    PathSocket& path_socket = *path_sockets_.at(path);
    try {
        path_socket.socket.rebind(Address(host, path_socket.socket.port()), path_socket.config);
    } catch (const std::system_error&) {
        path_socket.socket.rebind(Address(host, 0), path_socket.config);
    }
    // The descriptor now refers to another socket, which is not watched yet.
    attempt([&] {
        epoll_event event{.events = EPOLLIN, .data = {.fd = path_socket.socket.fd()}};
        if (epoll_ctl(inputs_.get(), EPOLL_CTL_ADD, path_socket.socket.fd(), &event) != 0)
            throw std::system_error(errno, std::generic_category(), "cannot watch a socket that has moved");
    });
    wake(thread_wake_);
    wake(caller_wake_);
}

void Driver::enable_keepalive() {
    const Lock lock(mutex_);
    check_open();
    for (const auto& path_socket : path_sockets_) path_socket->routes.enable_keepalive(clock_now());
    rearm();
}

std::vector<Routes::Route> Driver::routes() {
    const Lock lock(mutex_);
    const Routes& first = path_sockets_[0]->routes;
    std::vector<Routes::Route> all;
    for (std::uint16_t rank = 0; rank < first.present().size(); ++rank) all.push_back(first.look(rank));
    return all;
}

bool Driver::full() const {
    return std::any_of(path_sockets_.begin(), path_sockets_.end(),
                       [](const auto& path_socket) { return !path_socket->unsent.empty(); });
}

Nanos Driver::routes_timer() const {
    Nanos at = never;
    for (const auto& path_socket : path_sockets_) at = std::min(at, path_socket->routes.next_timer());
    return at;
}

Driver::Polled Driver::to_poll() const {
    Polled found;
    found.all[0] = {.fd = caller_wake_.get(), .events = POLLIN, .revents = 0};
    found.all[1] = {.fd = doorbell_.get(), .events = POLLIN, .revents = 0};
    for (const auto& path_socket : path_sockets_) {
        const auto events = static_cast<short>(path_socket->unsent.empty() ? POLLIN : POLLIN | POLLOUT);
        found.all[found.count++] = {.fd = path_socket->socket.fd(), .events = events, .revents = 0};
    }
    return found;
}

bool Driver::flush(Nanos now) {
    // A path whose socket is full does not block the others.
    std::size_t held = 0;
    for (std::size_t path = 0; path < path_sockets_.size(); ++path) {
        core_->hold(path, !path_sockets_[path]->unsent.empty());
        held += path_sockets_[path]->unsent.empty() ? 0 : 1;
    }
    for (std::size_t filled = 0; held < path_sockets_.size() && filled < burst; ++filled) {
        if (!core_->transmit(*free_.back(), now)) break;
        path_sockets_[free_.back()->path()]->unsent.push_back(free_.back());
        free_.pop_back();
    }
    bool any = false;
    for (const auto& path_socket : path_sockets_) {
        if (path_socket->unsent.empty()) continue;
        const std::size_t sent = path_socket->socket.send(path_socket->unsent, path_socket->routes.present());
        for (std::size_t i = 0; i < sent; ++i) {
            core_->transmitted(*path_socket->unsent[i], now);
            free_.push_back(path_socket->unsent[i]);
        }
        path_socket->unsent.erase(path_socket->unsent.begin(),
                                  path_socket->unsent.begin() + static_cast<std::ptrdiff_t>(sent));
        any = any || sent > 0;
    }
    return any;
}

void Driver::collect() {
    bool any = false;
    while (auto finished = core_->take_finished()) {
        ended_.emplace(finished->id, std::move(finished->outcome));
        any = true;
    }
    if (core_->view_number() != view_number_ || core_->inside() != inside_) {
        view_number_ = core_->view_number();
        inside_ = core_->inside();
        any = true;
        view_changed_.notify_all();
        if (on_view_ && core_->view()) on_view_(*core_->view(), inside_);
    }
    if (!any) return;
    changed_.notify_all();
    // A driving caller may be asleep, waiting for what another thread's call has just ended.
    if (caller_drives_ && sleeping_until_ != 0) wake(caller_wake_);
}

Nanos Driver::next_timer() const { return std::min({core_->next_timer(), faults_->next_release_at(), routes_timer()}); }

void Driver::arm() {
    // A full socket is retried soon rather than watched: it drains in microseconds.
    const Nanos at = full() ? std::min(next_timer(), clock_now() + 100 * microsecond) : next_timer();
    if (at == armed_at_) return;
    armed_at_ = at;
    itimerspec when{};
    if (at != never) when.it_value = to_timespec(std::max<Nanos>(at, 1));
    timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
}

Driver::Health Driver::health() {
    const Lock lock(mutex_);
    Health health;
    for (const auto& path_socket : path_sockets_) health.overflow += path_socket->socket.overflow();
    health.segments = socket().segments();
    health.coalesces = socket().coalesces();
    if (core_) {
        health.counters = core_->counters();
        health.faults = faults_->counters();
    }
    return health;
}

std::vector<Driver::LinkHealth> Driver::links(const std::vector<std::uint16_t>& peers) {
    std::vector<LinkHealth> found(peers.size());
    const Lock lock(mutex_);
    if (!core_) return found;
    std::transform(peers.begin(), peers.end(), found.begin(), [this](std::uint16_t peer) {
        return LinkHealth{.round_trip = core_->round_trip(peer),
                          .loss = core_->loss_from(peer),
                          .bytes_per_s = core_->rate_to(peer),
                          .path_bytes = core_->path_bytes(peer),
                          .paths = core_->paths_to(peer)};
    });
    return found;
}

BottleneckPeaks::Peaks Driver::take_bottleneck_peaks() {
    const Lock lock(mutex_);
    return core_ ? core_->take_bottleneck_peaks() : BottleneckPeaks::Peaks{};
}

}  // namespace storm
