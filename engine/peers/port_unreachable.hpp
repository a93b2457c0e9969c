// Whether a peer's process is gone, by what the kernel of its machine says: that nobody listens at its port (ICMP).
//
// Anybody can forge such an answer, and a router that has lost a translation gives it too. So one is only a reason to ask
// at once. The peer counts as dead when the answer has come again after most of a second, several pings were sent
// meanwhile, and nothing authentic came. A process that is stopped or starved keeps its socket, so there are no such answers.
#pragma once

#include <algorithm>

#include "base/clock.hpp"

namespace storm {

class PortUnreachable {
public:
    explicit PortUnreachable(Nanos silence) : lasts_(std::min(9 * second / 10, silence / 4)), every_(lasts_ / 9) {}

    // Nobody listens where it was. True once: when that is believed.
    [[nodiscard]] bool on_unreachable(Nanos now) {
        if (dead()) return false;
        if (began_ == never || now - refused_at_ > 4 * lasts_) *this = begun(now);
        refused_at_ = now;
        if (probes_ < least_probes || now - began_ < lasts_) return false;
        dead_at_ = now;
        probe_at_ = never;
        return true;
    }
    // Something authentic came from it.
    void clear() {
        if (began_ != never) *this = cleared();
    }
    // True if it is to be asked again now.
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
    // When a peer that is needed since then counts as silent; `never` if nothing says that it is dead.
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

    // Kernels answer a stranger once a second, after a first few: so an answer comes again in time.
    Nanos lasts_, every_;
    Nanos began_{never}, refused_at_{}, probe_at_{never}, dead_at_{never};
    unsigned probes_{};
};

}  // namespace storm
