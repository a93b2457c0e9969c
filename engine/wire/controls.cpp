#include "wire/controls.hpp"

#include <algorithm>

namespace storm {

void Controls::push(const Control& what) {
    if (waiting_.size() >= most) return;
    if (std::find(waiting_.begin(), waiting_.end(), what) == waiting_.end()) waiting_.push_back(what);
}

Control Controls::pop() {
    const Control first = waiting_.front();
    waiting_.pop_front();
    return first;
}

namespace {

// As many copies as make the loss of all of them rare: that would cost at least a round trip.
unsigned copies_against(double loss) {
    constexpr unsigned most = 4;
    constexpr double rare = 2e-3;
    unsigned copies = 1;
    for (double all = loss; all > rare && copies < most; all *= loss) ++copies;
    return copies;
}

}  // namespace

unsigned copies_of(Kind kind, unsigned urgent, const LinkState& link) {
    const unsigned lossy = link.lossy ? 1 : 0;
    if (kind == Kind::end) return 3;
    if (kind == Kind::ping) return 1 + lossy + std::min(link.probes, 3U);
    if (kind == Kind::report && urgent > 0) return std::max(urgent + lossy, copies_against(link.loss));
    return kind == Kind::done ? copies_against(link.loss) : 1;
}

}  // namespace storm
