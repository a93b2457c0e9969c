// Flow control: how credit and the bottleneck are shared between peers.
#include <random>
#include <vector>

#include "check.hpp"
#include "link/shared_bottleneck.hpp"
#include "peers/credit.hpp"

using namespace storm;

TEST(credit_of_all_peers_together_fits_the_buffer_whoever_is_awaited) {
    std::mt19937 random(2);
    constexpr std::size_t buffer = 1 << 20;
    for (const std::size_t world : {2U, 3U, 9U, 100U}) {
        Credit credit(buffer, world);
        std::vector<std::uint32_t> open(world);
        for (int step = 0; step < 1000; ++step) {
            const auto peer = static_cast<std::uint16_t>(1 + random() % (world - 1U));
            if (open[peer] > 0 && random() % 2 == 0) {
                --open[peer];
                credit.close(peer);
            } else {
                CHECK_EQUAL(credit.open(peer), open[peer] == 0);
                ++open[peer];
            }
            std::uint64_t awaited = 0, all = 0;
            for (std::uint16_t each = 1; each < world; ++each) {
                (open[each] > 0 ? awaited : all) += credit.bytes(each);
            }
            // Peers that nothing is awaited from share another quarter of the credit.
            CHECK(awaited <= buffer * 3 / 4);
            CHECK(awaited + all <= buffer);
        }
    }
}

TEST(last_peer_that_is_awaited_gets_more_credit) {
    Credit credit(1 << 20, 5);
    for (std::uint16_t peer = 1; peer < 5; ++peer) credit.open(peer);
    const std::uint64_t among_all = credit.bytes(4);
    CHECK_EQUAL(among_all, credit.idle_bytes());
    for (std::uint16_t peer = 1; peer < 4; ++peer) credit.close(peer);
    CHECK(credit.bytes(4) > among_all);
    credit.close(4);
    CHECK_EQUAL(credit.bytes(4), among_all);
}

TEST(world_of_one_has_the_whole_buffer) { CHECK_EQUAL(Credit(1000, 1).bytes(0), 1000U); }

TEST(links_share_the_line_by_what_they_still_have_to_carry) {
    SharedBottleneck line(4, 0);
    CHECK(line.due(0));
    line.begin(0);
    CHECK(!line.due(millisecond - 1));
    CHECK(line.due(millisecond));
    line.add(1, 300, 5 * second);
    line.add(1, 300, 2 * second);
    line.add(3, 200, never);
    std::vector<double> shares(4);
    line.share([&](std::uint16_t peer, double share, std::size_t busy, Nanos deadline) {
        shares[peer] = share;
        CHECK_EQUAL(busy, 2U);
        CHECK_EQUAL(deadline, peer == 1 ? 2 * second : never);
    });
    CHECK(shares == (std::vector<double>{0, 0.75, 0, 0.25}));
    line.begin(millisecond);
    line.share([](std::uint16_t, double, std::size_t, Nanos) { CHECK(false); });
}
