"""Policies under which every rank has a model and an optimizer of its own: RPS, and what it warns of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group, Op, Pending
from stormtorch.policies import GradientAveraging, ModelAveraging, rules
from stormtorch.policies.ledger import Row
from stormtorch.reliability import EXACT
from stormtorch.runtime.arrivals import Links
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.buffers import buffers_of
from stormtorch.runtime.calls import EXACT_MODEL, NAMES, Calls
from stormtorch.runtime.gate import Gate
from stormtorch.runtime.gradients import Gradients
from stormtorch.runtime.meeting import Meeting
from stormtorch.runtime.profiling import shown
from stormtorch.runtime.session import Session
from stormtorch.transport.waiting import doing


class _Averaging(Session):
    """What both have in common: buckets that are averaged in place, over what arrives."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group,
        name: str,
        policy: ModelAveraging | GradientAveraging,
    ) -> None:
        incarnation = getattr(group.transport, "incarnation", None)
        if incarnation is not None and incarnation(group.transport.rank) > 0:
            raise ValueError(
                f"a rank cannot return under {type(policy).__name__}, as nobody lets it in: use BoundedDrift, or "
                "restart all ranks from a checkpoint"
            )
        super().__init__(model, optimizer, group, name, policy)
        self.buckets = self.make_buckets(policy.bucket_mb, whole=False)
        if any(bucket.on_gpu for bucket in self.buckets):
            raise ValueError(f"{type(policy).__name__} is for parameters on the CPU; use BoundedDrift on a GPU")
        self.agree(self.buckets)
        self._reliability = policy.reliability
        self._groups = [self.subgroup(f"mean/{bucket.index}") for bucket in self.buckets]
        self._to_owners, self._back = Links(group.size), Links(group.size)
        self._pending: dict[int, Pending] = {}
        self.ledger.attend(group.rank, self.wait)

    def begin_mean(self, bucket: Bucket, vector: torch.Tensor, group: Group) -> None:
        """Begins to average a vector of a bucket; where the mean is lost, it stays as it is."""
        with shown("all_reduce", bucket.index, vector.numel(), vector.dtype):
            self._pending[bucket.index] = collectives.all_reduce(group, vector, Op.AVG, reliability=self._reliability)

    def end_mean(self, bucket: Bucket) -> None:
        """Waits for it."""
        with shown("all_reduce wait", bucket.index, bucket.layout.elements, bucket.dtype):
            arrivals = self._pending.pop(bucket.index).wait()
        for arrival in arrivals:
            # Peers are named by their place among all ranks, not by the one that this round has given them.
            self._to_owners.add(self.group, arrival)
            self._back.add(self.group, arrival, stage=1)

    def note(self, waited_s: float) -> None:
        """Completes the row of the step that was made last."""
        row = Row(self.steps - 1, gradients=self._to_owners.fractions(), broadcast=self._back.fractions())
        row.broadcast_wait_s = waited_s
        row.bytes_sent = self.bytes_sent()
        self.ledger.add(row)
        self._to_owners.clear()
        self._back.clear()

    def loaded(self) -> None:
        """Parameters are views of the buckets: nothing else has to follow."""


class ModelAveragingTraining(_Averaging):
    """RPS; arguments as of `Session`, and the policy."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: ModelAveraging
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self.policy = policy
        for bucket in self.buckets:
            bucket.release_gradients()
        self._gate = Gate(model, self.buckets, self.end_mean, self._passed, overlap=policy.overlap)
        self._order = torch.Generator(device="cpu").manual_seed(policy.seed)
        # GradScaler skips a step by not calling it, and the other ranks would wait for this one's model. An optimizer
        # that says it can unscale is called all the same.
        self._unscales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer.__dict__["_step_supports_amp_scaling"] = True
        self._buffers = buffers_of(model)
        self._calls = Calls(
            Meeting(self.subgroup("calls"), self.subgroup("exact"), EXACT, policy.collective_wait_s),
            steps=lambda: self.steps,
            ready=lambda: self._gate.is_open,
            serve=self._take_part,
        )

    def complete_gradients(self) -> None:
        """They are not exchanged."""

    def before_step(self, *, closure: bool) -> None:
        """The optimizer is about to change what may still be on its way."""
        self._gate.open()
        self._calls.forget()
        found_inf = getattr(self.optimizer, "found_inf", None)
        if self._unscales and found_inf is not None:
            self._unscale(skip=bool(found_inf), scale=getattr(self.optimizer, "grad_scale", None))
            self.optimizer.__dict__.update(found_inf=None, grad_scale=None)

    def _unscale(self, *, skip: bool, scale: torch.Tensor | None) -> None:
        """What GradScaler leaves to us; without gradients, the step changes nothing."""
        for parameter in self.parameters:
            if skip:
                parameter.grad = None
            elif parameter.grad is not None and scale is not None:
                parameter.grad.mul_(scale.double().reciprocal().float())

    @torch.no_grad()
    def after_step(self) -> None:
        """A local step was made; every so often, models are averaged."""
        self.steps += 1
        self._buffers.remember()
        if self.steps % self.policy.every:
            return
        for bucket in reversed(self.buckets):
            bucket.bring_home()
            turned = rules.block_order(self.group.size, self._order)
            self.begin_mean(bucket, bucket.flat, self._groups[bucket.index].turned(turned))
        self._gate.close()

    def arriving(self) -> bool:
        """Whether parameters are on their way."""
        return not self._gate.is_open

    def _passed(self) -> None:
        self.note(self._gate.waited_s)

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients."""
        torch.optim.Optimizer.zero_grad(self.optimizer, set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is exchanged in backward anyway."""
        return contextlib.nullcontext()

    def loaded(self) -> None:
        """Parameters are views of the buckets; what is kept of calls and buffers is of what was there before."""
        self._calls.forget()
        self._buffers.remember()

    def wait(self) -> None:
        """Returns when the last averaging has ended."""
        self._gate.open()

    @torch.no_grad()
    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Every rank that calls it gets the mean of all models."""
        with doing(NAMES[call]):
            self._gate.open()
        with self._calls.call(call) as (_, kept):
            if kept is None:
                for bucket in self.buckets:
                    collectives.all_reduce(self._calls.group, bucket.flat, Op.AVG).wait()
                self._buffers.average(self._calls.group, EXACT)
            else:
                self._follow(*kept)  # type: ignore[misc]  # of `_take_part`

    def _follow(self, means: list[torch.Tensor], mean: torch.Tensor | None) -> None:
        """Takes what came of a call that this rank has taken part in."""
        for bucket, values in zip(self.buckets, means, strict=True):
            bucket.flat.copy_(values)
        self._buffers.become(mean)

    def _take_part(self, _call: int, _present: list[int]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Takes part in a call that others make; this rank keeps its own model."""
        means = [bucket.flat.clone() for bucket in self.buckets]
        for values in means:
            collectives.all_reduce(self._calls.group, values, Op.AVG).wait()
        return means, self._buffers.give(self._calls.group, EXACT)

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Within it, the parameters are the mean of all models; afterwards each rank has its own again."""
        self.bring_home()
        self._gate.open()
        own = [bucket.flat.clone() for bucket in self.buckets]
        self.synchronise()
        try:
            yield
        finally:
            with torch.no_grad():
                for bucket, values in zip(self.buckets, own, strict=True):
                    bucket.flat.copy_(values)


class GradientAveragingTraining(_Averaging):
    """What RPS warns of; arguments as of `Session`, and the policy."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: GradientAveraging
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self._gradients = Gradients(self.buckets, self._start, self._finish)
        self._gradients.end = self.backward_ended
        self._gradients.wanted = self.wants_exchange
        self._waited_s = 0.0

    def _start(self, bucket: Bucket) -> None:
        self.begin_mean(bucket, bucket.grads, self._groups[bucket.index])

    def _finish(self) -> None:
        began = time.perf_counter()
        for bucket in self.buckets:
            self.end_mean(bucket)
        self._waited_s = time.perf_counter() - began

    def complete_gradients(self) -> None:
        """Ends the exchange of gradients, unless `no_sync` forbids it."""
        if self._gradients.syncing:
            self._gradients.complete()

    def before_step(self, *, closure: bool) -> None:
        """Gradients are waited for, unless a closure will make them."""
        if not closure:
            self._gradients.complete()

    def after_step(self) -> None:
        """Every rank has applied what it got."""
        self.steps += 1
        self.note(self._waited_s)

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients."""
        self._gradients.clear(set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within it, backward exchanges nothing."""
        return self._gradients.no_sync()

    def wait(self) -> None:
        """Parameters are never on their way."""

    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """There is no common value: every rank keeps its own."""
