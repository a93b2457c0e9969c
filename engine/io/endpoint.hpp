// The endpoint of a process in a job: one or more lanes, each with its own socket, thread, packet numbers and
// congestion control.
//
// A lane is a Driver. Exchanges of large messages are divided between the lanes, so that several cores copy, check and
// sum at the same time, and so that a network that spreads flows over several queues or paths can spread ours. Lane 0
// carries all small exchanges, and it alone takes part in the votes on membership views; the others follow it. An
// endpoint may have one more lane, whose datagrams are marked as of low priority: it carries exchanges that ask for it,
// and nothing else.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exchange/lanes.hpp"
#include "io/driver.hpp"

namespace storm {

class Endpoint {
public:
    // Opens a socket per lane: at `port` and the ports after it, or at ports that the kernel chooses if it is 0.
    // `more_hosts`: of further paths (paths.hpp), at the same port; an endpoint with several paths has one lane. `low`:
    // whether there is one more lane of low priority, at the port after the others.
    Endpoint(const std::string& host, std::uint16_t port, std::size_t lanes, const SocketConfig& config,
             const std::vector<std::string>& more_hosts = {}, bool low = false);
    ~Endpoint();
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;

    [[nodiscard]] std::vector<std::uint16_t> ports() const;
    // Ports of the second path and of those after it; the first path has those of the lanes.
    [[nodiscard]] std::vector<std::uint16_t> path_ports() const;
    // The least of all lanes.
    [[nodiscard]] std::size_t receive_buffer() const;
    // Starts as many lanes as there are configs, which differ in nothing but `lane` and `secrets`; sockets beyond them
    // are closed. The last config is that of the lane of low priority, if there is one, and has a rate of its own.
    // `peers`:
    // by lane, the addresses by rank. `more`: by rank, its addresses on further paths; empty if no rank has any. Throws
    // as Driver::start does; the endpoint can then only be closed.
    void start(std::vector<CoreConfig> configs, std::vector<std::vector<Address>> peers,
               const std::vector<std::vector<Address>>& more = {});
    // All of them, the one of low priority included.
    [[nodiscard]] std::size_t lanes() const { return lanes_.size(); }
    [[nodiscard]] bool low() const { return low_; }

    // As those of Driver.
    std::uint64_t post(ExchangeSpec spec);
    bool wait(std::uint64_t id, Nanos timeout, Outcome& outcome);
    [[nodiscard]] bool ended(std::uint64_t id);
    void cancel(std::uint64_t id);
    [[nodiscard]] CanComplete can_complete(std::uint64_t id);
    [[nodiscard]] std::vector<Pool::First> peek(std::uint32_t channel, std::uint32_t seq);
    // `addresses` and `keys`: by lane; no keys where datagrams are not sealed. `more`: addresses on further paths.
    void readmit(std::uint16_t peer, const std::vector<Address>& addresses, std::uint32_t incarnation,
                 const std::vector<LinkKeys>& keys, const std::vector<Address>& more = {});
    // One offer per lane.
    [[nodiscard]] std::vector<Driver::SharedMemoryOffer> offer_shared_memory(std::uint16_t peer,
                                                                             std::size_t neighbours);
    void accept_shared_memory(std::uint16_t peer, std::vector<Driver::SharedMemoryOffer> offers);
    void use_shared_memory(std::uint16_t peer, std::uint32_t incarnation);
    [[nodiscard]] std::vector<std::uint16_t> near() { return lanes_[0]->near(); }
    template <class Work>
    auto with_views(Work&& work) {
        return lanes_[0]->with_views(std::forward<Work>(work));
    }
    bool wait_view(std::uint32_t above, Nanos timeout) { return lanes_[0]->wait_view(above, timeout); }
    void close(Nanos linger);
    // The peer may be reachable at these addresses, by lane: see Routes.
    void offer(std::uint16_t peer, const std::vector<Address>& addresses);
    void enable_keepalive();
    // Rebinds a path to another address of this host, in all lanes.
    void rebind(std::size_t path, const std::string& host);
    // By lane and rank: where datagrams go.
    [[nodiscard]] std::vector<std::vector<Routes::Route>> routes();
    [[nodiscard]] Driver::Health health();
    [[nodiscard]] std::vector<Driver::LinkHealth> links(const std::vector<std::uint16_t>& peers);
    [[nodiscard]] BottleneckPeaks::Peaks take_bottleneck_peaks();

private:
    struct LanePart {
        std::size_t lane{};
        std::uint64_t id{};                // in that lane; 0 before it is posted
        std::optional<Outcome> outcome{};  // once it was waited for
    };
    // An exchange that is not in lane 0 alone: its parts, and the outcomes of those that were waited for.
    struct StripedExchange {
        std::vector<LanePart> parts;
        std::mutex mutex;  // one thread waits, others may query or cancel
        bool failed{};     // a part has failed, and the others were cancelled
    };
    [[nodiscard]] std::shared_ptr<StripedExchange> find(std::uint64_t id);
    // Ends what is left of an exchange of which a part has failed, and reports to lane 0 which peers another lane does
    // not reach.
    void check_parts(StripedExchange& exchange);
    void fail_rest(StripedExchange& exchange, const Driver::EndStatus& why);
    // How a part has ended, if it has.
    [[nodiscard]] std::optional<Driver::EndStatus> end_status(StripedExchange& exchange, LanePart& part);
    // False if it timed out.
    [[nodiscard]] bool wait_for_all(StripedExchange& exchange, Nanos timeout_at);
    // Cancels all parts and waits until no lane uses the caller's memory.
    void abort_parts(StripedExchange& exchange) noexcept;

    std::vector<std::unique_ptr<Driver>> lanes_;
    Lanes division_;
    std::mutex mutex_;
    std::unordered_map<std::uint64_t, std::shared_ptr<StripedExchange>>
        striped_;  // by the id of their part in lane 0; see low_ids
    bool low_;     // the last lane is of low priority
    pid_t owner_;
};

}  // namespace storm
