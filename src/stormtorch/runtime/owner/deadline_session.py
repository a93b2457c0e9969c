"""A session under a policy with a deadline: a rank that computes slowly keeps nobody waiting.

Every rank takes part in every round, also one whose program is still computing: a *deputy*, a thread of the rank, then
makes the round in its place. It gives the gradients that are ready, zeros for the rest, steps the rank's shard, and
takes part in the broadcast, all in a copy of the parameters, so that the program's own stay as they are until its
backward ends. Its gradients then go into the next round. What comes in one step of k weighs k times (`InverseProbabilityWeights`).

The deputy acts when half of the other ranks wait and the deadline has passed, or has no chance to be met. Where the
policy gives the deadline in seconds, it acts when one other rank waits and they have passed, not before.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from statistics import mean
from typing import Any, TypeVar

import torch
from torch import nn

from stormtorch.collectives import Group
from stormtorch.errors import Closed, StormError
from stormtorch.policies.policy import OwnerPolicy
from stormtorch.runtime.handover.reports import Report
from stormtorch.runtime.handover.standby import plain_step
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.gradient_norms import Clip
from stormtorch.runtime.memory.shard_state import ShardState
from stormtorch.runtime.owner.deadlines import Deadlines, InverseProbabilityWeights
from stormtorch.runtime.owner.sharded import ShardedSession
from stormtorch.telemetry.ledger import LedgerRow

_log = logging.getLogger("stormtorch")
T = TypeVar("T")

_IDLE_S = 0.02
_LEAST_PAUSE_S = 0.001
# Steps over which a rank's share of the gradients is counted, and shares at which it is called late, and in time again.
_RATE_WINDOW = 32
_LATE, _IN_TIME = 0.75, 0.95
_JOIN_TIMEOUT_S = 1.0

_live_sessions: weakref.WeakSet[DeadlineSession] = weakref.WeakSet()


class DeadlineSession(ShardedSession):
    """A session in which a late rank's rounds are made for it.

    Args: See `Session`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: OwnerPolicy
    ) -> None:
        if hasattr(group.transport, "network"):
            raise ValueError("deadline needs real time: a simulated network has none")
        # Guards all that follows. The program's thread and the deputy never act on the session at the same time.
        self._session_lock = threading.Condition()
        self._program_calls = 0
        """How many calls of the session the program is in; the deputy does nothing meanwhile."""
        self._stand_in_active = self._awaits_view = self._step_made = self._ended = False
        self._failure: BaseException | None = None
        self._started_buckets: set[int] = set()
        """Buckets whose exchange of this round has begun."""
        self._sent_buckets: set[int] = set()
        """Buckets whose gradients of the program's present backward have been given already."""
        self._contributed_buckets: set[int] = set()
        """Buckets of which this rank gives gradients in this round."""
        self._late_gradients: dict[int, tuple[torch.Tensor, int]] = {}
        """Gradients of late backwards by bucket: their sum, and how many there are."""
        self._zeros: dict[int, torch.Tensor] = {}
        self._took_s = 0.0
        self._began_s = self._round_s = self._finished_s = time.monotonic()
        self._began_step = 0
        self._least_waiting_since_s: float | None = None
        self._versions_given: list[int] = []
        self._clips: list[Clip] = []
        """How the program clipped the gradients of its last step; the deputy does the same."""
        super().__init__(model, optimizer, group, name, policy)
        self._norms.refusal = (
            "the norm of gradients needs all ranks, and a deadline goes on without the programs of those that are "
            "late: clip by stormtorch.clip_grad_norm_, which is repeated for them, or set deadline=None"
        )
        self._norms.written = self._note_versions
        self._began_step = self.steps
        self._begin_round()
        self._begin_backward()
        _live_sessions.add(self)
        self._stand_in_thread = threading.Thread(
            target=_stand_in_loop, args=(weakref.ref(self),), name="storm-deputy", daemon=True
        )
        self._stand_in_thread.start()

    def _begin_view(self, followed: ShardState | None) -> None:
        super()._begin_view(followed)
        ranks = self._round_reports.members_group.size
        self.deadlines = Deadlines(ranks)
        self.inverse_probability = InverseProbabilityWeights(len(self.buckets), self.steps)
        self._contribution_rates: list[deque[float]] = [deque(maxlen=_RATE_WINDOW) for _ in range(ranks)]
        self._reported_late: set[int] = set()
        self._late_gradients.clear()
        self._reduction.contribution = self._contribution
        self._feedback.lateness = self._lateness

    # --- the program's thread -----------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self._round_s = time.monotonic()
        self._least_waiting_since_s = None
        self._started_buckets.clear()
        self._contributed_buckets.clear()

    def _begin_backward(self) -> None:
        self._began_s, self._began_step = time.monotonic(), self.steps
        self._sent_buckets.clear()

    @contextlib.contextmanager
    def _exclusive(self, *, restore: bool = True) -> Iterator[None]:
        """Enters a context in which the program acts on the session, and the deputy does not.

        Args:
            restore: Whether the model gets the latest parameters first: it is not computing with its own.
        """
        with self._session_lock:
            self._session_lock.wait_for(lambda: not self._stand_in_active)
            if self._failure is not None:
                raise self._failure
            self._program_calls += 1
        try:
            if restore:
                self._restore_parameters()
            yield
        finally:
            with self._session_lock:
                self._program_calls -= 1

    def _restore_parameters(self) -> None:
        if self.buckets and self.buckets[0].uses_copy:
            for bucket in self.buckets:
                bucket.switch_to_model()
            self._shards.rebind_memory()

    def _start(self, bucket: Bucket) -> None:
        with self._session_lock:
            if self._stand_in_active or self.steps != self._began_step or self._awaits_view:
                return  # too late for this round: `_finish` hands it over
            super()._start(bucket)
            self._started_buckets.add(bucket.index)
            self._sent_buckets.add(bucket.index)

    def _finish(self) -> None:
        with self._exclusive(restore=False):
            self._finished_s = time.monotonic()
            self._took_s = self._finished_s - self._began_s
            if self._step_pending:
                raise StormError(
                    "a deadline needs a step after every backward() that exchanges gradients: add gradients up "
                    "under no_sync(), or set deadline=None"
                )
            if self._awaits_view:
                # A view begins, which only the program can do. The deputy's round was given up.
                self._awaits_view = False
                self._restore_parameters()
                for bucket in self.buckets:
                    self._reduction.start(bucket)
            elif self.steps != self._began_step:
                self._keep_late_gradients()
                self._step_made = self._norms.idle = True
                return
            self._program_calls += 1  # until the step has ended
            try:
                super()._finish()
            except BaseException:
                self._program_calls -= 1
                raise

    def _keep_late_gradients(self) -> None:
        """Keeps the gradients of a backward that came too late, for the next round."""
        if not self._reduction.finite():
            self._row.events.append("the gradients of a late backward are not finite, and are dropped")
            return
        for bucket in self.buckets:
            if bucket.index in self._sent_buckets:
                continue
            if bucket.is_staged:
                for moment in bucket.fetch(bucket.host_grads, bucket.grads):
                    moment.synchronize()
            total, count = self._late_gradients.get(bucket.index, (None, 0))
            total = bucket.host_grads.clone() if total is None else total.add_(bucket.host_grads)
            self._late_gradients[bucket.index] = total, count + 1

    def before_step(self, *, closure: bool) -> None:
        """Waits for gradients. The step of a rank that is late does nothing: its deputy has made it."""
        if closure:
            raise StormError("a deadline takes no closure: compute gradients before step(), or set deadline=None")
        self._gradients.complete()
        self._clips, self._norms.clips = self._norms.clips, []
        if self._step_made:
            with self._exclusive():
                self._shards.clear_gradients()
                self._shards.begin_step()
                self._program_calls += 1
            return
        changed = self._versions_given != [bucket.own_grads._version for bucket in self.buckets]
        if changed or self._gradients.settle() or self._gradients.present(self._used) != self._used:
            raise StormError(
                "averaged gradients were changed or removed between backward() and step(), as a GradScaler does: "
                "under a deadline, the step of a late rank is made without its program; set deadline=None"
            )
        self._ready_step()

    def gradients_final(self, *, within: bool = False) -> None:
        """Takes the gradients for the standby, unless the deputy has made this step."""
        if not self._step_made:
            super().gradients_final(within=within)

    def settle_gradients(self) -> None:
        """Does nothing: what a program changes was refused, and a deputy's gradients are not the program's."""

    @torch.no_grad()
    def after_step(self) -> None:
        """Begins the broadcast, or adopts the parameters of the steps that the deputy has made."""
        try:
            if self._step_made:
                self._step_made = self._norms.idle = False
                self._shards.end_step()
                for step in range(self._began_step + 1, self.steps + 1):
                    for callback in self._on_step:
                        callback(step)
                self._serve()
            else:
                super().after_step()
                self.deadlines.record_overhead(time.monotonic() - self._finished_s)
                self._begin_round()
            self._begin_backward()
        finally:
            with self._session_lock:
                self._program_calls -= 1

    def _serve(self) -> None:
        """Takes part in calls that others have begun: a late rank never waits long enough to do so otherwise."""
        server = self.group.transport.collective_servers.requested()
        if server is not None:
            server.serve()

    def stepped(self) -> None:
        """Calls back, unless this is the deputy's thread: the program is told of these steps at its own next step."""
        if not self._stand_in_active:
            super().stepped()

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients of the program; not those of a step that the deputy is about to make."""
        with self._exclusive(restore=False):
            super().zero_grad(set_to_none)

    def _call(self, call: int, work: Callable[[object], T]) -> T:
        with self._exclusive():
            return super()._call(call, work)

    def change(self) -> bool:
        """Begins the latest view; see `Session.change`."""
        with self._exclusive():
            held = super().change()
            self._begin_round()
            self._began_step = self.steps
            return held

    def loaded(self) -> None:
        """Copies loaded parameters to the float32 values that the optimizer works on."""
        with self._exclusive():
            super().loaded()

    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a state dict of the whole optimizer."""
        with self._exclusive():
            return super().local_state(whole)

    def is_between_steps(self) -> bool:
        """Whether this rank is between two steps, and its deputy makes none."""
        return super().is_between_steps() and not self._stand_in_active

    # --- a round, by whomever -----------------------------------------------------------------------------------------

    def _contribution(self, bucket: Bucket) -> torch.Tensor:
        """Returns what this rank gives of a bucket in this round, weighed by the inverse of its chance to be there."""
        handed = self._late_gradients.pop(bucket.index, None)
        if self._stand_in_active and handed is None:
            if bucket.index not in self._zeros:
                self._zeros[bucket.index] = torch.zeros_like(bucket.host_grads, pin_memory=False)
            return self._zeros[bucket.index]
        self._contributed_buckets.add(bucket.index)
        weight = self.inverse_probability.weight(bucket.index, self.steps)
        if handed is None:
            return bucket.host_grads if weight == 1.0 else bucket.host_grads * weight
        total, count = handed
        if not self._stand_in_active:
            total, count = total.add_(bucket.host_grads), count + 1
        return total.mul_(weight / count)

    def _deadline(self) -> tuple[float | None, bool]:
        """Returns the deadline of this round, None while it is not known or nobody is late; and whether it is given."""
        planned = self.policy.deadline_at(self.steps)
        return (self.deadlines.deadline_s, False) if planned == "auto" else (planned, True)

    def _lateness(self) -> tuple[float, float]:
        took_s = self._took_s
        if self._stand_in_active:
            took_s = max(took_s, time.monotonic() - self._began_s)
        return len(self._contributed_buckets) / len(self.buckets), took_s

    def _is_finite(self) -> bool:
        # The deputy gives only what was looked at before.
        return self._stand_in_active or super()._is_finite()

    def _set_gradients(self, used_P: torch.Tensor, not_finite: bool) -> None:
        if not self._stand_in_active:
            super()._set_gradients(used_P, not_finite)
            self._note_versions()
            return
        self._used = used_P.tolist()
        self._shards.assign_gradients(self._used, finite=not not_finite)

    def _note_versions(self) -> None:
        self._versions_given = [bucket.own_grads._version for bucket in self.buckets]

    def _on_reports(self, reports: Mapping[int, Report], row: LedgerRow) -> None:
        """Learns from a round how long ranks take, and notes who was late."""
        given, took_s = self._lateness()
        all_given = {
            self._round_reports.members_group.rank: given,
            **{peer: each.given for peer, each in reports.items()},
        }
        all_took = {
            self._round_reports.members_group.rank: took_s,
            **{peer: each.took_s for peer, each in reports.items()},
        }
        row.deadline_s = self._deadline()[0]
        self.deadlines.learn(all_took)
        labels = self.labels()
        row.late = {labels[peer]: each for peer, each in sorted(all_given.items()) if each < 1.0}
        row.effective_batch *= sum(all_given.values()) / len(all_given)
        for peer, each in all_given.items():
            self._contribution_rates[peer].append(each)
            self._note_straggler(peer, labels[peer], row)

    def _note_straggler(self, peer: int, label: int, row: LedgerRow) -> None:
        shares = self._contribution_rates[peer]
        if len(shares) < _RATE_WINDOW:
            return
        share = mean(shares)
        if peer not in self._reported_late and share < _LATE:
            self._reported_late.add(peer)
            words = (
                f"rank {label} is late: its gradients are in {share:.0%} of the steps, as they take it "
                f"{self.deadlines.usual_s(peer):.3g} s and the middle rank {self.deadlines.typical_s:.3g} s"
            )
        elif peer in self._reported_late and share > _IN_TIME:
            self._reported_late.discard(peer)
            words = f"rank {label} is in time again"
        else:
            return
        row.events.append(words)
        if self._round_reports.members_group.rank == 0:
            _log.warning("rank %d: %s", self.label(self.group.transport.rank), words)

    # --- the deputy ---------------------------------------------------------------------------------------------------

    def _poll(self) -> float:
        """Makes a round in the program's place if that is due. Returns the seconds until it should look again."""
        with self._session_lock:
            pause_s = self._until_due()
            if pause_s > 0.0:
                return pause_s
            self._stand_in_active = True
        try:
            self._stand_in_step()
        except BaseException as error:
            self._failure = error
        finally:
            with self._session_lock:
                self._stand_in_active = False
                self._session_lock.notify_all()
        return _LEAST_PAUSE_S

    def _until_due(self) -> float:
        (deadline_s, given), now = self._deadline(), time.monotonic()
        if self._program_calls or self._awaits_view or self._failure is not None or deadline_s is None:
            return _IDLE_S
        typical_s = self.deadlines.typical_s
        usual_s = self.deadlines.usual_s(self._round_reports.members_group.rank)
        # A deadline that is given is used to its end: layers that are reached meanwhile count.
        cannot_meet = not given and self._began_s + usual_s > self._round_s + deadline_s
        early_s = self._round_s + min(0.5 * typical_s, deadline_s) - now
        if early_s > 0.0:
            return min(early_s, _IDLE_S)
        pause_s = min(max(_LEAST_PAUSE_S, 0.01 * deadline_s), _IDLE_S)
        # Others may be at something else, as an evaluation: the round begins when half of them wait in it. A deadline
        # that is given may be one that few meet.
        least_waiting = 1 if given else max(1, self._round_reports.members_group.size // 2)
        if len(self._round_reports.peers_waiting()) < least_waiting:
            return pause_s
        if self._least_waiting_since_s is None:
            self._least_waiting_since_s = now
        overdue = now >= max(self._round_s + deadline_s, self._least_waiting_since_s + deadline_s - typical_s)
        return 0.0 if cannot_meet or overdue else pause_s

    @torch.no_grad()
    def _stand_in_step(self) -> None:
        for bucket in self.buckets:
            bucket.switch_to_copy()
        self._shards.rebind_memory()
        self._row = LedgerRow(self.steps, events=self._row.events)
        self._exchanging = True
        try:
            for bucket in self.buckets:
                if bucket.index not in self._started_buckets:
                    self._own_gradients_change(bucket)
                    self._reduction.start(bucket)
            if not self._round(self._row):
                self._awaits_view = True
                return
        finally:
            self._exchanging = False
        for clip in self._clips:
            self._norms.clip(clip)
        self._ready_step()
        super().gradients_final()
        with self._shards.without_personal():  # the program may be computing with them
            plain_step(self.optimizer)()
        super().after_step()
        self._begin_round()


def _stand_in_loop(found: weakref.ref[DeadlineSession]) -> None:
    """Looks again and again whether a session needs its deputy, as long as the session lives."""
    while (session := found()) is not None and not session._ended:
        try:
            pause_s = session._poll()
        except Closed:
            return
        del session
        time.sleep(pause_s)


@atexit.register
def _join_stand_ins() -> None:
    """Ends all deputies: Python must not stop a thread while it runs native code."""
    for session in list(_live_sessions):
        session._ended = True
        session._stand_in_thread.join(_JOIN_TIMEOUT_S)
