// Congestion control on a bottleneck without foreign traffic: one link, or several links of the same job.
#include "bottleneck.hpp"

using namespace storm;
using namespace storm::check;

TEST(finds_the_bottleneck_within_twenty_five_rounds) {
    for (const Path& path : paths) {
        Bottleneck network(path, 1);
        network.add(RateMode::automatic);
        network.run(rounds(path, 25));
        network.measure();
        network.run(rounds(path, 15));
        CHECK(network.throughput() > 0.9 * path.bytes_per_s);
    }
}

TEST(random_loss_up_to_forty_percent_costs_no_rate) {
    for (Path path : paths) {
        for (const double loss : {0.0, 0.1, 0.3, 0.4}) {
            path.loss = loss;
            Bottleneck network(path, 2);
            network.add(RateMode::automatic);
            network.run(second + rounds(path, 20));
            network.measure();
            network.run(2 * second + rounds(path, 100));
            CHECK(network.throughput() > 0.93 * path.bytes_per_s * (1 - loss));
            CHECK(network.overflow() < 0.01);
        }
    }
}

TEST(threads_that_wake_late_on_a_lossy_link_are_not_taken_for_a_queue) {
    for (Path path : paths) {
        for (const double loss : {0.0, 0.1, 0.3}) {
            path.loss = loss;
            path.jitter = (loss < 0.3 ? 1000 : 500) * microsecond;
            Bottleneck network(path, 13);
            network.add(RateMode::automatic);
            network.run(second + rounds(path, 20));
            network.measure();
            network.run(2 * second + rounds(path, 100));
            CHECK(network.throughput() > 0.88 * path.bytes_per_s * (1 - loss));
        }
    }
}

TEST(loss_that_begins_in_mid_run_costs_no_rate) {
    for (const Path& path : paths) {
        Bottleneck network(path, 3);
        network.add(RateMode::automatic);
        network.run(second + rounds(path, 20));
        network.set_loss(0.3);
        network.run(rounds(path, 50));
        network.measure();
        network.run(second + rounds(path, 50));
        CHECK(network.throughput() > 0.93 * path.bytes_per_s * 0.7);
    }
}

TEST(competing_senders_share_a_shallow_queue_without_overflow) {
    for (const Path& path : paths) {
        for (const int senders : {1, 3, 7}) {
            for (const Nanos jitter : {Nanos{0}, 300 * microsecond}) {
                Path noisy = path;
                noisy.jitter = jitter;
                noisy.links = static_cast<std::size_t>(senders);
                Bottleneck network(noisy, 4);
                for (int i = 0; i < senders; ++i) network.add(RateMode::automatic);
                network.run(3 * second + rounds(path, 50));  // past the first PROBE_RTT, in which all see the bare path
                network.measure();
                network.run(3 * second + rounds(path, 100));
                CHECK(network.overflow() < 0.01);
                CHECK(network.throughput() > 0.95 * path.bytes_per_s);
                CHECK(network.fairness() > (jitter > 0 ? 0.75 : 0.9));
            }
        }
    }
}

TEST(one_sender_keeps_even_a_queue_of_64_kilobytes_from_overflowing) {
    for (Path path : paths) {
        path.queue_bytes = 64 * 1024;
        Bottleneck network(path, 5);
        network.add(RateMode::automatic);
        network.run(second + rounds(path, 50));
        network.measure();
        network.run(2 * second + rounds(path, 100));
        CHECK(network.overflow() < 0.01);
        CHECK(network.throughput() > 0.95 * path.bytes_per_s);
    }
}

TEST(seven_senders_that_start_at_once_overflow_a_shallow_queue_hardly) {
    for (Path path : {lab, lan}) {
        path.links = 7;
        path.queue_bytes = 128 * 1024;
        path.most_held = millisecond / 2;
        Bottleneck network(path, 22);
        for (int i = 0; i < 7; ++i) network.add(RateMode::automatic);
        network.measure();
        network.run(second);
        CHECK(network.overflow() < 0.01);
        CHECK(network.throughput() > 0.93 * path.bytes_per_s);
    }
}

TEST(senders_that_join_one_after_the_other_become_equal) {
    for (Path path : paths) {
        path.links = 4;
        Bottleneck network(path, 6);
        for (int i = 0; i < 4; ++i) {
            network.add(RateMode::automatic);
            network.run(rounds(path, 50));
        }
        network.run(4 * second);
        network.measure();
        network.run(4 * second);
        CHECK(network.fairness() > 0.9);
        CHECK(network.overflow() < 0.01);
    }
}

TEST(many_seconds_of_traffic_do_not_raise_the_queue) {
    Path path = lan;
    path.links = 5;
    Bottleneck network(path, 7);
    for (int i = 0; i < 5; ++i) {
        network.add(RateMode::automatic);
        network.run(17 * millisecond);
    }
    network.run(30 * second);
    network.measure();
    network.run(5 * second);
    CHECK(network.most_queued() < 256 * 1024);
    CHECK(network.control(0).min_rtt() < 2 * lan.rtt);
}

TEST(a_rate_that_halves_and_doubles_is_followed_without_overflow) {
    for (const Path& path : paths) {
        Bottleneck network(path, 8);
        network.add(RateMode::automatic);
        network.run(second + rounds(path, 20));
        network.set_rate(path.bytes_per_s / 2);
        network.run(rounds(path, 30));
        network.measure();
        network.run(rounds(path, 60));
        CHECK(network.throughput() > 0.93 * path.bytes_per_s / 2);
        CHECK(network.overflow() < 0.01);
        network.set_rate(path.bytes_per_s);
        network.run(rounds(path, 100));
        network.measure();
        network.run(rounds(path, 60));
        CHECK(network.throughput() > 0.93 * path.bytes_per_s);
        CHECK(network.overflow() < 0.01);
    }
}

TEST(a_link_resumes_at_the_known_rate_after_every_pause) {
    for (const Path& path : paths) {
        Bottleneck network(path, 9);
        const std::uint64_t burst = 4'000'000;
        const std::size_t link = network.add(RateMode::automatic, burst);
        const double ideal_s = static_cast<double>(burst) / path.bytes_per_s + static_cast<double>(path.rtt) / 1e9;
        int slow = 0;  // every ten seconds a burst is slowed by a look at the bare path
        for (int i = 0; i < 25; ++i) {
            const Nanos begin = network.now();
            while (!network.finished(link)) network.run(100 * microsecond);
            const double took_s = static_cast<double>(network.now() - begin) / 1e9;
            if (i >= 2) CHECK(took_s < 1.35 * ideal_s);
            if (i >= 2) slow += took_s > 1.05 * ideal_s ? 1 : 0;
            network.run(500 * millisecond);
            network.give(link, burst);
        }
        CHECK(slow <= 2);
    }
}

TEST(app_limited_rounds_raise_the_estimate_and_never_lower_it) {
    for (const Path& path : paths) {
        Bottleneck network(path, 10);
        const std::size_t link = network.add(RateMode::automatic, static_cast<std::uint64_t>(3 * path.bytes_per_s));
        network.run(4 * second);
        const double before = network.control(link).bytes_per_s();
        for (int i = 0; i < 200; ++i) {
            network.give(link, 5'000);
            network.run(20 * millisecond);
        }
        CHECK(network.control(link).bytes_per_s() > 0.9 * before);
    }
}

TEST(batches_shrink_with_the_rate_to_two_datagrams) {
    const auto batch_at = [](double rate_mbit, std::size_t datagram) {
        Path path{.bytes_per_s = rate_mbit * mbit, .rtt = millisecond, .datagram_bytes = datagram};
        path.credit_bytes = 4e6;
        Bottleneck network(path, 12);
        network.add(RateMode::automatic);
        network.run(2 * second);
        return network.control(0).batch_bytes();
    };
    CHECK_EQUAL(batch_at(1, 1472), std::size_t{2 * 1472});
    CHECK(batch_at(400, 1472) > 8'000 && batch_at(400, 1472) < 20'000);
    CHECK_EQUAL(batch_at(10'000, 1472), std::size_t{65'536});
    CHECK(batch_at(10, 60'000) >= 60'000 && batch_at(10, 60'000) <= 65'536);
}

TEST(a_full_window_waits_for_a_report) {
    RateControl control(RateMode::automatic, 1472, 0);
    std::uint64_t in_flight = 0;
    Nanos now = 0;
    std::uint64_t at_once = 0;
    while (control.next_send_at(now) != never) {
        now = control.next_send_at(now);
        if (!control.try_send(1472, in_flight, now)) continue;
        in_flight += 1472;
        if (now < 5 * millisecond) at_once = in_flight;
    }
    CHECK(at_once >= 2 * 1472 && at_once <= 65'536);
    // A little more is sent before anything is answered, slowly: the path may be long, and it may be slow.
    CHECK(in_flight > at_once && in_flight <= 128 * 1472);
    CHECK(static_cast<double>(in_flight - at_once) <= 1.05e6 * static_cast<double>(now) * 1e-9);
    CHECK_EQUAL(control.min_rtt(), never);
    now += millisecond;
    control.on_delivery({.now = now, .rtt = millisecond, .bytes_per_s = 1e6, .delivered_bytes = in_flight});
    CHECK_EQUAL(control.min_rtt(), millisecond);
    CHECK(control.try_send(1472, 0, now + millisecond));
}
