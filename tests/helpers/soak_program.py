"""A random program of collectives that all ranks of a job run, and what each rank got: one checksum per call.

The program depends on its seed and the number of ranks alone, so that it can be run over shared memory, over datagrams
and on several hosts, and the results compared bit for bit.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from reference import DTYPES, ENGINE_DTYPES, ops_of
from stormtorch import EXACT, Reliability
from stormtorch.collectives import Op

LANES = 3
"""Threads of a rank that call collectives at once; each has groups of its own."""
MOST_CALLS = 10
MOST_BYTES = 4 << 20
BY_MACHINES_BYTES = 512 << 10
"""From this size on, ranks that share machines add up inside them first, so that a sum has another order."""

SYMMETRIC = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")
ON_GRIDS = ("int8", "int4")
KINDS = (*SYMMETRIC, "all_reduce", "all_reduce", "broadcast", "reduce", "gather", "scatter", "pair", *ON_GRIDS)
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
BUDGETS = (1e-9, 0.1, 1.0)
# Ordinary numbers of a rank, from which its tensors are cut: to draw them anew would take longer than to send them.
_POOL_ELEMENTS = MOST_BYTES // 4 + 4096


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective of the program."""

    index: int
    kind: str
    members: tuple[int, ...]
    lane: int
    by_backend: bool
    """Whether torch.distributed is called, or the function of `stormtorch.collectives`."""
    waits_at_once: bool
    elements: int
    """Elements of this rank's tensor; of each of its tensors, where it has one per rank."""
    dtype: torch.dtype
    op: Op
    root: int
    """Position in `members` of the root, or of the sender of a pair."""
    target: int
    tag: int
    offset: int
    whole: bool
    """Whether values are small whole numbers, whose sum is the same in every order."""
    reliability: Reliability

    @property
    def bytes(self) -> int:
        """Bytes of all tensors of a rank together."""
        each = self.elements * self.dtype.itemsize
        return (
            each if self.kind in ("all_reduce", "broadcast", "reduce", "pair", *ON_GRIDS) else each * len(self.members)
        )

    @property
    def order_shows(self) -> bool:
        """Whether the order of a sum changes its bits, and hosts with several ranks have an order of their own."""
        return self.kind in REDUCTIONS and not self.whole and self.bytes >= BY_MACHINES_BYTES

    def __str__(self) -> str:
        how = "torch.distributed" if self.by_backend else f"lane {self.lane}"
        return (
            f"call {self.index}: {self.kind} {self.op.name} of {self.elements} {self.dtype} by {how} among "
            f"{self.members}, root {self.root}, budget {self.reliability.budget:g}"
        )


def rounds(seed: int, calls: int, world: int, *, most_bytes: int = MOST_BYTES) -> Iterator[list[Call]]:
    """Draws `calls` calls in rounds. Those of a round may be under way together; a round begins when the last ended."""
    drawn, index = random.Random(seed), 0
    while index < calls:
        count = min(drawn.randint(1, MOST_CALLS), calls - index)
        yield [_call(drawn, index + i, world, most_bytes) for i in range(count)]
        index += count


def groups(world: int) -> list[tuple[int, ...]]:
    """Lists the groups of ranks that call collectives: all, pairs and some of the others."""
    everyone = tuple(range(world))
    pairs = [(0, 1), (0, world - 1), (1, 2)] if world > 2 else []
    return list(dict.fromkeys([everyone, everyone[1:], everyone[:-1], *pairs]))[: 6 if world > 2 else 1]


def _call(drawn: random.Random, index: int, world: int, most_bytes: int) -> Call:
    kind = drawn.choice(KINDS)
    all_groups = [each for each in groups(world) if len(each) > 1]
    members = all_groups[0] if drawn.random() < 0.5 else drawn.choice(all_groups)
    if kind in ON_GRIDS:
        # Their sums are those of the order in which chunks arrive: of two terms, all orders are the same.
        members = drawn.choice([each for each in all_groups if len(each) == 2] or [members])
    lossy = kind in ON_GRIDS or drawn.random() < 0.2
    dtype = drawn.choice(ENGINE_DTYPES if drawn.random() < 0.6 or lossy else DTYPES)
    dtype = torch.float32 if kind in ON_GRIDS else dtype
    op = drawn.choice(
        [Op.SUM, Op.AVG] if lossy or (drawn.random() < 0.5 and dtype is not torch.bool) else ops_of(dtype)
    )
    by_backend = not lossy and not dtype.is_complex and drawn.random() < 0.25
    lane = 0 if by_backend else drawn.randrange(LANES)
    draw = drawn.random()
    size = 0.0 if draw < 0.06 else 10 ** drawn.uniform(0.0, 4.5) if draw < 0.985 else drawn.uniform(3e4, most_bytes)
    split = 1 if kind in ("all_reduce", "broadcast", "reduce", "pair", *ON_GRIDS) else len(members)
    elements = min(int(min(size, most_bytes) / dtype.itemsize / split), _POOL_ELEMENTS - 4096)
    root = drawn.randrange(len(members))
    return Call(
        index=index,
        kind=kind,
        members=members,
        lane=lane,
        by_backend=by_backend,
        waits_at_once=drawn.random() < 0.4,
        elements=0 if kind == "barrier" else elements,
        dtype=dtype,
        op=op,
        root=root,
        target=(root + drawn.randrange(1, len(members))) % len(members),
        tag=drawn.randrange(3),
        offset=drawn.randrange(4096),
        whole=lossy or drawn.random() < 0.3,
        reliability=Reliability(budget=drawn.choice(BUDGETS)) if lossy else EXACT,
    )


@cache
def _pool(rank: int, dtype: torch.dtype, whole: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1009 * rank + 7)
    if whole:
        return torch.randint(-8, 9, (_POOL_ELEMENTS,), generator=generator).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        real = torch.randn(_POOL_ELEMENTS, generator=generator, dtype=torch.float64)
        # All magnitudes: another order of summation shows.
        real *= 10.0 ** torch.randint(-2, 3, (_POOL_ELEMENTS,), generator=generator)
        return (torch.complex(real, real.flip(0)) if dtype.is_complex else real).to(dtype)
    drawn = torch.randint(-128, 256, (_POOL_ELEMENTS,), generator=generator)
    return drawn % 2 == 0 if dtype is torch.bool else drawn.to(dtype)


def values(rank: int, call: Call, shift: int = 0) -> torch.Tensor:
    """Copies what a rank contributes to a call; where it has one tensor per rank, the one number `shift`."""
    begin = (call.offset + 97 * shift) % 4096
    return _pool(rank, call.dtype, call.whole)[begin : begin + call.elements].clone()


def checksum(tensors: list[torch.Tensor]) -> int:
    """Checksum of the bits of tensors."""
    value = 1
    for each in tensors:
        raw = torch.view_as_real(each) if each.is_complex() else each
        value = zlib.crc32(raw.contiguous().view(torch.uint8).numpy().data, value)
    return value
