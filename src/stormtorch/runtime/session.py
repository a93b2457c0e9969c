"""A session, the base of what every policy does on a real rank: the model and optimizer, and what hooks call."""

from __future__ import annotations

import contextlib
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.policies.ledger import Ledger
from stormtorch.policies.policy import Policy
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.calls import EXACT_MODEL
from stormtorch.runtime.layout import Layout, Slot, plan
from stormtorch.runtime.preparable import check_model, check_parameters
from stormtorch.runtime.prepared import trained

# Weak on both sides: the optimizer and the model's hooks keep a session alive, and the session keeps the model.
_sessions: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Session]]] = weakref.WeakKeyDictionary()


class Session(ABC):
    """A prepared model and optimizer on one rank. A subclass does what its kind of policy needs.

    Args:
        model: The user's model.
        optimizer: The user's optimizer.
        group: The ranks that train together.
        name: First part of the names of the session's channels; no other session of the transport has it.
        policy: The user's policy.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: Policy
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.name = name
        self.ledger = Ledger()
        self.steps = 0
        """Optimizer steps so far."""
        self._bytes_sent = 0
        # The transport may forget the names of a session's channels once the session is gone: no other one uses them.
        self._channels_used: set[str] = set()
        weakref.finalize(self, group.transport.channels.forget, self._channels_used).atexit = False
        self._given = {
            "model": [(each.shape, each.dtype, each.requires_grad) for each in trained(optimizer)],
            "optimizer": [type(optimizer).__name__, *(len(each["params"]) for each in optimizer.param_groups)],
            "policy": policy,
        }
        self.frozen = [each for each in trained(optimizer) if not each.requires_grad]
        """Parameters that required no gradient at `prepare`, so that no bucket has them."""
        self.parameters = trained(optimizer)
        """All parameters of the optimizer as the user gave it, in the order of its groups."""
        self.buckets: list[Bucket] = []
        self.looked = False
        """Whether parameters that no prepared optimizer has were looked for."""
        check_model(model, self.parameters)
        check_parameters(self.parameters)

    def backward_ended(self) -> None:
        """Completes the gradients of all optimizers of the model, in the same order on all ranks.

        A backward may have brought gradients for one optimizer on this rank and for another one on others.
        """
        for session in sessions_of(self.model):
            session.complete_gradients()

    def wants_exchange(self) -> bool:
        """Whether backward may exchange gradients: scripts for DDP forbid it by `model.require_backward_grad_sync`."""
        return bool(getattr(self.model, "require_backward_grad_sync", True))

    # --- what a subclass does ---------------------------------------------------------------------------------------

    @abstractmethod
    def complete_gradients(self) -> None:
        """Ends the exchange of gradients, if there is one and `no_sync` does not forbid it."""

    @abstractmethod
    def before_step(self, *, closure: bool) -> None:
        """Called before the optimizer steps. With a closure, gradients are computed within the step."""

    @abstractmethod
    def after_step(self) -> None:
        """Called after the optimizer has stepped."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients."""

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context within which backward exchanges nothing."""

    @abstractmethod
    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Gives every rank the parameters that count under the policy. All ranks take part.

        Args:
            call: Number of the user's call that needs them, as in `stormtorch.runtime.meeting`.
        """

    @abstractmethod
    def wait(self) -> None:
        """Waits until the parameters of the last step have arrived or are lost."""

    @abstractmethod
    def loaded(self) -> None:
        """Called after `load_state_dict` has given the model other values."""

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Enters a context within which the parameters are those that count under the policy. All ranks take part."""
        self.bring_home()
        self.synchronise()
        yield

    def optimizer_state(self, local: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dict of the whole optimizer, given this rank's."""
        return local

    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a state dict of the whole optimizer."""
        return whole

    def arriving(self) -> bool:
        """Whether parameters are on their way."""
        return False

    def bring_home(self) -> None:
        """Puts parameters back into their buckets, or raises an error where that is impossible."""
        arriving = self.arriving()
        for bucket in self.buckets:
            bucket.bring_home(arriving=arriving)

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def bytes_sent(self) -> int:
        """Returns the bytes that this rank's transport has sent since the last call."""
        before, self._bytes_sent = self._bytes_sent, int(self.group.transport.health()["bytes_sent"])
        return self._bytes_sent - before

    def subgroup(self, name: str) -> Group:
        """Returns a group of the same ranks whose exchanges have a sequence of their own."""
        self._channels_used.add(f"{self.name}/{name}")
        return Group(self.group.transport, self.group.ranks, name=f"{self.name}/{name}")

    def make_buckets(self, bucket_mb: float, *, whole: bool) -> list[Bucket]:
        """Moves the parameters that require a gradient into buckets, each of one dtype and device.

        Args:
            bucket_mb: Size at which a bucket is full.
            whole: Whether shards must not cut through parameters.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(number)
        if not kinds:
            raise ValueError("the optimizer has no parameter that requires a gradient")
        layouts: list[Layout] = []
        for (dtype, _), numbers in kinds.items():
            counts = [self.parameters[number].numel() for number in numbers]
            for each in plan(counts, dtype.itemsize, bucket_mb * 1e6, self.group.size, whole=whole):
                slots = tuple(Slot(numbers[slot.parameter], slot.first, slot.count) for slot in each.slots)
                layouts.append(Layout(each.elements, slots, each.spans))
        return [Bucket(index, layout, self.parameters, self.group.rank) for index, layout in enumerate(layouts)]

    def agree(self, buckets: Sequence[Bucket]) -> None:
        """Gives every rank the parameters and buffers of rank 0.

        Raises:
            ValueError: A rank was given another model, optimizer or policy than rank 0. Much of that would otherwise go
                unnoticed.
        """
        group = self.subgroup("begin")
        self._compare(group)
        for bucket in buckets:
            collectives.broadcast(group, bucket.host_flat, 0).wait()
            if bucket.on_gpu:
                bucket.flat.copy_(bucket.host_flat)
            if bucket.masters is not bucket.own:
                bucket.masters.copy_(bucket.own)
        homes = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                if id(tensor) not in homes and tensor.numel():
                    values = tensor.detach().to("cpu").contiguous()
                    collectives.broadcast(group, values, 0).wait()
                    tensor.copy_(values)

    def _compare(self, group: Group) -> None:
        digests = [zlib.crc32(repr(each).encode()) for each in self._given.values()]
        all_N = [torch.tensor(digests, dtype=torch.int64, device="cpu") for _ in range(group.size)]
        collectives.all_gather(group, all_N, all_N[group.rank]).wait()
        for what, first, *others in zip(self._given, *(each.tolist() for each in all_N), strict=True):
            for peer, digest in enumerate(others, 1):
                if digest != first:
                    raise ValueError(f"rank {peer} has prepared another {what} than rank 0: give all ranks the same")


def register(session: Session) -> None:
    """Makes a session one of its model's."""
    _sessions.setdefault(session.model, []).append(weakref.ref(session))


def sessions_of(model: nn.Module) -> list[Session]:
    """Returns the sessions of a model, one per optimizer; none if it is not prepared."""
    return [session for found in _sessions.get(model, ()) if (session := found()) is not None]


def any_prepared(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any of some parameters is prepared."""
    given = {id(parameter) for parameter in parameters}
    return any(
        id(parameter) in given
        for model in list(_sessions)
        for session in sessions_of(model)
        for parameter in session.parameters
    )


@contextlib.contextmanager
def combined(contexts: Iterable[contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enters several contexts as one."""
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
