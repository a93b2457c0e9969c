"""Data-parallel session of a `RankPolicy` that sends gradients: ranks average them before each step, as DDP does."""

from __future__ import annotations

import contextlib
import logging
import pickle
import time

import torch
from torch import nn

from stormtorch.collectives import Group
from stormtorch.collectives.base import objects
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.runtime.members.prepared_optimizer import trained
from stormtorch.runtime.members.served_collectives import EXACT_MODEL
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.gradient_collector import GradientCollector
from stormtorch.runtime.rank.replicated import ReplicatedSession
from stormtorch.telemetry.ledger import LedgerRow

_log = logging.getLogger("stormtorch")


class GradientSession(ReplicatedSession):
    """A session whose ranks exchange gradients before each step; each rank applies its own result.

    Args: See `Session`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: RankPolicy
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self._gradients = GradientCollector(self.buckets, self._start, self._finish)
        self._gradients.began, self._gradients.end = self.scaling.begins, self.backward_ended
        self._gradients.wanted = self.wants_exchange
        self._waited_s = 0.0
        self._exchanging = self._step_pending = False
        if self.membership.newcomer:
            self.change()

    def exchanged(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients of a bucket."""
        return bucket.grads, bucket.host_grads

    def _start(self, bucket: Bucket) -> None:
        self.scaling.fit(bucket)
        self.begin(bucket)

    def _finish(self) -> None:
        if self.skips_round():
            return
        began = time.perf_counter()
        # Keep events: an earlier backward of this step, or a rejoin, may have left some.
        self._row = LedgerRow(self.steps, events=self._row.events)
        self._exchanging = True
        try:
            while not self._exchange():
                # This rank was cut off. Once it has rejoined, it sends the gradients that it has.
                for bucket in self.buckets:
                    self._start(bucket)
                if self.skips_round():
                    break
        finally:
            self._exchanging = False
        self._step_pending = True
        self._waited_s = time.perf_counter() - began

    def _exchange(self) -> bool:
        # Counted by rounds, not by steps: a rank may skip a step, but no exchange.
        number, digest = self.membership.round, self._round_reports.hyperparameters.digest()
        self.sample(number)
        pending_reports = self.send_reports(number, digest)
        for bucket in self.buckets:
            self._averages.finish(bucket)
        return self.complete(pending_reports, self._row, number, digest)

    def complete_gradients(self) -> None:
        """Ends the exchange of gradients, unless `no_sync` forbids it."""
        if self._gradients.syncing:
            self._gradients.complete()

    def before_step(self, *, closure: bool) -> None:
        """Waits for gradients, unless a closure will compute them."""
        if not closure:
            self._gradients.complete()

    def after_step(self) -> None:
        """Completes the step's ledger row."""
        row = self._row
        self._step_pending = False
        row.step = self.steps
        self.steps += 1
        self.complete_row(row, self._waited_s)
        self.stepped()

    def make_missed_round(self) -> None:
        """Contributes zeros to a round in which others wait for this rank, which leaves and computes no more."""
        _log.warning(
            "rank %d: leaves after the other ranks have begun step %d, and contributes zeros to it",
            *(self.label(self.group.transport.rank), self.steps),
        )
        self._gradients.clear(True)
        for bucket in self.buckets:
            bucket.grads.zero_()
            self._start(bucket)
        self._finish()
        self._step_pending = False

    def is_between_steps(self) -> bool:
        """Whether no exchange is running and no view is being applied."""
        return not (self._exchanging or self._applying_view)

    @property
    def has_no_pending_step(self) -> bool:
        """Whether no averaged gradients wait for a step, so that this session can apply a view."""
        return not self._step_pending

    def can_apply_view(self) -> bool:
        """Whether this session can apply a view: a round that has begun must end in its own view."""
        return super().can_apply_view() and not self._open

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears all gradients."""
        self._gradients.clear(set_to_none)
        self._step_pending = False  # the program has skipped this step
        self.forget_personal(set_to_none=set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which backward exchanges nothing."""
        return self._gradients.no_sync()

    def wait(self) -> None:
        """Returns immediately, because parameters are never in flight."""

    def _broadcast_model(self, root: int, *, new: bool) -> None:
        """Broadcasts the root's model and optimizer state to joining ranks, which make the same steps from then on."""
        super()._broadcast_model(root, new=new)
        group = self.channel("optimizer", interruptible=True)
        whole = self.optimizer.state_dict()
        homes = {id(parameter) for bucket in self.buckets for parameter in bucket.parameters}
        ours = [number for number, parameter in enumerate(trained(self.optimizer)) if id(parameter) in homes]
        message = objects.pack({number: whole["state"][number] for number in ours if number in whole["state"]})
        message = self._broadcast_bytes(group, message, root)
        auxiliary_state = self._broadcast_bytes(group, self.auxiliary_state.reported(whole=True), root)
        if not new:
            return
        kept = {number: each for number, each in whole["state"].items() if number not in ours}
        try:
            state = objects.unpack(message)
        except pickle.UnpicklingError as error:
            _log.warning(
                "rank %d: differs from the other ranks from now on: the state of their %s cannot be sent: %s",
                *(self.label(group.transport.rank), type(self.optimizer).__name__, error),
            )
            return
        self.optimizer.load_state_dict(whole | {"state": kept | state})
        self.load_auxiliary_state(auxiliary_state)

    def _broadcast_bytes(self, group: Group, message: torch.Tensor, root: int) -> torch.Tensor:
        """Broadcasts the root's bytes to all ranks."""
        size = torch.tensor([message.numel()], device="cpu")
        self.broadcast_values(group, size, root)
        if group.rank != root:
            message = objects.room(int(size), group.ranks[root], group)
        if message.numel():
            self.broadcast_values(group, message, root)
        return message

    def loaded(self) -> None:
        """Does nothing, because parameters are views of the buckets."""

    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Does nothing, because there is no common value: every rank keeps its own."""
