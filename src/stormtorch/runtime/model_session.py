"""A session under a `RankPolicy` that sends parameters: ranks average their models after every few steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group, Op, Pending
from stormtorch.errors import Interrupted
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.calls import EXACT_MODEL, NAMES, Calls
from stormtorch.runtime.gate import Gate
from stormtorch.runtime.objects import complete
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
        if self.membership.newcomer:
            self.change()
        # Where the policy stands between two stages, nobody would begin the second one during forward.
        overlap = policy.overlap and self._averages.fused
        self._gate = Gate(
            model, self.buckets, lambda bucket: self._averages.finish(bucket), self._passed, overlap=overlap
        )
        # GradScaler skips a step by not calling it, and then the other ranks would wait for this rank's model. It calls
        # an optimizer that claims to unscale gradients itself in any case.
        self._unscales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer.__dict__["_step_supports_amp_scaling"] = True
        self._calls = Calls(
            self._rounds.meeting(),
            steps=lambda: self.steps,
            ready=self.at_rest,
            serve=lambda _call: self._take_part(),
            due=lambda: self.at_rest() and self.membership.due(),
            change=self.change,
        )

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
        if self.steps % self.policy.every == 0:
            self._begin_round()
        self.stepped()

    def _begin_round(self) -> None:
        self._row.step = self.steps - 1
        for bucket in reversed(self.buckets):
            bucket.bring_home()
            self.begin(bucket)
        self._digest = self._rounds.hyperparameters.digest(anywhere=True)
        self._telling = self.tell(self.steps, self._digest)
        self._gate.close()

    def _passed(self) -> None:
        """Completes a round: all parameters have arrived or are lost."""
        telling, self._telling = self._telling, None
        assert telling is not None
        row, waited_s = self._row, self._gate.waited_s
        here = self.complete(telling, row, self.steps, self._digest)
        self.complete_row(row, waited_s)
        if not here:
            self.change()
        self.sample(self.steps + 1)

    def _begin_view(self) -> None:
        super()._begin_view()
        if hasattr(self, "_calls"):
            self._calls.meeting = self._rounds.meeting()
            self._calls.forget()

    def steps_of_rounds(self) -> int:
        """Returns the number of steps at the last round, without one that is about to begin."""
        return (self.steps - self._open) // self.policy.every * self.policy.every

    def count_from(self, steps: int) -> None:
        """Counts steps as the others do, with those of the round that this rank is about to begin."""
        self.steps = steps + self._open * self.policy.every

    def at_rest(self) -> bool:
        """Whether no round is under way, and no view begins."""
        return self._gate.is_open and not self._entering

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
        while True:
            try:
                with self._calls.call(call) as kept:
                    if kept is None:
                        self._take(self._means())
                        self._buffers.average(self._calls.group)
                    else:
                        taken: tuple[list[torch.Tensor], torch.Tensor | None] = kept  # type: ignore[assignment]
                        self._take(taken[0])
                        self._buffers.become(taken[1])
                return
            except Interrupted:
                self.change()

    def _means(self) -> list[torch.Tensor]:
        for device in {bucket.device for bucket in self.buckets if bucket.on_gpu}:
            torch.cuda.synchronize(device)  # the step may be on another stream than this thread's
        means = [bucket.flat.detach().to("cpu", copy=True) for bucket in self.buckets]
        group = self._calls.group
        for values in means:
            complete(collectives.all_reduce(group, values, Op.AVG), group)
        return means

    def _take(self, means: list[torch.Tensor]) -> None:
        for bucket, values in zip(self.buckets, means, strict=True):
            bucket.flat.copy_(values)

    def _take_part(self) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Takes part in a call of other ranks. This rank keeps its own model."""
        means = self._means()
        return means, self._buffers.give(self._calls.group)

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
