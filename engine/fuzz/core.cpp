// Fuzz target: cores under a program made by the fuzzer. The input is a list of operations: post, deliver, drop,
// duplicate, corrupt, forge, wait, cancel, leave, restart, shrink a path's MTU, block a path. The first byte sets the
// number of ranks and paths, whether members may be Byzantine, and the memory for what must be kept. Messages are coded
// or not, and sums replace contributions or not. Forged datagrams carry the rank of a member that sends honest ones as
// well, so two ranks may wait for one another for ever: then only safety is required.
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
