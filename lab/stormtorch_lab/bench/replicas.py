"""Replicas of a model for `bench ddp`: under DDP, prepared for a policy, or alone; each with its own process group."""

import contextlib
import copy
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from stormtorch.backend.hooks.lossy import LossyGradients, lossy_hook
from stormtorch.backend.process_group import StormProcessGroup
from stormtorch.exchange.options import Options
from stormtorch.policies import BoundedDrift, RankPolicy
from stormtorch.policies.policy import Policy
from stormtorch.runtime.prepare import prepare
from stormtorch.runtime.session.session import sessions_of
from stormtorch.telemetry.ledger import Ledger
from stormtorch.udp.udp import UdpTransport
from stormtorch_lab.bench.backends import chosen_tcp
from stormtorch_lab.bench.tcp import opened_by
from stormtorch_lab.jobs.control import CallTimeout
from stormtorch_lab.jobs.counters import Delivery
from stormtorch_lab.jobs.ranks import Member
from stormtorch_lab.policies.presets import WIRES

NO_SYNC = "no_sync"
"""Name of the replica that computes but does not communicate."""
_LAYERS, _HEADS, _VOCABULARY = 8, 8, 256
LEARNING_RATE = 1e-3
"""Learning rate of the transformer's SGD."""
_ENDINGS = {"float32": "", "bfloat16": "-bf16", "float16": "-fp16", "int8": "-int8", "int4": "-int4"}
LOSSY = {f"storm-lossy{ending}": wire for wire, ending in _ENDINGS.items()}
"""Wires of the replicas under DistributedDataParallel with the lossy hook."""
_FOLLOWED = {f"storm-drift{ending}": wire for wire, ending in _ENDINGS.items()}
_ALONE = {f"storm-alone{ending}": wire for wire, ending in _ENDINGS.items()}
_FLAT = {f"storm-drift-flat{ending}": wire for wire, ending in _ENDINGS.items()}
_BY_RATE = {f"storm-drift-rate{ending}": wire for wire, ending in _ENDINGS.items()}
DRIFT = {**_FOLLOWED, **_ALONE, **_FLAT, **_BY_RATE}
"""Wires of the replicas prepared for `BoundedDrift`: storm-alone has no standbys, storm-drift-flat no hierarchy,
storm-drift-rate has shards in proportion to measured rates."""
DEFAULT = ("storm", "storm-lossy", "storm-drift", "gloo")
"""Backends that are compared by default."""
DRIFT_FLAT = "storm-drift-flat"
"""Backend in a lab: storm-drift without its hierarchy on hosts with several ranks."""
DRIFT_RATE = "storm-drift-rate"
"""Backend in a lab: storm-drift with shards in proportion to the rates of the links."""
BACKENDS = (*DEFAULT, "storm-alone")
"""Backends that can be chosen; a lab also has gloo with other congestion controls of TCP."""
LAB_DEFAULT = ("storm", "storm-lossy", "storm-drift", "gloo-bbr", "gloo-cubic")
"""Backends that a lab compares by default."""


def contenders(backends: tuple[str, ...], wires: tuple[str, ...]) -> tuple[str, ...]:
    """Replaces storm-lossy and each kind of storm-drift by one contender per wire."""
    families = {"storm-lossy": LOSSY, "storm-drift": _FOLLOWED, "storm-alone": _ALONE, DRIFT_FLAT: _FLAT}
    families[DRIFT_RATE] = _BY_RATE
    return tuple(
        name
        for each in backends
        for name, wire in families.get(each, {each: None}).items()
        if wire is None or wire in wires
    )


def wire_of(name: str) -> str:
    """Wire of a contender."""
    return LOSSY.get(name) or DRIFT.get(name, "float32")


def transformer(params_m: float) -> nn.Module:
    """A small language model of about that many million float32 parameters, the same in every process.

    Of each layer's 12 width^2, attention has matrices of 3 and of 1, the rest two of 4; biases and norms are tiny.
    """
    # About a width^2 + b width parameters.
    a, b = 12 * _LAYERS, 13 * _LAYERS + 2 * _VOCABULARY
    exact = (math.sqrt(b * b + 4 * a * params_m * 1e6) - b) / (2 * a)
    width = max(round(exact / _HEADS), 1) * _HEADS
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [
            nn.TransformerEncoderLayer(width, _HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(_LAYERS)
        ]
        return nn.Sequential(
            nn.Embedding(_VOCABULARY, width), *layers, nn.LayerNorm(width), nn.Linear(width, _VOCABULARY)
        )


@dataclass(frozen=True)
class Workload:
    """Workload of every replica, each with its own model and optimizer."""

    model: nn.Module
    """Model, the same on all ranks; replicas copy it."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[int], torch.Tensor]
    """This rank's batch of a step, by the number of the step: sequences of tokens for next-token prediction."""


class Replica:
    """A model, its optimizer, and the process group that synchronises it with other ranks; it owns the group."""

    def __init__(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, task: Workload) -> None:
        self.name = name
        self.limit_s: float | None = None
        self.wire = wire_of(name)
        """Wire of its gradients, and of its parameters if they are sent."""
        self.model = model
        self.steps = 0
        """Steps so far."""
        self.begun = 0
        """Steps of the last call that were at least begun."""
        self._optimizer = optimizer
        self._batch = task.batch
        self._on_gpu = any(parameter.is_cuda for parameter in model.parameters())

    def run_steps(self, steps: int) -> Delivery:
        """Makes that many steps without a pause; returns when this rank has the parameters of the last one."""
        self.begun = 0
        for _ in range(steps):
            self.begun += 1
            self._step()
        self._settle()
        if self._on_gpu:
            torch.cuda.synchronize()
        return Delivery()

    def _step(self) -> None:
        tokens = self._batch(self.steps)
        self._optimizer.zero_grad()
        loss = next_token_loss(self.model(tokens[:, :-1]), tokens)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self._optimizer.step()
        self.steps += 1

    def _settle(self) -> None:
        """Waits for parameters in flight."""

    def gradients(self) -> list[torch.Tensor]:
        """Gradients of the first step, averaged over the ranks, on the CPU; valid until the second step."""
        return [parameter.grad.cpu() for parameter in self.model.parameters() if parameter.grad is not None]

    def alike(self) -> list[torch.Tensor]:
        """Tensors that must be bit-identical on all ranks after a call, on the CPU; collective."""
        return self.gradients()

    def synchronise(self) -> None:
        """Loads the authoritative parameters on all ranks; under DistributedDataParallel they always are."""

    def judged(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context with the parameters to evaluate; collective."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Closes its connections."""


class StormReplica(Replica):
    """Replica on the backend storm, with its own transport, so that its counters count nothing else."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Workload,
        group: StormProcessGroup,
    ) -> None:
        super().__init__(name, model, optimizer, task)
        self._group = group
        transport = group.group.transport
        assert isinstance(transport, UdpTransport)
        self.transport = transport

    def close(self) -> None:
        """Says goodbye."""
        self._group.shutdown()


class DdpReplica(StormReplica):
    """Replica under DistributedDataParallel: exact, or lossy by its hook."""

    def __init__(self, name: str, task: Workload, member: Member, datagram_bytes: int | None = None) -> None:
        group = _storm(member, datagram_bytes)
        model, optimizer = _data_parallel(task, group)
        super().__init__(name, model, optimizer, task, group)
        self._state = LossyGradients(group=group, wire=WIRES[self.wire])
        if name in LOSSY:
            model.register_comm_hook(self._state, lossy_hook)

    def run_steps(self, steps: int) -> Delivery:
        """See `Replica`."""
        buckets, arrived = self._state.reductions, self._state.arrived_sum
        delivery = super().run_steps(steps)
        buckets = self._state.reductions - buckets
        return Delivery((self._state.arrived_sum - arrived) / buckets) if buckets else delivery


class PreparedReplica(StormReplica):
    """Replica prepared for a policy: parameters of a step may still arrive during the next one."""

    def __init__(
        self,
        name: str,
        task: Workload,
        member: Member,
        policy: Policy,
        datagram_bytes: int | None = None,
        options: Options | None = None,
    ) -> None:
        group = _storm(member, datagram_bytes, options)
        model = copy.deepcopy(task.model)
        model, optimizer = prepare(model, task.optimizer(model), policy=policy, group=group)
        super().__init__(name, model, optimizer, task, group)
        self._of_ranks = isinstance(policy, RankPolicy)
        self._exchanges = 0
        (self._session,) = sessions_of(model)
        self._session.ledger.on_row(self._count)

    @property
    def ledger(self) -> Ledger:
        """Record of its steps."""
        return self._session.ledger

    def _count(self, _row: object) -> None:
        self._exchanges += 1

    def run_steps(self, steps: int) -> Delivery:
        """See `Replica`."""
        self._exchanges = 0
        super().run_steps(steps)
        rows = list(itertools.islice(reversed(self._session.ledger.rows), self._exchanges))
        return Delivery(sum(row.arrived for row in rows) / len(rows)) if rows else Delivery()

    def _settle(self) -> None:
        self._session.wait()

    def synchronise(self) -> None:
        """See `Replica`. If each rank trains its own model, it keeps that."""
        if not self._of_ranks:
            self._session.synchronise()

    def judged(self) -> contextlib.AbstractContextManager[None]:
        """See `Replica`."""
        return self._session.exact() if self._of_ranks else contextlib.nullcontext()


class DriftReplica(PreparedReplica):
    """Replica prepared for `BoundedDrift`; its name selects the variant."""

    def __init__(self, name: str, task: Workload, member: Member, datagram_bytes: int | None = None) -> None:
        self._begun_with = [parameter.detach().clone() for parameter in task.model.parameters()]
        wire, standby, hierarchy = WIRES[DRIFT[name]], int(name not in _ALONE), name not in _FLAT
        shards: Literal["equal", "rate"] = "rate" if name in _BY_RATE else "equal"
        policy = BoundedDrift(wire=wire, standby=standby, hierarchy=hierarchy, shards=shards)
        super().__init__(name, task, member, policy, datagram_bytes)

    def gradients(self) -> list[torch.Tensor]:
        """See `Replica`. No rank has all gradients: they are recovered from SGD's update of the owners' parameters."""
        before, self._begun_with = self._begun_with, []
        (rate,) = {group["lr"] for group in self._optimizer.param_groups}
        return [(old.cpu() - new) / rate for old, new in zip(before, self.alike(), strict=True)]

    def alike(self) -> list[torch.Tensor]:
        """See `Replica`. Copies may differ between ranks; the parameters at their owners may not."""
        self.synchronise()
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


class GlooReplica(Replica):
    """Replica under DistributedDataParallel on gloo, over TCP.

    A call that times out is aborted by cutting its connections: DistributedDataParallel offers nothing else.
    """

    def __init__(self, name: str, task: Workload, member: Member) -> None:
        group, self.connections = opened_by(lambda: _gloo(member.interface), chosen_tcp(name))
        super().__init__(name, *_data_parallel(task, group), task)
        self._store = member.store
        self._key = f"stormtorch/gave_up/{name}"

    def run_steps(self, steps: int) -> Delivery:
        """See `Replica`.

        Raises:
            CallTimeout: It did not end within `limit_s`, on this or another rank.
        """
        with self._limited():
            return super().run_steps(steps)

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        if self.limit_s is None:
            yield
            return
        watchdog = threading.Timer(self.limit_s, self._abort)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        except RuntimeError as error:
            # If one rank cuts its connections, all ranks fail; the others find the reason in the store.
            if self._store.check([self._key]):
                raise CallTimeout(f"{self.name} did not end within {self.limit_s:g} s: raise --patience-s") from error
            raise
        finally:
            watchdog.cancel()

    def _abort(self) -> None:
        self._store.set(self._key, "")
        self.connections.abort()

    def close(self) -> None:
        """Cuts its connections."""
        self.connections.abort()


class LocalReplica(Replica):
    """Replica without communication: the cost of computation alone."""

    def __init__(self, name: str, task: Workload) -> None:
        model, optimizer = _data_parallel(task, None)
        super().__init__(name, model, optimizer, task)
        self._no_sync = model.no_sync

    def run_steps(self, steps: int) -> Delivery:
        """See `Replica`."""
        with self._no_sync():
            return super().run_steps(steps)


def next_token_loss(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of next-token prediction, in nats."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def transformer_task(params_m: float, tokens: int, device: str, rank: int) -> Workload:
    """A transformer of that many million parameters that learns one sequence by SGD."""
    # Every rank has its own data.
    own = torch.randint(_VOCABULARY, (1, tokens + 1), generator=torch.Generator().manual_seed(rank)).to(device)
    return Workload(
        model=transformer(params_m).to(device),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        batch=lambda _step: own,
    )


def open_groups(member: Member) -> None:
    """Initialises torch for replicas; collective, as is `open_replica`."""
    # torch requires a default group before others; nothing is sent over it.
    os.environ["GLOO_SOCKET_IFNAME"] = member.control_interface
    dist.init_process_group("gloo", store=PrefixStore("ddp", member.store), rank=member.rank, world_size=member.world)


def open_replica(
    name: str, task: Workload, member: Member, datagram_bytes: int | None = None, policy: Policy | None = None
) -> Replica:
    """Makes a replica: a copy of the workload's model on its own process group.

    Args:
        name: Name of the backend.
        task: Its workload.
        member: This rank.
        datagram_bytes: Payload of a datagram of storm's; None lets it choose.
        policy: Policy of a replica that is named after one.
    """
    if policy is not None:
        return PreparedReplica(name, task, member, policy, datagram_bytes)
    if name == NO_SYNC:
        return LocalReplica(name, task)
    if name.startswith("gloo"):
        return GlooReplica(name, task, member)
    kind = DriftReplica if name in DRIFT else DdpReplica
    return kind(name, task, member, datagram_bytes)


def close_groups() -> None:
    """Undoes `open_groups`; call it after the replicas are closed."""
    dist.destroy_process_group()


def _data_parallel(task: Workload, group: ProcessGroup | None) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    # All processes made the same model, without buffers: no initial broadcast is needed.
    model = DistributedDataParallel(
        copy.deepcopy(task.model), process_group=group, init_sync=False, gradient_as_bucket_view=True
    )
    return model, task.optimizer(model)


def _storm(member: Member, datagram_bytes: int | None, options: Options | None = None) -> StormProcessGroup:
    options = options or Options(interface=member.interface, datagram_bytes=datagram_bytes)
    group = dist.new_group(backend="storm", pg_options=options)
    assert isinstance(group, StormProcessGroup)
    return group


def _gloo(interface: str) -> ProcessGroup:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    group: ProcessGroup = dist.new_group(backend="gloo")
    group.barrier().wait()  # by now, all ranks are connected
    return group
