"""Hierarchical collectives: they reduce inside each machine first, so that fewer bytes pass between machines.

If several machines have k ranks each, a large tensor is split into k slices. The ranks of a machine reduce-scatter
their slices, each rank exchanges its slice with the ranks at the same position on other machines, and the ranks of a
machine all-gather the result. A machine's link carries 1/k of the bytes, and only those may be lost.

The functions have the names and arguments of the flat collectives that they call. They choose by themselves: small
tensors, other layouts and groups with a view use the flat collective, in which all ranks exchange with all.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps

import torch

from stormtorch.collectives.all_gather import all_gather as flat_all_gather
from stormtorch.collectives.all_reduce import all_reduce as flat_all_reduce
from stormtorch.collectives.base import ops
from stormtorch.collectives.base.group import Group, NodeLayout, Pending
from stormtorch.collectives.base.ops import Op
from stormtorch.collectives.base.spans import address, shards, size
from stormtorch.collectives.broadcast import broadcast as flat_broadcast
from stormtorch.collectives.formats.grid import all_reduce_on_grids as flat_all_reduce_on_grids
from stormtorch.collectives.formats.grid import reduce_scatter_on_grids as flat_reduce_scatter_on_grids
from stormtorch.collectives.pipeline import Pipeline, PipelinePiece
from stormtorch.collectives.reduce_scatter import reduce_scatter as flat_reduce_scatter
from stormtorch.exchange.reliability import EXACT, Reliability

# Below this size, the additional exchanges inside a machine take as long as the bytes that they save.
_SMALLEST_BYTES = 512 << 10
# Large tensors travel in pieces of this many bytes per rank, so that exchanges inside a machine and between machines
# overlap. Smaller pieces would make messages of a few datagrams.
_PIECE_BYTES_PER_RANK = 512 << 10
# The first and the last piece are split further: while they move inside a machine, the network is idle.
_PIECES_AT_ENDS = 4


def is_worthwhile(length: int) -> bool:
    """Whether a hierarchy saves time for `length` bytes."""
    return length >= _SMALLEST_BYTES


def _chosen(group: Group, length: int) -> NodeLayout | None:
    """Returns the layout for a hierarchical collective of `length` bytes, or None for the flat one."""
    return group.node_layout if is_worthwhile(length) and group.size > 2 else None


@wraps(flat_all_reduce)
def all_reduce(
    group: Group,
    tensor: torch.Tensor,
    op: Op = Op.SUM,
    *,
    reliability: Reliability = EXACT,
    share: Reliability | None = None,
    timeout_s: float | None = None,
) -> Pending:
    """Reduces `tensor` over the group, in place."""
    node_layout = _chosen(group, size(tensor))
    if node_layout is None or not ops.on_arrival(tensor, op):
        return flat_all_reduce(group, tensor, op, reliability=reliability, share=share, timeout_s=timeout_s)
    ops.check(tensor, op, reliability)
    address(tensor, "tensor")
    share = reliability if share is None else share
    between = partial(flat_all_reduce, op=op, reliability=reliability, share=share, timeout_s=timeout_s)
    whole = reliability.deadline_s is not None or share.deadline_s is not None
    return _all_reduce(group, node_layout, tensor.view(-1), op, between, whole, timeout_s)


@wraps(flat_all_reduce_on_grids)
def all_reduce_on_grids(
    group: Group,
    tensor: torch.Tensor,
    op: Op = Op.AVG,
    *,
    wire: torch.dtype,
    reliability: Reliability,
    timeout_s: float | None = None,
) -> Pending:
    """Replaces `tensor` by the mean of the contributions that arrived, the same bits on every rank."""
    node_layout = _chosen(group, size(tensor))
    if node_layout is None or tensor.dtype != torch.float32 or op not in (Op.AVG, Op.SUM):
        return flat_all_reduce_on_grids(group, tensor, op, wire=wire, reliability=reliability, timeout_s=timeout_s)
    address(tensor, "tensor")
    between = partial(flat_all_reduce_on_grids, op=op, wire=wire, reliability=reliability, timeout_s=timeout_s)
    whole = reliability.deadline_s is not None
    return _all_reduce(group, node_layout, tensor.view(-1), op, between, whole, timeout_s)


@wraps(flat_reduce_scatter)
def reduce_scatter(
    group: Group,
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Op = Op.SUM,
    *,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Reduces `inputs[i]` of all ranks into rank i's `output`."""
    node_layout = _chosen(group, sum(map(size, inputs)))
    if node_layout is None or not _is_supported(group, output, inputs, op):
        return flat_reduce_scatter(group, output, inputs, op, reliability=reliability, timeout_s=timeout_s)
    ops.check(inputs[group.rank], op, reliability)
    between = partial(flat_reduce_scatter, op=op, reliability=reliability, timeout_s=timeout_s)
    return _reduce_scatter(group, node_layout, output, inputs, op, between, not reliability.exact, timeout_s)


@wraps(flat_reduce_scatter_on_grids)
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
    """Writes the mean of the `inputs[i]` that arrived into rank i's `output`."""
    node_layout = _chosen(group, sum(map(size, inputs)))
    floats = all(each.dtype == torch.float32 for each in (output, *inputs))
    if node_layout is None or not floats or not _is_supported(group, output, inputs, op):
        return flat_reduce_scatter_on_grids(
            group, output, inputs, op, wire=wire, reliability=reliability, timeout_s=timeout_s
        )
    between = partial(flat_reduce_scatter_on_grids, op=op, wire=wire, reliability=reliability, timeout_s=timeout_s)
    return _reduce_scatter(group, node_layout, output, inputs, op, between, True, timeout_s)


@wraps(flat_all_gather)
def all_gather(
    group: Group,
    outputs: list[torch.Tensor],
    tensor: torch.Tensor,
    *,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Copies rank i's `tensor` into every rank's `outputs[i]`."""
    node_layout = _chosen(group, sum(map(size, outputs)))
    # A lossy one reports to its caller which chunks are missing, and keeps the caller's old values there.
    if node_layout is None or not reliability.exact or not _are_outputs_supported(group, outputs, tensor):
        return flat_all_gather(group, outputs, tensor, reliability=reliability, timeout_s=timeout_s)
    own = outputs[group.rank].view(-1)
    if own.data_ptr() != tensor.data_ptr():
        own.copy_(tensor.view(-1))
    machine, place = node_layout.place(group.rank)
    count = _pieces_of(group, sum(map(size, outputs)))
    others = [at for at in range(len(node_layout.machines)) if at != machine]
    before = node_layout.inside.reserve_ahead(count)
    across = node_layout.between.reserve_ahead(count)
    after = node_layout.inside.reserve_ahead(count * len(others))
    gather = partial(flat_all_gather, timeout_s=timeout_s)
    pieces = []
    split = [_split(each, count) for each in outputs]
    for at in range(count):
        by_machine = [[split[rank][at] for rank in ranks] for ranks in node_layout.machines]
        same_place = [parts[place] for parts in by_machine]
        pieces.append(
            PipelinePiece(
                before=[partial(gather, before, by_machine[machine], split[group.rank][at])],
                across=[partial(gather, across, same_place, split[group.rank][at])],
                after=[partial(gather, after, by_machine[other], same_place[other]) for other in others],
            )
        )
    return Pipeline(pieces, node_layout.each)


@wraps(flat_broadcast)
def broadcast(
    group: Group,
    tensor: torch.Tensor,
    root: int,
    *,
    reliability: Reliability = EXACT,
    timeout_s: float | None = None,
) -> Pending:
    """Copies the root's `tensor` into every rank's `tensor`."""
    node_layout = _chosen(group, size(tensor))
    # A lossy one keeps the caller's old values where chunks are missing.
    if node_layout is None or not reliability.exact or not 0 <= root < group.size:
        return flat_broadcast(group, tensor, root, reliability=reliability, timeout_s=timeout_s)
    address(tensor, "tensor")
    from_machine, from_place = node_layout.place(root)
    machine, place = node_layout.place(group.rank)
    count = _pieces_of(group, size(tensor))
    before, across, after = (
        node_layout.inside.reserve_ahead(count),
        node_layout.between.reserve_ahead(count),
        node_layout.inside.reserve_ahead(count),
    )
    send = partial(flat_broadcast, timeout_s=timeout_s)
    pieces = []
    for piece in _split(tensor.view(-1), count):
        parts = _split(piece, node_layout.each)
        slice_ = partial(send, across, parts[place], from_machine)
        if machine == from_machine:
            pieces.append(PipelinePiece(before=[partial(send, before, piece, from_place)], across=[slice_]))
        else:
            gather = partial(flat_all_gather, after, parts, parts[place], timeout_s=timeout_s)
            pieces.append(PipelinePiece(across=[slice_], after=[gather]))
    return Pipeline(pieces, node_layout.each)


def _all_reduce(
    group: Group,
    node_layout: NodeLayout,
    flat: torch.Tensor,
    op: Op,
    between: Callable[[Group, torch.Tensor], Pending],
    whole: bool,
    timeout_s: float | None,
) -> Pending:
    # A deadline holds for the call, not for a piece.
    tensors = [flat] if whole else _tapered(group, flat)
    count = len(tensors)
    before, across, after = (
        node_layout.inside.reserve_ahead(count),
        node_layout.between.reserve_ahead(count),
        node_layout.inside.reserve_ahead(count),
    )
    pieces = []
    for piece in tensors:
        parts = _split(piece, node_layout.each)
        own = parts[node_layout.inside.rank]
        pieces.append(
            PipelinePiece(
                # The mean of the machines' means is the mean, as each has as many ranks. Unlike a sum, it cannot
                # overflow.
                before=[partial(flat_reduce_scatter, before, own, parts, op, timeout_s=timeout_s)],
                across=[partial(between, across, own)],
                after=[partial(flat_all_gather, after, parts, own, timeout_s=timeout_s)],
            )
        )
    return Pipeline(pieces, node_layout.each)


def _reduce_scatter(
    group: Group,
    node_layout: NodeLayout,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: Op,
    between: Callable[[Group, torch.Tensor, list[torch.Tensor]], Pending],
    whole: bool,
    timeout_s: float | None,
) -> Pending:
    # A lossy one stays whole, so that its counts are those of the output's chunks.
    count = 1 if whole else _pieces_of(group, sum(map(size, inputs)))
    machines = node_layout.machines
    before, across = node_layout.inside.reserve_ahead(count * len(machines)), node_layout.between.reserve_ahead(count)
    split, outputs = [_split(each, count) for each in inputs], _split(output, count)
    pieces = []
    for at in range(count):
        # For each machine, this machine's contributions to the rank there at this rank's position.
        parts = [[split[rank][at] for rank in ranks] for ranks in machines]
        rooms = [torch.empty_like(each[node_layout.inside.rank]) for each in parts]
        pieces.append(
            PipelinePiece(
                before=[
                    partial(flat_reduce_scatter, before, room, each, op, timeout_s=timeout_s)
                    for room, each in zip(rooms, parts, strict=True)
                ],
                across=[partial(between, across, outputs[at], rooms)],
            )
        )
    return Pipeline(pieces, node_layout.each)


def _pieces_of(group: Group, length: int) -> int:
    return max(round(length / (group.size * _PIECE_BYTES_PER_RANK)), 1)


def _tapered(group: Group, flat: torch.Tensor) -> list[torch.Tensor]:
    """Splits a tensor into pieces, with smaller ones at both ends."""
    parts = _split(flat, _pieces_of(group, size(flat)))
    if len(parts) < 3:
        return parts
    return [*_split(parts[0], _PIECES_AT_ENDS), *parts[1:-1], *_split(parts[-1], _PIECES_AT_ENDS)]


def _split(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    flat = tensor.view(-1)
    return [flat.narrow(0, *span) for span in shards(flat.numel(), flat.element_size(), count)]


def _is_supported(group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op) -> bool:
    """Whether the engine can reduce these tensors. The flat collective handles others, or raises an error."""
    fits = len(inputs) == group.size and output.numel() == inputs[group.rank].numel()
    kinds = {each.dtype for each in inputs}
    fits = fits and len(kinds) == 1 and output.dtype in {*kinds, torch.float32}
    return fits and ops.on_arrival(inputs[0], op) and _is_cpu_contiguous(output, *inputs)


def _are_outputs_supported(group: Group, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> bool:
    fits = len(outputs) == group.size and outputs[group.rank].numel() == tensor.numel()
    return fits and {each.dtype for each in outputs} == {tensor.dtype} and _is_cpu_contiguous(tensor, *outputs)


def _is_cpu_contiguous(*tensors: torch.Tensor) -> bool:
    return all(each.device.type == "cpu" and each.is_contiguous() for each in tensors)
