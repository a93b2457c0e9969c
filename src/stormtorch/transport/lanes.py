"""How many lanes a job uses: sockets and threads of each rank between which large messages are divided."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stormtorch.transport.options import Options

if TYPE_CHECKING:
    from stormtorch.transport.cards import Card

# Beyond these, memory is the limit and not the number of threads that copy.
_MOST_UNASKED = 4
# A lane keeps a core busy while a large message is on its way.
_CORES_PER_LANE = 1
# One core sends and receives about this much.
_MBIT_PER_LANE = 10_000


def own_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def sockets_to_open(options: Options) -> int:
    """Number of sockets of a process that does not know the others yet; those that turn out unneeded are closed."""
    if not options.lanes_possible:
        return 1
    if options.lanes is not None:
        return options.lanes
    if options.port:  # the ports after it may be meant for other ranks
        return 1
    return max(min(own_cores() // _CORES_PER_LANE, _MOST_UNASKED), 1)


def agree_lanes(cards: Sequence["Card"]) -> int:
    """Derives the number of lanes of a job from the first card of every rank: the smallest that any of them wants.

    Without being asked for, a rank wants as many lanes as it has cores for, and between machines no more than its line
    needs: up to 10 Gbit/s, one core fills it.
    """
    fewest = min(1 + len(card.lanes) for card in cards)
    ranks = Counter(card.machine for card in cards)
    for card in cards:
        if not card.cores:  # its user chose a number
            continue
        if not card.machine:
            return 1
        fewest = min(fewest, max(card.cores // ranks[card.machine] // _CORES_PER_LANE, 1))
        if len(ranks) > 1:
            fewest = min(fewest, max(card.line_mbit // _MBIT_PER_LANE, 1))
    return fewest
