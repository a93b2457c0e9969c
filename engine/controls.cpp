#include "controls.hpp"

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

unsigned copies_of(Kind kind, unsigned urgent, const LinkState& link) {
    const unsigned lossy = link.lossy ? 1 : 0;
    if (kind == Kind::end) return 3;
    if (kind == Kind::ping) return 1 + lossy + std::min(link.probes, 3U);
    return kind == Kind::report && urgent > 0 ? urgent + lossy : 1;
}

}  // namespace storm
