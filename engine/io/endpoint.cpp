#include "io/endpoint.hpp"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>

namespace storm {
namespace {

// How long to wait for one lane before the others are checked.
constexpr Nanos check_interval = 50 * millisecond;
// A cancelled part ends at once, unless its last datagrams are still in a full socket.
constexpr Nanos longest_abort = second;
// Distinguishes ids of the lane of low priority from those of lane 0.
constexpr std::uint64_t low_ids = 1ULL << 63;

}  // namespace

Endpoint::Endpoint(const std::string& host, std::uint16_t port, std::size_t lanes, const SocketConfig& config,
                   const std::vector<std::string>& more_hosts, bool low)
    : low_(low), owner_(getpid()) {
    if (lanes == 0) throw std::invalid_argument("an endpoint has at least one lane");
    if ((lanes > 1 || low) && !more_hosts.empty())
        throw std::invalid_argument("an endpoint with several paths has one lane");
    std::vector<std::string> hosts{host};
    hosts.insert(hosts.end(), more_hosts.begin(), more_hosts.end());
    for (std::size_t lane = 0; lane < lanes + (low ? 1 : 0); ++lane) {
        const auto at = static_cast<std::uint16_t>(port == 0 ? 0 : port + lane);
        if (port != 0 && at < port) throw std::invalid_argument("there are not that many ports for the lanes");
        SocketConfig own = config;
        own.low_priority = config.low_priority || lane == lanes;
        lanes_.push_back(std::make_unique<Driver>(hosts, at, own));
    }
}

Endpoint::~Endpoint() {
    // A thread may have been in the middle of a change when this process was forked, so nothing of this can be
    // destroyed.
    if (getpid() != owner_) new (&striped_) decltype(striped_);
}

std::vector<std::uint16_t> Endpoint::ports() const {
    std::vector<std::uint16_t> all;
    for (const auto& lane : lanes_) all.push_back(lane->socket().port());
    return all;
}

std::vector<std::uint16_t> Endpoint::path_ports() const {
    std::vector<std::uint16_t> all;
    for (std::size_t path = 1; path < lanes_[0]->paths(); ++path) all.push_back(lanes_[0]->socket(path).port());
    return all;
}

std::size_t Endpoint::receive_buffer() const {
    std::size_t least = lanes_[0]->socket().receive_buffer();
    for (const auto& lane : lanes_) {
        for (std::size_t path = 0; path < lane->paths(); ++path)
            least = std::min(least, lane->socket(path).receive_buffer());
    }
    return least;
}

void Endpoint::start(std::vector<CoreConfig> configs, std::vector<std::vector<Address>> peers,
                     const std::vector<std::vector<Address>>& more) {
    if (configs.size() < (low_ ? 2 : 1) || configs.size() > lanes_.size() || peers.size() != configs.size())
        throw std::invalid_argument("one config and one list of addresses per lane is needed, for at most " +
                                    std::to_string(lanes_.size()) + " lanes");
    division_ = {.lanes = configs.size() - (low_ ? 1 : 0),
                 .chunk_bytes = Core::chunk_bytes_for(configs[0].datagram_bytes, configs[0].secrets.sealed)};
    if (low_) std::swap(lanes_[configs.size() - 1], lanes_.back());
    lanes_.resize(configs.size());
    lanes_[0]->on_view([this](const View& view, bool inside) {
        for (std::size_t lane = 1; lane < lanes_.size(); ++lane) lanes_[lane]->follow(view, inside);
    });
    // Lane 0 last: the others must be ready to follow every view that it learns of.
    for (std::size_t lane = configs.size(); lane-- > 0;) {
        configs[lane].lane = static_cast<std::uint16_t>(lane);
        std::vector<std::vector<Address>> by_rank;
        for (std::size_t rank = 0; rank < peers[lane].size(); ++rank) {
            by_rank.push_back({peers[lane][rank]});
            if (lane == 0 && rank < more.size())
                by_rank.back().insert(by_rank.back().end(), more[rank].begin(), more[rank].end());
        }
        lanes_[lane]->start(std::move(configs[lane]), by_rank);
    }
}

std::uint64_t Endpoint::post(ExchangeSpec spec) {
    if (spec.low && !low_) throw std::invalid_argument("this endpoint has no lane of low priority");
    const std::size_t used = spec.low || division_.lanes == 1 ? 1 : division_.lanes_of(spec);
    if (used == 1 && !spec.low) return lanes_[0]->post(std::move(spec));
    const auto exchange = std::make_shared<StripedExchange>();
    std::uint64_t id = 0;
    if (spec.low) {
        if (spec.view != 0)
            with_views([](Views&, Nanos) {});  // lane 0 has the views, also those that no exchange of its own needs
        exchange->parts.push_back({.lane = lanes_.size() - 1});
        exchange->parts[0].id = lanes_.back()->post(std::move(spec));
        id = low_ids | exchange->parts[0].id;
    } else {
        for (std::size_t lane = 0; lane < used; ++lane) exchange->parts.push_back({.lane = lane});
        // Lane 0 last: its work is done by this thread, while those of the other lanes are busy already.
        try {
            for (std::size_t lane = used; lane-- > 0;)
                exchange->parts[lane].id = lanes_[lane]->post(division_.part_of(spec, lane), lane != 0);
        } catch (...) {
            abort_parts(*exchange);
            throw;
        }
        id = exchange->parts[0].id;
    }
    const std::lock_guard guard(mutex_);
    striped_.emplace(id, exchange);
    return id;
}

void Endpoint::abort_parts(StripedExchange& exchange) noexcept {
    for (const LanePart& part : exchange.parts) {
        if (part.id == 0 || part.outcome) continue;  // ids begin at 1
        try {
            Outcome outcome;
            lanes_[part.lane]->cancel(part.id);
            (void)lanes_[part.lane]->wait(part.id, longest_abort, outcome);
        } catch (...) {
            // This lane is closed or has failed: it does not touch the caller's memory any more.
        }
    }
}

std::shared_ptr<Endpoint::StripedExchange> Endpoint::find(std::uint64_t id) {
    if (lanes_.size() == 1) return nullptr;
    const std::lock_guard guard(mutex_);
    const auto found = striped_.find(id);
    return found == striped_.end() ? nullptr : found->second;
}

void Endpoint::fail_rest(StripedExchange& exchange, const Driver::EndStatus& why) {
    {
        const std::lock_guard guard(exchange.mutex);
        if (std::exchange(exchange.failed, true)) return;
    }
    // Parts that have ended already keep their outcomes.
    for (const LanePart& part : exchange.parts) {
        if (why.status == Status::closed) {
            lanes_[part.lane]->cancel(part.id);
        } else {
            lanes_[part.lane]->fail(part.id, why);
        }
    }
}

std::optional<Driver::EndStatus> Endpoint::end_status(StripedExchange& exchange, LanePart& part) {
    // In this order: the outcome moves from the lane to here.
    const std::optional<Driver::EndStatus> there = lanes_[part.lane]->end_status(part.id);
    const std::lock_guard guard(exchange.mutex);
    if (!part.outcome) return there;
    const Outcome& here = *part.outcome;
    return Driver::EndStatus{.status = here.status, .peer = here.peer, .failure_cause = here.failure_cause};
}

void Endpoint::check_parts(StripedExchange& exchange) {
    for (LanePart& part : exchange.parts) {
        const std::optional<Driver::EndStatus> ended = end_status(exchange, part);
        if (ended && ended->status != Status::ok) fail_rest(exchange, *ended);
        if (part.lane == 0 || ended) continue;
        for (const std::uint16_t peer : lanes_[part.lane]->unreachable_peers(part.id))
            with_views([peer](Views& views, Nanos now) { views.blocked(peer, now); });
    }
}

bool Endpoint::wait_for_all(StripedExchange& exchange, Nanos timeout_at) {
    for (LanePart& part : exchange.parts) {
        while (!part.outcome) {
            const Nanos left = timeout_at == never ? never : std::max<Nanos>(timeout_at - clock_now(), 0);
            Outcome outcome;
            if (!lanes_[part.lane]->wait(part.id, std::min(left, check_interval), outcome)) {
                check_parts(exchange);
                if (clock_now() >= timeout_at) return false;
                continue;
            }
            const Driver::EndStatus why{
                .status = outcome.status, .peer = outcome.peer, .failure_cause = outcome.failure_cause};
            {
                const std::lock_guard guard(exchange.mutex);
                part.outcome = std::move(outcome);
            }
            if (why.status != Status::ok) fail_rest(exchange, why);
        }
    }
    return true;
}

bool Endpoint::wait(std::uint64_t id, Nanos timeout, Outcome& outcome) {
    const std::shared_ptr<StripedExchange> exchange = find(id);
    if (!exchange) return lanes_[0]->wait(id, timeout, outcome);
    const Nanos timeout_at = timeout == never ? never : clock_now() + timeout;
    try {
        if (!wait_for_all(*exchange, timeout_at)) return false;
    } catch (...) {
        // A lane is closed or has failed. The others must stop using the caller's memory before the caller learns of
        // it.
        abort_parts(*exchange);
        const std::lock_guard guard(mutex_);
        striped_.erase(id);
        throw;
    }
    {
        const std::lock_guard guard(mutex_);
        striped_.erase(id);
    }
    const std::lock_guard guard(exchange->mutex);
    outcome = std::move(*exchange->parts[0].outcome);
    for (std::size_t at = 1; at < exchange->parts.size(); ++at)
        merge_outcome(outcome, std::move(*exchange->parts[at].outcome));
    return true;
}

bool Endpoint::ended(std::uint64_t id) {
    const std::shared_ptr<StripedExchange> exchange = find(id);
    if (!exchange) return lanes_[0]->ended(id);
    for (LanePart& part : exchange->parts) {
        if (end_status(*exchange, part) || lanes_[part.lane]->failed()) continue;
        check_parts(*exchange);
        return false;
    }
    return true;
}

void Endpoint::cancel(std::uint64_t id) {
    if (const std::shared_ptr<StripedExchange> exchange = find(id)) {
        fail_rest(*exchange, {.status = Status::closed});
    } else {
        lanes_[0]->cancel(id);
    }
}

CanComplete Endpoint::can_complete(std::uint64_t id) {
    const std::shared_ptr<StripedExchange> exchange = find(id);
    if (!exchange) return lanes_[0]->can_complete(id);
    CanComplete worst = CanComplete::good;
    for (LanePart& part : exchange->parts) {
        if (!end_status(*exchange, part)) worst = std::max(worst, lanes_[part.lane]->can_complete(part.id));
    }
    return worst;
}

std::vector<Pool::First> Endpoint::peek(std::uint32_t channel, std::uint32_t seq) {
    std::vector<Pool::First> firsts = lanes_[0]->peek(channel, seq);
    if (low_) {
        for (Pool::First& each : lanes_.back()->peek(channel, seq)) firsts.push_back(std::move(each));
    }
    return firsts;
}

void Endpoint::readmit(std::uint16_t peer, const std::vector<Address>& addresses, std::uint32_t incarnation,
                       const std::vector<LinkKeys>& keys, const std::vector<Address>& more) {
    if (addresses.size() < lanes_.size() || (!keys.empty() && keys.size() < lanes_.size()))
        throw std::invalid_argument("the process has fewer lanes than the " + std::to_string(lanes_.size()) +
                                    " of the job");
    // Lane 0 last: once its views know the process, exchanges with it may begin in all lanes.
    for (std::size_t lane = lanes_.size(); lane-- > 0;) {
        std::vector<Address> paths{addresses[lane]};
        if (lane == 0) paths.insert(paths.end(), more.begin(), more.end());
        lanes_[lane]->readmit(peer, paths, incarnation, keys.empty() ? std::nullopt : std::optional(keys[lane]));
    }
}

std::vector<Driver::SharedMemoryOffer> Endpoint::offer_shared_memory(std::uint16_t peer, std::size_t neighbours) {
    std::vector<Driver::SharedMemoryOffer> all;
    for (const auto& lane : lanes_) all.push_back(lane->offer_shared_memory(peer, neighbours));
    return all;
}

void Endpoint::accept_shared_memory(std::uint16_t peer, std::vector<Driver::SharedMemoryOffer> offers) {
    if (offers.size() != lanes_.size())
        throw std::invalid_argument("expected memory for " + std::to_string(lanes_.size()) + " lanes, got it for " +
                                    std::to_string(offers.size()));
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane)
        lanes_[lane]->accept_shared_memory(peer, std::move(offers[lane]));
}

void Endpoint::use_shared_memory(std::uint16_t peer, std::uint32_t incarnation) {
    for (const auto& lane : lanes_) lane->use_shared_memory(peer, incarnation);
}

void Endpoint::close(Nanos linger) {
    // All lanes together wait no longer than one would: while one waits for answers, those of the others are in flight
    // too.
    const Nanos timeout_at = clock_now() + linger;
    if (lanes_.size() > 1 && linger > 0) {
        for (const auto& lane : lanes_) {
            try {
                lane->leave();
            } catch (...) {
                // A lane that has failed cannot say goodbye; it is closed below, like the others.
            }
        }
    }
    for (const auto& lane : lanes_) {
        lane->close(linger == 0 ? 0 : std::max<Nanos>(timeout_at - clock_now(), 0));
    }
}

void Endpoint::offer(std::uint16_t peer, const std::vector<Address>& addresses) {
    for (std::size_t lane = 0; lane < std::min(lanes_.size(), addresses.size()); ++lane)
        lanes_[lane]->offer(peer, addresses[lane]);
}

void Endpoint::rebind(std::size_t path, const std::string& host) {
    for (const auto& lane : lanes_) lane->rebind(path, host);
}

void Endpoint::enable_keepalive() {
    for (const auto& lane : lanes_) lane->enable_keepalive();
}

std::vector<std::vector<Routes::Route>> Endpoint::routes() {
    std::vector<std::vector<Routes::Route>> all;
    for (const auto& lane : lanes_) all.push_back(lane->routes());
    return all;
}

Driver::Health Endpoint::health() {
    Driver::Health sum = lanes_[0]->health();
    sum.lane_bytes_sent.push_back(sum.counters.bytes_sent + sum.counters.shared_bytes_sent);
    for (std::size_t lane = 1; lane < lanes_.size(); ++lane) {
        const Driver::Health more = lanes_[lane]->health();
        sum.lane_bytes_sent.push_back(more.counters.bytes_sent + more.counters.shared_bytes_sent);
        add(sum.counters, more.counters, counter_names);
        add(sum.faults, more.faults, fault_names);
        sum.overflow += more.overflow;
    }
    return sum;
}

std::vector<Driver::LinkHealth> Endpoint::links(const std::vector<std::uint16_t>& peers) {
    std::vector<Driver::LinkHealth> all = lanes_[0]->links(peers);
    for (std::size_t lane = 1; lane < lanes_.size(); ++lane) {
        const std::vector<Driver::LinkHealth> more = lanes_[lane]->links(peers);
        for (std::size_t at = 0; at < all.size(); ++at) {
            // Rates add up. Lane 0 always has traffic: what it knows of the path is newest.
            all[at].bytes_per_s += more[at].bytes_per_s;
        }
    }
    return all;
}

// Lanes share the bottleneck, and an exchange fills all of them at once.
BottleneckPeaks::Peaks Endpoint::take_bottleneck_peaks() {
    BottleneckPeaks::Peaks all;
    for (const auto& lane : lanes_) {
        const BottleneckPeaks::Peaks more = lane->take_bottleneck_peaks();
        all = {all.out + more.out, all.in + more.in, all.both + more.both};
    }
    return all;
}

}  // namespace storm
