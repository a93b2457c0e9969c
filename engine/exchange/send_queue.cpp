#include "exchange/send_queue.hpp"

#include <algorithm>

#include "exchange/exchange.hpp"

namespace storm {

void SendQueue::push(Outgoing& message) {
    if (message.queued || message.released || !message.wanted) return;
    message.queued = true;
    const auto older = [](const Outgoing* one, const Outgoing* other) {
        return one->exchange->id < other->exchange->id;
    };
    messages_.insert(std::upper_bound(messages_.begin(), messages_.end(), &message, older), &message);
}

void SendQueue::remove(Outgoing& message) {
    if (!message.queued) return;
    message.queued = false;
    std::erase(messages_, &message);
}

void SendQueue::clear() {
    for (Outgoing* message : messages_) message->queued = false;
    messages_.clear();
}

Outgoing* SendQueue::next(std::uint64_t eager_bytes) {
    for (std::size_t i = 0; i < messages_.size();) {
        Outgoing* candidate = messages_[i];
        if (!candidate->sendable() && !candidate->parked) {
            candidate->queued = false;
            messages_.erase(messages_.begin() + static_cast<std::ptrdiff_t>(i));
            continue;
        }
        const bool within_eager = candidate->ready || !candidate->repairs.empty() || candidate->only_extra_copies() ||
                                  candidate->parity_due() > 0 || candidate->eager_bytes < eager_bytes;
        if (candidate->sendable() && within_eager) return candidate;
        ++i;
    }
    return nullptr;
}

bool SendQueue::only_repairs() const {
    return std::none_of(messages_.begin(), messages_.end(),
                        [](const Outgoing* message) { return message->sendable() && !message->first_pass_over(); });
}

}  // namespace storm
