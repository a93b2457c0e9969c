// The queue of control datagrams, and how many copies of each are sent.
#include "check.hpp"
#include "wire/controls.hpp"

using namespace storm;

TEST(equal_controls_are_sent_once_and_others_in_the_order_they_came) {
    Controls controls;
    controls.push({.kind = Kind::ready, .channel = 1, .seq = 2});
    controls.push({.kind = Kind::done, .channel = 1, .seq = 2});
    controls.push({.kind = Kind::ready, .channel = 1, .seq = 2});
    controls.push({.kind = Kind::ready, .channel = 1, .seq = 3});
    CHECK(controls.pop() == (Control{.kind = Kind::ready, .channel = 1, .seq = 2}));
    CHECK(controls.pop() == (Control{.kind = Kind::done, .channel = 1, .seq = 2}));
    CHECK(controls.pop() == (Control{.kind = Kind::ready, .channel = 1, .seq = 3}));
    CHECK(controls.empty());
    // What was sent may be queued again.
    controls.push({.kind = Kind::ready, .channel = 1, .seq = 2});
    CHECK(!controls.empty());
}

TEST(controls_are_bounded) {
    Controls controls;
    for (std::uint32_t seq = 0; seq < 2 * Controls::most; ++seq) controls.push({.kind = Kind::done, .seq = seq});
    std::size_t count = 0;
    while (!controls.empty()) CHECK_EQUAL(controls.pop().seq, count++);
    CHECK_EQUAL(count, Controls::most);
}

TEST(controls_that_somebody_waits_for_leave_in_several_copies) {
    CHECK_EQUAL(copies_of(Kind::end, 0, {}), 3U);
    CHECK_EQUAL(copies_of(Kind::done, 1, {.lossy = true, .probes = 9}), 1U);
    CHECK_EQUAL(copies_of(Kind::done, 0, {.loss = 0.03, .lossy = true}), 2U);
    CHECK_EQUAL(copies_of(Kind::done, 0, {.loss = 0.1, .lossy = true}), 3U);
    CHECK_EQUAL(copies_of(Kind::done, 0, {.loss = 0.9, .lossy = true}), 4U);
    CHECK_EQUAL(copies_of(Kind::report, 0, {.loss = 0.1, .lossy = true}), 1U);
    CHECK_EQUAL(copies_of(Kind::report, 1, {.loss = 0.1, .lossy = true}), 3U);
    CHECK_EQUAL(copies_of(Kind::report, 1, {}), 1U);
    CHECK_EQUAL(copies_of(Kind::report, 1, {.lossy = true}), 2U);
    CHECK_EQUAL(copies_of(Kind::report, 4, {.lossy = true}), 5U);
    CHECK_EQUAL(copies_of(Kind::ping, 0, {}), 1U);
    CHECK_EQUAL(copies_of(Kind::ping, 0, {.lossy = true, .probes = 1}), 3U);
    CHECK_EQUAL(copies_of(Kind::ping, 0, {.probes = 100}), 4U);
}
