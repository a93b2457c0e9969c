// Messages to one peer that have something to send, those of the oldest exchange first: a repair must not wait behind all
// that was posted since. A message stands in one queue at most, and its `queued` says whether it does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

namespace storm {

struct Outgoing;

class SendQueue {
public:
    // Adds a message, unless it stands here already or nothing of it is wanted any more.
    void push(Outgoing& message);
    void remove(Outgoing& message);
    void clear();
    // The oldest message that may send something now; null if none may. Drops messages that have nothing to send.
    // `eager_bytes`: how much of a message may leave before its receiver says that it has posted.
    [[nodiscard]] Outgoing* next(std::uint64_t eager_bytes);
    // Whether every chunk that waits here was sent before.
    [[nodiscard]] bool only_repairs() const;
    [[nodiscard]] bool empty() const { return messages_.empty(); }
    [[nodiscard]] std::size_t size() const { return messages_.size(); }

private:
    std::deque<Outgoing*> messages_;
};

}  // namespace storm
