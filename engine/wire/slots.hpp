// Numbers for outgoing messages, so that a datagram in flight or a batch in the socket can name its message without a
// pointer that may dangle. A slot is used again for another message, under another generation.
#pragma once

#include <cstdint>
#include <vector>

namespace storm {

struct Outgoing;

// Names one outgoing message, also after it is gone.
struct SlotRef {
    std::uint32_t slot{}, generation{};
    bool operator==(const SlotRef&) const = default;
};

class Slots {
public:
    [[nodiscard]] SlotRef add(Outgoing& message);
    // Null if the message was removed.
    [[nodiscard]] Outgoing* find(SlotRef ref) const;
    // Forgets a message; every other copy of `ref` then finds nothing. Removing it twice has no effect.
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
