"""Communication hooks with partial reliability: lossy gradients for DDP and FSDP2 that keep replicas bit-identical.

    state = stormtorch.LossyGradients()
    model.register_comm_hook(state, stormtorch.lossy_hook)      # DistributedDataParallel
    stormtorch.lossy_reduce_scatter(model, state)               # fully_shard

Each rank owns a shard of the gradients and averages the contributions to it that arrived, its own included. Under DDP,
owners then send their averages exactly; under FSDP2, parameters are gathered exactly. So every rank applies the same
gradients, and no rank waits for contributions that were lost.
"""
# mypy: disable-error-code="attr-defined, arg-type"

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from stormtorch.backend.launching import reduce_operation
from stormtorch.backend.process_group import StormProcessGroup, storm_group
from stormtorch.backend.tensors import Staged, pieces
from stormtorch.backend.work import StormWork
from stormtorch.collectives import Op, Pending
from stormtorch.collectives.wire import WIRES, Wire
from stormtorch.exchange.reliability import EXACT, Reliability

_MAY_LOSE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(kw_only=True)
class LossyGradients:
    """Settings of lossy gradients, and a count of what arrived.

    Args:
        group: A group of the backend storm; None takes the default group. Only `lossy_hook` uses it.
        wire: Number format on the network. bfloat16 halves the bytes, int8 quarters them, and int4 takes a seventh;
            sums are always in float32. int8 and int4 round to randomly shifted grids, which is unbiased.
        deadline_s: Seconds after which a lossy stage ends with what has arrived; None waits until every sender has
            reported that it is done.
    """

    group: Any = None
    wire: torch.dtype = torch.float32
    deadline_s: float | None = None
    reductions: int = field(default=0, init=False)
    """Number of reductions so far."""
    arrived_sum: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.wire not in WIRES:
            raise ValueError(f"wire must be one of {', '.join(map(str, WIRES))}, got {self.wire}")
        self.reliability = Reliability(budget=1.0, deadline_s=self.deadline_s)
        self._lock = threading.Lock()

    @property
    def arrived(self) -> float:
        """Fraction of the contributions that arrived at this rank, averaged over all reductions."""
        return self.arrived_sum / self.reductions if self.reductions else 1.0

    def process_group(self) -> StormProcessGroup:
        """Returns the group to use.

        Raises:
            TypeError: The group is of another backend.
        """
        return storm_group(self.group or dist.distributed_c10d._get_default_group(), "lossy gradients")

    def count(self, pending: Pending) -> None:
        """Counts what arrived in a reduction, as one reduction even if it took several exchanges."""
        arrivals = pending.wait()
        if arrivals:
            with self._lock:
                self.reductions += 1
                self.arrived_sum += sum(arrival.fraction(stage=0) for arrival in arrivals) / len(arrivals)

    def wire_for(self, gradients: torch.Tensor, group: StormProcessGroup) -> tuple[Wire, Reliability]:
        """Returns format and reliability of gradients: the wire's and lossy for floats, else their own and exact."""
        chunk_bytes = group.group.transport.chunk_bytes
        if gradients.dtype in _MAY_LOSE:
            return Wire(self.wire, chunk_bytes), self.reliability
        return Wire(gradients.dtype, chunk_bytes), EXACT


def lossy_hook(
    state: LossyGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # public, but not marked as exported
) -> torch.futures.Future[torch.Tensor]:
    """Communication hook for DistributedDataParallel: `model.register_comm_hook(state, lossy_hook)`."""
    group = state.process_group()
    gradients = bucket.buffer()
    wire, loses = state.wire_for(gradients, group)
    staged = Staged("lossy_all_reduce")
    sent = staged.update(gradients, wire.reduces)
    started: list[Pending] = []

    def begin() -> list[Pending]:
        started.append(wire.all_reduce(group.group, sent, Op.AVG, reliability=loses, timeout_s=group.timeout_s))
        return started

    work = group.begin_work("lossy_all_reduce", begin, [gradients], staged, finish=lambda: state.count(started[0]))
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(_only)
    return future


def _only(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


class LossyReduceScatter:
    """Reduce-scatter that FSDP2 calls for gradients; see `lossy_reduce_scatter`."""

    def __init__(self, state: LossyGradients) -> None:
        self.state = state

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates memory for inputs and outputs."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> StormWork | None:
        """Starts a reduce-scatter and, unless `async_op` is set, waits for it."""
        to, state, operation = storm_group(group, "lossy gradients"), self.state, reduce_operation(op)
        wire, loses = state.wire_for(input_tensor, to)
        staged = Staged("lossy_reduce_scatter")
        sent = staged.read(input_tensor, wire.reduces)
        parts = pieces(sent, to.group.size, "lossy_reduce_scatter")
        # The engine adds in float32 and writes the result as float32 or in the type of the inputs.
        out = staged.write(output_tensor, sent.dtype if output_tensor.dtype == sent.dtype else torch.float32).view(-1)
        started: list[Pending] = []

        def begin() -> list[Pending]:
            started.append(
                wire.reduce_scatter(to.group, out, parts, operation, reliability=loses, timeout_s=to.timeout_s)
            )
            return started

        work = to.begin_work(
            "lossy_reduce_scatter", begin, [output_tensor], staged, finish=lambda: state.count(started[0])
        )
        if async_op:
            return work
        work.wait()
        return None


def lossy_reduce_scatter(model: nn.Module, state: LossyGradients) -> None:
    """Makes the gradients of every `fully_shard`ed module in `model` lossy.

    Args:
        model: A model with at least one module that `fully_shard` was applied to, on a group of the backend storm.
        state: Settings, and the count of what arrived.

    Raises:
        ValueError: `fully_shard` was not applied to any module of the model.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError("lossy_reduce_scatter needs a model with fully_shard applied to it or to some of its modules")
    for module in sharded:
        module.set_custom_reduce_scatter(LossyReduceScatter(state))
