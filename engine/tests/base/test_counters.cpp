// Lists of counters, used to sum and show them.
#include "base/counters.hpp"
#include "check.hpp"

using namespace storm;

namespace {

struct Three {
    std::uint64_t one{}, two{}, three{};
};

constexpr auto all =
    std::to_array<Named<Three>>({{"one", &Three::one}, {"two", &Three::two}, {"three", &Three::three}});
constexpr auto one_missing = std::to_array<Named<Three>>({{"one", &Three::one}, {"three", &Three::three}});
constexpr auto one_twice =
    std::to_array<Named<Three>>({{"one", &Three::one}, {"two", &Three::two}, {"two", &Three::two}});
static_assert(names_all(all) && !names_all(one_missing) && !names_all(one_twice));

}  // namespace

TEST(every_counter_is_added_up) {
    Counters sum, more;
    std::uint64_t value = 0;
    for (const Named<Counters>& each : counter_names) {
        sum.*each.counter = ++value;
        more.*each.counter = 1'000 * value;
    }
    add(sum, more, counter_names);
    value = 0;
    for (const Named<Counters>& each : counter_names) CHECK_EQUAL(sum.*each.counter, 1'001 * ++value);
}
