// Rate control against a bottleneck in virtual time: a FIFO queue with a rate, a capacity and a propagation delay, random
// loss behind it, and receivers that report every quarter of a credit window or when nothing more arrives.
#include <algorithm>
#include <deque>
#include <initializer_list>
#include <queue>
#include <random>
#include <vector>

#include "check.hpp"
#include "rate_control.hpp"

using namespace storm;

namespace {

constexpr double mbit = 125'000;  // bytes per second
constexpr std::uint64_t no_end = 1ULL << 60;

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
};

class Network {
public:
    Network(Path path, std::uint64_t seed) : path_(path), random_(seed) {}

    // `greedy` ignores rate control: the window given is kept full, as a bulk TCP does at a queue.
    std::size_t add(RateMode mode, std::uint64_t backlog = no_end, double greedy_window = 0) {
        links_.emplace_back(mode, path_.datagram_bytes, now_, backlog, greedy_window);
        push(now_, Kind::send, links_.size() - 1);
        return links_.size() - 1;
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
        Link(RateMode mode, std::size_t datagram_bytes, Nanos now, std::uint64_t bytes, double window)
            : control(mode, datagram_bytes, now), backlog(bytes), greedy_window(window) {}
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
            const Nanos patience = 3 * path_.rtt + 20 * millisecond;
            for (std::uint64_t left = bytes; left > 0;) {
                const std::size_t size = std::min<std::size_t>(left, path_.datagram_bytes);
                const std::uint64_t number = link.first + link.packets.size();
                link.packets.push_back({link.meter.on_send(link.in_flight, now_), size, false});
                link.in_flight += size;
                left -= size;
                enter({index, number, size});
            }
            link.backlog -= bytes;
            push(now_ + patience, Kind::ping, index, link.first + link.packets.size() - 1);
        }
        link.meter.on_app_limited(link.in_flight);
        if (!link.packets.empty()) link.packets.back().stamp.app_limited = true;
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
        if (link.unreported >= path_.credit_bytes / 4 || now_ - link.unreported_at >= path_.most_held)
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
    std::deque<Queued> queue_;
    double queued_{}, overflow_{}, entered_{}, most_queued_{};
};

constexpr Path wan{.bytes_per_s = 100 * mbit, .rtt = 40 * millisecond, .credit_bytes = 1.5e6};
constexpr Path lan{.bytes_per_s = 1000 * mbit, .rtt = 200 * microsecond};
constexpr Path lab{.bytes_per_s = 400 * mbit, .rtt = 500 * microsecond};
constexpr std::initializer_list<Path> paths = {wan, lan, lab};

// Round trips, but of at least a millisecond: shorter ones hold too few reports to learn from.
Nanos rounds(const Path& path, int count) { return count * std::max(path.rtt, millisecond); }

}  // namespace

TEST(finds_the_bottleneck_within_twenty_five_rounds) {
    for (const Path& path : paths) {
        Network network(path, 1);
        network.add(RateMode::automatic);
        network.run(rounds(path, 25));
        network.measure();
        network.run(rounds(path, 15));
        CHECK(network.throughput() > 0.9 * path.bytes_per_s);
    }
}

TEST(random_loss_up_to_forty_percent_costs_no_rate) {
    for (Path path : paths) {
        for (const double loss : {0.0, 0.1, 0.3, 0.4}) {
            path.loss = loss;
            Network network(path, 2);
            network.add(RateMode::automatic);
            network.run(second + rounds(path, 20));
            network.measure();
            network.run(2 * second + rounds(path, 100));
            CHECK(network.throughput() > 0.95 * path.bytes_per_s * (1 - loss));
            CHECK(network.overflow() < 0.01);
        }
    }
}

TEST(threads_that_wake_late_on_a_lossy_link_are_not_taken_for_a_queue) {
    for (Path path : paths) {
        for (const double loss : {0.0, 0.1, 0.3}) {
            path.loss = loss;
            path.jitter = (loss < 0.3 ? 1000 : 500) * microsecond;
            Network network(path, 13);
            network.add(RateMode::automatic);
            network.run(second + rounds(path, 20));
            network.measure();
            network.run(2 * second + rounds(path, 100));
            CHECK(network.throughput() > 0.88 * path.bytes_per_s * (1 - loss));
        }
    }
}

TEST(loss_that_begins_in_mid_run_costs_no_rate) {
    for (const Path& path : paths) {
        Network network(path, 3);
        network.add(RateMode::automatic);
        network.run(second + rounds(path, 20));
        network.set_loss(0.3);
        network.run(rounds(path, 50));
        network.measure();
        network.run(second + rounds(path, 50));
        CHECK(network.throughput() > 0.93 * path.bytes_per_s * 0.7);
    }
}

TEST(competing_senders_share_a_shallow_queue_without_overflow) {
    for (const Path& path : paths) {
        for (const int senders : {1, 3, 7}) {
            for (const Nanos jitter : {Nanos{0}, 300 * microsecond}) {
                Path noisy = path;
                noisy.jitter = jitter;
                Network network(noisy, 4);
                for (int i = 0; i < senders; ++i) network.add(RateMode::automatic);
                network.run(second + rounds(path, 50));
                network.measure();
                network.run(3 * second + rounds(path, 100));
                CHECK(network.overflow() < 0.01);
                CHECK(network.throughput() > 0.95 * path.bytes_per_s);
                CHECK(network.fairness() > (jitter > 0 ? 0.75 : 0.9));
            }
        }
    }
}

TEST(one_sender_keeps_even_a_queue_of_64_kilobytes_from_overflowing) {
    for (Path path : paths) {
        path.queue_bytes = 64 * 1024;
        Network network(path, 5);
        network.add(RateMode::automatic);
        network.run(second + rounds(path, 50));
        network.measure();
        network.run(2 * second + rounds(path, 100));
        CHECK(network.overflow() < 0.01);
        CHECK(network.throughput() > 0.95 * path.bytes_per_s);
    }
}

TEST(senders_that_join_one_after_the_other_become_equal) {
    for (const Path& path : paths) {
        Network network(path, 6);
        for (int i = 0; i < 4; ++i) {
            network.add(RateMode::automatic);
            network.run(rounds(path, 50));
        }
        network.run(4 * second);
        network.measure();
        network.run(4 * second);
        CHECK(network.fairness() > 0.9);
        CHECK(network.overflow() < 0.01);
    }
}

TEST(many_seconds_of_traffic_do_not_raise_the_queue) {
    Network network(lan, 7);
    for (int i = 0; i < 5; ++i) {
        network.add(RateMode::automatic);
        network.run(17 * millisecond);
    }
    network.run(30 * second);
    network.measure();
    network.run(5 * second);
    CHECK(network.most_queued() < 256 * 1024);
    CHECK(network.control(0).min_rtt() < 2 * lan.rtt);
}

TEST(a_rate_that_halves_and_doubles_is_followed_without_overflow) {
    for (const Path& path : paths) {
        Network network(path, 8);
        network.add(RateMode::automatic);
        network.run(second + rounds(path, 20));
        network.set_rate(path.bytes_per_s / 2);
        network.run(rounds(path, 30));
        network.measure();
        network.run(rounds(path, 60));
        CHECK(network.throughput() > 0.93 * path.bytes_per_s / 2);
        CHECK(network.overflow() < 0.01);
        network.set_rate(path.bytes_per_s);
        network.run(rounds(path, 100));
        network.measure();
        network.run(rounds(path, 60));
        CHECK(network.throughput() > 0.93 * path.bytes_per_s);
        CHECK(network.overflow() < 0.01);
    }
}

TEST(a_link_resumes_at_the_known_rate_after_every_pause) {
    for (const Path& path : paths) {
        Network network(path, 9);
        const std::uint64_t burst = 4'000'000;
        const std::size_t link = network.add(RateMode::automatic, burst);
        const double ideal_s = static_cast<double>(burst) / path.bytes_per_s + static_cast<double>(path.rtt) / 1e9;
        int slow = 0;  // every ten seconds a burst is slowed by a look at the bare path
        for (int i = 0; i < 25; ++i) {
            const Nanos begin = network.now();
            while (!network.finished(link)) network.run(100 * microsecond);
            const double took_s = static_cast<double>(network.now() - begin) / 1e9;
            if (i >= 2) CHECK(took_s < 1.35 * ideal_s);
            if (i >= 2) slow += took_s > 1.05 * ideal_s ? 1 : 0;
            network.run(500 * millisecond);
            network.give(link, burst);
        }
        CHECK(slow <= 2);
    }
}

TEST(app_limited_rounds_raise_the_estimate_and_never_lower_it) {
    for (const Path& path : paths) {
        Network network(path, 10);
        const std::size_t link = network.add(RateMode::automatic, static_cast<std::uint64_t>(3 * path.bytes_per_s));
        network.run(4 * second);
        const double before = network.control(link).bytes_per_s();
        for (int i = 0; i < 200; ++i) {
            network.give(link, 5'000);
            network.run(20 * millisecond);
        }
        CHECK(network.control(link).bytes_per_s() > 0.9 * before);
    }
}

TEST(low_priority_leaves_nine_tenths_to_others_and_returns_when_they_leave) {
    for (const Path& path : paths) {
        for (const bool greedy : {false, true}) {
            Network network(path, 11);
            const std::size_t low = network.add(RateMode::low_priority);
            network.run(second + rounds(path, 100));
            network.measure();
            network.run(second);
            CHECK(network.throughput(low) > 0.6 * path.bytes_per_s);
            const double window = path.bytes_per_s * static_cast<double>(path.rtt) / 1e9 + 300'000;
            const auto backlog = static_cast<std::uint64_t>(path.bytes_per_s * 6);
            const RateMode mode = greedy ? RateMode::unlimited : RateMode::automatic;
            const std::size_t other = network.add(mode, backlog, greedy ? window : 0);
            network.run(rounds(path, 70));
            network.measure();
            network.run(second);
            CHECK(network.throughput(other) > 0.9 * path.bytes_per_s);
            while (!network.finished(other)) network.run(second);
            network.run(second + rounds(path, 100));
            network.measure();
            network.run(second);
            CHECK(network.throughput(low) > 0.6 * path.bytes_per_s);
        }
    }
}

TEST(batches_shrink_with_the_rate_to_two_datagrams) {
    const auto batch_at = [](double rate_mbit, std::size_t datagram) {
        Path path{.bytes_per_s = rate_mbit * mbit, .rtt = millisecond, .datagram_bytes = datagram};
        path.credit_bytes = 4e6;
        Network network(path, 12);
        network.add(RateMode::automatic);
        network.run(2 * second);
        return network.control(0).batch_bytes();
    };
    CHECK_EQUAL(batch_at(1, 1472), std::size_t{2 * 1472});
    CHECK(batch_at(400, 1472) > 8'000 && batch_at(400, 1472) < 20'000);
    CHECK_EQUAL(batch_at(10'000, 1472), std::size_t{65'536});
    CHECK(batch_at(10, 60'000) >= 60'000 && batch_at(10, 60'000) <= 65'536);
}

TEST(a_full_window_waits_for_a_report) {
    RateControl control(RateMode::automatic, 1472, 0);
    std::uint64_t in_flight = 0;
    while (control.try_send(1472, in_flight, 0)) in_flight += 1472;
    CHECK(in_flight >= 2 * 1472 && in_flight <= 65'536);
    CHECK_EQUAL(control.next_send_at(0), never);
    CHECK_EQUAL(control.min_rtt(), never);
    control.on_delivery({.now = millisecond, .rtt = millisecond, .bytes_per_s = 1e6, .delivered_bytes = in_flight});
    CHECK_EQUAL(control.min_rtt(), millisecond);
    CHECK(control.try_send(1472, 0, 2 * millisecond));
}
