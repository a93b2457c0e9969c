"""Quantised all-reduce and reduce-scatter (quantization): 8 or 4 bits per element travel, rounded without bias.

Each block of elements has a grid between its smallest and largest value, shifted by a random offset; every element is
rounded to the nearest point of the grid. Owners sum in float32 and round the result once more before they send it.
"""

import hashlib
from typing import NamedTuple

import torch

import stormtorch._engine as _engine
from stormtorch.collectives.base.group import Group, Pending, Steps, nothing
from stormtorch.collectives.base.ops import Op
from stormtorch.collectives.base.spans import address, shards
from stormtorch.exchange.exchange import Plan, Receive, ReduceMode, Reduction, Send, WireDtype
from stormtorch.exchange.reliability import EXACT, Reliability

Span = tuple[int, int]


class Grids(NamedTuple):
    """How elements of a type are rounded; `engine/math/grid.hpp` explains the length of blocks."""

    code: WireDtype
    """Number of the type in the engine."""
    bits: int
    """Bits of an element, without its block's grid."""
    block_elements: int
    """Elements that share a grid."""

    @property
    def steps(self) -> int:
        """Steps between the smallest and the largest value of a block."""
        return int(2**self.bits - 1)

    @property
    def element_bytes(self) -> float:
        """Bytes of an element and its part of the grid, which has 8."""
        return self.bits / 8 + 8 / self.block_elements

    def chunk_elements(self, chunk_bytes: int) -> int:
        """Returns the elements of a full chunk: blocks of codes, each after its grid, the last one short."""
        return _engine.grid_elements(self.code, chunk_bytes)

    def message_bytes(self, elements: int, chunk_bytes: int) -> int:
        """Returns the bytes of a message of `elements` elements."""
        return _engine.grid_bytes(self.code, elements, chunk_bytes)

    def encode(self, values: torch.Tensor, chunk_bytes: int, seed: int, out: int) -> None:
        """Writes contiguous float32 values as a message to an address; the seed chooses the grids' offsets."""
        _engine.grid_encode(self.code, values.data_ptr(), values.numel(), chunk_bytes, seed, out)

    def decode(self, message: int, chunk_bytes: int, values: torch.Tensor) -> None:
        """Reads the message at an address into contiguous float32 values."""
        _engine.grid_decode(self.code, message, values.numel(), chunk_bytes, values.data_ptr())


GRIDS: dict[torch.dtype, Grids] = {
    torch.int8: Grids(WireDtype.INT8, 8, 1024),
    torch.int4: Grids(WireDtype.INT4, 4, 128),  # type: ignore[attr-defined]  # missing in torch's own stubs
}
"""Types whose elements are rounded to grids."""


def all_reduce_on_grids(
    group: Group,
    tensor: torch.Tensor,
    op: Op = Op.AVG,
    *,
    wire: torch.dtype,
    reliability: Reliability,
    timeout_s: float | None = None,
) -> Pending:
    """Replaces `tensor` by the mean of the contributions that arrived, the same bits on every rank.

    Args:
        group: The ranks that take part.
        tensor: This rank's contribution, replaced by the result: float32, contiguous, on the CPU.
        op: AVG, or SUM, which is the mean times the number of ranks.
        wire: Type in which elements travel, a key of `GRIDS`.
        reliability: How much may be missing in the first stage, in which each shard's owner collects contributions.
            The second stage is exact.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    _check(tensor, op, wire, "tensor")
    if group.size == 1:
        return group.start(nothing())
    return group.start(_all_reduce(group, tensor.view(-1), op, GRIDS[wire], group.reserve(), reliability, timeout_s))


def reduce_scatter_on_grids(
    group: Group,
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Op = Op.AVG,
    *,
    wire: torch.dtype,
    reliability: Reliability,
    timeout_s: float | None = None,
) -> Pending:
    """Writes the mean of the `inputs[i]` that arrived into rank i's `output`.

    Args:
        group: The ranks that take part.
        output: This rank's shard of the result: float32, contiguous, on the CPU.
        inputs: One contribution per rank, of the same kind.
        op: AVG, or SUM, which is the mean times the number of ranks.
        wire: Type in which elements travel, a key of `GRIDS`.
        reliability: How much of each message may be missing.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    if len(inputs) != group.size:
        raise ValueError(f"inputs must hold one tensor per rank, {group.size}, got {len(inputs)}")
    for index, each in enumerate([*inputs, output]):
        _check(each, op, wire, f"inputs[{index}]" if index < group.size else "output")
    if output.numel() != inputs[group.rank].numel():
        raise ValueError(
            f"output must have as many elements as inputs[{group.rank}], {inputs[group.rank].numel()}, "
            f"got {output.numel()}"
        )
    return group.start(_reduce_scatter(group, output, inputs, op, GRIDS[wire], group.reserve(), reliability, timeout_s))


def _check(tensor: torch.Tensor, op: Op, wire: torch.dtype, what: str) -> None:
    if wire not in GRIDS:
        raise ValueError(f"wire must be one of {', '.join(map(str, GRIDS))}, got {wire}")
    if tensor.dtype != torch.float32:
        raise ValueError(f"{what} must be float32 to travel as {wire}, got {tensor.dtype}")
    if op not in (Op.AVG, Op.SUM):
        raise ValueError(f"{op.name} cannot travel as {wire}: use AVG or SUM")
    address(tensor, what)


class _Encoded:
    """Tensors encoded as messages, one after the other in one buffer."""

    def __init__(self, group: Group, grids: Grids, tensors: list[torch.Tensor], name: tuple[int, int]) -> None:
        self.grids = grids
        self.chunk_bytes = group.transport.chunk_bytes
        self.seed = _seed(group, name)
        lengths = [grids.message_bytes(each.numel(), self.chunk_bytes) for each in tensors]
        self.buffer = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        self.spans: list[Span] = []
        at = self.buffer.data_ptr()
        for index, (tensor, length) in enumerate(zip(tensors, lengths, strict=True)):
            grids.encode(tensor, self.chunk_bytes, self.seed + index, at)
            self.spans.append((at, length))
            at += length


def _seed(group: Group, name: tuple[int, int]) -> int:
    """Seed of the grids' offsets: different for every rank and collective, the same in every run."""
    text = f"{name[0]} {name[1]} {group.transport.rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _all_reduce(
    group: Group,
    flat: torch.Tensor,
    op: Op,
    grids: Grids,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    parts = [flat.narrow(0, first, count) for first, count in shards(flat.numel(), 4, group.size)]
    encoded = _Encoded(group, grids, parts, name)
    ranks, me, others, spans = group.ranks, group.rank, group.others(), encoded.spans
    own, length = spans[me]
    yield Plan(
        "all_reduce",
        *name,
        [Send(ranks[peer], *spans[peer]) for peer in others]
        + [Send(ranks[peer], own, length, True) for peer in others],
        [Receive(ranks[peer], 0, length, False, True) for peer in sorted(others)]
        + [Receive(ranks[peer], *spans[peer], True) for peer in others],
        _reduction(encoded, grids.code, own, own, parts[me].numel(), me, op),
        reliability,
        EXACT,
        timeout_s,
        (encoded.buffer,),
    )
    for part, (at, _) in zip(parts, spans, strict=True):
        grids.decode(at, encoded.chunk_bytes, part)


def _reduce_scatter(
    group: Group,
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Op,
    grids: Grids,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    if group.size == 1:
        output.copy_(inputs[0].view_as(output))
        return
    encoded = _Encoded(group, grids, inputs, name)
    ranks, me, others, spans = group.ranks, group.rank, group.others(), encoded.spans
    own, length = spans[me]
    yield Plan(
        "reduce_scatter",
        *name,
        [Send(ranks[peer], *spans[peer]) for peer in others],
        [Receive(ranks[peer], 0, length, False, True) for peer in sorted(others)],
        _reduction(encoded, WireDtype.FLOAT32, own, output.data_ptr(), output.numel(), me, op),
        reliability,
        timeout_s=timeout_s,
        keep=(encoded.buffer, output),
    )


def _reduction(encoded: _Encoded, out: WireDtype, own: int, into: int, elements: int, me: int, op: Op) -> Reduction:
    # The grids of results need offsets that are independent of those of contributions.
    seed = encoded.seed ^ 1 << 60
    _, length = encoded.spans[me]
    wire = encoded.grids.code
    return Reduction(ReduceMode.ARRIVED, wire, out, own, into, length, me, op is Op.AVG, seed, elements)
