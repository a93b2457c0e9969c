// Sequence numbers of channels: posted once, in bounded memory.
#include <random>
#include <set>
#include <stdexcept>

#include "check.hpp"
#include "wire/sequences.hpp"

using namespace storm;

namespace {

bool refused(Sequences& sequences, std::uint32_t channel, std::uint32_t seq) {
    try {
        sequences.post(channel, seq);
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

}  // namespace

TEST(sequence_numbers_are_remembered_as_a_set_would_remember_them) {
    std::mt19937 random(1);
    Sequences sequences;
    std::set<std::uint32_t> model;
    for (std::uint32_t step = 0; step < 5000; ++step) {
        const auto seq = static_cast<std::uint32_t>(step / 2 + random() % 50);
        CHECK_EQUAL(sequences.posted(7, seq), model.contains(seq));
        CHECK_EQUAL(refused(sequences, 7, seq), !model.insert(seq).second);
    }
    CHECK(!sequences.posted(8, 0));
}

TEST(sequence_number_too_far_ahead_is_refused_and_changes_nothing) {
    Sequences sequences;
    const auto most = static_cast<std::uint32_t>(Sequences::most_skipped);
    CHECK(refused(sequences, 0, most + 1));
    CHECK(!sequences.posted(0, most + 1));
    sequences.post(0, most);
    CHECK(!sequences.posted(0, most - 1));
    CHECK(refused(sequences, 0, most + 2));
    sequences.post(0, 0);
    sequences.post(0, most + 2);
}
