// The cache of path metrics: what it returns, and what it forgets.
#include "check.hpp"
#include "congestion/path_cache.hpp"

using namespace storm;

TEST(a_path_is_remembered_by_host_and_lane_until_it_is_stale) {
    PathCache memory;
    memory.store("10.0.0.1", 0, {.bytes_per_s = 1e6, .round_trip = 40 * millisecond}, second);
    CHECK_EQUAL(memory.recall("10.0.0.1", 0, 2 * second)->bytes_per_s, 1e6);
    CHECK_EQUAL(memory.recall("10.0.0.1", 0, 2 * second)->round_trip, 40 * millisecond);
    CHECK(!memory.recall("10.0.0.1", 1, 2 * second));
    CHECK(!memory.recall("10.0.0.2", 0, 2 * second));
    memory.store("10.0.0.1", 0, {.bytes_per_s = 2e6, .round_trip = 30 * millisecond}, 3 * second);
    CHECK_EQUAL(memory.recall("10.0.0.1", 0, 4 * second)->bytes_per_s, 2e6);
    CHECK(!memory.recall("10.0.0.1", 0, 3 * second + PathCache::stale_after));
}

TEST(of_too_many_paths_the_oldest_is_forgotten) {
    PathCache memory;
    for (std::size_t i = 0; i <= PathCache::most; ++i)
        memory.store(std::to_string(i), 0, {.bytes_per_s = 1e6}, static_cast<Nanos>(i));
    const auto end = static_cast<Nanos>(PathCache::most);
    CHECK(!memory.recall("0", 0, end));
    CHECK(memory.recall("1", 0, end).has_value());
    CHECK(memory.recall(std::to_string(PathCache::most), 0, end).has_value());
}
