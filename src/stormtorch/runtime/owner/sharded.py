"""The sharded session under an `OwnerPolicy`, as in ZeRO: reduce-scatter of gradients, owners step, all-gather."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from stormtorch.collectives import Group
from stormtorch.collectives.base import objects
from stormtorch.collectives.base.group import NodeLayout
from stormtorch.collectives.hierarchy import is_worthwhile
from stormtorch.errors import Interrupted, StormError
from stormtorch.exchange.reliability import REPAIRED
from stormtorch.exchange.waiting import BACKWARD, in_call, is_elsewhere
from stormtorch.policies.policy import OwnerPolicy, overrides
from stormtorch.runtime.handover.moves import Partition
from stormtorch.runtime.handover.reports import NO_SHARD, Report, ShardReport
from stormtorch.runtime.handover.standby import Resync, Standby, can_follow
from stormtorch.runtime.handover.transition import Handshake, MoveResult, RetainedShards, exchange_handshakes, move
from stormtorch.runtime.members.barrier import Barrier
from stormtorch.runtime.members.prepared_optimizer import plain_state, settings
from stormtorch.runtime.members.served_collectives import EXACT_MODEL, NAMES, OPTIMIZER_STATE, ServedCollectives
from stormtorch.runtime.memory import fingerprints
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.gradient_collector import GradientCollector
from stormtorch.runtime.memory.gradient_norms import GradientNorms
from stormtorch.runtime.memory.shard_state import ShardState
from stormtorch.runtime.memory.sharded_optimizer import ShardedOptimizer, owns_whole
from stormtorch.runtime.owner.feedback import Feedback
from stormtorch.runtime.owner.full_state import FullStateGather
from stormtorch.runtime.owner.gradient_reduction import GradientReduction
from stormtorch.runtime.owner.parameter_broadcast import ParameterBroadcast
from stormtorch.runtime.owner.partitioner import Partitioner
from stormtorch.runtime.owner.redundancy_control import RedundancyControl
from stormtorch.runtime.owner.separable import check_separable
from stormtorch.runtime.session.buffers import buffers_of
from stormtorch.runtime.session.parameter_barrier import ParameterBarrier
from stormtorch.runtime.session.relays import Relays
from stormtorch.runtime.session.round_reports import RoundReports
from stormtorch.runtime.session.session import Session
from stormtorch.staging.launch_queue import LaunchQueue
from stormtorch.telemetry.ledger import LedgerRow

_log = logging.getLogger("stormtorch")
T = TypeVar("T")


class ShardedSession(Session):
    """A session in which every rank runs the user's optimizer on the shard that it owns.

    Args: See `Session`.
    """

    splits_optimizer = True

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: OwnerPolicy
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self.policy = policy
        self._whole = owns_whole(optimizer, policy.ownership)
        check_separable(optimizer)
        self.buckets = buckets = self.make_buckets(policy.bucket_mb, whole=self._whole)
        for bucket in buckets if policy.deadline is None else ():
            bucket.share_gradients()
        self._standbys = policy.standby if can_follow(optimizer) else 0
        if self._standbys < policy.standby and group.rank == 0:
            _log.warning(
                "rank 0: %s wraps another optimizer, whose steps a standby cannot repeat: shards have no standby, as "
                "with standby=0",
                type(optimizer).__name__,
            )
        whole, standbys = self._whole, self._standbys
        self._partitioner = Partitioner(
            self, policy, buckets, standbys, whole=whole, by_machines=self._goes_by_machines
        )
        self._order, self._relays = LaunchQueue(), Relays(group.transport)
        self._lead = 0.0
        self._buffers = buffers_of(model)
        self._row = LedgerRow(0)
        self._exchanging = self._step_pending = self._round_skipped = False
        self._calls_made = False
        self._retained: dict[int, RetainedShards] = {}
        """While a view begins: this rank's shards in the last settled view, and those received for later ones."""
        self._standby: Standby | None = None
        self._used: list[bool] = []
        self._seeds = 0, 0
        self._moves = 0
        """Number of calls of optimizer methods that moved parameters outside steps."""
        self._undo: Callable[[], None] | None = None
        """Undoes the latest of these moves, while this rank waits for the others to make it."""
        self._resync = Resync.NOTHING
        self._exchanged = -1
        """Number of the step whose gradients were exchanged last, or are in flight."""
        self._round_reports = rounds = RoundReports(self, optimizer, policy)
        newcomer = self.membership.newcomer
        if not newcomer:
            self._repartition(self._partitioner.first(self.view.members))
            self.agree(buckets)
            rounds.agree()
            self.log_absent_ranks(self._row)
        self._shards = ShardedOptimizer(optimizer, self.parameters, buckets, whole=self._whole, personal=self.personal)
        self._norms = GradientNorms(group, buckets, len(self.parameters), lambda: self._gradients.complete())
        self._norms.writable = self._own_gradients_change
        self._norms.on_missing = self._report_missing_norm
        self._gradients = GradientCollector(buckets, self._start, self._finish, self._norms)
        self._gradients.began, self._gradients.end = self.scaling.begins, self.backward_ended
        self._gradients.wanted = self.wants_exchange
        self._parameter_barrier = ParameterBarrier(model, buckets, self._receive, self._passed, overlap=policy.overlap)
        self.ledger.attach_session(group.rank, self.wait)
        if newcomer:
            self.change()
            return
        self._begin_view(self._first_followed())

    def _repartition(self, partition: Partition, masters: Sequence[torch.Tensor] | None = None) -> None:
        """Partitions every bucket as a view needs it.

        Args:
            partition: The view's partition.
            masters: Float32 values of this rank's shard, by bucket.
        """
        place = partition.members.index(self.group.transport.rank)
        self._partitioner.now = partition
        for bucket, layout in zip(self.buckets, partition.layouts, strict=True):
            values = torch.empty(0) if masters is None else masters[bucket.index]
            if values.numel():
                bucket.flat.narrow(0, *layout.spans[place]).copy_(values)
            bucket.repartition(layout, place, values)

    def _begin_view(self, followed: ShardState | None) -> None:
        """Makes everything that depends on the number of ranks. Buckets are partitioned already."""
        rounds, policy, buckets = self._round_reports, self.policy, self.buckets
        rounds.begin_view(buckets)
        members_group = rounds.members_group
        up, down = rounds.channels("gradients", interruptible=True), rounds.channels("broadcast")
        self._reduction = GradientReduction(up, policy, buckets, self._order, self._relays, self._layout(up))
        self._broadcast = ParameterBroadcast(down, policy, buckets, self._order, self._relays, self._layout(down))
        chunks = [self._broadcast.chunks_of(owner) for owner in range(members_group.size)]
        rounds.open(chunks, chunks if policy.max_lag else [0] * members_group.size)
        wires, chunk_bytes = self._broadcast.wires, members_group.transport.chunk_bytes
        self._redundancy_control = RedundancyControl(policy, rounds.losses, buckets, wires, chunk_bytes)
        self._feedback = Feedback(
            policy,
            rounds,
            self._reduction,
            self._broadcast,
            self._redundancy_control,
            members_group.rank,
            members_group.size,
        )
        self._norms.begin_view(self.channel("norms"))
        self._full_state = FullStateGather(
            members_group, self.optimizer, buckets, self._shards, self._broadcast, self._buffers
        )
        self._standby = None
        if followed is not None:
            self._standby = Standby(
                self.optimizer,
                self._shards.groups,
                buckets,
                followed,
                whole=self._whole,
                shapes=[each.shape for each in self.parameters],
                channel=self.channel("standby"),
                order=self._order,
            )
            self._standby.begin(self._shards.shard_state(), self.steps)
        self._make_calls(rounds.barrier())

    def _layout(self, channels: Sequence[Group]) -> list[NodeLayout] | None:
        """Returns the hierarchical layout of these channels over machines; None if exchanges are flat.

        A rank that dies may lose what others of its machine have sent through it. This does no lasting harm: the next
        view repeats the exchange of gradients, and gathers all parameters on every rank.
        """
        return self.node_layout(channels) if self._goes_by_machines() else None

    def _goes_by_machines(self) -> bool:
        """Whether exchanges are hierarchical where the layout of machines allows it."""
        policy = self.policy
        # These policies treat each link by itself: what they send or store depends on the pair of ranks.
        by_link = policy.weighs or overrides(policy, "accept")
        length = sum(bucket.layout.elements * bucket.dtype.itemsize for bucket in self.buckets)
        # A deadline counts from when a rank begins: in a hierarchy, one slow rank would make its whole machine late.
        timed = any(each is not None for each in (policy.up.deadline_s, policy.down.deadline_s, policy.deadline))
        return policy.hierarchy and not by_link and not timed and is_worthwhile(length)

    def _make_calls(self, barrier: Barrier) -> None:
        if self._calls_made:
            self._calls.barrier = barrier
            self._calls.forget()
            return
        self._calls_made = True
        self._calls: ServedCollectives = ServedCollectives(
            barrier,
            steps=lambda: self.steps,
            ready=lambda: self._shards.settled and not self._applying_view,
            # Between its exchange of gradients and the end of the step, this rank waits for others within the step.
            mid_step=lambda: self._exchanged == self.steps and not is_elsewhere(),
            serve=lambda call: self._full_state.serve_call(call, self._calls.group),
            due=lambda: self.iterations.due(self),
            change=lambda: self.iterations.change(self),
        )

    def _first_followed(self) -> ShardState | None:
        """Returns the shard that this rank follows from the start, when all ranks have the same parameters."""
        partition, states = self._partitioner.now, self._shards.state_at_start
        for shard in range(len(partition.members)):
            if partition.standby(shard) == self.group.transport.rank:
                masters = [
                    bucket.flat.narrow(0, *layout.spans[shard]).detach().to(torch.float32, copy=True)
                    for bucket, layout in zip(self.buckets, partition.layouts, strict=True)
                ]
                return ShardState(shard, partition.layouts, masters, lambda _bucket, piece: states(piece))
        return None

    # --- stage 1 ----------------------------------------------------------------------------------------------------

    def _start(self, bucket: Bucket) -> None:
        self._exchanging = True
        if self._gradients.received(bucket):
            self._parameter_barrier.used(bucket.index)
        self._parameter_barrier.open([bucket.index])  # no module may have waited for these parameters
        self._own_gradients_change(bucket)
        self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        self.scaling.fit(bucket)
        self._reduction.start(bucket)

    def _own_gradients_change(self, bucket: Bucket) -> None:
        if self._standby is not None:
            with in_call(BACKWARD):
                self._standby.sent(bucket)

    def _report_missing_norm(self, gone: Sequence[int]) -> None:
        """Records that a norm lacks shards: averaged gradients of a rank that died exist on no other rank."""
        words = (
            f"the norm of the gradients of step {self.steps} lacks the shard of rank "
            f"{', '.join(str(self.label(rank)) for rank in gone)}, which is gone: clipping by it clips too little"
        )
        self._row.events.append(words)
        _log.warning("rank %d: %s", self.label(self.group.transport.rank), words)

    def _finish(self) -> None:
        self._parameter_barrier.open()
        began = time.perf_counter()
        # Keep events: an earlier backward of this step, or a view that began, may have recorded some.
        self._row = LedgerRow(self.steps, events=self._row.events, view_wait_s=self._row.view_wait_s)
        self._exchanging = True
        self.iterations.begin(self)
        try:
            while not self._round(self._row):
                if self.iterations.misses_iteration(self) and self.policy.deadline is None:
                    self._skip_round()
                    break
                if not self.iterations.change(self):
                    self._drop_gradients()
                for bucket in self.buckets:
                    self._reduce(bucket)
            self.iterations.made(self)
        finally:
            self._exchanging = False
            self.iterations.end()
        self._step_pending = True
        self._row.gradient_wait_s = time.perf_counter() - began

    def _drop_gradients(self) -> None:
        """Drops this rank's gradients: it returns with other parameters, and other ranks have taken its samples."""
        for bucket in self.buckets:
            bucket.grads.zero_()
            bucket.finite = True
        self.scaling.left_out()

    def _skip_round(self) -> None:
        """Skips a round and its step: the others have made it without this rank, which joins at the next iteration."""
        self._drop_gradients()
        self._gradients.repartition()
        self._shards.clear_gradients()
        self._round_skipped = self._norms.idle = True

    def _round(self, row: LedgerRow) -> bool:
        """Completes the exchange of gradients and reports. Returns False if it was aborted because a view begins."""
        if self.iterations.wants_view(self):
            self._reduction.abort()
            return False
        self._exchanged = self.steps
        rounds = self._round_reports
        samples_S = rounds.drift.read()
        used = self._gradients.used()
        used_P = torch.tensor([used.get(number, False) for number in range(len(self.parameters))], device="cpu")
        not_finite = not self._is_finite()
        digest = rounds.hyperparameters.digest()
        feedback, shard, scale = self._feedback, self._shard_report(), self.scaling.report(self.buckets)
        self._partitioner.measure(feedback)

        def report_to(peer: int) -> Report:
            return feedback.report_to(peer, samples_S, used_P, not_finite, digest, shard, scale)

        pending_reports = rounds.send_reports(self.steps, report_to)
        try:
            self._reduction.finish()
            self._norms.forget()
            reports = rounds.receive_reports(pending_reports, row, self.steps, digest)
            complete = self.membership.complete()
        except Interrupted:
            complete = False
        if not complete:
            pending_reports.cancel()
            self._reduction.abort()
            return False
        self._retained.clear()
        if self._standby is not None:
            self._follow(self._standby, shard, reports, row)
        self._reduction.present = rounds.members_group.size
        feedback.learn(reports, row, samples_S, self._lead, self.steps)
        self._partitioner.receive_reports(reports, row)
        row.gradients = self._labelled(self._reduction.links.fractions())
        row.effective_batch = self._reduction.effective_batch
        row.variance_inflation = self._reduction.variance_inflation
        for report in reports.values():
            used_P |= report.used_P
            not_finite |= report.not_finite
        not_finite |= self.agree_on_scale(scale, reports, row)
        if self.scaling.shown != 1.0:
            for bucket in self.buckets:
                bucket.own_grads.mul_(self.scaling.shown)
        self._on_reports(reports, row)
        self._set_gradients(used_P, not_finite)
        return True

    def _is_finite(self) -> bool:
        """Whether the gradients that this rank contributes are finite."""
        # Personal ones count, too: a GradScaler that finds one of them infinite skips the step, so all ranks must.
        own = (each.grad for each in self.personal if each.grad is not None)
        return self._reduction.finite() and all(bool(each.isfinite().all()) for each in own)

    def _shard_report(self) -> ShardReport:
        """Returns this rank's report on its shard, for the standby."""
        if self._standby is None:
            return NO_SHARD
        return self._standby.report(self._shards.shard_state(), self.steps)

    def _follow(self, standby: Standby, own: ShardReport, reports: Mapping[int, Report], row: LedgerRow) -> None:
        """Has the standby repeat the owner's last step, and compares the results."""
        standby.follow()
        found = reports.get(standby.shard)
        owner = NO_SHARD if found is None else found.shard
        self._seeds = own.seed, owner.seed
        self._resync = Resync(max(own.resync, *(report.shard.resync for report in reports.values())))
        if not standby.compare(owner, self._resync, self.steps):
            label = self.labels()[standby.shard]
            words = (
                f"this rank's standby of the shard of rank {label} differs from it, as if the steps of rank {label}'s "
                f"{type(self.optimizer).__name__} could not be repeated here: the standby receives a new copy"
            )
            row.events.append(words)
            if standby.mismatches == 1:
                _log.warning("rank %d: %s", self.label(self.group.transport.rank), words)

    def _on_reports(self, reports: Mapping[int, Report], row: LedgerRow) -> None:
        """Called with the reports of each complete round. For subclasses."""

    def _labelled(self, fractions: Mapping[int, float]) -> dict[int, float]:
        labels = self.labels()
        return {labels[place]: fraction for place, fraction in fractions.items()}

    def _set_gradients(self, used_P: torch.Tensor, not_finite: bool) -> None:
        """Sets the averaged gradients in the optimizer, also of parameters that only other ranks have used."""
        # If one rank's gradients are not finite, every rank must see that, so that GradScaler skips the step on all.
        self._used = used_P.tolist()
        self._shards.assign_gradients(self._used, finite=not not_finite)
        self._gradients.show(self._used)

    # --- the step, and stage 2 --------------------------------------------------------------------------------------

    def complete_gradients(self) -> None:
        """Completes the exchange of gradients, unless `no_sync` forbids it."""
        if self._gradients.syncing:
            self._gradients.complete()

    def before_step(self, *, closure: bool) -> None:
        """Waits for gradients, unless a closure will compute them."""
        if not closure:
            self._gradients.complete()
        if self._round_skipped:
            self._shards.clear_gradients()
            self._shards.begin_step()
            return
        self._ready_step()

    def _ready_step(self) -> None:
        """Prepares the optimizer's step on this rank's shard."""
        self._parameter_barrier.open()
        self._calls.forget()
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.follow()
        self._shards.begin_step()
        exact = self._feedback.guarded or self.policy.down.exact
        loss = self._round_reports.losses.broadcast.value
        self._lead = 0.0 if exact else self.policy.ahead(loss)
        if self._broadcast.looks_back(self._lead):
            for bucket in self.buckets:
                bucket.remember()
        self._round_reports.drift.choose(self.steps + 1)
        self._round_reports.drift.before_step()
        self._partitioner.step_begins()

    def gradients_final(self, *, within: bool = False) -> None:
        """Passes the final gradients to the standby, as the optimizer is about to use them."""
        if self._round_skipped:
            return
        if within:
            self._ready_step()  # again, as another view may have begun
        self.settle_gradients()
        if self._standby is not None:
            self._standby.take(self._used, self._seeds, self._resync, self._shards.shard_state())
            if not within:
                self._standby.send()

    def settle_gradients(self) -> None:
        """Copies the program's changes of its gradients since backward to the optimizer."""
        if self._gradients.reduced:
            self._gradients.settle()
            before, self._used = self._used, self._gradients.present(self._used)
            self._shards.settle_gradients(before, self._used)

    def closure_begins(self) -> None:
        """Called when the optimizer calls its closure, which must draw the program's own random numbers."""
        if self._standby is not None:
            self._standby.release()

    @torch.no_grad()
    def after_step(self) -> None:
        """Begins the broadcast of the buckets, in the order in which forward needs them."""
        self._step_pending = False
        if self._round_skipped:
            self._round_skipped = self._norms.idle = False
            self._shards.end_step()
            return
        self._partitioner.step_ends()
        self._shards.end_step()
        if self._standby is not None:
            if not self._standby.taken:
                self.gradients_final()  # the optimizer has not called its closure
            self._standby.stepped(self._shards.shard_state(), self.steps)
        row, broadcast, guarded = self._row, self._broadcast, self._feedback.guarded
        reliability = REPAIRED if guarded and not self.policy.down.exact else self._redundancy_control.down
        self._feedback.broadcast_begins(exact=guarded or reliability.exact)
        broadcast.clear()
        serve, fetch = self._feedback.requests()
        for bucket in reversed(self.buckets):
            broadcast.send(
                bucket,
                self._lead,
                reliability,
                self.steps * self._round_reports.members_group.size + self._round_reports.members_group.rank,
                [None if each is None else each[bucket.index] for each in serve],
                [None if each is None else each[bucket.index] for each in fetch],
            )
        self._round_reports.drift.after_step()
        row.step, row.lead, row.guarded = self.steps, self._lead, guarded
        self.steps += 1
        self._buffers.remember()
        self._parameter_barrier.close()
        self.stepped()

    def _receive(self, bucket: Bucket) -> None:
        self._broadcast.receive(bucket)

    def _passed(self) -> None:
        """Completes the row of a step: all its parameters have arrived or are lost."""
        row, self._row = self._row, LedgerRow(self.steps)
        row.broadcast = self._labelled(self._broadcast.links.fractions())
        row.broadcast_wait_s = self._parameter_barrier.waited_s
        if self._standby is not None:
            self._standby.arrived(self._broadcast.received(self._standby.shard))
        self.count_sent(row)
        row.lag = self._broadcast.lag()
        row.fetched = self._broadcast.fetched
        self._feedback.watch(row)
        self.ledger.add(row)

    # --- views: ranks that join and leave ----------------------------------------------------------------------------

    def is_between_steps(self) -> bool:
        """Whether this rank is between two steps, with no exchange in flight and no view beginning."""
        return self._parameter_barrier.is_open and not (self._exchanging or self._applying_view or self._step_pending)

    @property
    def has_no_pending_step(self) -> bool:
        """Whether no averaged gradients wait for a step, so that a view could begin with this session."""
        return not self._step_pending

    def switch(self) -> None:
        """Applies the latest view before another session's round. Backward may have begun a round of this session."""
        begun = [bucket for bucket in self.buckets if self._gradients.started(bucket)] if self._exchanging else []
        if begun:
            self._reduction.abort()
        if not self.change():
            self._drop_gradients()
        for bucket in begun:
            self._reduce(bucket)

    def begin_latest(self) -> bool:
        """Moves shards, with the optimizer's state, to their owners in the latest view."""
        if not self.membership.newcomer:
            self._parameter_barrier.open()
            if not self._retained:
                for bucket in self.buckets:
                    bucket.follow()
                if self._standby is not None:
                    self._standby.end(self._shards.shard_state())
                self._retained[self.membership.settled] = self._retained_state()
        began = time.perf_counter()
        while (held := self._try_view(self.iterations.await_view(self))) is None:
            pass
        self._row.view_wait_s += time.perf_counter() - began
        return held

    @torch.no_grad()
    def prune(self, masks: Sequence[torch.Tensor]) -> None:
        """Prunes all buckets, and the optimizer's state of what this rank owns and follows."""
        if self._standby is not None:
            self._standby.follow()
        held = self._retained_state()
        for bucket, kept in zip(self.buckets, masks, strict=True):
            bucket.prune(kept)
        for shard_state in (held.own, held.followed):
            if shard_state is not None:
                shard_state.clear_pruned(self.buckets)
        self.count_pruning()
        self._retained.clear()
        self._begin_view(held.followed)

    def _retained_state(self) -> RetainedShards:
        standby = self._standby
        followed = None if standby is None else standby.shard_state()
        partition = self._partitioner.now
        ages = [self._broadcast.oldest_of(owner) for owner in range(len(partition.members))]
        if standby is None:
            return RetainedShards(partition, self._shards.shard_state(), followed, ages)
        flags = standby.behind > 0, standby.differs, standby.older, standby.changes
        return RetainedShards(partition, self._shards.shard_state(), followed, ages, *flags)

    def _try_view(self, latest: Any) -> bool | None:
        """Moves shards to their owners in a view.

        Returns whether this rank had state of the view before; None if another view has superseded this one.
        """
        membership, rank = self.membership, self.group.transport.rank
        base, round_ = membership.base(latest)
        held = None if membership.blank() else self._retained.get(base)
        members, waiting = membership.members_of(latest), membership.waiting(latest)
        machine = self.group.transport.machine_of(rank) if self.policy.hierarchy else ""
        try:
            group = self.transition_group(latest, without=() if rank in waiting else waiting)
            reported = held, self.steps, self.given(), machine, self._partitioner.speed
            admits_joiners = self.iterations.admits_joiners(latest.number) and self._undo is None
            handshake = exchange_handshakes(group, *reported, moves=self._moves, open_=admits_joiners)
            if not handshake.open:
                waiting = [each for each in members if each not in handshake.holders]
                members = tuple(each for each in members if each not in waiting)
                if rank in waiting:
                    membership.skip_view(latest)
                    return None
            elif waiting and rank not in waiting:
                group = self.transition_group(latest)
                handshake = exchange_handshakes(group, *reported, moves=self._moves)
            if held is None:
                self.check_fits(handshake.reported[handshake.sender(members)])
                self._moves = handshake.moves
            elif self._undo is not None and handshake.moves < self._moves:
                self._undo()
                self._moves, self._undo = handshake.moves, None
            before, after = self._partitioner.change(handshake, members)
            moved = move(group, handshake, before, after, held, self.buckets, whole=self._whole)
            if rank not in members:
                objects.gather(True, group)
                self.leave()
            self.steps = handshake.steps
            membership.enter(latest, self.steps, members)
            if held is None:
                self.joined(handshake.reported[handshake.sender(members)])
            self.machines = handshake.machines
            learns = self.sync_masks(handshake.reported, new=held is None)
            self._repartition(after, moved.masters)
            self._shards.repartition(lambda bucket, piece: moved.states[bucket, piece])
            for shard_state in (self._shards.shard_state(), moved.followed) if learns else ():
                if shard_state is not None:
                    shard_state.clear_pruned(self.buckets)
            self._begin_view(moved.followed)
            self._retained[latest.number] = self._retained_state()
            # Averaged gradients of an earlier backward of this step stay valid if the partition has not changed.
            cuts = zip(before.layouts, after.layouts, strict=True)
            same = held is not None and before.members == after.members and all(o.spans == n.spans for o, n in cuts)
            self._gather_all_parameters(handshake, members, same=same)
            objects.gather(True, group)
        except Interrupted:
            return None
        if not membership.settle(round_):
            return None
        self.forget_channels()
        self._tell(before, after, moved, handshake)
        self.taken({rank: reported["carried"] for rank, reported in handshake.reported.items()})
        return held is not None

    def _gather_all_parameters(self, handshake: Handshake, members: Sequence[int], *, same: bool) -> None:
        """Gathers all parameters on every member, and sends newcomers the rest of the model and settings."""
        if not same and self._gradients.repartition():
            words = f"the gradients of earlier backwards of step {self.steps} are lost: shards were repartitioned in it"
            self._row.events.append(words)
            _log.warning("rank %d: %s", self.label(self.group.transport.rank), words)
        with self._calls.serving_paused():
            self._full_state.gather_parameters(self.channel("share", interruptible=True))
        if self._standby is not None:
            self._standby.arrived()
        newcomers = handshake.newcomers(members)
        if newcomers:
            group = self.channel("handover", interruptible=True)
            root, new = members.index(handshake.sender(members)), group.transport.rank in newcomers
            self.broadcast_rest(group, self.buckets, root, take=new)
            self._round_reports.hyperparameters.take(group, root, new=new)
        self._buffers.remember()

    def _tell(self, before: Partition, after: Partition, moved: MoveResult, handshake: Handshake) -> None:
        """Records and logs which ranks have joined and left, and what was lost with them."""
        reported = [self.describe_view_change(before.members, after.members, handshake.newcomers(after.members))]
        reported += self._partitioner.reported(before)
        reported += [
            f"the shard of rank {self.label(before.members[shard])} had no standby left: its parameters are the "
            "freshest copy, and the optimizer's state of it and of parameters that reach into it is reset"
            for shard in moved.lost
        ]
        reported += [
            f"the last update of the shard of rank {self.label(before.members[shard])} is lost: the rank died before "
            "its standby received it"
            for shard in moved.late
        ]
        reported += [
            f"the shard of rank {self.label(before.members[shard])} goes on from a standby that was not equal to it: "
            "it lacks the program's changes since the last step, or steps that could not be repeated"
            for shard in moved.unequal
        ]
        for words in reported:
            self._row.events.append(words)
            _log.warning("rank %d: %s", self.label(self.group.transport.rank), words)
        self.log_join_messages(self._row)

    @torch.no_grad()
    def shard_prints(self) -> dict[int, list[int]]:
        """Returns fingerprints of this rank's shard and of the one that it follows, by owner."""
        self._parameter_barrier.open()
        members, found = self.view.members, {}
        if self._standby is not None:
            self._standby.follow()
            found[members[self._standby.shard]] = list(fingerprints.of_shard_state(self._standby.shard_state()))
        found[self.group.transport.rank] = list(fingerprints.of_shard_state(self._shards.shard_state()))
        return found

    # --- for the user -----------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears all gradients."""
        self._gradients.clear(set_to_none)
        self._shards.clear_gradients()
        self.forget_personal(set_to_none=set_to_none)
        self._step_pending = False  # the program skips this step

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context within which backward exchanges nothing."""
        return self._gradients.no_sync()

    def arriving(self) -> bool:
        """Whether parameters are in flight."""
        return not self._parameter_barrier.is_open

    def wait(self) -> None:
        """Waits until the parameters of the last step have arrived or are lost."""
        self._parameter_barrier.open()

    def whole_groups(self) -> list[dict[str, Any]]:
        """Returns the optimizer's groups with the model's parameters."""
        return [
            {**group, "params": [self.parameters[number] for number in members]}
            for group, members in zip(self.optimizer.param_groups, self._shards.groups, strict=True)
        ]

    @torch.no_grad()
    def moves(self, method: Callable[[], Any]) -> Any:
        """Calls a method that may move parameters, on all ranks: each moves its own shard and the one that it follows.

        At any time a rank has moved both or none, so the others can go on if it dies meanwhile.
        """
        self.wait()
        while True:
            before = settings(self.optimizer)
            undo = self._undoing()
            result = method()
            if settings(self.optimizer) == before:
                return result
            for bucket in self.buckets:
                bucket.settle()
            self._calls.forget()
            if self._standby is not None:
                self._standby.move(method, self._shards.shard_state())
            self._moves, self._undo = self._moves + 1, undo
            if self._all_moved():
                return result

    def _undoing(self) -> Callable[[], None]:
        """Returns a function that undoes a move that is about to be made."""
        standby, optimizer = self._standby, self.optimizer
        own = [(each, each.clone()) for each in self._shards.shard_state().masters]
        followed = None if standby is None else standby.kept()
        groups = [dict(each) for each in optimizer.param_groups]
        states = {key: dict(each) for key, each in optimizer.state.items() if isinstance(each, dict)}

        @torch.no_grad()
        def undo() -> None:
            for each, values in own:
                each.copy_(values)
            for group, old in zip(optimizer.param_groups, groups, strict=True):
                group.update(old)
            optimizer.state.update(states)
            for bucket in self.buckets:
                bucket.settle()
            if standby is not None and followed is not None:
                standby.restore(followed)

        return undo

    def _all_moved(self) -> bool:
        """Waits until all ranks have moved their shards, and gathers all parameters on every rank.

        If a rank is gone, a view begins and gathers the moved parameters. If a member of that view has not moved its
        shard yet, no rank has completed the call, and all others undo it. Returns False if this rank has undone it.
        """
        try:
            with in_call("the optimizer's train() or eval()"):
                group = self.channel(f"moves/{self._moves}", interruptible=True)
                objects.gather(True, group)
                with self._calls.serving_paused():
                    self._full_state.gather_parameters(group)
            if self._standby is not None:
                self._standby.adopt()
            return True
        except Interrupted:
            self.change()
            return self._undo is not None
        finally:
            self._undo = None

    @torch.no_grad()
    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Gathers the owners' parameters and the mean of all ranks' floating-point buffers on this rank."""
        with in_call(NAMES[call]):
            self._parameter_barrier.open()

        def gather_parameters(kept: object) -> None:
            if self._standby is not None:
                self._standby.follow()
            if kept is None:
                self._full_state.gather_parameters(self._calls.group)
            else:
                self._full_state.follow(kept, self._calls.group)
            if self._standby is not None:
                self._standby.adopt()

        self._call(call, gather_parameters)

    def _call(self, call: int, work: Callable[[object], T]) -> T:
        """Makes a collective call with all members; starts again if another view begins meanwhile.

        Args:
            call: Number of the call.
            work: Does it, given the result if this rank has already served this call for others.

        Raises:
            StormError: A view begins between backward and step, when averaged gradients cannot be transferred.
        """
        while True:
            try:
                with self._calls.call(call) as kept:
                    return work(kept)
            except Interrupted as error:
                if self._step_pending:
                    raise StormError(
                        f"rank {self.label(self.group.transport.rank)}: a rank is gone, and {NAMES[call]} cannot "
                        "complete between backward() and step(): call it after step()"
                    ) from error
            self.iterations.change(self)

    @torch.no_grad()
    def loaded(self) -> None:
        """Copies loaded parameters to the float32 values that the optimizer works on."""
        self._parameter_barrier.open()
        self._calls.forget()
        self._retained.clear()  # superseded by the loaded values
        for bucket in self.buckets:
            bucket.adopt()
        if self._standby is not None:
            self._standby.load(None, self.buckets)
            self._standby.begin(self._shards.shard_state(), self.steps)
        self._buffers.remember()

    def optimizer_state(self, local: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dict of the whole optimizer, gathered from all owners."""

        def gather(kept: object) -> dict[str, Any]:
            # Read the state here, on every attempt: a view that begins gives this rank another shard.
            return self._full_state.optimizer_state(plain_state(self.optimizer), kept, self._calls.group)

        return self._call(OPTIMIZER_STATE, gather)

    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's shard of a state dict of the whole optimizer."""
        self._calls.forget()
        self._retained.clear()  # superseded by the loaded values
        local = self._shards.scatter(whole)
        for bucket in self.buckets:
            bucket.settle()
        if self._standby is not None:
            self._standby.load(lambda piece: self._shards.state_slice(whole, piece), self.buckets)
            self._standby.begin(self._shards.shard_state(), self.steps)
        return local
