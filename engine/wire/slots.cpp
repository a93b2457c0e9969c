#include "wire/slots.hpp"

namespace storm {

SlotRef Slots::add(Outgoing& message) {
    if (free_.empty()) {
        free_.push_back(static_cast<std::uint32_t>(slots_.size()));
        slots_.push_back({});
    }
    const std::uint32_t slot = free_.back();
    free_.pop_back();
    slots_[slot].message = &message;
    return {.slot = slot, .generation = slots_[slot].generation};
}

Outgoing* Slots::find(SlotRef ref) const {
    if (ref.slot >= slots_.size() || slots_[ref.slot].generation != ref.generation) return nullptr;
    return slots_[ref.slot].message;
}

void Slots::remove(SlotRef ref) {
    if (find(ref) == nullptr) return;
    ++slots_[ref.slot].generation;
    slots_[ref.slot].message = nullptr;
    free_.push_back(ref.slot);
}

}  // namespace storm
