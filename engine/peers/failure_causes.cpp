#include "peers/failure_causes.hpp"

#include <algorithm>

namespace storm {

void FailureCauses::on_failed(std::uint64_t key, Status status, FailureCause failure_cause, Nanos now) {
    failed_.emplace_back(key, failure_cause);
    if (failed_.size() > most) failed_.pop_front();
    if (status == Status::closed) return;
    if (!last_ || now > last_at_ + 2 * silence_) {
        last_ = failure_cause;
        last_at_ = now;
    }
}

void FailureCauses::on_success(Nanos started, std::optional<Nanos> culprit_received_at) {
    if (!last_ || started < last_at_) return;
    const bool ours = last_.culprit == own_rank_, long_ago = started > last_at_ + 2 * silence_;
    if (ours || long_ago || (culprit_received_at && *culprit_received_at > last_at_)) last_ = {};
}

FailureCause FailureCauses::of(std::uint64_t key) const {
    const auto found =
        std::find_if(failed_.begin(), failed_.end(), [&](const auto& each) { return each.first == key; });
    return found == failed_.end() ? FailureCause{} : found->second;
}

}  // namespace storm
