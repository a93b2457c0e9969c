"""Averages float32 tensors that travel as eight bits per element: a quarter of the bytes, unbiased.

Each block of 1,024 elements has a grid of 255 steps between its smallest and largest value, shifted by a random offset;
every element is rounded to the nearest point of the grid. Owners add in float32 and round the result once more before
they send it.
"""

import hashlib

import torch

import stormtorch._engine as _engine
from stormtorch.collectives.group import Group, Pending, Steps, nothing
from stormtorch.collectives.ops import Op
from stormtorch.collectives.spans import address, shards
from stormtorch.reliability import EXACT, Reliability
from stormtorch.transport.exchange import Plan, Receive, ReduceMode, Reduction, Send, WireDtype

Span = tuple[int, int]
_BLOCK_ELEMENTS, _GRID_BYTES = 1024, 8


def chunk_elements(chunk_bytes: int) -> int:
    """Returns how many elements a full chunk carries: blocks of codes, each after its grid, the last block shorter."""
    blocks, rest = divmod(chunk_bytes, _GRID_BYTES + _BLOCK_ELEMENTS)
    return blocks * _BLOCK_ELEMENTS + max(rest - _GRID_BYTES, 0)


def all_reduce_int8(
    group: Group,
    tensor: torch.Tensor,
    op: Op = Op.AVG,
    *,
    reliability: Reliability,
    timeout_s: float | None = None,
) -> Pending:
    """Replaces `tensor` by the mean of the contributions that arrived, the same bits on every rank.

    Args:
        group: The ranks that take part.
        tensor: This rank's contribution, replaced by the result: float32, contiguous, on the CPU.
        op: AVG, or SUM, which is the mean times the number of ranks.
        reliability: How much may be missing in the first stage, in which each shard's owner collects contributions.
            The second stage is exact.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    _check(tensor, op, "tensor")
    if group.size == 1:
        return group.start(nothing())
    return group.start(_all_reduce(group, tensor.view(-1), op, group.reserve(), reliability, timeout_s))


def reduce_scatter_int8(
    group: Group,
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Op = Op.AVG,
    *,
    reliability: Reliability,
    timeout_s: float | None = None,
) -> Pending:
    """Writes the mean of the `inputs[i]` that arrived into rank i's `output`.

    Args:
        group: The ranks that take part.
        output: This rank's shard of the result: float32, contiguous, on the CPU.
        inputs: One contribution per rank, of the same kind.
        op: AVG, or SUM, which is the mean times the number of ranks.
        reliability: How much of each message may be missing.
        timeout_s: Seconds until the call fails; None takes the transport's default.
    """
    if len(inputs) != group.size:
        raise ValueError(f"inputs must hold one tensor per rank, {group.size}, got {len(inputs)}")
    for index, each in enumerate([*inputs, output]):
        _check(each, op, f"inputs[{index}]" if index < group.size else "output")
    if output.numel() != inputs[group.rank].numel():
        raise ValueError(
            f"output must have as many elements as inputs[{group.rank}], {inputs[group.rank].numel()}, "
            f"got {output.numel()}"
        )
    return group.start(_reduce_scatter(group, output, inputs, op, group.reserve(), reliability, timeout_s))


def _check(tensor: torch.Tensor, op: Op, what: str) -> None:
    if tensor.dtype != torch.float32:
        raise ValueError(f"{what} must be float32 to travel as int8, got {tensor.dtype}")
    if op not in (Op.AVG, Op.SUM):
        raise ValueError(f"{op.name} cannot travel as int8: use AVG or SUM")
    address(tensor, what)


class _Encoded:
    """Tensors encoded as int8 messages, one after the other in one buffer."""

    def __init__(self, group: Group, tensors: list[torch.Tensor], name: tuple[int, int]) -> None:
        self.chunk_bytes = group.transport.chunk_bytes
        self.seed = _seed(group, name)
        lengths = [_engine.int8_bytes(each.numel(), self.chunk_bytes) for each in tensors]
        self.buffer = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        self.spans: list[Span] = []
        at = self.buffer.data_ptr()
        for index, (tensor, length) in enumerate(zip(tensors, lengths, strict=True)):
            _engine.int8_encode(tensor.data_ptr(), tensor.numel(), self.chunk_bytes, self.seed + index, at)
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
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    parts = [flat.narrow(0, first, count) for first, count in shards(flat.numel(), 4, group.size)]
    encoded = _Encoded(group, parts, name)
    ranks, me, others, spans = group.ranks, group.rank, group.others(), encoded.spans
    own, length = spans[me]
    yield Plan(
        "all_reduce",
        *name,
        [Send(ranks[peer], *spans[peer]) for peer in others]
        + [Send(ranks[peer], own, length, True) for peer in others],
        [Receive(ranks[peer], 0, length, False, True) for peer in sorted(others)]
        + [Receive(ranks[peer], *spans[peer], True) for peer in others],
        _reduction(encoded, WireDtype.INT8, own, own, length, me, op),
        reliability,
        EXACT,
        timeout_s,
        (encoded.buffer,),
    )
    for part, (at, _) in zip(parts, spans, strict=True):
        _engine.int8_decode(at, part.numel(), encoded.chunk_bytes, part.data_ptr())


def _reduce_scatter(
    group: Group,
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Op,
    name: tuple[int, int],
    reliability: Reliability,
    timeout_s: float | None,
) -> Steps:
    if group.size == 1:
        output.copy_(inputs[0].view_as(output))
        return
    encoded = _Encoded(group, inputs, name)
    ranks, me, others, spans = group.ranks, group.rank, group.others(), encoded.spans
    own, length = spans[me]
    yield Plan(
        "reduce_scatter",
        *name,
        [Send(ranks[peer], *spans[peer]) for peer in others],
        [Receive(ranks[peer], 0, length, False, True) for peer in sorted(others)],
        _reduction(encoded, WireDtype.FLOAT32, own, output.data_ptr(), length, me, op),
        reliability,
        timeout_s=timeout_s,
        keep=(encoded.buffer, output),
    )


def _reduction(encoded: _Encoded, out: WireDtype, own: int, into: int, length: int, me: int, op: Op) -> Reduction:
    # Grids of results have other offsets than grids of contributions.
    seed = encoded.seed ^ 1 << 60
    return Reduction(ReduceMode.ARRIVED, WireDtype.INT8, out, own, into, length, me, op is Op.AVG, seed)
