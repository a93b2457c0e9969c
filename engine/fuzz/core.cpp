// Cores under a program of a fuzzer's making. The input is a list of operations: post, deliver, drop, duplicate, bend,
// forge, wait, cancel, leave, restart, narrow, darken a path. The first byte says how many ranks and paths there are, whether
// members may lie, and how much room there is for what must be kept. Messages are coded or not, and sums replace
// contributions or not.
// A lie is told under the name of a rank that goes on telling the truth as well, so that the two may wait for one another
// for ever: then only safety is asked for.
#include "world.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    storm::fuzz::Program program{{data, size}};
    const std::uint8_t first = program.byte();
    storm::fuzz::World world(static_cast<std::uint16_t>(2 + first % 2), first / 2 % 2 == 1,
                             first / 4 % 2 == 1 ? 8 << 10 : 128 << 10, static_cast<std::uint8_t>(1 + first / 8 % 2));
    for (int steps = 0; !program.rest.empty() && steps < 200; ++steps) world.step(program);
    world.finish();
    return 0;
}
