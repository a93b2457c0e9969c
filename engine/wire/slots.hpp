// Slot map of outgoing messages: a datagram in flight or a batch in the socket names its message by slot and
// generation, without a pointer that may dangle. A slot is reused under another generation.
#pragma once

#include <cstdint>
#include <vector>

namespace storm {

struct Outgoing;

// Handle of one outgoing message. It may be looked up even after the message was removed.
struct SlotRef {
    std::uint32_t slot{}, generation{};
    bool operator==(const SlotRef&) const = default;
};

class Slots {
public:
    [[nodiscard]] SlotRef add(Outgoing& message);
    // Null if the message was removed.
    [[nodiscard]] Outgoing* find(SlotRef ref) const;
    // Removes a message; every other copy of `ref` then finds nothing. Removing it twice has no effect.
    void remove(SlotRef ref);

private:
    struct Slot {
        Outgoing* message{};
        std::uint32_t generation{};
    };
    std::vector<Slot> slots_;
    std::vector<std::uint32_t> free_;
};

}  // namespace storm
