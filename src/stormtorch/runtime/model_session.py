"""A session under a `RankPolicy` that sends parameters: ranks average their models after every few steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group, Op, Pending
from stormtorch.policies.policy import RankPolicy
from stormtorch.reliability import EXACT
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.calls import EXACT_MODEL, NAMES, Calls
from stormtorch.runtime.gate import Gate
from stormtorch.runtime.members import Epoch
from stormtorch.runtime.replicated import ReplicatedSession
from stormtorch.transport.waiting import doing


class ModelSession(ReplicatedSession):
    """A session whose ranks exchange parameters after every few steps.

    Args: See `Session`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: RankPolicy
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        for bucket in self.buckets:
            bucket.release_gradients()
        self._telling: Pending | None = None
        self._digest = 0
        self._entering = False
        # Where the policy stands between two stages, nobody would begin the second one during forward.
        overlap = policy.overlap and self._averages.fused
        self._gate = Gate(model, self.buckets, self._averages.finish, self._passed, overlap=overlap)
        # GradScaler skips a step by not calling it, and then the other ranks would wait for this rank's model. It calls
        # an optimizer that claims to unscale gradients itself in any case.
        self._unscales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer.__dict__["_step_supports_amp_scaling"] = True
        self._calls = Calls(
            self._rounds.meeting(),
            steps=lambda: self.steps,
            ready=lambda: self._gate.is_open and not self._entering,
            serve=self._take_part,
        )
        if self._rounds.members.restarted:
            self.come_back()

    def exchanged(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the parameters of a bucket."""
        return bucket.flat, bucket.host_flat

    def complete_gradients(self) -> None:
        """Does nothing: gradients are not exchanged."""

    def before_step(self, *, closure: bool) -> None:
        """Waits for parameters that are on their way, as the optimizer is about to change them."""
        self._gate.open()
        self._calls.forget()
        found_inf = getattr(self.optimizer, "found_inf", None)
        if self._unscales and found_inf is not None:
            self._unscale(skip=bool(found_inf), scale=getattr(self.optimizer, "grad_scale", None))
            self.optimizer.__dict__.update(found_inf=None, grad_scale=None)

    def _unscale(self, *, skip: bool, scale: torch.Tensor | None) -> None:
        """Unscales gradients, or removes them so that the step changes nothing: GradScaler leaves both to us."""
        for parameter in self.parameters:
            if skip:
                parameter.grad = None
            elif parameter.grad is not None and scale is not None:
                parameter.grad.mul_(scale.double().reciprocal().float())

    @torch.no_grad()
    def after_step(self) -> None:
        """Begins a round after every `every`-th step."""
        self.steps += 1
        self._buffers.remember()
        if self.steps % self.policy.every:
            return
        self._row.step = self.steps - 1
        for bucket in reversed(self.buckets):
            bucket.bring_home()
            self.begin(bucket)
        self._digest = self._rounds.hyperparameters.digest(anywhere=True)
        self._telling = self.tell(self.steps, self._digest)
        epoch = self._rounds.members.look(self.steps)
        if epoch is not None:
            self._row.events.append(str(epoch))  # before the gate closes, which may complete the row
        self._gate.close()
        if epoch is not None:
            self._gate.open()
            if self._rounds.members.epoch < epoch.number:  # it was cut off meanwhile, and has come back by a later one
                self.enter(epoch)

    def _passed(self) -> None:
        """Completes a round: all parameters have arrived or are lost."""
        telling, self._telling = self._telling, None
        assert telling is not None
        row = self._row
        here = self.hear(telling, row, self.steps, self._digest)
        self.note(row, self._gate.waited_s)
        self.sample(self.steps + 1)
        if not here:
            self.come_back()

    def enter(self, epoch: Epoch) -> None:
        """Begins an epoch. A rank that returns continues at the others' step."""
        self._entering = True
        self.steps = epoch.step
        super().enter(epoch)
        self._calls.meeting = self._rounds.meeting()
        self._calls.forget()
        self._entering = False

    # --- for the user ------------------------------------------------------------------------------------------------

    def arriving(self) -> bool:
        """Whether parameters are on their way."""
        return not self._gate.is_open

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients."""
        torch.optim.Optimizer.zero_grad(self.optimizer, set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that changes nothing: backward exchanges nothing anyway."""
        return contextlib.nullcontext()

    def loaded(self) -> None:
        """Forgets what calls and buffers have kept of the values before."""
        self._calls.forget()
        self._buffers.remember()

    def wait(self) -> None:
        """Waits until the last round has ended."""
        self._gate.open()

    @torch.no_grad()
    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Gives this rank the mean of all models, and of all ranks' floating-point buffers."""
        with doing(NAMES[call]):
            self._gate.open()
        with self._calls.call(call) as (present, kept):
            if kept is None:
                self._take(self._means(present))
                self._buffers.average(self._group_of(present), EXACT)
            else:
                taken: tuple[list[torch.Tensor], torch.Tensor | None] = kept  # type: ignore[assignment]  # `_take_part`'s
                self._take(taken[0])
                self._buffers.become(taken[1])

    def _group_of(self, present: list[int]) -> Group:
        """Returns the ranks that take part in a call: those that are missing can average nothing."""
        everyone = len(present) == self.group.size
        return self._calls.group if everyone else self._rounds.channel(f"exact/{present}", present)

    def _means(self, present: list[int]) -> list[torch.Tensor]:
        for device in {bucket.device for bucket in self.buckets if bucket.on_gpu}:
            torch.cuda.synchronize(device)  # the step may be on another stream than this thread's
        means = [bucket.flat.detach().to("cpu", copy=True) for bucket in self.buckets]
        group = self._group_of(present)
        for values in means:
            collectives.all_reduce(group, values, Op.AVG, reliability=EXACT).wait()
        return means

    def _take(self, means: list[torch.Tensor]) -> None:
        for bucket, values in zip(self.buckets, means, strict=True):
            bucket.flat.copy_(values)

    def _take_part(self, _call: int, present: list[int]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Takes part in a call of other ranks. This rank keeps its own model."""
        means = self._means(present)
        return means, self._buffers.give(self._group_of(present), EXACT)

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Enters a context with the mean of all models as parameters. Afterwards each rank has its own again."""
        self.bring_home()
        self._gate.open()
        own = [bucket.flat.clone() for bucket in self.buckets]
        self.synchronise()
        try:
            yield
        finally:
            with torch.no_grad():
                self._take(own)
