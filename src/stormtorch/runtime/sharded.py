"""A session under an `OwnerPolicy`: gradients to their owners, who step, and parameters from them to everyone."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import torch
from torch import nn

from stormtorch import theory
from stormtorch.collectives import Group
from stormtorch.errors import PeerLeft
from stormtorch.policies import rules
from stormtorch.policies.guard import Guard
from stormtorch.policies.ledger import Row
from stormtorch.policies.policy import OwnerPolicy
from stormtorch.reliability import REPAIRED, Reliability
from stormtorch.runtime.broadcast import Broadcast
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.buffers import buffers_of
from stormtorch.runtime.calls import EXACT_MODEL, NAMES, OPTIMIZER_STATE, Calls
from stormtorch.runtime.gate import Gate
from stormtorch.runtime.gradients import Gradients
from stormtorch.runtime.handover import hand_over
from stormtorch.runtime.members import Epoch
from stormtorch.runtime.norms import Norms
from stormtorch.runtime.owned import Owned
from stormtorch.runtime.reduction import Reduction
from stormtorch.runtime.reports import Report
from stormtorch.runtime.rounds import Rounds
from stormtorch.runtime.session import Session
from stormtorch.runtime.shards import Shards, owns_whole
from stormtorch.staging.order import Order
from stormtorch.transport.waiting import doing, is_elsewhere


class ShardedSession(Session):
    """A session whose owners run the user's optimizer, each on its own shard; arguments as of `Session`."""

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
        self._guard = Guard(policy.guard, policy.max_lag)
        self._guarded = False
        self._lead = 0.0
        self._serve: list[torch.Tensor | None] = [None] * group.size
        self._fetch: list[torch.Tensor | None] = [None] * group.size
        self._buffers = buffers_of(model)
        self._row = Row(0)
        self._norms = Norms(
            rounds.channel("norms"), rounds.certain, buckets, len(self.parameters), lambda: self._gradients.complete()
        )
        self._gradients = Gradients(buckets, self._start, self._finish, self._norms)
        self._gradients.end = self.backward_ended
        self._gradients.wanted = self.wants_exchange
        self._gate = Gate(model, buckets, self._broadcast.receive, self._passed, overlap=policy.overlap)
        self.ledger.attend(group.rank, self.wait)
        self._entering = False
        self._exchanged = -1
        """The step whose gradients were last exchanged, or are now."""
        self._owned = Owned(group, optimizer, buckets, self._shards, self._broadcast, self._buffers, rounds)
        self._calls = Calls(
            rounds.meeting(),
            steps=lambda: self.steps,
            ready=lambda: self._shards.settled and not self._entering,
            # Between its exchange of gradients and its end, a step is what this rank waits for.
            going_on=lambda: self._exchanged == self.steps and not is_elsewhere(),
            serve=lambda call, present: self._owned.take_part(call, present, self._calls.group),
        )
        self._last_broadcast_exact = True
        # The last broadcast was reported: a step with several backwards must not count it several times.
        self._told = True
        if rounds.members.restarted:
            self._return()

    # --- stage 1 ----------------------------------------------------------------------------------------------------

    def _start(self, bucket: Bucket) -> None:
        if self._gradients.came(bucket):
            self._gate.used(bucket.index)
        self._gate.open([bucket.index])  # of parameters that no module has waited for
        self._reduction.start(bucket)

    def _finish(self) -> None:
        self._gate.open()
        began = time.perf_counter()
        self._row = Row(self.steps, events=self._row.events)  # of an earlier backward of this step, or a return
        while not self._exchange(self._row):
            # What is lost is this rank itself: it comes in again, and gives the gradients that it has.
            self._return()
            for bucket in self.buckets:
                self._reduction.start(bucket)
        self._row.gradient_wait_s = time.perf_counter() - began

    def _exchange(self, row: Row) -> bool:
        """Ends the exchange of gradients and reports; false if this rank is cut off from the others."""
        self._exchanged = self.steps
        rounds = self._rounds
        samples_S = rounds.gauge.read()
        used = self._gradients.used()
        used_P = torch.tensor([used.get(number, False) for number in range(len(self.parameters))], device="cpu")
        not_finite = not all(self._reduction.finite(bucket) for bucket in self.buckets)
        digest = rounds.settings.digest()
        telling = rounds.tell(self.steps, lambda peer: self._report_to(peer, samples_S, used_P, not_finite, digest))
        self._reduction.finish()
        self._norms.forget()
        reports = rounds.hear(telling, row, self.steps, digest)
        if reports is None:
            return False
        self._reduction.present = self.group.size - len(row.missing)
        self._learn(reports, row, samples_S)
        for report in reports.values():
            used_P |= report.used_P
            not_finite |= report.not_finite
        self._give(used_P, not_finite)
        return True

    def _report_to(
        self, peer: int, samples_S: torch.Tensor, used_P: torch.Tensor, not_finite: bool, settings: int
    ) -> Report:
        nothing = self._last_broadcast_exact or self._told
        of_broadcast = None if nothing else self._broadcast.links.fraction(peer)
        of_gradients = self._reduction.links.fraction(peer)
        most = self.policy.max_lag
        wanted = torch.empty(0, dtype=torch.bool) if most is None else self._broadcast.too_old(peer, most)
        self._fetch[peer] = wanted if most is not None and peer != self.group.rank else None
        return Report(
            not_finite,
            self._guard.alarm,
            -1.0 if of_broadcast is None else 1.0 - of_broadcast,
            -1.0 if of_gradients is None else 1.0 - of_gradients,
            self._rounds.gauge.update_variance,
            samples_S,
            used_P,
            wanted,
            settings,
        )

    def _learn(self, reports: dict[int, Report], row: Row, samples_S: torch.Tensor) -> None:
        """What the others have met of what this rank sent, and how far replicas are apart."""
        policy = self.policy
        resent = (0, 0) if self._told else self._broadcast.resent(row.missing)
        self._rounds.losses.hear(reports, guarded=self._guarded, resent=resent)
        self._reduction.losses = [each.value for each in self._rounds.losses.gradients]
        guarded = self._guard.alarm or any(report.alarm for report in reports.values())
        if guarded != self._guarded:
            row.events.append("guard: the broadcast is exact" if guarded else "guard: the broadcast may lose again")
        self._guarded = guarded
        for peer in range(self.group.size):
            heard = reports.get(peer)
            self._serve[peer] = heard.wanted_C if heard is not None and policy.max_lag else None
            if heard is None:
                self._fetch[peer] = None
        p = min(self._rounds.losses.broadcast.value, rules.MOST_LOSS)
        row.loss = p
        row.pair_drift, row.owner_drift = self._rounds.gauge.compare(
            samples_S, {peer: report.samples_S for peer, report in reports.items()}
        )
        variances = [self._rounds.gauge.update_variance, *(report.update_variance for report in reports.values())]
        variances = [each for each in variances if not math.isnan(each)]  # of ranks that own nothing
        if self.steps and self._rounds.gauge.samples and variances:
            row.update_variance = sum(variances) / len(variances)
            lost = 0.0 if self._last_broadcast_exact else self._rounds.losses.at_most
            row.pair_bound = self._rounds.gauge.bound(
                row.update_variance, lost, self._lead, policy.max_lag, again=self._told
            )
            row.published_bound = theory.pair_drift_published(lost) * row.update_variance
        self._told = True
        row.gradients = self._reduction.links.fractions()
        row.effective_batch = self._reduction.effective_batch
        row.variance_inflation = self._reduction.variance_inflation

    def _give(self, used_P: torch.Tensor, not_finite: bool) -> None:
        """Gradients to the optimizer, and to the parameters that only other ranks have used."""
        # What is not finite anywhere must be found by every rank, so that all skip the step, as GradScaler does.
        self._shards.give_gradients(used_P.tolist(), finite=not not_finite)
        self._gradients.show(used_P.tolist())

    # --- the step, and stage 2 --------------------------------------------------------------------------------------

    def complete_gradients(self) -> None:
        """Ends the exchange of gradients, unless `no_sync` forbids it."""
        if self._gradients.syncing:
            self._gradients.complete()

    def before_step(self, *, closure: bool) -> None:
        """Gradients are waited for, unless a closure will make them."""
        if not closure:
            self._gradients.complete()
        self._gate.open()
        self._calls.forget()
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.follow()
        self._shards.begin_step()
        exact = self._guarded or self.policy.down.exact
        loss = self._rounds.losses.broadcast.value
        self._lead = 0.0 if exact else self.policy.ahead(loss)
        if self._broadcast.looks_back(self._lead):
            for bucket in self.buckets:
                bucket.remember()
        self._rounds.gauge.choose(self.steps + 1)
        self._rounds.gauge.before_step()

    @torch.no_grad()
    def after_step(self) -> None:
        """Parameters go out, those that forward needs first at the head."""
        self._shards.end_step()
        row, broadcast = self._row, self._broadcast
        reliability = self._reliability()
        self._last_broadcast_exact, self._told = self._guarded or reliability.exact, False
        broadcast.clear()
        serve = [None if each is None else broadcast.split(each, self.group.rank) for each in self._serve]
        fetch = [None if each is None else broadcast.split(each, owner) for owner, each in enumerate(self._fetch)]
        for bucket in reversed(self.buckets):
            broadcast.send(
                bucket,
                self._lead,
                reliability,
                self.steps * self.group.size + self.group.rank,
                [None if each is None else each[bucket.index] for each in serve],
                [None if each is None else each[bucket.index] for each in fetch],
            )
        self._serve = [None] * self.group.size
        self._fetch = [None] * self.group.size
        self._rounds.gauge.after_step()
        row.step, row.lead, row.guarded = self.steps, self._lead, self._guarded
        self.steps += 1
        self._buffers.remember()
        epoch = self._rounds.members.look(self.steps)
        if epoch is not None:
            row.events.append(str(epoch))  # now, as the row may be complete when the gate has closed
        self._gate.close()
        if epoch is not None:
            self._enter(epoch)

    def _reliability(self) -> Reliability:
        return REPAIRED if self._guarded and not self.policy.down.exact else self.policy.down

    def _passed(self) -> None:
        """All parameters of a step have arrived, or are lost: its row is complete."""
        row, self._row = self._row, Row(self.steps)
        row.broadcast = self._broadcast.links.fractions()
        row.broadcast_wait_s = self._gate.waited_s
        row.bytes_sent = self.bytes_sent()
        row.lag = self._broadcast.lag()
        row.fetched = self._broadcast.fetched
        # No guard can bring back what a rank that is not there would send.
        first_pass = self._broadcast.links.counts(row.missing)
        if row.guarded:  # and exact: then gradients tell, unless they are repaired, too
            lossy = self.policy.up.budget == 1.0
            first_pass = self._reduction.links.counts(row.missing) if lossy else self._broadcast.resent(row.missing)
        self._guard.watch(*first_pass, self._broadcast.oldest(row.missing))
        self.ledger.add(row)

    # --- those that return ------------------------------------------------------------------------------------------

    def _return(self) -> None:
        """Asks to be let in, and begins the epoch in which this rank is."""
        epoch = self._rounds.members.ask_in()
        self._row.events.append(str(epoch))
        self._enter(epoch)

    @torch.no_grad()
    def _enter(self, epoch: Epoch) -> None:
        """Begins an epoch together with those that return: all ranks are here."""
        self._entering = True
        self._gate.open()
        rounds = self._rounds
        rounds.enter(epoch)
        self.steps = epoch.step
        rounds.gauge.choose(self.steps)
        self._reduction.groups = rounds.channels("gradients")
        self._broadcast.groups = rounds.channels("broadcast")
        self._norms.group = rounds.channel("norms")
        self._calls.meeting = rounds.meeting()
        self._calls.forget()
        self._last_broadcast_exact = True
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
        """Within it, backward exchanges nothing."""
        return self._gradients.no_sync()

    def arriving(self) -> bool:
        """Whether parameters are on their way."""
        return not self._gate.is_open

    def wait(self) -> None:
        """Returns when the parameters of the last step are here, or lost."""
        self._gate.open()

    @torch.no_grad()
    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Gives every rank that calls it the owners' parameters, and the mean of all ranks' floating-point buffers."""
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
        """Makes masters and stand-ins follow what was loaded."""
        self._gate.open()
        self._calls.forget()
        for bucket in self.buckets:
            bucket.adopt()
        self._buffers.remember()

    def optimizer_state(self, local: dict[str, Any]) -> dict[str, Any]:
        """The state dict of the whole optimizer, gathered from all owners."""
        with self._calls.call(OPTIMIZER_STATE) as (present, kept):
            return self._owned.optimizer_state(local, present, kept, self._calls.group)

    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a state dict of the whole optimizer."""
        self._calls.forget()
        local = self._shards.scatter(whole)
        for bucket in self.buckets:
            bucket.settle()
        return local
