"""What the policies have in common: a model and an optimizer whose hooks call the policy, and what the user may ask."""

from __future__ import annotations

import contextlib
import logging
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.policies.ledger import Ledger
from stormtorch.policies.policy import Policy
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.buffers import buffers_of
from stormtorch.runtime.calls import EXACT_MODEL, MODEL_STATE
from stormtorch.runtime.layout import Layout, Slot, plan
from stormtorch.runtime.prepared import adopt, trained
from stormtorch.runtime.wrappers import Kept, refuse_active_wrapper, refuse_wrapped, refuse_wrappers
from stormtorch.transport.exchange import WIRE_DTYPES
from stormtorch.transport.waiting import doing

_log = logging.getLogger("stormtorch")

# Weak on both sides: the optimizer and the model's hooks keep a training alive, and it keeps the model.
_trainings: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Session]]] = weakref.WeakKeyDictionary()


class Session(ABC):
    """A prepared model and optimizer. Its policy's part is in the subclasses.

    Args:
        model: The user's.
        optimizer: The user's.
        group: Who trains together.
        name: Of the channels; every training of a transport has its own.
        policy: The user's.
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
        # Every training has names of its own, which nobody needs after it.
        self._channels_used: set[str] = set()
        weakref.finalize(self, group.transport.channels.forget, self._channels_used).atexit = False
        self._given = {
            "model": [(each.shape, each.dtype, each.requires_grad) for each in trained(optimizer)],
            "optimizer": [type(optimizer).__name__, *(len(each["params"]) for each in optimizer.param_groups)],
            "policy": policy,
        }
        self._frozen = [each for each in trained(optimizer) if not each.requires_grad]
        self.parameters = trained(optimizer)
        self.buckets: list[Bucket] = []
        self._looked = False
        self._check_model()
        self._check()

    def take_over(self) -> None:
        """From now on the optimizer is a prepared one, and the model's state is everyone's."""
        self.bytes_sent()
        adopt(self.optimizer, self)
        self.optimizer.__dict__["ledger"] = self.ledger
        _trainings.setdefault(self.model, []).append(weakref.ref(self))
        refuse_wrappers(_any_prepared)
        optimizer_of = weakref.ref(self.optimizer)
        kept = Kept(self.model, self.parameters)

        def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if optimizer is optimizer_of():
                self._check_frozen()
                kept.check()
                self._check_left_out()
                self.bring_home()
                # Of kwargs there may be more than the closure, and the closure may be None in either place.
                closure = any(callable(each) for each in (*args[1:], kwargs.get("closure")))
                with doing("optimizer.step()"):
                    self.before_step(closure=closure)

        def after(optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            if optimizer is optimizer_of():
                with doing("optimizer.step()"):
                    self.after_step()

        def forward(module: nn.Module, _args: object) -> None:
            if not torch.compiler.is_compiling():
                refuse_active_wrapper(module)
                if module.training and torch.is_grad_enabled():
                    self.bring_home()

        def saving(module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
            if module is self.model:
                kept.check()
                self.bring_home()
                self.synchronise(MODEL_STATE)

        def loading(module: nn.Module, *_: Any) -> None:
            if module is self.model:
                self.bring_home()
                self.wait()  # what is on its way would overwrite what is loaded

        def loaded(module: nn.Module, _keys: Any) -> None:
            if module is self.model:
                if kept.gone():
                    raise RuntimeError(
                        "load_state_dict(assign=True) replaces parameters that are prepared: use assign=False"
                    )
                self.loaded()
                buffers_of(module).remember()  # as this rank may be asked for them before its next step

        self.optimizer.register_step_pre_hook(before)
        self.optimizer.register_step_post_hook(after)
        self.model.register_forward_pre_hook(forward)
        self.model.register_state_dict_pre_hook(saving)  # type: ignore[no-untyped-call]  # torch's, and the next
        self.model.register_load_state_dict_pre_hook(loading)  # type: ignore[no-untyped-call]
        self.model.register_load_state_dict_post_hook(loaded)  # type: ignore[no-untyped-call]
        # A function and not a method: a copy of the model must not copy all of this.
        model_of = weakref.ref(self.model)

        def no_sync() -> contextlib.AbstractContextManager[None]:
            model = model_of()
            return together(each.no_sync() for each in ([] if model is None else sessions_of(model)))

        self.model.__dict__["no_sync"] = no_sync
        # By setattr, not in __dict__: a compiled model hands attributes on to the one that it was made of.
        self.model.require_backward_grad_sync = True  # type: ignore[assignment]  # torch's modules hold anything

    def backward_ended(self) -> None:
        """Completes the gradients of all optimizers of the model, in the same order on all ranks.

        A backward may have brought gradients for one of them here and for another one elsewhere.
        """
        for training in sessions_of(self.model):
            training.complete_gradients()

    def wants_exchange(self) -> bool:
        """Whether the user has not told the model, as people tell DDP, to leave gradients alone for now."""
        return bool(getattr(self.model, "require_backward_grad_sync", True))

    # --- what a policy does -----------------------------------------------------------------------------------------

    @abstractmethod
    def complete_gradients(self) -> None:
        """Ends the exchange of gradients, for policies that have one, unless `no_sync` forbids it."""

    @abstractmethod
    def before_step(self, *, closure: bool) -> None:
        """The optimizer is about to step."""

    @abstractmethod
    def after_step(self) -> None:
        """It has."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients."""

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within it, backward exchanges nothing."""

    @abstractmethod
    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """The parameters become what the policy holds for true. `call` is what all ranks must make for it."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when the parameters of the last step are here, or lost."""

    @abstractmethod
    def loaded(self) -> None:
        """The model was given values by `load_state_dict`."""

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Within it, the parameters are what the policy holds for true. All ranks must enter it."""
        self.bring_home()
        self.synchronise()
        yield

    def optimizer_state(self, local: dict[str, Any]) -> dict[str, Any]:
        """The state dict of the whole optimizer."""
        return local

    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a state dict of the whole optimizer."""
        return whole

    def arriving(self) -> bool:
        """Whether parameters are on their way."""
        return False

    def bring_home(self) -> None:
        """Puts parameters back into their buckets, or raises an error where that cannot be."""
        arriving = self.arriving()
        for bucket in self.buckets:
            bucket.bring_home(arriving=arriving)

    # --- for the policies -------------------------------------------------------------------------------------------

    def bytes_sent(self) -> int:
        """By this rank's transport, since it was last asked for."""
        before, self._bytes_sent = self._bytes_sent, int(self.group.transport.health()["bytes_sent"])
        return self._bytes_sent - before

    def subgroup(self, name: str) -> Group:
        """The same ranks with a sequence of exchanges of their own."""
        self._channels_used.add(f"{self.name}/{name}")
        return Group(self.group.transport, self.group.ranks, name=f"{self.name}/{name}")

    def make_buckets(self, bucket_mb: float, *, whole: bool) -> list[Bucket]:
        """Moves the parameters that are trained into buckets, one kind after the other."""
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
        """Every rank begins with the parameters and buffers of rank 0.

        Raises:
            ValueError: A rank was given something else than rank 0. Without a look, much of that would go unnoticed.
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

    def _check_frozen(self) -> None:
        if any(parameter.requires_grad for parameter in self._frozen):
            raise RuntimeError(
                "a parameter that was frozen when the model was prepared is so no longer, and has no place in what "
                "ranks exchange: let all that will ever be trained require a gradient at prepare(), and freeze it then"
            )

    def _check_left_out(self) -> None:
        """Warns of parameters that no optimizer has. Another one may have been prepared since; now it is too late."""
        if self._looked:
            return
        trainings = sessions_of(self.model)
        for training in trainings:
            training._looked = True
        known = {id(parameter) for training in trainings for parameter in training.parameters}
        left_out = [
            name for name, each in self.model.named_parameters() if each.requires_grad and id(each) not in known
        ]
        if left_out:
            _log.warning(
                "rank %d: no prepared optimizer has %s: they require a gradient and will never change. Give them to an "
                "optimizer before prepare(), or freeze them",
                *(self.group.rank, _listed(left_out)),
            )

    def _check_model(self) -> None:
        own = {id(parameter) for parameter in self.model.parameters()}
        if not any(id(parameter) in own for parameter in self.parameters):
            raise ValueError(
                "the optimizer has none of the model's parameters: make it from model.parameters() of this very model, "
                "not of a copy or of what it was before it was converted"
            )
        refuse_wrapped(self.model)
        if any(isinstance(parameter, DTensor) for parameter in self.parameters):
            raise ValueError("prepare() takes the place of FSDP, and does not know DTensors: give it a plain model")

    def _check(self) -> None:
        seen: set[int] = set()
        for number, parameter in enumerate(self.parameters):
            if parameter.requires_grad and parameter.dtype not in WIRE_DTYPES:
                raise ValueError(
                    f"parameter {number} is {parameter.dtype}: only float32, bfloat16 and float16 can be prepared"
                )
            if id(parameter) in seen:
                raise ValueError(f"parameter {number} is in the optimizer twice")
            seen.add(id(parameter))
            if parameter.is_sparse or parameter.is_meta:
                raise ValueError(f"parameter {number} is {'sparse' if parameter.is_sparse else 'on meta'}")
        devices = {parameter.device.type for parameter in self.parameters}
        if not devices <= {"cpu", "cuda"}:
            raise ValueError(f"parameters must be on the CPU or on CUDA, got {', '.join(sorted(devices))}")


def sessions_of(model: nn.Module) -> list[Session]:
    """The trainings that a model was prepared for, one per optimizer; none if it was not."""
    return [training for found in _trainings.get(model, ()) if (training := found()) is not None]


def _any_prepared(parameters: Iterable[nn.Parameter]) -> bool:
    given = {id(parameter) for parameter in parameters}
    return any(
        id(parameter) in given
        for model in list(_trainings)
        for training in sessions_of(model)
        for parameter in training.parameters
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - 8
    return ", ".join(names[:8]) + (f" and {more} others" if more > 0 else "")


@contextlib.contextmanager
def together(contexts: Iterable[contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Several contexts as one."""
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
