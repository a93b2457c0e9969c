"""Ranks that own shards of the same parameters, without a network between them, and plain torch beside them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from stormtorch.runtime.members.prepared_optimizer import trained as parameters_of
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import plan
from stormtorch.runtime.memory.sharded_optimizer import ShardedOptimizer

Optimizer = torch.optim.Optimizer
Make = Callable[[Iterable[Any]], Optimizer]
# Two matrices, a vector, a single number, and one that is smaller than the alignment of a shard.
SHAPES = [(7, 30), (30,), (), (40, 5), (3,)]
FEW_BYTES = 600.0
"""Bytes after which a bucket is closed: these parameters then have several."""


def adamw(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def numbers(shapes: Iterable[tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    chance = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=chance).to(dtype)) for shape in shapes]


def gradients(parameters: Iterable[torch.Tensor], seed: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(each.shape, generator=chance) for each in parameters]


class Owner:
    """What one rank has: a copy of the parameters in buckets, and the optimizer on its shard."""

    def __init__(
        self,
        rank: int,
        world: int,
        optimizer: Optimizer,
        *,
        whole: bool = False,
        bucket_bytes: float = FEW_BYTES,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters_of(optimizer)
        counts = [each.numel() for each in self.parameters]
        element_bytes = self.parameters[0].dtype.itemsize
        layouts = plan(counts, element_bytes, bucket_bytes, world, whole=whole)
        self.buckets = [Bucket(index, each, self.parameters, rank) for index, each in enumerate(layouts)]
        self.shards = ShardedOptimizer(optimizer, self.parameters, self.buckets, whole=whole)

    def step(self, grads: list[torch.Tensor]) -> None:
        """One step, given the mean gradient of every parameter."""
        for bucket, piece, _ in self.shards.pieces:
            part = grads[piece.parameter].reshape(-1)[piece.offset : piece.offset + piece.count]
            bucket.within_own(piece, bucket.own_grads).copy_(part)
        self.shards.assign_gradients([True] * len(self.parameters), finite=True)
        self.shards.begin_step()
        self.optimizer.step()
        self.shards.end_step()
        for bucket in self.buckets:
            bucket.settle()
        self.shards.clear_gradients()


def owners(world: int, make: Make, *, dtype: torch.dtype = torch.float32, **how: Any) -> list[Owner]:
    return [Owner(rank, world, make(numbers(SHAPES, 0, dtype)), **how) for rank in range(world)]


def joined(ranks: list[Owner]) -> list[torch.Tensor]:
    """The parameters that count: each piece from its owner."""
    found = [torch.full_like(each.data, torch.nan) for each in ranks[0].parameters]
    for rank in ranks:
        for _, piece, _ in rank.shards.pieces:
            own = rank.parameters[piece.parameter].detach().reshape(-1)
            found[piece.parameter].view(-1)[piece.offset : piece.offset + piece.count] = own[
                piece.offset : piece.offset + piece.count
            ]
    return found


def plain(make: Make, steps: int, dtype: torch.dtype = torch.float32) -> Optimizer:
    """An optimizer that was never sharded, after as many steps."""
    optimizer = make(numbers(SHAPES, 0, dtype))
    for step in range(steps):
        for parameter, grad in zip(parameters_of(optimizer), gradients(parameters_of(optimizer), step), strict=True):
            parameter.grad = grad.to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer
