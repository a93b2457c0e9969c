"""The two-stage protocol: gradients to their owners, parameters from them, nothing sent twice, drift bounded."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stormtorch import collectives, theory
from stormtorch.collectives import Group
from stormtorch.errors import PeerLeft, StormError
from stormtorch.policies import rules
from stormtorch.policies.guard import Guard
from stormtorch.policies.ledger import Row
from stormtorch.policies.policy import BoundedDrift
from stormtorch.reliability import EXACT, REPAIRED, Reliability
from stormtorch.runtime.broadcast import Broadcast
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.buffers import buffers_of
from stormtorch.runtime.calls import EXACT_MODEL, NAMES, OPTIMIZER_STATE, Calls
from stormtorch.runtime.drift_samples import Gauge
from stormtorch.runtime.gate import Gate
from stormtorch.runtime.gradients import Gradients
from stormtorch.runtime.handover import hand_over
from stormtorch.runtime.hyperparameters import Settings
from stormtorch.runtime.losses import Losses
from stormtorch.runtime.meeting import Meeting
from stormtorch.runtime.members import Epoch, Members
from stormtorch.runtime.norms import Norms
from stormtorch.runtime.reduction import Reduction
from stormtorch.runtime.reports import Report, Reports
from stormtorch.runtime.session import Training
from stormtorch.runtime.shards import Prepared, Shards, owns_whole
from stormtorch.staging.order import Order
from stormtorch.transport.exchange import Arrival
from stormtorch.transport.waiting import doing, is_elsewhere

_log = logging.getLogger("stormtorch")


class BoundedDriftTraining(Training):
    """A training under `BoundedDrift`; arguments as of `Training`, and the policy."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: BoundedDrift
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self.policy = policy
        whole = owns_whole(optimizer, policy.ownership)
        self.buckets = buckets = self.make_buckets(policy.bucket_mb, whole=whole)
        self._members = Members(group, name, policy.warn_every, policy.give_up_s)
        self._settings = Settings(optimizer, policy.settings)
        if not self._members.restarted:
            self.agree(buckets)
            if self._settings.compared:
                self._settings.agree(self.subgroup("begin"), range(group.size), "at prepare()")
        order = Order()
        # Where both stages are exact, a rank that is lost ends the job; otherwise it is done without.
        exact = policy.gradients.exact and policy.broadcast.exact
        self._certain = EXACT if exact else REPAIRED
        self._reduction = Reduction(self._channels("gradients"), policy, buckets, order)
        self._broadcast = Broadcast(self._channels("broadcast"), policy.wire, buckets, order)
        self._shards = Shards(optimizer, self.parameters, buckets, whole=whole)
        self._gauge = Gauge(buckets, group.size, group.rank, policy.drift_samples)
        self._gauge.choose(0)
        asked = [self._broadcast.chunks_of(owner) if policy.max_lag else 0 for owner in range(group.size)]
        self._reports = Reports(
            self._channel("reports"), self._certain, len(self.parameters), self._gauge.samples, asked
        )
        self._guard = Guard(policy.guard, policy.max_lag)
        self._guarded = False
        chunks = [self._broadcast.chunks_of(owner) for owner in range(group.size)]
        self._losses = Losses(policy, group.rank, chunks)
        self._lead = 0.0
        self._serve: list[torch.Tensor | None] = [None] * group.size
        self._fetch: list[torch.Tensor | None] = [None] * group.size
        self._buffers = buffers_of(model)
        self._row = Row(0)
        self._norms = Norms(
            self._channel("norms"), self._certain, buckets, len(self.parameters), lambda: self._gradients.complete()
        )
        self._gradients = Gradients(buckets, self._start, self._finish, self._norms)
        self._gradients.end = self.backward_ended
        self._gradients.wanted = self.wants_exchange
        self._gate = Gate(model, buckets, self._broadcast.receive, self._passed, overlap=policy.overlap)
        self.ledger.attend(group.rank, self.wait)
        self._entering = False
        self._exchanged = -1
        """The step whose gradients were last exchanged, or are now."""
        self._calls = Calls(
            self._meeting(),
            steps=lambda: self.steps,
            ready=lambda: self._shards.settled and not self._entering,
            # Between its exchange of gradients and its end, a step is what this rank waits for.
            going_on=lambda: self._exchanged == self.steps and not is_elsewhere(),
            serve=self._take_part,
        )
        self._last_broadcast_exact = True
        self._told = True  # of the last broadcast: a step with several backwards must not count it several times
        if self._members.restarted:
            self._return()

    def _channel(self, name: str, members: Sequence[int] | None = None) -> Group:
        all_ranks = self.subgroup(f"{self._members.epoch}/{name}")
        if members is None:
            return all_ranks
        return Group(all_ranks.transport, [all_ranks.ranks[each] for each in members], name=all_ranks.name)

    def _channels(self, name: str) -> list[Group]:
        """One per bucket, so that buckets may start in any order."""
        return [self._channel(f"{name}/{bucket.index}") for bucket in self.buckets]

    def _meeting(self) -> Meeting:
        wait_s = self.policy.collective_wait_s
        return Meeting(self._channel("calls"), self._channel("exact"), self._certain, wait_s)

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
        samples_S = self._gauge.read()
        used = self._gradients.used()
        used_P = torch.tensor([used.get(number, False) for number in range(len(self.parameters))], device="cpu")
        not_finite = not all(self._reduction.finite(bucket) for bucket in self.buckets)
        digest = self._settings.digest()
        everyone = range(self.group.size)
        telling = self._reports.begin(
            self.steps, [self._report_to(peer, samples_S, used_P, not_finite, digest) for peer in everyone]
        )
        self._reduction.finish()
        self._norms.forget()
        telling.wait()
        reports: dict[int, Report] = {}
        for peer in everyone:
            report = self._reports.read(peer)
            if report is not None and peer != self.group.rank:
                reports[peer] = report
        row.missing = self._members.hear(set(reports), self.steps, row.events)
        if self._members.cut_off:
            return False
        self._reduction.present = self.group.size - len(row.missing)
        self._compare_settings({digest, *(report.settings for report in reports.values())}, row)
        self._learn(reports, row, samples_S)
        for report in reports.values():
            used_P |= report.used_P
            not_finite |= report.not_finite
        self._give(used_P, not_finite)
        return True

    def _compare_settings(self, digests: set[int], row: Row) -> None:
        """Where optimizers are set otherwise, those that are here say how; all of them know of it."""
        if len(digests - {0}) > 1:
            here = [peer for peer in range(self.group.size) if peer not in row.missing]
            row.events += self._settings.agree(self._channel("settings", here), here, f"at step {self.steps}")

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
            self._gauge.update_variance,
            samples_S,
            used_P,
            wanted,
            settings,
        )

    def _learn(self, reports: dict[int, Report], row: Row, samples_S: torch.Tensor) -> None:
        """What the others have met of what this rank sent, and how far replicas are apart."""
        policy = self.policy
        resent = (0, 0) if self._told else self._broadcast.resent(row.missing)
        self._losses.hear(reports, guarded=self._guarded, resent=resent)
        self._reduction.losses = [each.value for each in self._losses.gradients]
        guarded = self._guard.alarm or any(report.alarm for report in reports.values())
        if guarded != self._guarded:
            row.events.append("guard: the broadcast is exact" if guarded else "guard: the broadcast may lose again")
        self._guarded = guarded
        for peer in range(self.group.size):
            heard = reports.get(peer)
            self._serve[peer] = heard.wanted_C if heard is not None and policy.max_lag else None
            if heard is None:
                self._fetch[peer] = None
        p = min(self._losses.broadcast.value, rules.MOST_LOSS)
        row.loss = p
        row.pair_drift, row.owner_drift = self._gauge.compare(
            samples_S, {peer: report.samples_S for peer, report in reports.items()}
        )
        variances = [self._gauge.update_variance, *(report.update_variance for report in reports.values())]
        variances = [each for each in variances if not math.isnan(each)]  # of ranks that own nothing
        if self.steps and self._gauge.samples and variances:
            row.update_variance = sum(variances) / len(variances)
            lost = 0.0 if self._last_broadcast_exact else self._losses.at_most
            row.pair_bound = self._gauge.bound(row.update_variance, lost, self._lead, policy.max_lag, again=self._told)
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
        exact = self._guarded or self.policy.broadcast.exact
        loss = self._losses.broadcast.value
        self._lead = 0.0 if exact else rules.lead_for(self.policy.lead, loss, self.policy.max_lag)
        if self._lead:
            for bucket in self.buckets:
                bucket.remember()
        self._gauge.choose(self.steps + 1)
        self._gauge.before_step()

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
        self._gauge.after_step()
        row.step, row.lead, row.guarded = self.steps, self._lead, self._guarded
        self.steps += 1
        self._buffers.remember()
        epoch = self._members.look(self.steps)
        if epoch is not None:
            row.events.append(str(epoch))  # now, as the row may be complete when the gate has closed
        self._gate.close()
        if epoch is not None:
            self._enter(epoch)

    def _reliability(self) -> Reliability:
        return REPAIRED if self._guarded and not self.policy.broadcast.exact else self.policy.broadcast

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
            lossy = self.policy.gradients.budget == 1.0
            first_pass = self._reduction.links.counts(row.missing) if lossy else self._broadcast.resent(row.missing)
        self._guard.watch(*first_pass, self._broadcast.oldest(row.missing))
        self.ledger.add(row)

    # --- those that return ------------------------------------------------------------------------------------------

    def _return(self) -> None:
        """Asks to be let in, and begins the epoch in which this rank is."""
        epoch = self._members.ask_in()
        self._row.events.append(str(epoch))
        self._enter(epoch)

    @torch.no_grad()
    def _enter(self, epoch: Epoch) -> None:
        """Begins an epoch together with those that return: all ranks are here."""
        self._entering = True
        self._gate.open()
        self._members.begin(epoch)
        self.steps = epoch.step
        self._gauge.choose(self.steps)
        self._reduction.groups = self._channels("gradients")
        self._broadcast.groups = self._channels("broadcast")
        self._reports.group, self._norms.group = self._channel("reports"), self._channel("norms")
        self._calls.meeting = self._meeting()
        self._calls.forget()
        self._last_broadcast_exact = True
        self._reduction.present = len(epoch.members)
        new = [peer for peer, restarted in epoch.joins.items() if restarted]
        if new:
            hand_over(self, self.buckets, epoch, new, self._certain)
            root, joining = epoch.members.index(epoch.root), self.group.rank in new
            # On a channel of its own: where a rank dies now, the others may have come to different points of it.
            self._settings.take(self._channel("settings/handed", epoch.members), root, new=joining)
        with self._calls.occupied():
            self._share()
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
        """Every rank that calls it gets the owners' parameters, and the mean of all ranks' floating-point buffers."""
        with doing(NAMES[call]):
            self._gate.open()
        try:
            with self._calls.call(call) as (present, kept):
                if kept is None:
                    self._share()
                else:
                    self._follow(kept)  # type: ignore[arg-type]  # of `_take_part`
        except PeerLeft as error:
            known = error.culprit is not None and error.culprit != self.group.transport.rank
            present = [peer for peer, rank in enumerate(self.group.ranks) if known and rank != error.culprit]
        missing = set(range(self.group.size)) - set(present) - {self.group.rank}
        if missing:
            self._tell_age(sorted(missing))

    def _tell_age(self, missing: list[int]) -> None:
        ages = [int(age.max()) for each in self._broadcast.ages for peer in missing if (age := each[peer]).numel()]
        _log.warning(
            "rank %d: rank %s takes no part any more: its shard of the parameters is as this rank last heard of it, at "
            "most %d steps before the last",
            *(self.group.rank, ", ".join(map(str, missing)), max(ages, default=0)),
        )

    def _share(self) -> None:
        group = self._calls.group
        for bucket in self.buckets:
            rooms = bucket.shards(bucket.host_flat)
            own = rooms[self.group.rank]
            if bucket.on_gpu:
                own.copy_(bucket.own)
            for arrival in collectives.all_gather(group, rooms, own, reliability=self._certain).wait():
                self._broadcast.refresh(bucket, group, arrival)
            if bucket.on_gpu:
                bucket.flat.copy_(bucket.host_flat)
        self._buffers.average(group, self._certain, self._members.lowest)

    def _take_part(self, call: int, present: list[int]) -> object:
        """Takes part in a call that others make. This rank may be in the middle of a step: nothing changes here."""
        group = self._calls.group
        if call == OPTIMIZER_STATE:
            self._need_all(present)
            return self._shards.gather(super(Prepared, self.optimizer).state_dict(), group)  # type: ignore[misc]
        shared: list[tuple[list[torch.Tensor], Arrival]] = []
        for bucket in self.buckets:
            if bucket.on_gpu:
                torch.cuda.synchronize(bucket.device)  # the step may be on another stream than this thread's
            own = bucket.own.to("cpu", copy=True)
            rooms = [own.new_empty(count) for _, count in bucket.layout.spans]
            rooms[self.group.rank] = own
            shared += [
                (rooms, arrival)
                for arrival in collectives.all_gather(group, rooms, own, reliability=self._certain).wait()
            ]
        return shared, self._buffers.give(group, self._certain, self._members.lowest)

    def _follow(self, kept: tuple[list[tuple[list[torch.Tensor], Arrival]], torch.Tensor | None]) -> None:
        """Takes what came of a call that this rank has taken part in."""
        shared, mean = kept
        group = self._calls.group
        for bucket, (rooms, arrival) in zip(self.buckets, shared, strict=True):
            for rank, (chunks, arrived) in arrival.links().items():
                if arrived == chunks:
                    owner = group.ranks.index(rank)
                    bucket.shard(bucket.host_flat, owner).copy_(rooms[owner])
            self._broadcast.refresh(bucket, group, arrival)
            if bucket.on_gpu:
                bucket.shard(bucket.host_flat, self.group.rank).copy_(bucket.own)
                bucket.flat.copy_(bucket.host_flat)
        self._buffers.become(mean)

    @torch.no_grad()
    def loaded(self) -> None:
        """Masters and stand-ins follow what was loaded."""
        self._gate.open()
        self._calls.forget()
        for bucket in self.buckets:
            bucket.adopt()
        self._buffers.remember()

    def optimizer_state(self, local: dict[str, Any]) -> dict[str, Any]:
        """The state dict of the whole optimizer, gathered from all owners."""
        with self._calls.call(OPTIMIZER_STATE) as (present, kept):
            self._need_all(present)
            if kept is None:
                return self._shards.gather(local, self._calls.group)
        # Settings are each rank's own, and a scheduler may have changed them since.
        whole: dict[str, Any] = kept  # type: ignore[assignment]  # of `_take_part`
        groups = zip(local["param_groups"], whole["param_groups"], strict=True)
        return {
            **whole,
            **{name: value for name, value in local.items() if name != "state"},
            "param_groups": [{**own, "params": each["params"]} for own, each in groups],
        }

    def _need_all(self, present: list[int]) -> None:
        """What a rank owns of the optimizer's state, nobody else has."""
        missing = sorted(set(range(self.group.size)) - set(present))
        if missing:
            raise StormError(
                f"rank {self.group.rank}: optimizer.state_dict() needs what rank {', '.join(map(str, missing))} "
                "owns of the optimizer's state, and it takes no part any more: save before ranks leave"
            )

    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a state dict of the whole optimizer."""
        self._calls.forget()
        local = self._shards.scatter(whole)
        for bucket in self.buckets:
            bucket.settle()
        return local
