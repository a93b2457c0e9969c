"""A session under an `OwnerPolicy`: gradients go to their owners, owners step, and parameters go to everyone."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import nn

from stormtorch.collectives import Group
from stormtorch.errors import PeerLeft
from stormtorch.policies.ledger import Row
from stormtorch.policies.policy import OwnerPolicy
from stormtorch.reliability import REPAIRED
from stormtorch.runtime.broadcast import Broadcast
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.buffers import buffers_of
from stormtorch.runtime.calls import EXACT_MODEL, NAMES, OPTIMIZER_STATE, Calls
from stormtorch.runtime.feedback import Feedback
from stormtorch.runtime.gate import Gate
from stormtorch.runtime.gradients import GradientCollector
from stormtorch.runtime.handover import hand_over
from stormtorch.runtime.members import Epoch
from stormtorch.runtime.norms import Norms
from stormtorch.runtime.owned import Owned
from stormtorch.runtime.reduction import Reduction
from stormtorch.runtime.rounds import Rounds
from stormtorch.runtime.session import Session
from stormtorch.runtime.shards import Shards, owns_whole
from stormtorch.staging.order import Order
from stormtorch.transport.waiting import doing, is_elsewhere


class ShardedSession(Session):
    """A session in which every rank runs the user's optimizer on the shard that it owns.

    Args: See `Session`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: OwnerPolicy
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self.policy = policy
        whole = owns_whole(optimizer, policy.ownership)
        self.buckets = buckets = self.make_buckets(policy.bucket_mb, whole=whole)
        self._rounds = rounds = Rounds(group, name, self.subgroup, optimizer, policy, buckets, len(self.parameters))
        if not rounds.members.restarted:
            self.agree(buckets)
            rounds.agree()
        order = Order()
        self._reduction = Reduction(rounds.channels("gradients"), policy, buckets, order)
        self._broadcast = Broadcast(rounds.channels("broadcast"), policy, buckets, order)
        self._shards = Shards(optimizer, self.parameters, buckets, whole=whole)
        chunks = [self._broadcast.chunks_of(owner) for owner in range(group.size)]
        rounds.open(chunks, chunks if policy.max_lag else [0] * group.size)
        self._feedback = Feedback(policy, rounds, self._reduction, self._broadcast, group.rank, group.size)
        self._lead = 0.0
        self._buffers = buffers_of(model)
        self._row = Row(0)
        self._norms = Norms(
            rounds.channel("norms"), rounds.certain, buckets, len(self.parameters), lambda: self._gradients.complete()
        )
        self._gradients = GradientCollector(buckets, self._start, self._finish, self._norms)
        self._gradients.end = self.backward_ended
        self._gradients.wanted = self.wants_exchange
        self._gate = Gate(model, buckets, self._broadcast.receive, self._passed, overlap=policy.overlap)
        self.ledger.attend(group.rank, self.wait)
        self._entering = False
        self._exchanged = -1
        """Number of the step whose gradients were last exchanged, or are exchanged now."""
        self._owned = Owned(group, optimizer, buckets, self._shards, self._broadcast, self._buffers, rounds)
        self._calls = Calls(
            rounds.meeting(),
            steps=lambda: self.steps,
            ready=lambda: self._shards.settled and not self._entering,
            # From its exchange of gradients to its end, this rank waits for others within the step.
            going_on=lambda: self._exchanged == self.steps and not is_elsewhere(),
            serve=lambda call, present: self._owned.take_part(call, present, self._calls.group),
        )
        if rounds.members.restarted:
            self._return()

    # --- stage 1 ----------------------------------------------------------------------------------------------------

    def _start(self, bucket: Bucket) -> None:
        if self._gradients.came(bucket):
            self._gate.used(bucket.index)
        self._gate.open([bucket.index])  # no module may have waited for these parameters
        self._reduction.start(bucket)

    def _finish(self) -> None:
        self._gate.open()
        began = time.perf_counter()
        # Keep events: an earlier backward of this step, or a return, may have left some.
        self._row = Row(self.steps, events=self._row.events)
        while not self._exchange(self._row):
            # This rank itself was cut off: it returns to the others, and sends the gradients that it has.
            self._return()
            for bucket in self.buckets:
                self._reduction.start(bucket)
        self._row.gradient_wait_s = time.perf_counter() - began

    def _exchange(self, row: Row) -> bool:
        """Ends the exchange of gradients and reports. Returns False if this rank is cut off from the others."""
        self._exchanged = self.steps
        rounds = self._rounds
        samples_S = rounds.drift.read()
        used = self._gradients.used()
        used_P = torch.tensor([used.get(number, False) for number in range(len(self.parameters))], device="cpu")
        not_finite = not all(self._reduction.finite(bucket) for bucket in self.buckets)
        digest = rounds.hyperparameters.digest()
        feedback = self._feedback
        telling = rounds.tell(self.steps, lambda peer: feedback.report_to(peer, samples_S, used_P, not_finite, digest))
        self._reduction.finish()
        self._norms.forget()
        reports = rounds.hear(telling, row, self.steps, digest)
        if reports is None:
            return False
        self._reduction.present = self.group.size - len(row.missing)
        feedback.learn(reports, row, samples_S, self._lead, self.steps)
        row.gradients = self._reduction.links.fractions()
        row.effective_batch = self._reduction.effective_batch
        row.variance_inflation = self._reduction.variance_inflation
        for report in reports.values():
            used_P |= report.used_P
            not_finite |= report.not_finite
        self._give(used_P, not_finite)
        return True

    def _give(self, used_P: torch.Tensor, not_finite: bool) -> None:
        """Gives gradients to the optimizer, and to parameters that only other ranks have used."""
        # If one rank's gradients are not finite, every rank must see that, so that GradScaler skips the step on all.
        self._shards.give_gradients(used_P.tolist(), finite=not not_finite)
        self._gradients.show(used_P.tolist())

    # --- the step, and stage 2 --------------------------------------------------------------------------------------

    def complete_gradients(self) -> None:
        """Ends the exchange of gradients, unless `no_sync` forbids it."""
        if self._gradients.syncing:
            self._gradients.complete()

    def before_step(self, *, closure: bool) -> None:
        """Waits for gradients, unless a closure will compute them."""
        if not closure:
            self._gradients.complete()
        self._gate.open()
        self._calls.forget()
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.follow()
        self._shards.begin_step()
        exact = self._feedback.guarded or self.policy.down.exact
        loss = self._rounds.losses.broadcast.value
        self._lead = 0.0 if exact else self.policy.ahead(loss)
        if self._broadcast.looks_back(self._lead):
            for bucket in self.buckets:
                bucket.remember()
        self._rounds.drift.choose(self.steps + 1)
        self._rounds.drift.before_step()

    @torch.no_grad()
    def after_step(self) -> None:
        """Begins the broadcast, with the buckets first that forward needs first."""
        self._shards.end_step()
        row, broadcast, guarded = self._row, self._broadcast, self._feedback.guarded
        reliability = REPAIRED if guarded and not self.policy.down.exact else self.policy.down
        self._feedback.broadcast_begins(exact=guarded or reliability.exact)
        broadcast.clear()
        serve, fetch = self._feedback.requests()
        for bucket in reversed(self.buckets):
            broadcast.send(
                bucket,
                self._lead,
                reliability,
                self.steps * self.group.size + self.group.rank,
                [None if each is None else each[bucket.index] for each in serve],
                [None if each is None else each[bucket.index] for each in fetch],
            )
        self._rounds.drift.after_step()
        row.step, row.lead, row.guarded = self.steps, self._lead, guarded
        self.steps += 1
        self._buffers.remember()
        epoch = self._rounds.members.look(self.steps)
        if epoch is not None:
            row.events.append(str(epoch))  # before the gate closes, which may complete the row
        self._gate.close()
        if epoch is not None:
            self._enter(epoch)

    def _passed(self) -> None:
        """Completes the row of a step: all its parameters have arrived or are lost."""
        row, self._row = self._row, Row(self.steps)
        row.broadcast = self._broadcast.links.fractions()
        row.broadcast_wait_s = self._gate.waited_s
        row.bytes_sent = self.bytes_sent()
        row.lag = self._broadcast.lag()
        row.fetched = self._broadcast.fetched
        self._feedback.watch(row)
        self.ledger.add(row)

    # --- ranks that return ------------------------------------------------------------------------------------------

    def _return(self) -> None:
        """Asks to be let in, and begins the first epoch that includes this rank."""
        epoch = self._rounds.members.ask_in()
        self._row.events.append(str(epoch))
        self._enter(epoch)

    @torch.no_grad()
    def _enter(self, epoch: Epoch) -> None:
        """Begins an epoch together with the ranks that return. All ranks are at this point."""
        self._entering = True
        self._gate.open()
        rounds = self._rounds
        rounds.enter(epoch)
        self.steps = epoch.step
        rounds.drift.choose(self.steps)
        self._reduction.groups = rounds.channels("gradients")
        self._broadcast.groups = rounds.channels("broadcast")
        self._norms.group = rounds.channel("norms")
        self._calls.meeting = rounds.meeting()
        self._calls.forget()
        self._feedback.epoch_begins()
        self._reduction.present = len(epoch.members)
        new = [peer for peer, restarted in epoch.joins.items() if restarted]
        if new:
            hand_over(self, self.buckets, epoch, new, rounds.certain)
            rounds.hand_settings(epoch, new)
        with self._calls.occupied():
            self._owned.share(self._calls.group)
        self._entering = False

    # --- for the user -----------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients."""
        self._gradients.clear(set_to_none)
        self._shards.clear_gradients()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context within which backward exchanges nothing."""
        return self._gradients.no_sync()

    def arriving(self) -> bool:
        """Whether parameters are on their way."""
        return not self._gate.is_open

    def wait(self) -> None:
        """Waits until the parameters of the last step have arrived or are lost."""
        self._gate.open()

    @torch.no_grad()
    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Gives this rank the owners' parameters and the mean of all ranks' floating-point buffers."""
        with doing(NAMES[call]):
            self._gate.open()
        try:
            with self._calls.call(call) as (present, kept):
                if kept is None:
                    self._owned.share(self._calls.group)
                else:
                    self._owned.follow(kept, self._calls.group)
        except PeerLeft as error:
            known = error.culprit is not None and error.culprit != self.group.transport.rank
            present = [peer for peer, rank in enumerate(self.group.ranks) if known and rank != error.culprit]
        missing = set(range(self.group.size)) - set(present) - {self.group.rank}
        if missing:
            self._owned.tell_age(sorted(missing))

    @torch.no_grad()
    def loaded(self) -> None:
        """Copies loaded parameters to the float32 values that the optimizer works on."""
        self._gate.open()
        self._calls.forget()
        for bucket in self.buckets:
            bucket.adopt()
        self._buffers.remember()

    def optimizer_state(self, local: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dict of the whole optimizer, gathered from all owners."""
        with self._calls.call(OPTIMIZER_STATE) as (present, kept):
            return self._owned.optimizer_state(local, present, kept, self._calls.group)

    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a state dict of the whole optimizer."""
        self._calls.forget()
        local = self._shards.scatter(whole)
        for bucket in self.buckets:
            bucket.settle()
        return local
