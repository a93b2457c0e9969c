"""Local SGD session (`DiLoCo`, `ModelAveraging`): ranks average their models after every few steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group, Op, Pending
from stormtorch.collectives.base.objects import complete
from stormtorch.errors import Interrupted
from stormtorch.exchange.waiting import in_call
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.runtime.members.served_collectives import EXACT_MODEL, NAMES, ServedCollectives
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.rank.replicated import ReplicatedSession
from stormtorch.runtime.session.parameter_barrier import ParameterBarrier


class ModelSession(ReplicatedSession):
    """A session whose ranks exchange parameters after every few steps.

    Args: See `Session`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: RankPolicy
    ) -> None:
        self._pending_reports: Pending | None = None
        self._round_ends_at = self._fragment_index = self._round_began_at = 0
        super().__init__(model, optimizer, group, name, policy)
        for bucket in self.buckets:
            bucket.release_gradients()
        self._fragments = fragments_of(self.buckets, policy.fragments)
        self._made = [0] * len(self._fragments)
        self._digest = 0
        if self.membership.newcomer:
            self.change()
        # Overlap with forward needs one fused exchange: with two stages, no rank would start the second one.
        overlap = policy.overlap and self._averages.fused
        self._parameter_barrier = ParameterBarrier(
            model, self.buckets, lambda bucket: self._averages.finish(bucket), self._on_round_complete, overlap=overlap
        )
        # GradScaler skips a step by not calling it, and the other ranks would wait for this rank's model. It always
        # calls an optimizer that claims to unscale gradients itself.
        self._unscales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer.__dict__["_step_supports_amp_scaling"] = True
        self._calls = ServedCollectives(
            self._round_reports.barrier(),
            # Ranks of different speeds have made different numbers of steps, but the same number of rounds.
            steps=lambda: self.steps if policy.pace == "together" else self.steps_of_rounds(),
            ready=self.is_between_steps,
            serve=lambda _call: self._take_part(),
            due=lambda: self.iterations.due(self),
            change=lambda: self.iterations.change(self),
        )

    def exchanged(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the parameters of a bucket."""
        return bucket.flat, bucket.host_flat

    def complete_gradients(self) -> None:
        """Does nothing, because gradients are not exchanged."""

    def before_step(self, *, closure: bool) -> None:
        """Waits for parameters in flight, because the optimizer is about to change them."""
        self._parameter_barrier.open()
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
        """Ends a round whose delay is over, and begins the next if it is due."""
        self.steps += 1
        self._made = [steps + 1 for steps in self._made]
        self._buffers.remember()
        if self._pending_reports is not None and self.steps >= self._round_ends_at:
            self._end_round()
        if self._pending_reports is None and self._due():
            self._begin_round()
        self.stepped()

    def _due(self) -> bool:
        """Whether a round begins after this step."""
        policy, number = self.policy, self.round_number
        if policy.pace == "together":
            return self.steps >= policy.begins_at(number)
        before = policy.begins_at(number - 1) if number else 0
        return self._since_round() >= policy.begins_at(number) - before or bool(self._round_reports.peers_waiting())

    def _since_round(self) -> int:
        return self.steps - self._round_began_at

    def made(self) -> int:
        """Returns the steps since this rank last took part in an exchange of the current fragment."""
        return self._made[self._fragment_index]

    def _begin_round(self) -> None:
        self._fragment_index = self.round_number % len(self._fragments)
        self.round_number += 1
        self._round_began_at = self.steps
        self._row.step = self.steps - 1
        fragment = self._fragments[self._fragment_index]
        for bucket in reversed(fragment):
            bucket.reattach_parameters()
            self.begin(bucket)
        if self.skips_round():
            return
        if self._participation.takes:
            self._made[self._fragment_index] = 0
        self._digest = self._round_reports.hyperparameters.digest(anywhere=True)
        self._pending_reports = self.send_reports(self._nominal(), self._digest)
        self._round_ends_at = self.steps + self.policy.delay
        if not self.policy.delay:
            self._end_round()

    def _nominal(self) -> int:
        """Returns the scheduled step of the current round, the same on all ranks."""
        return self.policy.begins_at(self.round_number - 1) if self.round_number else 0

    def _end_round(self) -> None:
        """Ends the current round with the parameters that arrived."""
        self._parameter_barrier.close(self._fragments[self._fragment_index])

    def _on_round_complete(self) -> None:
        """Completes a round, once all parameters have arrived or are lost."""
        pending_reports, self._pending_reports = self._pending_reports, None
        assert pending_reports is not None
        row, waited_s = self._row, self._parameter_barrier.waited_s
        here = self.complete(pending_reports, row, self._nominal(), self._digest)
        self.complete_row(row, waited_s)
        if not here and not self.iterations.misses_iteration(self):
            self.iterations.change(self)
        self.sample(self._nominal() + 1)

    def _begin_view(self) -> None:
        super()._begin_view()
        if hasattr(self, "_calls"):
            self._calls.barrier = self._round_reports.barrier()
            self._calls.forget()

    def make_missed_round(self) -> None:
        """Contributes this rank's current model, perhaps after fewer steps, to a round in which others wait for it."""
        self._begin_round()
        self.wait()

    def steps_of_rounds(self) -> int:
        """Returns the number of steps at the last round, without one that is about to begin."""
        number = self.round_number - self._open
        return self.policy.begins_at(number - 1) if number else 0

    def count_from(self, steps: int) -> None:
        """Sets the step and round counts to those of the other ranks, including the round that is about to begin."""
        number = 0
        while self.policy.begins_at(number) <= steps:
            number += 1
        self.round_number = number + self._open
        self.steps = self._nominal()
        self._round_began_at = self.steps
        self._made = [0] * len(self._made)

    def is_between_steps(self) -> bool:
        """Whether no round is running and no view is being applied."""
        return self._parameter_barrier.is_open and self._pending_reports is None and not self._applying_view

    def switch(self) -> None:
        """Applies the latest view where another session's round is about to begin, after ending a running round."""
        self.wait()
        if self.membership.due():
            self.change()

    # --- for the user ------------------------------------------------------------------------------------------------

    def arriving(self) -> bool:
        """Whether parameters are in flight."""
        return not self._parameter_barrier.is_open

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears all gradients."""
        torch.optim.Optimizer.zero_grad(self.optimizer, set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that changes nothing, because backward exchanges nothing."""
        return contextlib.nullcontext()

    def loaded(self) -> None:
        """Resets what served calls, buffers and the policy have stored of the previous values."""
        self._calls.forget()
        self._memories.reset()
        self._buffers.remember()

    def wait(self) -> None:
        """Waits until the last round has ended, even if its delay is not over."""
        self._parameter_barrier.open()
        if self._pending_reports is not None:
            self._end_round()

    @torch.no_grad()
    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Gives this rank the mean of all models, and of all ranks' floating-point buffers."""
        with in_call(NAMES[call]):
            self.wait()
        while True:
            try:
                with self._calls.call(call) as kept:
                    if kept is None:
                        self._take(self._means())
                        self._buffers.average(self._calls.group)
                    else:
                        taken: tuple[list[torch.Tensor], torch.Tensor | None] = kept  # type: ignore[assignment]
                        self._take(taken[0])
                        self._buffers.set_mean(taken[1])
                return
            except Interrupted:
                self.iterations.change(self)

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
        """Serves a call of other ranks. This rank keeps its own model."""
        means = self._means()
        return means, self._buffers.contribute(self._calls.group)

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Enters a context with the mean of all models as parameters. Afterwards each rank gets its own back."""
        self.reattach_parameters()
        self.wait()
        own = [bucket.flat.clone() for bucket in self.buckets]
        self.synchronise()
        try:
            yield
        finally:
            with torch.no_grad():
                self._take(own)


def fragments_of(buckets: Sequence[Bucket], count: int) -> list[list[Bucket]]:
    """Divides buckets into fragments of about the same size, fewer than asked for if there are fewer buckets."""
    elements = sum(bucket.layout.elements for bucket in buckets)
    found: dict[int, list[Bucket]] = {}
    before = 0
    for bucket in buckets:
        middle = before + bucket.layout.elements / 2
        found.setdefault(int(middle * count / elements), []).append(bucket)
        before += bucket.layout.elements
    return [found[place] for place in sorted(found)]
