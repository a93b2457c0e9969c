"""Replicated session, the base of sessions under a `RankPolicy`: every rank runs the optimizer on its own model."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group, Pending
from stormtorch.collectives.base import objects
from stormtorch.errors import Interrupted, StormError
from stormtorch.policies.memory import MemoryStore
from stormtorch.policies.policy import overrides
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.runtime.handover.reports import Report, ShardReport
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import repartition
from stormtorch.runtime.memory.scaling import UNKNOWN
from stormtorch.runtime.memory.shard_state import clear_pruned
from stormtorch.runtime.rank.averages import Averages, Participation
from stormtorch.runtime.rank.memories import CallContext, Memories
from stormtorch.runtime.session.buffers import buffers_of
from stormtorch.runtime.session.drift_samples import mean_squared_difference
from stormtorch.runtime.session.round_reports import RoundReports
from stormtorch.runtime.session.session import Session
from stormtorch.staging.launch_queue import LaunchQueue
from stormtorch.telemetry.ledger import LedgerRow

_log = logging.getLogger("stormtorch")

# Name of a policy's memories in the state dict of an optimizer.
_MEMORIES = "stormtorch_memories"


class ReplicatedSession(Session):
    """A session whose rounds exchange one vector per bucket: the parameters or the gradients.

    Args: See `Session`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: RankPolicy
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self.policy = policy
        self.buckets = buckets = self.make_buckets(self._bucket_mb(), whole=False)
        self._planned = [bucket.layout for bucket in buckets]
        self._round_reports = RoundReports(self, optimizer, policy)
        self._memories = Memories(policy, buckets, self._planned)
        self._participation = Participation()
        self._partners: list[int] = []
        self.round_number = 0
        """Number of exchanges of all ranks that this rank has begun."""
        self._staging = LaunchQueue()
        self._row = LedgerRow(0)
        self._scale = UNKNOWN
        self._buffers = buffers_of(model)
        self._open = self._missed = False
        """Whether a round has begun and not ended; and whether this rank, which was excluded, skips it."""
        self._ready = 0
        """Latest view for which this rank has the state that it needs."""
        self.ledger.attach_session(group.rank, self.wait)
        if not self.membership.newcomer:
            self.agree(buckets)
            self._round_reports.agree()
            self.log_absent_ranks(self._row)
            self._memories.begin(group.transport.rank, self.view.number, self.view.members)
            self._begin_view()

    def _bucket_mb(self) -> float:
        """Returns the size of buckets: small enough that every fragment has one of its own."""
        bytes_ = sum(each.numel() * each.element_size() for each in self.parameters if each.requires_grad)
        return min(self.policy.bucket_mb, max(bytes_ / self.policy.fragments / 1e6, 1e-6))

    def _begin_view(self) -> None:
        """Creates everything that depends on the members."""
        members = self.view.members
        for bucket, layout in zip(self.buckets, self._planned, strict=True):
            bucket.divide(repartition(layout, bucket.dtype.itemsize, len(members), whole=False), self.membership.index)
        rounds = self._round_reports
        rounds.begin_view(self.buckets)
        self._averages = Averages(
            *(self.policy, self.buckets, self.exchanged, self._staging, rounds.members_group, self._memories),
            reports=rounds.channels("arrived") if self.policy.reports else [],
            following=rounds.channels("follow") if self.policy.owners_remember else [],
        )
        self._groups = rounds.channels("mean")
        self._weighing = self.channel("weights") if self.policy.pace == "fastest" else None
        chunks = [self._averages.chunks_of(owner) for owner in range(len(members))]
        rounds.open(chunks, [0] * len(members))
        self._order = torch.Generator(device="cpu").manual_seed(self.policy.seed + self.view.number - 1)
        self._orders: dict[int, list[int]] = {}
        self._samples_S = rounds.drift.read()
        if overrides(self.policy, "meet"):
            self._exchange_policy_messages()

    def _exchange_policy_messages(self) -> None:
        """Exchanges the policies' messages between all members when a view begins."""
        group = self.channel("meet", interruptible=True)
        rank = MemoryStore(0).chunks(0, 0, 0).told(index=group.rank, ranks=group.size, round_=self.membership.round)
        # As text: torch does not unpickle bytes from untrusted data.
        reported = objects.gather(self.policy.meet(rank).decode("latin-1"), group)
        self.policy.met(rank, [str(each).encode("latin-1") for each in reported])

    @abstractmethod
    def exchanged(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the vector of a bucket that ranks exchange, and the memory that the network reads and writes."""

    # --- a round -----------------------------------------------------------------------------------------------------

    def begin(self, bucket: Bucket) -> None:
        """Begins to exchange a bucket's vector."""
        if not self._open:
            self._open = True
            self._wait_for_round()
            if not self._missed:
                self._decide_participation()
        if self._missed:
            return
        group = self._groups[bucket.index]
        if not self._orders:
            # Drawn for all buckets at once: they may begin in another order on another rank, but need the same owners.
            self._orders = {each.index: self.policy.order(group.size, self._order) for each in reversed(self.buckets)}
        order = self._orders.pop(bucket.index)
        reordered = group if order == list(range(group.size)) else group.reordered(order)
        seed = self.membership.round * group.size + group.rank
        self._averages.start(bucket, reordered, self._participation, seed)

    def _wait_for_round(self) -> None:
        """Waits until this rank's round can begin, or skips it if this rank was excluded within an iteration."""
        self.iterations.begin(self)
        try:
            while self.iterations.wants_view(self) or not self.membership.complete():
                if self.iterations.misses_iteration(self):
                    self._missed = True
                    break
                self.iterations.change(self)
            self.iterations.made(self)
        finally:
            self.iterations.end()

    def skips_round(self) -> bool:
        """Whether this rank skips the round that it has begun, which then ends."""
        missed, self._missed = self._missed, False
        self._open = self._open and not missed
        return missed

    def made(self) -> int:
        """Returns the optimizer steps that this rank has made since it last took part in a round like this one."""
        return 1

    def _decide_participation(self) -> None:
        """Decides this rank's weight and partner in the round that begins."""
        policy, group, steps = self.policy, self._groups[0], self.made()
        self._participation = participation = Participation(takes=policy.pace == "together" or steps >= policy.at_least)
        self._memories.call = CallContext(group.rank, group.size, self.membership.round, steps)
        if self._weighing is not None:
            most = policy.every if policy.by_steps else max(steps, 1)
            participation.weight = min(steps / most, 1.0) if participation.takes else 0.0
            participation.weights_N = [torch.zeros(1, device="cpu") for _ in range(group.size)]
            own = torch.tensor([participation.weight], device="cpu")
            participation.all_weights = collectives.all_gather(self._weighing, participation.weights_N, own)
        if policy.exchanges_in_pairs:
            participation.partner = policy.partners(group.size, self._order)[group.rank]

    def send_reports(self, step: int, digest: int) -> Pending:
        """Begins to send reports about the previous round."""
        averages = self._averages

        self._scale = scale = self.scaling.report(self.buckets)

        def report_to(peer: int) -> Report:
            down, up = averages.down.fraction(peer), averages.up.fraction(peer)
            nothing = torch.empty(0, dtype=torch.bool)
            return Report(
                not_finite=False,
                alarm=False,
                broadcast_missing=-1.0 if down is None else 1.0 - down,
                gradients_missing=-1.0 if up is None else 1.0 - up,
                update_variance=0.0,
                samples_S=self._samples_S,
                used_P=torch.zeros(len(self.parameters), dtype=torch.bool),
                wanted_C=nothing,
                settings=digest,
                shard=ShardReport(state=self._memories.checkpoint_number),
                scale=scale,
            )

        pending_reports = self._round_reports.send_reports(step, report_to)
        averages.clear()
        return pending_reports

    def receive_reports(self, pending_reports: Pending, row: LedgerRow, step: int, digest: int) -> None:
        """Updates the members present and the measured loss from the reports of all ranks."""
        rounds, averages = self._round_reports, self._averages
        reports = rounds.receive_reports(pending_reports, row, step, digest)
        averages.present = rounds.members_group.size
        if self.agree_on_scale(self._scale, reports, row):
            for bucket in self.buckets:
                bucket.grads.fill_(torch.nan)  # so that every GradScaler skips the step
        rounds.losses.receive_reports(reports, guarded=False, retransmitted=(0, 0))
        averages.losses = [each.value for each in rounds.losses.gradients]
        if len({self._memories.checkpoint_number, *(report.shard.state for report in reports.values())}) > 1:
            # All ranks see this: they have loaded different checkpoints, so owners may count what no rank remembers.
            self._memories.recompute_known_mean(self.round_channel("memories"))
        self._memories.used()
        row.loss = rounds.losses.broadcast.value
        row.pair_drift = mean_squared_difference(self._samples_S, [report.samples_S for report in reports.values()])

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def optimizer_state(self, local: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dict of this rank's optimizer, with the policy's memories on this rank."""
        self.wait()
        memories = self._memories.state_dict(f"{self.name}/{self.round_number}/{self.steps}")
        return local | {_MEMORIES: memories} if memories else local

    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Loads the policy's memories from a state dict, and returns it without them."""
        if _MEMORIES in whole:
            why = self._memories.load_state_dict(whole[_MEMORIES])
            if why:
                rank = self.label(self.group.transport.rank)
                _log.warning("rank %d: resets the memory of %s: %s", rank, type(self.policy).__name__, why)
        return {name: each for name, each in whole.items() if name != _MEMORIES}

    def complete_row(self, row: LedgerRow, waited_s: float) -> None:
        """Completes the ledger row of a round."""
        averages = self._averages
        labels = self.labels()
        row.gradients = {labels[place]: each for place, each in averages.up.fractions().items()}
        row.broadcast = {labels[place]: each for place, each in averages.down.fractions().items()}
        row.effective_batch, row.variance_inflation = averages.effective_batch, averages.variance_inflation
        row.broadcast_wait_s = waited_s
        self.count_sent(row)
        self.ledger.add(row)
        self._row = LedgerRow(self.steps)

    def sample(self, number: int) -> None:
        """Reads the sampled elements that measure the drift of replicas in a round, the same ones on all ranks."""
        self._round_reports.drift.choose(number)
        self._samples_S = self._round_reports.drift.read()

    @torch.no_grad()
    def prune(self, masks: Sequence[torch.Tensor]) -> None:
        """Prunes all buckets, and the optimizer's state of all parameters."""
        for bucket, kept in zip(self.buckets, masks, strict=True):
            bucket.prune(kept)
            if bucket.kept is not None:
                for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                    state = self.optimizer.state.get(parameter, {})
                    clear_pruned(state, bucket.kept.narrow(0, slot.first, slot.count))
        self.count_pruning()
        self._begin_view()

    # --- ranks that join and leave -----------------------------------------------------------------------------------

    def must_abort_round(self) -> bool:
        """Whether the running round must be aborted: only if this rank is cut off. Else it ends in its own view."""
        return self.membership.cut_off()

    def complete(self, pending_reports: Pending, row: LedgerRow, step: int, digest: int) -> bool:
        """Ends a round. Returns False if this rank was cut off: its result was not shared and must be discarded."""
        self._open = False
        try:
            self.receive_reports(pending_reports, row, step, digest)
        except Interrupted:
            pending_reports.cancel()
            return False
        return not self.membership.cut_off()

    @abstractmethod
    def make_missed_round(self) -> None:
        """Makes a round that other ranks began in the former view before this rank announced that it leaves."""

    def steps_of_rounds(self) -> int:
        """Returns the number of optimizer steps that the rounds so far have covered."""
        return self.steps

    def count_from(self, steps: int) -> None:
        """Sets the step count of a new or formerly excluded rank to that of the other ranks.

        Args:
            steps: What `steps_of_rounds` returns on the other ranks.
        """
        self.steps = steps

    def begin_latest(self) -> bool:
        """Applies the latest view, in which joining ranks receive another rank's model."""
        while (held := self._try_view(self.iterations.await_view(self))) is None:
            pass
        return held

    def _try_view(self, latest: Any) -> bool | None:
        """Tries to apply a view. Returns whether this rank kept its state; None if another view superseded it."""
        membership, rank = self.membership, self.group.transport.rank
        base, round_ = membership.base(latest)
        members, waiting = membership.members_of(latest), membership.waiting(latest)
        before = membership.view.members
        holds = not membership.blank() and base in (self._ready, membership.settled)
        if holds and round_ > membership.round:
            self.make_missed_round()
        memories = self._memories
        if holds and memories.view != base:
            memories.roll_back(base)
        own = {
            "holds": holds,
            "steps": self.steps_of_rounds(),
            "carried": self.given(),
            "members": memories.members(),
            "names": memories.names(),
            "open": self.iterations.admits_joiners(latest.number),
        }
        try:
            group = self.transition_group(latest, without=() if rank in waiting else waiting)
            reported = dict(zip(group.ranks, objects.gather(own, group), strict=True))
            if not all(each["open"] for each in reported.values() if each["holds"]):
                members = tuple(each for each in members if each in reported and reported[each]["holds"])
                if rank in membership.members_of(latest) and rank not in members:
                    membership.skip_view(latest)
                    return None
            elif waiting and rank not in waiting:
                group = self.transition_group(latest)
                reported = dict(zip(group.ranks, objects.gather(own, group), strict=True))
            if rank not in members:
                self.leave()
            holders = [rank for rank in members if reported[rank]["holds"]]
            if not holders:
                raise StormError(
                    f"rank {group.transport.rank}: no rank of {members} still has the model: restart the job from a "
                    "checkpoint"
                )
            root, newcomers = min(holders), [rank for rank in members if rank not in holders]
            if not holds:
                self.check_fits(reported[root])
                self.count_from(max(int(reported[rank]["steps"]) for rank in holders))
                self.joined(reported[root])
            membership.enter(latest, self.steps_of_rounds(), members)
            if newcomers:
                self._broadcast_model(members.index(root), new=rank in newcomers)
            self.sync_masks(reported, new=not holds)
            memories.move(
                self.channel("memories", interruptible=True),
                latest.number,
                reported[root]["members"],
                members,
                holders,
                sorted({name for rank in holders for name in reported[rank]["names"]}),
            )
            self._begin_view()
            self._ready = latest.number
            objects.gather(True, self.channel("settle", interruptible=True))
            settled = membership.settle(round_)
        except Interrupted:
            settled = False
        if not settled and not (self._ready == latest.number and membership.finish_superseded(round_)):
            return None
        memories.settle()
        self.forget_channels()
        words = self.describe_view_change(before, members, newcomers)
        self._row.events.append(words)
        _log.warning("rank %d: %s", self.label(group.transport.rank), words)
        self.log_join_messages(self._row)
        self.taken({rank: each["carried"] for rank, each in reported.items()})
        return holds

    def _broadcast_model(self, root: int, *, new: bool) -> None:
        """Broadcasts the root's whole model and settings to joining ranks."""
        group = self.channel("handover", interruptible=True)
        for bucket in self.buckets:
            message = bucket.flat.detach().to("cpu", copy=True)
            self.broadcast_values(group, message, root)
            if new:
                bucket.flat.copy_(message)
                bucket.adopt()
        if new:
            self._memories.begin_ranks()
        self.broadcast_rest(group, self.buckets, root, take=new)
        self._round_reports.hyperparameters.take(group, root, new=new)
