#include "coding/coding_model.hpp"

#include <algorithm>
#include <cmath>

namespace storm {
namespace {

// Coding costs processor time on both sides, so it must save some time on the network.
constexpr double least_gain_s = 0.5e-3;
constexpr double least_gain = 0.1;  // of what repairing costs
// A rarer failure than this saves nothing that could be noticed.
constexpr double least_failure = 1e-4;
// Even the smallest block may have so much parity.
constexpr std::size_t least_bound = 8;

// The chain of two states, seen only every `apart` datagrams.
struct Chain {
    double lose, recover;  // chances to go from good to bad and back

    Chain(const CodedLink& link, std::size_t apart) {
        const double loss = std::clamp(link.loss, 1e-9, 0.99);
        // Independent losses have runs of 1 / (1 - loss); shorter ones than that would alternate.
        const double back = 1.0 / std::max(link.burst, 1.0 / (1.0 - loss));
        const double there = back * loss / (1.0 - loss);
        const double memory = std::pow(std::max(0.0, 1.0 - back - there), static_cast<double>(apart));
        recover = (1.0 - loss) * (1.0 - memory);
        lose = loss * (1.0 - memory);
    }
};

// Expected delay after the last first-pass chunk that rounds of repair cause to a stretch: round j is over j round
// trips after the stretch, of which the chunks that follow hide `hidden_s`. From the second round on, repairs are sent
// twice.
double repair_delay(const CodedLink& link, double chunks, double hidden_s) {
    const double events = chunks / std::max(1.0, (1.0 - link.loss) * link.burst);
    double delay = 0.0;
    for (int round = 1; round < 64; ++round) {
        const double still = std::pow(link.loss, round == 1 ? 1.0 : 2.0 * round - 2.0);
        const double chance = -std::expm1(events * std::log1p(-std::min(still, 0.999)));
        if (chance < 1e-6) break;
        delay += chance * std::clamp(round * link.round_trip_s - hidden_s, 0.0, link.round_trip_s);
    }
    return delay;
}

}  // namespace

std::vector<double> block_failures(const CodedLink& link, std::size_t chunks, std::size_t most, std::size_t apart) {
    const Chain chain(link, apart);
    const double loss = std::clamp(link.loss, 1e-9, 0.99);
    // good[l], bad[l]: the chance that l of the datagrams so far were lost, and the last one was not, or was. More than
    // `most` are not distinguished.
    std::vector<double> good(most + 2), bad(most + 2), next_good(most + 2), next_bad(most + 2), failures;
    good[0] = 1.0 - loss;
    bad[std::min<std::size_t>(1, most + 1)] = loss;
    for (std::size_t sent = 1; sent <= chunks + most; ++sent) {
        if (sent >= chunks) {
            double fine = 0.0;
            for (std::size_t l = 0; l <= sent - chunks; ++l) fine += good[l] + bad[l];
            failures.push_back(std::clamp(1.0 - fine, 0.0, 1.0));
        }
        for (std::size_t l = 0; l <= most; ++l) {
            next_good[l] = good[l] * (1.0 - chain.lose) + bad[l] * chain.recover;
            next_bad[l + 1] = good[l] * chain.lose + bad[l] * (1.0 - chain.recover);
        }
        next_bad[0] = 0.0;
        good.swap(next_good);
        bad.swap(next_bad);
    }
    return failures;
}

std::size_t parity_that_pays(const CodedLink& link, const CodedStretch& stretch) {
    if (!(link.loss > 0.0) || !(link.round_trip_s > 0.0) || stretch.chunks == 0 || stretch.blocks == 0) return 0;
    const double n = static_cast<double>(stretch.chunks), blocks = static_cast<double>(stretch.blocks);
    const double hidden_s = static_cast<double>(stretch.after) * link.chunk_s;
    const double delay = repair_delay(link, n * stretch.messages, hidden_s);
    const double repairs = n * link.loss / (1.0 - std::min(link.loss, 0.99));
    const double without = delay + repairs * link.chunk_s;
    if (delay < least_gain_s) return 0;
    const std::size_t each = (stretch.chunks + stretch.blocks - 1) / stretch.blocks;
    const std::size_t most = std::min(std::max(each, least_bound), 255 - each);
    const std::vector<double> failures = block_failures(link, each, most, stretch.blocks);
    const double all_blocks = blocks * stretch.messages, trip_s = link.round_trip_s;
    std::size_t best = 0;
    double least = without;
    for (std::size_t m = 1; m <= most; ++m) {
        const double any = -std::expm1(all_blocks * std::log1p(-std::min(failures[m], 0.999999)));
        // Blocks that fail are topped up: one round for a few chunks of each, and perhaps more.
        const double few = 4.0 * std::max(1.0, all_blocks * failures[m]);
        const double failed = std::clamp(trip_s - hidden_s, 0.0, trip_s) + repair_delay(link, few, hidden_s - trip_s);
        // With less parity than chunks are lost, the rest is repaired.
        const double sent = std::max(static_cast<double>(m) * blocks, repairs);
        const double cost = sent * link.chunk_s + any * failed;
        if (cost < least) {
            least = cost;
            best = m;
        }
        if (any < least_failure) break;
    }
    return without - least > std::max(least_gain_s, least_gain * without) ? best : 0;
}

}  // namespace storm
