"""A session under a `RankPolicy` that sends gradients: ranks average their gradients before each step."""

from __future__ import annotations

import contextlib
import time

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.policies.ledger import Row
from stormtorch.policies.policy import RankPolicy
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.calls import EXACT_MODEL
from stormtorch.runtime.gradients import GradientCollector
from stormtorch.runtime.members import Epoch
from stormtorch.runtime.replicated import ReplicatedSession

# Steps travel as two numbers below this, which a float32 can say.
_FLOAT_STEPS = 1 << 20


class GradientSession(ReplicatedSession):
    """A session whose ranks exchange gradients before each step, and each apply what they got.

    Args: See `Session`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: RankPolicy
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self._gradients = GradientCollector(self.buckets, self.begin, self._finish)
        self._gradients.end = self.backward_ended
        self._gradients.wanted = self.wants_exchange
        self._waited_s = 0.0
        self._number = 0
        """Exchanges so far, the same on all ranks: a rank may skip a step, but no exchange."""
        if self._rounds.members.restarted:
            self.come_back()

    def exchanged(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients of a bucket."""
        return bucket.grads, bucket.host_grads

    def _finish(self) -> None:
        began = time.perf_counter()
        # Keep events: an earlier backward of this step, or a return, may have left some.
        self._row = Row(self.steps, events=self._row.events)
        while not self._exchange(self._row):
            # This rank itself was cut off: it returns to the others, and sends the gradients that it has.
            self.come_back()
            for bucket in self.buckets:
                self.begin(bucket)
        self._number += 1
        epoch = self._rounds.members.look(self._number)
        if epoch is not None:
            self._row.events.append(str(epoch))
            self.enter(epoch)
        self._waited_s = time.perf_counter() - began

    def _exchange(self, row: Row) -> bool:
        digest = self._rounds.hyperparameters.digest()
        self.sample(self._number)
        telling = self.tell(self._number, digest)
        for bucket in self.buckets:
            self._averages.finish(bucket)
        return self.hear(telling, row, self._number, digest)

    def complete_gradients(self) -> None:
        """Ends the exchange of gradients, unless `no_sync` forbids it."""
        if self._gradients.syncing:
            self._gradients.complete()

    def before_step(self, *, closure: bool) -> None:
        """Waits for gradients, unless a closure will compute them."""
        if not closure:
            self._gradients.complete()

    def after_step(self) -> None:
        """Completes the row of the step: every rank has applied what it got."""
        row = self._row
        row.step = self.steps
        self.steps += 1
        self.note(row, self._waited_s)

    def enter(self, epoch: Epoch) -> None:
        """Begins an epoch. A rank that returns continues at the others' step."""
        self._number = epoch.step
        super().enter(epoch)
        # Ranks may have skipped steps, so that the number of exchanges does not tell how many they have made.
        steps = torch.tensor([self.steps // _FLOAT_STEPS, self.steps % _FLOAT_STEPS], dtype=torch.float32, device="cpu")
        group = self._rounds.channel("steps", epoch.members)
        root = epoch.members.index(epoch.root)
        collectives.broadcast(group, steps, root, reliability=self._rounds.certain).wait()
        if self.group.rank in epoch.joins:
            self.steps = int(steps[0]) * _FLOAT_STEPS + int(steps[1])

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients."""
        self._gradients.clear(set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context within which backward exchanges nothing."""
        return self._gradients.no_sync()

    def wait(self) -> None:
        """Returns immediately: parameters are never on their way."""

    def loaded(self) -> None:
        """Does nothing: parameters are views of the buckets."""

    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Does nothing: there is no common value, and every rank keeps its own."""
