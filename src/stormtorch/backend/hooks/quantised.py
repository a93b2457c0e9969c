"""QSDP for FSDP2: gathers weights and scatters gradients in 8 or 4 bits, coded by `collectives/formats/grid.py`.

    stormtorch.quantise(model)      # after fully_shard, on the backend storm

This is QSDP (Markov et al., 2023) for `torch.distributed.fsdp.fully_shard`. Shards and optimizer states keep their
precision.
"""
# mypy: disable-error-code="arg-type, attr-defined, no-any-return"

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stormtorch import collectives
from stormtorch.backend.launching import reduce_operation
from stormtorch.backend.process_group import StormProcessGroup, storm_group
from stormtorch.backend.tensors import Staged, pieces
from stormtorch.backend.work import StormWork
from stormtorch.checks import check
from stormtorch.collectives import Pending
from stormtorch.collectives.formats.grid import GRIDS
from stormtorch.collectives.wire import Wire
from stormtorch.exchange.reliability import EXACT

Bits = Literal[32, 8, 4]
_WIRE_OF = {grids.bits: wire for wire, grids in GRIDS.items()}
_ROUNDED = (torch.float32, torch.bfloat16, torch.float16)


def quantise(model: nn.Module, *, weight_bits: Bits = 8, gradient_bits: Bits = 8) -> None:
    """Makes every `fully_shard`ed module in `model` send its weights and gradients in few bits.

    Each block of elements is rounded to a grid with a random offset, so the mean over many roundings is the value
    itself. All ranks compute with the same rounded weights in forward and backward, the owner of a shard included;
    optimizers update the unrounded shards. Tensors other than float32, bfloat16 and float16 are not quantised, and
    neither is anything in a group of one rank.

    Args:
        model: A model with at least one module that `fully_shard` was applied to, on a group of the backend storm.
        weight_bits: Bits of a weight on the network: 8, 4, or 32 to gather weights as before.
        gradient_bits: Bits of a gradient on the network: 8, 4, or 32 to scatter gradients as before.

    Raises:
        TypeError: Modules are sharded over a group of another backend.
        ValueError: `fully_shard` was not applied to any module of the model, or a number of bits is none of these.
    """
    for name, bits in (("weight_bits", weight_bits), ("gradient_bits", gradient_bits)):
        check(bits in (32, *_WIRE_OF), name, "be 32, 8 or 4", bits)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError("quantise needs a model with fully_shard applied to it or to some of its modules")
    for parameter in model.parameters():
        _check_backend(parameter)
    for module in sharded:
        if weight_bits in _WIRE_OF:
            module.set_custom_all_gather(QuantisedAllGather(_WIRE_OF[weight_bits]))
        if gradient_bits in _WIRE_OF:
            module.set_custom_reduce_scatter(QuantisedReduceScatter(_WIRE_OF[gradient_bits]))


def _check_backend(parameter: nn.Parameter) -> None:
    """Raises TypeError for a parameter that is sharded over groups of other backends only; the forward would fail."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        groups = [mesh.get_group(dim) for dim, placement in enumerate(parameter.placements) if placement.is_shard()]
        if groups and not any(isinstance(group, StormProcessGroup) for group in groups):
            storm_group(groups[-1], "quantise")


class _Allocated:
    """The part of torch's interface `Comm` that allocates memory."""

    def __init__(self, wire: torch.dtype) -> None:
        self.wire = wire

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates memory for inputs and outputs."""
        return torch.empty(size, dtype=dtype, device=device)


class QuantisedAllGather(_Allocated):
    """All-gather that FSDP2 calls for weights; see `quantise`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Starts an all-gather and, unless `async_op` is set, waits for it."""
        to = storm_group(group, "quantise")
        if input_tensor.dtype not in _ROUNDED or to.group.size == 1:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        what, wire = "quantised_all_gather", Wire(self.wire, to.group.transport.chunk_bytes)
        staged = Staged(what)
        sent = staged.read(input_tensor, torch.float32).view(-1)
        outs = pieces(staged.write(output_tensor, torch.float32), to.group.size, what)

        def begin() -> list[_Decoded]:
            message = wire.encode(sent, _seed(sent, to.group.rank))
            rooms = [wire.room(out.numel()) for out in outs]
            rooms[to.group.rank] = message
            pending = collectives.all_gather(to.group, rooms, message, timeout_s=to.timeout_s)

            def decode() -> None:
                for room, out in zip(rooms, outs, strict=True):
                    wire.decode(room, out)

            return [_Decoded(pending, decode)]

        return _waited(to.begin_work(what, begin, [output_tensor], staged), async_op)


class QuantisedReduceScatter(_Allocated):
    """Reduce-scatter that FSDP2 calls for gradients; see `quantise`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Starts a reduce-scatter and, unless `async_op` is set, waits for it."""
        to, operation = storm_group(group, "quantise"), reduce_operation(op)
        if input_tensor.dtype not in _ROUNDED or to.group.size == 1:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        what, wire = "quantised_reduce_scatter", Wire(self.wire, to.group.transport.chunk_bytes)
        staged = Staged(what)
        parts = pieces(staged.read(input_tensor, torch.float32), to.group.size, what)
        out = staged.write(output_tensor, torch.float32).view(-1)

        def begin() -> list[Pending]:
            return [wire.reduce_scatter(to.group, out, parts, operation, reliability=EXACT, timeout_s=to.timeout_s)]

        return _waited(to.begin_work(what, begin, [output_tensor], staged), async_op)


class _Decoded:
    """An all-gather of encoded messages; the thread that waits for it decodes them."""

    def __init__(self, pending: Pending, decode: Callable[[], None]) -> None:
        self._pending, self._decode = pending, decode

    @property
    def exchanges(self) -> int:
        return self._pending.exchanges

    @property
    def ended(self) -> bool:
        return self._pending.ended

    def done(self) -> bool:
        return self._pending.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._pending.wait(timeout_s)
        self._decode()


def _waited(work: StormWork, async_op: bool) -> StormWork | None:
    if async_op:
        return work
    work.wait()
    return None


def _seed(values: torch.Tensor, rank: int) -> int:
    """Seed of the grids' offsets: new after each step, but the same when backward gathers the weights again."""
    text = f"{int(values.view(torch.int32).sum(dtype=torch.int64))} {rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
