"""A session with a deadline per round: no rank waits for a straggler.

Every rank takes part in every round. Where a rank's program is still computing, a *stand-in*, a background thread of
that rank, makes the round instead: it contributes the gradients that are ready and zeros for the rest, steps the rank's
shard, and takes part in the broadcast. It works on a copy of the parameters, so the program's own do not change until
its backward ends. The late gradients go into the next round. Gradients that arrive in one step out of k are weighed by
k (`InverseProbabilityWeights`).

The stand-in acts once half of the other ranks wait and the deadline has passed or can no longer be met. If the policy
sets the deadline in seconds, it acts once that time has passed and one other rank waits, and never earlier.
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
# Steps over which a rank's contribution rate is measured; rates below and above which it counts as late, and on time.
_RATE_WINDOW = 32
_LATE, _IN_TIME = 0.75, 0.95
_JOIN_TIMEOUT_S = 1.0

_live_sessions: weakref.WeakSet[DeadlineSession] = weakref.WeakSet()


class DeadlineSession(ShardedSession):
    """A sharded session in which a stand-in makes the rounds of a late rank.

    Args: See `Session`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: OwnerPolicy
    ) -> None:
        if hasattr(group.transport, "network"):
            raise ValueError("deadline needs real time: a simulated network has none")
        # Guards all fields below. The program's thread and the stand-in never use the session at the same time.
        self._session_lock = threading.Condition()
        self._program_calls = 0
        """Number of session calls that the program is in; while there is one, the stand-in does nothing."""
        self._stand_in_active = self._awaits_view = self._step_made = self._ended = False
        self._failure: BaseException | None = None
        self._started_buckets: set[int] = set()
        """Buckets whose exchange has begun in this round."""
        self._sent_buckets: set[int] = set()
        """Buckets whose gradients of the program's current backward have been sent."""
        self._contributed_buckets: set[int] = set()
        """Buckets for which this rank contributes gradients in this round."""
        self._late_gradients: dict[int, tuple[torch.Tensor, int]] = {}
        """Gradients of late backwards, by bucket: their sum and their number."""
        self._zeros: dict[int, torch.Tensor] = {}
        self._took_s = 0.0
        self._began_s = self._round_s = self._finished_s = time.monotonic()
        self._began_step = 0
        self._least_waiting_since_s: float | None = None
        self._versions_given: list[int] = []
        self._clips: list[Clip] = []
        """How the program clipped the gradients of its last step; the stand-in repeats it."""
        super().__init__(model, optimizer, group, name, policy)
        self._norms.refusal = (
            "the norm of gradients needs all ranks, but under a deadline the round of a late rank is made without its "
            "program: clip by stormtorch.clip_grad_norm_, which the late rank's stand-in repeats, or set deadline=None"
        )
        self._norms.written = self._note_versions
        self._began_step = self.steps
        self._begin_round()
        self._begin_backward()
        _live_sessions.add(self)
        self._stand_in_thread = threading.Thread(
            target=_stand_in_loop, args=(weakref.ref(self),), name="storm-stand-in", daemon=True
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
        """Enters a context in which the program uses the session, and the stand-in does not.

        Args:
            restore: Whether to give the model the latest parameters first. Only while it is not computing.
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
                return  # too late for this round: `_finish` keeps the gradients for the next one
            super()._start(bucket)
            self._started_buckets.add(bucket.index)
            self._sent_buckets.add(bucket.index)

    def _finish(self) -> None:
        with self._exclusive(restore=False):
            self._finished_s = time.monotonic()
            self._took_s = self._finished_s - self._began_s
            if self._step_pending:
                raise StormError(
                    "a deadline needs a step after every backward() that exchanges gradients: accumulate gradients "
                    "under no_sync(), or set deadline=None"
                )
            if self._awaits_view:
                # Only the program can begin a view, so the stand-in's round was aborted.
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
        """Keeps the gradients of a backward that missed the deadline, for the next round."""
        if not self._reduction.finite():
            self._row.events.append("the gradients of a late backward are not finite and were dropped")
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
        """Waits for gradients. On a late rank, the step does nothing: the stand-in has made it."""
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
                "under a deadline, the step of a late rank is made without its program, which cannot repeat that "
                "change. Set deadline=None"
            )
        self._ready_step()

    def gradients_final(self, *, within: bool = False) -> None:
        """Passes the gradients to the standby, unless the stand-in has made this step."""
        if not self._step_made:
            super().gradients_final(within=within)

    def settle_gradients(self) -> None:
        """Does nothing: `before_step` refuses changed gradients, and the stand-in's are not visible to the program."""

    @torch.no_grad()
    def after_step(self) -> None:
        """Begins the broadcast, or adopts the parameters of the steps that the stand-in has made."""
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
        """Serves collectives that other ranks have started: a late rank never waits long enough to do so otherwise."""
        server = self.group.transport.collective_servers.requested()
        if server is not None:
            server.serve()

    def stepped(self) -> None:
        """Runs the `on_step` callbacks, except for a stand-in's step: the program runs those at its next own step."""
        if not self._stand_in_active:
            super().stepped()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the program's gradients, but not those of a step that the stand-in is about to make."""
        with self._exclusive(restore=False):
            super().zero_grad(set_to_none)

    def _call(self, call: int, work: Callable[[object], T]) -> T:
        with self._exclusive():
            return super()._call(call, work)

    def change(self) -> bool:
        """Applies the latest view; see `Session.change`."""
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
        """Returns this rank's shard of a state dict of the whole optimizer."""
        with self._exclusive():
            return super().local_state(whole)

    def is_between_steps(self) -> bool:
        """Whether this rank is between two steps, and its stand-in makes none."""
        return super().is_between_steps() and not self._stand_in_active

    # --- a round, made by the program or by the stand-in --------------------------------------------------------------

    def _contribution(self, bucket: Bucket) -> torch.Tensor:
        """Returns this rank's contribution to a bucket in this round, weighed by the inverse of its probability."""
        late = self._late_gradients.pop(bucket.index, None)
        if self._stand_in_active and late is None:
            if bucket.index not in self._zeros:
                self._zeros[bucket.index] = torch.zeros_like(bucket.host_grads, pin_memory=False)
            return self._zeros[bucket.index]
        self._contributed_buckets.add(bucket.index)
        weight = self.inverse_probability.weight(bucket.index, self.steps)
        if late is None:
            return bucket.host_grads if weight == 1.0 else bucket.host_grads * weight
        total, count = late
        if not self._stand_in_active:
            total, count = total.add_(bucket.host_grads), count + 1
        return total.mul_(weight / count)

    def _deadline(self) -> tuple[float | None, bool]:
        """Returns the deadline of this round, None if there is none yet; and whether the policy sets it in seconds."""
        planned = self.policy.deadline_at(self.steps)
        return (self.deadlines.deadline_s, False) if planned == "auto" else (planned, True)

    def _lateness(self) -> tuple[float, float]:
        took_s = self._took_s
        if self._stand_in_active:
            took_s = max(took_s, time.monotonic() - self._began_s)
        return len(self._contributed_buckets) / len(self.buckets), took_s

    def _is_finite(self) -> bool:
        # The stand-in contributes only gradients that were checked before.
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
        """Learns how long each rank took in a round, and records which ranks were late."""
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
                f"rank {label} is late: it contributes gradients to {share:.0%} of the steps. Computing them takes it "
                f"{self.deadlines.usual_s(peer):.3g} s, and the median rank {self.deadlines.typical_s:.3g} s"
            )
        elif peer in self._reported_late and share > _IN_TIME:
            self._reported_late.discard(peer)
            words = f"rank {label} is on time again"
        else:
            return
        row.events.append(words)
        if self._round_reports.members_group.rank == 0:
            _log.warning("rank %d: %s", self.label(self.group.transport.rank), words)

    # --- the stand-in -------------------------------------------------------------------------------------------------

    def _poll(self) -> float:
        """Makes a round instead of the program if one is due. Returns the seconds until the next poll."""
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
        # A deadline in seconds is always waited for in full: layers that become ready meanwhile count.
        cannot_meet = not given and self._began_s + usual_s > self._round_s + deadline_s
        early_s = self._round_s + min(0.5 * typical_s, deadline_s) - now
        if early_s > 0.0:
            return min(early_s, _IDLE_S)
        pause_s = min(max(_LEAST_PAUSE_S, 0.01 * deadline_s), _IDLE_S)
        # Other ranks may be busy elsewhere, such as in an evaluation, so the round begins only when half of them wait
        # in it. A deadline in seconds may be too short for most ranks, so there one waiting rank is enough.
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
    """Runs a session's stand-in: polls until the session is gone. Body of the background thread."""
    while (session := found()) is not None and not session._ended:
        try:
            pause_s = session._poll()
        except Closed:
            return
        del session
        time.sleep(pause_s)


@atexit.register
def _join_stand_ins() -> None:
    """Joins all stand-in threads at exit: Python must not stop a thread while it runs native code."""
    for session in list(_live_sessions):
        session._ended = True
        session._stand_in_thread.join(_JOIN_TIMEOUT_S)
