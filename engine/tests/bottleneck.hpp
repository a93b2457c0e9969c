// A bottleneck in virtual time for tests of rate control: a FIFO queue with a rate, a capacity and a propagation delay,
// random loss behind it, and receivers that report every quarter of a credit window or when nothing more arrives.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <initializer_list>
#include <queue>
#include <random>
#include <vector>

#include "check.hpp"
#include "congestion/rate_control.hpp"

namespace storm::check {

inline constexpr double mbit = 125'000;  // bytes per second
inline constexpr std::uint64_t no_end = 1ULL << 60;

struct Path {
    double bytes_per_s{};
    Nanos rtt{};
    double queue_bytes{512 * 1024};
    double loss{};  // behind the bottleneck, per datagram
    std::size_t datagram_bytes{1472};
    double credit_bytes{256.0 * 1472};  // in flight per link at most; a report goes out every quarter of it
    Nanos idle{500 * microsecond};      // a receiver reports when nothing came for so long
    Nanos most_held{never};             // a receiver also reports this long after the first unreported arrival
    Nanos jitter{};                     // uniform noise on each round trip: threads that wake late
    std::size_t links{1};               // what the controllers are told of how many they are
};

class Bottleneck {
public:
    Bottleneck(Path path, std::uint64_t seed) : path_(path), random_(seed) {}

    // `greedy` ignores rate control: the window given is kept full, as a bulk TCP does at a queue.
    std::size_t add(RateMode mode, std::uint64_t backlog = no_end, double greedy_window = 0) {
        links_.emplace_back(mode, path_.datagram_bytes, now_, path_.links, backlog, greedy_window);
        push(now_, Kind::send, links_.size() - 1);
        return links_.size() - 1;
    }
    // A bulk TCP flow with CUBIC, acknowledged at every second segment.
    std::size_t add_cubic(std::uint64_t backlog = no_end) {
        const std::size_t index = add(RateMode::unlimited, backlog, 10.0 * static_cast<double>(path_.datagram_bytes));
        links_[index].cubic = true;
        return index;
    }
    void give(std::size_t link, std::uint64_t bytes) {
        links_[link].backlog += bytes;
        push(now_, Kind::send, link);
    }
    void set_loss(double loss) { path_.loss = loss; }
    void set_rate(double bytes_per_s) { path_.bytes_per_s = bytes_per_s; }
    void run(Nanos duration) {
        const Nanos end = now_ + duration;
        while (!events_.empty() && events_.top().at <= end) {
            const Event event = events_.top();
            events_.pop();
            now_ = event.at;
            handle(event);
        }
        now_ = end;
    }
    // Counters since the last call of `measure`.
    void measure() {
        measured_at_ = now_;
        overflow_ = entered_ = most_queued_ = 0;
        for (Link& link : links_) link.arrived_bytes = 0;
    }
    [[nodiscard]] double throughput(std::size_t link) const { return links_[link].arrived_bytes / elapsed(); }
    [[nodiscard]] double throughput() const {
        double sum = 0;
        for (std::size_t i = 0; i < links_.size(); ++i) sum += throughput(i);
        return sum;
    }
    [[nodiscard]] double overflow() const { return overflow_ / (overflow_ + entered_); }
    [[nodiscard]] double most_queued() const { return most_queued_; }
    [[nodiscard]] double fairness() const {  // Jain's index: 1 when all are equal
        double sum = 0, squares = 0;
        for (const Link& link : links_) sum += link.arrived_bytes, squares += link.arrived_bytes * link.arrived_bytes;
        return sum * sum / (static_cast<double>(links_.size()) * squares);
    }
    [[nodiscard]] const RateControl& control(std::size_t link) const { return links_[link].control; }
    [[nodiscard]] bool finished(std::size_t link) const {
        return links_[link].backlog == 0 && links_[link].in_flight == 0;
    }
    [[nodiscard]] Nanos now() const { return now_; }

private:
    enum class Kind : std::uint8_t { send, serve, arrive, idle, report, ping };
    struct Event {
        Nanos at;
        std::uint64_t order;
        Kind kind;
        std::size_t link;
        std::uint64_t number;
        Nanos held;
        bool operator<(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
    };
    struct Packet {
        SendStamp stamp;
        std::size_t bytes;
        bool arrived;
    };
    struct Link {
        Link(RateMode mode, std::size_t datagram_bytes, Nanos now, std::size_t links, std::uint64_t bytes,
             double window)
            : control(mode, datagram_bytes, now, links), backlog(bytes), greedy_window(window) {}
        RateControl control;
        DeliveryMeter meter;
        std::uint64_t backlog;
        double greedy_window;
        std::deque<Packet> packets;  // from number `first`
        std::uint64_t first{}, in_flight{};
        Nanos wake_at{never};
        // receiver
        std::uint64_t largest{};
        double unreported{}, arrived_bytes{};
        Nanos largest_at{}, unreported_at{};
        // CUBIC, in segments and seconds (RFC 9438)
        bool cubic{};
        double most{1e9};  // the window at the last loss
        Nanos epoch{}, smooth_rtt{};
        std::uint64_t recover_until{};
    };
    struct Queued {
        std::size_t link;
        std::uint64_t number;
        std::size_t bytes;
    };

    [[nodiscard]] double elapsed() const { return static_cast<double>(now_ - measured_at_) / 1e9; }
    void push(Nanos at, Kind kind, std::size_t link, std::uint64_t number = 0, Nanos held = 0) {
        events_.push({at, order_++, kind, link, number, held});
    }

    void handle(const Event& event) {
        switch (event.kind) {
            case Kind::send:
                if (links_[event.link].wake_at == event.at) links_[event.link].wake_at = never;
                send(event.link);
                break;
            case Kind::serve: serve(); break;
            case Kind::arrive: arrive(event.link, event.number); break;
            case Kind::idle:
                if (links_[event.link].largest_at == event.at - path_.idle) report(event.link);
                break;
            case Kind::report: learn(event.link, event.number, event.held); break;
            case Kind::ping:
                if (links_[event.link].first <= event.number) learn(event.link, event.number, 0);
                break;
        }
    }

    void send(std::size_t index) {
        Link& link = links_[index];
        while (link.backlog > 0) {
            const double window = link.greedy_window > 0 ? link.greedy_window : path_.credit_bytes;
            const double room = window - static_cast<double>(link.in_flight);
            const auto bytes = std::min({static_cast<std::uint64_t>(link.control.batch_bytes()), link.backlog,
                                         static_cast<std::uint64_t>(std::max(room, 0.0))});
            if (bytes < std::min<std::uint64_t>(path_.datagram_bytes, link.backlog))
                return;  // credit: a report will help
            if (!link.control.try_send(bytes, link.in_flight, now_)) {
                const Nanos next = link.control.next_send_at(now_);
                if (next != never && next < link.wake_at) push(link.wake_at = next, Kind::send, index);
                return;
            }
            const Nanos wait_limit = 3 * path_.rtt + 20 * millisecond;
            for (std::uint64_t left = bytes; left > 0;) {
                const std::size_t size = std::min<std::size_t>(left, path_.datagram_bytes);
                const std::uint64_t number = link.first + link.packets.size();
                link.packets.push_back({link.meter.on_send(link.in_flight, now_), size, false});
                link.in_flight += size;
                left -= size;
                enter({index, number, size});
            }
            link.backlog -= bytes;
            push(now_ + wait_limit, Kind::ping, index, link.first + link.packets.size() - 1);
        }
        link.meter.on_app_limited(link.in_flight);
        if (!link.packets.empty()) link.packets.back().stamp.app_limited = true;
    }

    void grow_cubic(Link& link, const Delivery& delivery) {
        const auto segment = static_cast<double>(path_.datagram_bytes);
        double window = link.greedy_window / segment;
        if (delivery.rtt > 0) link.smooth_rtt += (delivery.rtt - link.smooth_rtt) / (link.smooth_rtt == 0 ? 1 : 8);
        if (delivery.lost_bytes > 0 && link.first > link.recover_until) {
            link.recover_until = link.first + link.packets.size();
            link.most = window;
            window = std::max(0.7 * window, 2.0);
            link.epoch = now_;
        } else if (link.epoch == 0) {  // slow start
            window += static_cast<double>(delivery.delivered_bytes) / segment;
        } else {
            const double t = static_cast<double>(now_ - link.epoch + link.smooth_rtt) / 1e9;
            const double k = std::cbrt(link.most * 0.3 / 0.4);
            const double target = std::clamp(0.4 * (t - k) * (t - k) * (t - k) + link.most, window, 1.5 * window);
            const double rtts =
                static_cast<double>(now_ - link.epoch) / static_cast<double>(std::max<Nanos>(link.smooth_rtt, 1));
            const double reno = 0.7 * link.most + 0.53 * rtts;
            window =
                std::max(window + (target - window) / window * static_cast<double>(delivery.delivered_bytes) / segment,
                         std::min(reno, 1.5 * window));
        }
        link.greedy_window = window * segment;
    }

    void enter(Queued packet) {
        const auto size = static_cast<double>(packet.bytes);
        if (queued_ + size > path_.queue_bytes) {
            overflow_ += size;
            return;
        }
        entered_ += size;
        queued_ += size;
        most_queued_ = std::max(most_queued_, queued_);
        queue_.push_back(packet);
        if (queue_.size() == 1) push(now_ + serve_time(packet), Kind::serve, 0);
    }
    [[nodiscard]] Nanos serve_time(const Queued& packet) const {
        return static_cast<Nanos>(static_cast<double>(packet.bytes) / path_.bytes_per_s * 1e9);
    }
    void serve() {
        const Queued packet = queue_.front();
        queue_.pop_front();
        queued_ -= static_cast<double>(packet.bytes);
        if (!queue_.empty()) push(now_ + serve_time(queue_.front()), Kind::serve, 0);
        if (!(chance_(random_) < path_.loss)) push(now_ + path_.rtt / 2, Kind::arrive, packet.link, packet.number);
    }

    void arrive(std::size_t index, std::uint64_t number) {
        Link& link = links_[index];
        if (number < link.first) return;
        Packet& packet = link.packets[number - link.first];
        packet.arrived = true;
        link.arrived_bytes += static_cast<double>(packet.bytes);
        if (link.unreported <= 0) link.unreported_at = now_;
        link.unreported += static_cast<double>(packet.bytes);
        link.largest = number;
        link.largest_at = now_;
        const double quantum = link.cubic ? 2 * static_cast<double>(path_.datagram_bytes) : path_.credit_bytes / 4;
        if (link.unreported >= quantum || now_ - link.unreported_at >= path_.most_held)
            report(index);
        else
            push(now_ + path_.idle, Kind::idle, index);
    }
    void report(std::size_t index) {
        Link& link = links_[index];
        if (link.unreported <= 0) return;
        link.unreported = 0;
        const Nanos late = static_cast<Nanos>(chance_(random_) * static_cast<double>(path_.jitter));
        push(now_ + path_.rtt / 2 + late, Kind::report, index, link.largest, now_ - link.largest_at);
    }

    // What the link does with a report: everything up to `largest` has arrived or is lost.
    void learn(std::size_t index, std::uint64_t largest, Nanos held) {
        Link& link = links_[index];
        Delivery delivery;
        delivery.now = now_;
        SendStamp newest;
        bool any = false;
        while (!link.packets.empty() && link.first <= largest) {
            const Packet& packet = link.packets.front();
            (packet.arrived ? delivery.delivered_bytes : delivery.lost_bytes) += packet.bytes;
            if (packet.arrived) newest = packet.stamp, any = true;
            link.in_flight -= packet.bytes;
            link.packets.pop_front();
            ++link.first;
        }
        delivery.in_flight_bytes = link.in_flight;
        if (any) {
            delivery.rtt = now_ - newest.sent_at - held;
            delivery.bytes_per_s = link.meter.on_report(newest, delivery.delivered_bytes, held, now_);
            delivery.app_limited = newest.app_limited;
        }
        if (link.cubic) grow_cubic(link, delivery);
        if (!link.cubic) delivery.bottleneck_bytes_per_s = line_.on_report(delivery.delivered_bytes, now_);
        link.control.on_delivery(delivery);
        send(index);
    }

    Path path_;
    std::mt19937_64 random_;
    std::uniform_real_distribution<double> chance_{0, 1};
    Nanos now_{}, measured_at_{};
    std::uint64_t order_{};
    std::priority_queue<Event> events_;
    std::deque<Link> links_;
    BottleneckMeter line_{0};  // all links but TCP's belong to one endpoint
    std::deque<Queued> queue_;
    double queued_{}, overflow_{}, entered_{}, most_queued_{};
};

inline constexpr Path wan{.bytes_per_s = 100 * mbit, .rtt = 40 * millisecond, .credit_bytes = 1.5e6};
inline constexpr Path lan{.bytes_per_s = 1000 * mbit, .rtt = 200 * microsecond};
inline constexpr Path lab{.bytes_per_s = 400 * mbit, .rtt = 500 * microsecond};
inline constexpr std::initializer_list<Path> paths = {wan, lan, lab};

// Round trips, but of at least a millisecond: shorter ones hold too few reports to learn from.
inline Nanos rounds(const Path& path, int count) { return count * std::max(path.rtt, millisecond); }

}  // namespace storm::check
