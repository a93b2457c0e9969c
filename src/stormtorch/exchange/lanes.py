"""Number of lanes of a rank: sockets, with a thread each, among which large messages are divided."""

import os

from stormtorch.exchange.options import Options

# With more lanes, memory bandwidth is the bottleneck.
_MOST_BY_DEFAULT = 4
# A lane keeps a core busy while it carries a large message.
_CORES_PER_LANE = 1
# One core sends and receives about this much.
_MBIT_PER_LANE = 10_000


def own_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def sockets_to_open(options: Options) -> int:
    """Number of sockets to open before the other ranks are known; those beyond the agreed lanes are closed later."""
    if not options.lanes_possible:
        return 1
    if options.lanes is not None:
        return options.lanes
    if options.port:  # the ports after it may be meant for other ranks
        return 1
    return max(min(own_cores() // _CORES_PER_LANE, _MOST_BY_DEFAULT), 1)


def lanes_for(cores: int, ranks: int, interface_mbit: int | None) -> int:
    """Number of lanes that are worthwhile for a rank.

    Args:
        cores: Cores that it may use.
        ranks: Ranks that share them.
        interface_mbit: Speed of the interface to other machines in Mbit/s, 0 if unknown; None if all ranks are on one
            machine. One core saturates an interface of up to 10 Gbit/s.
    """
    lanes = cores // ranks // _CORES_PER_LANE
    return max(lanes if interface_mbit is None else min(lanes, interface_mbit // _MBIT_PER_LANE), 1)
