// The send queue of one peer: messages that have something to send, those of the oldest exchange first, so that a
// retransmission does not wait behind everything posted since. A message is in at most one queue, or in none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

namespace storm {

struct Outgoing;

class SendQueue {
public:
    // Adds a message, unless it is queued already or nothing of it is wanted any more.
    void push(Outgoing& message);
    void remove(Outgoing& message);
    void clear();
    // The oldest message that may send something now; null if none may. Drops messages that have nothing to send.
    // `eager_bytes`: how much of a message may be sent before its receiver reports that it has posted.
    [[nodiscard]] Outgoing* next(std::uint64_t eager_bytes);
    // Whether only retransmissions are queued.
    [[nodiscard]] bool only_repairs() const;
    [[nodiscard]] bool empty() const { return messages_.empty(); }
    [[nodiscard]] std::size_t size() const { return messages_.size(); }

private:
    std::deque<Outgoing*> messages_;
};

}  // namespace storm
