"""Collectives over any transport, one file each: generators that yield the plan of an exchange and receive its result.

Used by the backend and the runtime. Begin with `all_gather.py`, which is one exchange, and `base/group.py`, which posts
it.
With n ranks and S bytes per tensor (per entry of a list), a rank sends in one exchange, or in two where noted:

    all_reduce       2 (n-1)/n S in two overlapping stages; small ones (n-1) S in one; two exchanges for any op or dtype
                     but SUM and AVG of float32, bfloat16 and float16
    reduce_scatter   (n-1)/n S, of n inputs of S/n
    reduce           the root (n-1)/n S, others S
    broadcast        the root S, others (n-2)/(n-1) S; small ones the root (n-1) S, others 0
    all_gather, all_to_all    (n-1) S;   gather  S to the root;   scatter  (n-1) S from it
    send             S;   barrier  n-1 empty messages

A stage takes one trip through the network; the sender of an exact message waits one more, for the acknowledgement.
Only floating-point tensors may be lossy, and of reductions only SUM and AVG that the engine computes.
"""

from stormtorch.collectives.all_to_all import all_to_all
from stormtorch.collectives.barrier import barrier
from stormtorch.collectives.base.group import Group, Pending
from stormtorch.collectives.base.ops import Op
from stormtorch.collectives.gather import gather
from stormtorch.collectives.hierarchy import (
    all_gather,
    all_reduce,
    all_reduce_on_grids,
    broadcast,
    reduce_scatter,
    reduce_scatter_on_grids,
)
from stormtorch.collectives.point_to_point import receive, send
from stormtorch.collectives.reduce import reduce
from stormtorch.collectives.scatter import scatter

__all__ = [
    "Group",
    "Op",
    "Pending",
    "all_gather",
    "all_reduce",
    "all_reduce_on_grids",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "receive",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_on_grids",
    "scatter",
    "send",
]
