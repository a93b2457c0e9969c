// Slots of outgoing messages: a handle never finds another message.
#include <random>
#include <vector>

#include "check.hpp"
#include "exchange/message.hpp"
#include "wire/slots.hpp"

using namespace storm;

TEST(slot_of_a_message_that_is_gone_finds_nothing_also_when_another_uses_it) {
    Slots slots;
    Outgoing first(ChunkLayout(10, 16, 0, 0)), second(ChunkLayout(10, 16, 0, 1));
    const SlotRef old = slots.add(first);
    CHECK(slots.find(old) == &first);
    slots.remove(old);
    CHECK(slots.find(old) == nullptr);
    const SlotRef fresh = slots.add(second);
    CHECK_EQUAL(fresh.slot, old.slot);
    CHECK(slots.find(old) == nullptr);
    CHECK(slots.find(fresh) == &second);
    slots.remove(old);  // a second time: not the other one
    CHECK(slots.find(fresh) == &second);
}

TEST(slot_that_was_never_given_finds_nothing) {
    const Slots slots;
    CHECK(slots.find({.slot = 3, .generation = 0}) == nullptr);
}

TEST(no_two_messages_have_the_same_slot) {
    std::mt19937 random(5);
    Slots slots;
    std::vector<std::unique_ptr<Outgoing>> messages;
    std::vector<SlotRef> refs;
    for (int step = 0; step < 2000; ++step) {
        if (refs.empty() || random() % 2 == 0) {
            messages.push_back(std::make_unique<Outgoing>(ChunkLayout(1, 16, 0, 0)));
            refs.push_back(slots.add(*messages.back()));
        } else {
            const std::size_t at = random() % refs.size();
            slots.remove(refs[at]);
            refs.erase(refs.begin() + static_cast<std::ptrdiff_t>(at));
            messages.erase(messages.begin() + static_cast<std::ptrdiff_t>(at));
        }
        for (std::size_t i = 0; i < refs.size(); ++i) CHECK(slots.find(refs[i]) == messages[i].get());
    }
}
