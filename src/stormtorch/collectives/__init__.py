"""Collectives over any transport, one file each. A collective is made of one or more exchanges."""

from stormtorch.collectives.all_to_all import all_to_all
from stormtorch.collectives.barrier import barrier
from stormtorch.collectives.gather import gather
from stormtorch.collectives.group import Group, Pending
from stormtorch.collectives.hierarchy import (
    all_gather,
    all_reduce,
    all_reduce_on_grids,
    broadcast,
    reduce_scatter,
    reduce_scatter_on_grids,
)
from stormtorch.collectives.ops import Op
from stormtorch.collectives.pair import receive, send
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
