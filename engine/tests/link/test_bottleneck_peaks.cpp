// Peak rates of a bottleneck, over windows.
#include "check.hpp"
#include "link/bottleneck_peaks.hpp"

using namespace storm;

namespace {

constexpr Nanos start = 10 * second;

bool near(double found, double expected) { return found > 0.9 * expected && found < 1.1 * expected; }

}  // namespace

TEST(line_that_carried_little_has_no_peak) {
    BottleneckPeaks line;
    CHECK_EQUAL(line.take().both, 0.0);
    for (int each = 0; each < 40; ++each) line.received(1000, start + each * 5 * millisecond);
    CHECK_EQUAL(line.take().in, 0.0);
}

TEST(peak_is_the_busiest_window_and_pauses_do_not_count) {
    BottleneckPeaks line;
    for (int burst = 0; burst < 3; ++burst) {
        // Bursts at 1 MB/s, the middle one at 2 MB/s; and long pauses.
        const Nanos begin = start + burst * 10 * second;
        for (int each = 0; each <= 150; ++each) line.received(burst == 1 ? 2000 : 1000, begin + each * millisecond);
    }
    const BottleneckPeaks::Peaks peaks = line.take();
    CHECK(near(peaks.in, 2e6));
    CHECK_EQUAL(peaks.out, 0.0);
    CHECK_EQUAL(line.take().in, 0.0);  // it was taken
}

TEST(thin_line_is_measured_over_longer_windows) {
    BottleneckPeaks line;
    for (int each = 0; each <= 200; ++each) line.received(1500, start + each * 15 * millisecond);
    CHECK(near(line.take().in, 1e5));
}

TEST(bunched_reports_do_not_count_as_speed) {
    BottleneckPeaks line;
    for (int each = 0; each <= 3000; ++each) {
        const Nanos now = start + each * millisecond;
        line.sent(1000, now);
        if (each % 200 == 199) line.delivered(200 * 1000, now);
    }
    CHECK(near(line.take().out, 1e6));
}

TEST(both_ways_count_together_only_if_they_were_busy_at_once) {
    BottleneckPeaks one_by_one, at_once;
    const auto send = [](BottleneckPeaks& line, Nanos now) {
        line.sent(1000, now);
        line.delivered(1000, now);
    };
    for (int each = 0; each <= 300; ++each) {
        send(one_by_one, start + each * millisecond);
        send(at_once, start + each * millisecond);
        at_once.received(1000, start + each * millisecond);
    }
    for (int each = 0; each <= 300; ++each) one_by_one.received(1000, start + second + each * millisecond);
    CHECK(near(one_by_one.take().both, 1e6));
    const BottleneckPeaks::Peaks together = at_once.take();
    CHECK(near(together.both, 2e6));
    CHECK(near(together.out, 1e6));
}
