// One direction of a link between a host and the switch, under virtual time: two priority classes with a queue each.
// The classes share the link as those of Linux's htb do. Each may send at its own rate; what one does not use, the
// other may borrow, and the normal class borrows first. So the link is never idle while a packet waits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "base/clock.hpp"

namespace storm {

enum class Priority : std::uint8_t { normal, low };

struct SimLinkSettings {
    double bytes_per_s{};                // 0 is unlimited: nothing ever waits
    std::size_t queue_bytes{512 << 10};  // of the normal class; 0 is unlimited
    std::size_t low_queue_bytes{128 << 10};
    double
        low_share{};  // part of the link that the low class gets while both want it all; 0 lets it wait for all others
    // What an idle link sends at once, and an idle class before the other may borrow again. 0 is a plain wire, which
    // sends packets one after another at its rate.
    double burst_bytes{};
};

class SimLink {
public:
    // Throws std::invalid_argument.
    explicit SimLink(const SimLinkSettings& settings);

    // Sets the rate of packets that are taken from now on.
    void set_rate(double bytes_per_s) { settings_.bytes_per_s = bytes_per_s; }

    // Takes a packet, or drops and counts it if the queue of its class is full.
    bool offer(std::uint32_t packet, std::size_t bytes, Priority priority, Nanos now);
    // When the next packet may be taken; `never` while none waits.
    [[nodiscard]] Nanos next_at() const;
    struct Departure {
        std::uint32_t packet{};
        Nanos at{};  // its last byte leaves
    };
    // Puts the next packet on the link. Only at or after `next_at()`.
    [[nodiscard]] Departure take(Nanos now);

    struct Counts {
        std::uint64_t packets{}, bytes{};  // that left
        std::uint64_t drops{};
    };
    [[nodiscard]] const Counts& counts(Priority priority) const { return of(priority).counts; }
    [[nodiscard]] std::size_t waiting_bytes(Priority priority) const { return of(priority).bytes; }

private:
    struct Waiting {
        std::uint32_t packet{};
        std::size_t bytes{};
    };
    struct Class {
        std::deque<Waiting> queue{};
        std::size_t bytes{}, limit{};
        double share{};
        double credit{};  // bytes that it may send before it borrows; below 0 after a packet that exceeded it
        Counts counts{};
    };

    [[nodiscard]] const Class& of(Priority priority) const { return classes_[static_cast<std::size_t>(priority)]; }
    [[nodiscard]] Class& of(Priority priority) { return classes_[static_cast<std::size_t>(priority)]; }
    void refill(Nanos now);

    SimLinkSettings settings_;
    std::array<Class, 2> classes_{};
    Nanos refilled_at_{};
    Nanos clear_at_{};  // when all that was taken would be through without bursts
    Nanos free_at_{};   // when the next packet may be taken
};

}  // namespace storm
