// A model of TCP for simulations: the sender and the receiver of one connection, in whole segments and without any
// input or output. It follows Linux where that shows in how long a response takes: ten segments at first, slow start
// that HyStart ends, CUBIC's 0.7 after a loss and its growth beside Reno (round trips are too short for its cubic),
// losses found by the order of transmissions (RACK: links keep packets in order), a probe for a lost tail, timeouts of
// 200 ms and more, a window that is kept between responses and shrinks in longer pauses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <set>

#include "base/clock.hpp"

namespace storm {

inline constexpr std::uint32_t tcp_payload_bytes = 1448;

class TcpSender {
public:
    struct Transmission {
        std::uint32_t number{};
        std::uint64_t order{};
    };

    // `rtt`: that of the handshake.
    void open(Nanos rtt);
    // Appends segments to what is to be sent.
    void write(std::uint32_t segments, Nanos now);
    // The next segment to send now, if the window allows any.
    [[nodiscard]] std::optional<Transmission> next(Nanos now);
    // `next`: the first segment that the receiver misses; `sacked`: the segment that it just got, by transmission
    // `order`.
    void on_ack(std::uint32_t next, std::uint32_t sacked, std::uint64_t order, Nanos now);
    // When `on_timer` is due; `never` while nothing is in flight.
    [[nodiscard]] Nanos timer() const { return timer_; }
    void on_timer(Nanos now);

    [[nodiscard]] double window() const { return window_; }
    [[nodiscard]] std::uint32_t in_flight() const { return pipe_; }
    [[nodiscard]] std::uint64_t resent() const { return resent_; }
    [[nodiscard]] std::uint64_t timeouts() const { return timeouts_; }

private:
    enum class State : std::uint8_t { open, recovery, loss };
    struct Flight {
        std::uint64_t order{};
        Nanos sent_at{};
        bool sacked{}, lost{}, resent{};
    };

    [[nodiscard]] Nanos timeout() const;
    [[nodiscard]] Transmission transmit(std::size_t index, Nanos now);
    void arm(Nanos now);
    void learn_rtt(Nanos rtt);
    void find_losses(Nanos now);
    void grow(std::uint32_t acked, Nanos rtt, Nanos now);
    [[nodiscard]] bool queue_builds_up(Nanos rtt, Nanos now);
    void shrink();

    State state_{State::open};
    std::deque<Flight> flight_;  // from unacked_ on
    std::uint32_t unacked_{}, written_{}, recover_to_{};
    std::uint32_t pipe_{};  // segments on their way: neither acknowledged nor known to be lost
    std::uint64_t order_{}, newest_delivered_{};
    double window_{10}, threshold_{std::numeric_limits<double>::infinity()};
    bool limited_{};             // by the window, since it was last acknowledged
    std::uint32_t most_pipe_{};  // since the last write into an idle connection
    Nanos srtt_{}, rttvar_{}, least_rtt_{never};
    Nanos sent_at_{}, timer_{never};
    bool probes_{}, probed_{}, probe_{};  // tail-loss probe: the timer is for one; one was sent; one is to be sent now
    int backoff_{};
    // HyStart
    std::uint32_t round_end_{};
    int round_samples_{};
    Nanos round_start_{}, last_ack_{}, round_rtt_{never};
    std::uint64_t resent_{}, timeouts_{};
};

class TcpReceiver {
public:
    // Whether an acknowledgement must leave at once.
    [[nodiscard]] bool on_data(std::uint32_t number, std::uint64_t order, Nanos now);
    // The first segment that is missing.
    [[nodiscard]] std::uint32_t next() const { return next_; }
    [[nodiscard]] std::uint32_t newest() const { return newest_; }
    [[nodiscard]] std::uint64_t order() const { return order_; }
    // When an acknowledgement that was delayed must leave; `never` if none is.
    [[nodiscard]] Nanos timer() const { return timer_; }
    void acked() {
        unacked_ = 0;
        timer_ = never;
    }

private:
    std::uint32_t next_{}, newest_{};
    std::uint64_t order_{};
    std::set<std::uint32_t> beyond_;  // that arrived although earlier ones are missing
    std::uint32_t unacked_{};
    Nanos timer_{never};
};

}  // namespace storm
