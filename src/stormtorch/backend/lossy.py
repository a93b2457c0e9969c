"""Gradients that may lose packets, while the replicas stay bit-identical.

    model = DistributedDataParallel(model)
    model.register_comm_hook(stormtorch.LossyGradients(), stormtorch.lossy_hook)

Each rank owns a part of every bucket and averages what arrived of it, its own contribution included; the average is
then shared exactly. So every rank applies the same gradients, and nothing waits for a lost packet of the first half.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from stormtorch import collectives
from stormtorch.backend.process_group import StormProcessGroup
from stormtorch.backend.work import StormWork
from stormtorch.collectives import Op, Pending
from stormtorch.reliability import EXACT, Reliability

WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(kw_only=True)
class LossyGradients:
    """What `lossy_hook` does, and what it met.

    Args:
        group: A group of the backend storm; None is the default group.
        wire: Type of what is sent. bfloat16 halves the bytes; sums are made in float32 all the same.
        deadline_s: A bucket's first half is not waited for longer; None waits until every sender has said that it is
            done, which needs no setting.
    """

    group: Any = None
    wire: torch.dtype = torch.float32
    deadline_s: float | None = None
    buckets: int = field(default=0, init=False)
    """How many were averaged."""
    arrived_sum: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.wire not in WIRE_DTYPES:
            raise ValueError(f"wire must be one of {', '.join(map(str, WIRE_DTYPES))}, got {self.wire}")
        self.reliability = Reliability(budget=1.0, deadline_s=self.deadline_s)

    @property
    def arrived(self) -> float:
        """The mean fraction of all contributions that arrived at this rank."""
        return self.arrived_sum / self.buckets if self.buckets else 1.0

    def process_group(self) -> StormProcessGroup:
        """The group to use.

        Raises:
            TypeError: It is on another backend.
        """
        group = self.group or dist.distributed_c10d._get_default_group()
        if not isinstance(group, StormProcessGroup):
            raise TypeError('lossy_hook needs a group of the backend "storm": dist.init_process_group("storm")')
        return group

    def count(self, pending: Pending) -> None:
        """Takes notice of what arrived."""
        for arrival in pending.wait():
            self.buckets += 1
            self.arrived_sum += arrival.fraction(stage=0)


def lossy_hook(
    state: LossyGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # public, but not marked as exported
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DistributedDataParallel."""
    group = state.process_group()
    gradients = bucket.buffer()
    may_lose = gradients.dtype in WIRE_DTYPES and gradients.numel() > 0
    sent = gradients.to(state.wire) if may_lose else gradients
    pending = collectives.all_reduce(
        group.group, sent, Op.AVG, reliability=state.reliability if may_lose else EXACT, share=EXACT
    )

    def finish() -> None:
        state.count(pending)
        if sent.data_ptr() != gradients.data_ptr():
            gradients.copy_(sent)

    work = StormWork("lossy_gradients", [pending], [gradients], finish)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(_only)
    return future


def _only(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
