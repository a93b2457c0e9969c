"""What `bench ddp` measures: replicas of a model under DistributedDataParallel, each on a process group of its own."""

import contextlib
import copy
import math
import os
import threading
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from stormtorch.backend.lossy import LossyGradients, lossy_hook
from stormtorch.backend.process_group import StormProcessGroup
from stormtorch.bench.backends import TooSlow, chosen_tcp
from stormtorch.bench.ranks import Member
from stormtorch.bench.samples import Delivery
from stormtorch.bench.tcp import opened_by
from stormtorch.options import Options
from stormtorch.udp import UdpTransport

NO_SYNC = "no_sync"
"""The name of the replica that computes but does not communicate."""
_LAYERS, _HEADS, _VOCABULARY = 8, 8, 256
_LEARNING_RATE = 1e-3
WIRES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
"""What a lossy replica may send its gradients as."""


LOSSY = {"storm-lossy": "float32", "storm-lossy-bf16": "bfloat16", "storm-lossy-int8": "int8"}
"""What the lossy replicas of those names send."""


def transformer(params_m: float) -> nn.Module:
    """A small language model of about so many million float32 parameters, the same in every process.

    Of each layer's 12 width^2, attention has matrices of 3 and of 1, the rest two of 4; biases and norms are tiny.
    """
    # a width^2 + b width parameters, but for a few.
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


class Replica:
    """A model, its optimizer, and a group that averages its gradients. It owns the group."""

    def __init__(self, name: str, model: nn.Module, tokens: torch.Tensor, group: ProcessGroup | None) -> None:
        self.name = name
        self.limit_s: float | None = None
        self.exact = name not in LOSSY
        """Whether its gradients are exact whatever the network does."""
        self.wire = LOSSY.get(name, "float32")
        """What its gradients travel as."""
        self._tokens = tokens
        # All processes made the same model, and it has no buffers: nothing has to be sent to begin with.
        self._model = DistributedDataParallel(model, process_group=group, init_sync=False, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=_LEARNING_RATE)

    def step(self) -> Delivery:
        """Forward, backward with the exchange of gradients, and the update; returns when this rank is done."""
        self._optimizer.zero_grad()
        logits = self._model(self._tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self._optimizer.step()
        if self._tokens.is_cuda:
            torch.cuda.synchronize()
        return Delivery()

    def gradients(self) -> list[torch.Tensor]:
        """Those of the last step, one per parameter, on the CPU."""
        return [parameter.grad.cpu() for parameter in self._model.parameters() if parameter.grad is not None]

    def close(self) -> None:
        """Ends its connections."""


class StormReplica(Replica):
    """On the backend storm, with a transport of its own, so that its counters count nothing else."""

    def __init__(self, name: str, model: nn.Module, tokens: torch.Tensor, member: Member) -> None:
        group = dist.new_group(backend="storm", pg_options=Options(interface=member.interface))
        assert isinstance(group, StormProcessGroup)
        super().__init__(name, model, tokens, group)
        self._group = group
        transport = group.group.transport
        assert isinstance(transport, UdpTransport)
        self.transport = transport
        self._state = LossyGradients(group=group, wire=WIRES[self.wire])
        if not self.exact:
            self._model.register_comm_hook(self._state, lossy_hook)

    def step(self) -> Delivery:
        """See `Replica`."""
        buckets, arrived = self._state.reductions, self._state.arrived_sum
        delivery = super().step()
        buckets = self._state.reductions - buckets
        return Delivery((self._state.arrived_sum - arrived) / buckets) if buckets else delivery

    def close(self) -> None:
        """Says goodbye."""
        self._group.shutdown()


class GlooReplica(Replica):
    """On gloo, over TCP. A step that takes too long is ended by cutting its connections: DDP has no other way out."""

    def __init__(self, name: str, model: nn.Module, tokens: torch.Tensor, member: Member) -> None:
        group, self.connections = opened_by(lambda: _gloo(member.interface), chosen_tcp(name))
        super().__init__(name, model, tokens, group)
        self._store = member.store
        self._key = f"stormtorch/gave_up/{name}"

    def step(self) -> Delivery:
        """See `Replica`.

        Raises:
            TooSlow: It did not end within `limit_s`, here or on another rank.
        """
        with self._limited():
            return super().step()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        if self.limit_s is None:
            yield
            return
        watchdog = threading.Timer(self.limit_s, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        except RuntimeError as error:
            # What one rank cuts fails on all; who did not cut finds the reason in the store.
            if self._store.check([self._key]):
                raise TooSlow(f"{self.name} did not end within {self.limit_s:g} s: it needs more patience") from error
            raise
        finally:
            watchdog.cancel()

    def _give_up(self) -> None:
        self._store.set(self._key, "")
        self.connections.cut()

    def close(self) -> None:
        """Cuts its connections."""
        self.connections.cut()


class LocalReplica(Replica):
    """Without communication: what a step costs by itself."""

    def step(self) -> Delivery:
        """See `Replica`."""
        with self._model.no_sync():
            return super().step()


def open_replicas(names: Sequence[str], member: Member, params_m: float, tokens: int, device: str) -> list[Replica]:
    """A replica for each of the names, and one that does not communicate; all ranks call this together."""
    # torch wants a default group before it makes others; nothing is sent over it.
    os.environ["GLOO_SOCKET_IFNAME"] = member.control_interface
    dist.init_process_group("gloo", store=PrefixStore("ddp", member.store), rank=member.rank, world_size=member.world)
    model = transformer(params_m).to(device)
    # Every rank has its own data, as replicas have.
    own = torch.randint(_VOCABULARY, (1, tokens + 1), generator=torch.Generator().manual_seed(member.rank))
    own = own.to(device)
    replicas: list[Replica] = []
    for name in names:
        kind = GlooReplica if name.startswith("gloo") else StormReplica
        replicas.append(kind(name, copy.deepcopy(model), own, member))
    return [*replicas, LocalReplica(NO_SYNC, model, own, None)]


def close_groups() -> None:
    """After the replicas were closed."""
    dist.destroy_process_group()


def _gloo(interface: str) -> ProcessGroup:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    group: ProcessGroup = dist.new_group(backend="gloo")
    group.barrier().wait()  # by now, everybody is connected
    return group
