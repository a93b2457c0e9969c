// Failure detection by ICMP port unreachable: the kernel of a peer's machine reports that its port is closed.
//
// Such a report can be forged, and a NAT router that has lost a translation sends it too. So a single report only makes
// us ping the peer at once. The peer counts as dead when the report still comes after most of a second, several pings
// were sent meanwhile, and nothing authentic arrived. A process that is stopped or starved keeps its socket, so its
// kernel sends no such reports.
#pragma once

#include <algorithm>

#include "base/clock.hpp"

namespace storm {

class PortUnreachable {
public:
    explicit PortUnreachable(Nanos silence) : lasts_(std::min(9 * second / 10, silence / 4)), every_(lasts_ / 9) {}

    // Its kernel reports that its port is closed. True once: when the peer counts as dead.
    [[nodiscard]] bool on_unreachable(Nanos now) {
        if (dead()) return false;
        if (began_ == never || now - refused_at_ > 4 * lasts_) *this = begun(now);
        refused_at_ = now;
        if (probes_ < least_probes || now - began_ < lasts_) return false;
        dead_at_ = now;
        probe_at_ = never;
        return true;
    }
    // Something authentic arrived from it.
    void clear() {
        if (began_ != never) *this = cleared();
    }
    // True if it is to be pinged again now.
    [[nodiscard]] bool probe_due(Nanos now) {
        if (now < probe_at_) return false;
        if (now - refused_at_ > 4 * lasts_) {
            clear();
            return false;
        }
        ++probes_;
        probe_at_ = now + every_;
        return true;
    }
    [[nodiscard]] Nanos timer() const { return probe_at_; }
    [[nodiscard]] bool dead() const { return dead_at_ != never; }
    // When the peer counts as silent for an exchange begun at `started`; `never` if it does not count as dead.
    [[nodiscard]] Nanos silent_at(Nanos started) const { return dead() ? std::max(dead_at_, started + lasts_) : never; }

private:
    static constexpr unsigned least_probes = 5;

    [[nodiscard]] PortUnreachable cleared() const {
        PortUnreachable fresh = *this;
        fresh.began_ = fresh.probe_at_ = fresh.dead_at_ = never;
        fresh.probes_ = 0;
        return fresh;
    }
    [[nodiscard]] PortUnreachable begun(Nanos now) const {
        PortUnreachable fresh = cleared();
        fresh.began_ = fresh.probe_at_ = now;
        return fresh;
    }

    // After a first few, kernels send such reports once a second, so the next one comes in time.
    Nanos lasts_, every_;
    Nanos began_{never}, refused_at_{}, probe_at_{never}, dead_at_{never};
    unsigned probes_{};
};

}  // namespace storm
