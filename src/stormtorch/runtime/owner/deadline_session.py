"""A session under a policy with a deadline: a rank that computes slowly keeps nobody waiting.

Every rank takes part in every round, also one whose program is still computing: a *deputy*, a thread of the rank, then
makes the round in its place. It gives the gradients that are ready, zeros for the rest, steps the rank's shard, and
takes part in the broadcast, all in a copy of the parameters, so that the program's own stay as they are until its
backward ends. Its gradients then go into the next round. What comes in one step of k weighs k times (`Chances`).

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
from stormtorch.runtime.memory.shard_state import Holding
from stormtorch.runtime.owner.deadlines import Chances, Deadlines
from stormtorch.runtime.owner.sharded import ShardedSession
from stormtorch.telemetry.ledger import Row

_log = logging.getLogger("stormtorch")
T = TypeVar("T")

_IDLE_S = 0.02
_LEAST_PAUSE_S = 0.001
# Steps over which a rank's share of the gradients is counted, and shares at which it is called late, and in time again.
_SHARES = 32
_LATE, _IN_TIME = 0.75, 0.95
_LAST_MOMENT_S = 1.0

_watched: weakref.WeakSet[TimedSession] = weakref.WeakSet()


class TimedSession(ShardedSession):
    """A session in which a late rank's rounds are made for it.

    Args: See `Session`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: OwnerPolicy
    ) -> None:
        if hasattr(group.transport, "network"):
            raise ValueError("deadline needs real time: a simulated network has none")
        # Guards all that follows. The program's thread and the deputy never act on the session at the same time.
        self._turn = threading.Condition()
        self._acting = 0
        """How many calls of the session the program is in; the deputy does nothing meanwhile."""
        self._deputising = self._stalled = self._skips = self._ended = False
        self._failure: BaseException | None = None
        self._posted: set[int] = set()
        """Buckets whose exchange of this round has begun."""
        self._spent: set[int] = set()
        """Buckets whose gradients of the program's present backward have been given already."""
        self._gifts: set[int] = set()
        """Buckets of which this rank gives gradients in this round."""
        self._handed: dict[int, tuple[torch.Tensor, int]] = {}
        """Gradients of late backwards by bucket: their sum, and how many there are."""
        self._zeros: dict[int, torch.Tensor] = {}
        self._took_s = 0.0
        self._began_s = self._round_s = self._finished_s = time.monotonic()
        self._began_step = 0
        self._crowd_s: float | None = None
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
        _watched.add(self)
        self._deputy = threading.Thread(target=_watch, args=(weakref.ref(self),), name="storm-deputy", daemon=True)
        self._deputy.start()

    def _begin_view(self, followed: Holding | None) -> None:
        super()._begin_view(followed)
        ranks = self._rounds.here.size
        self.deadlines = Deadlines(ranks)
        self.chances = Chances(len(self.buckets), self.steps)
        self._shares: list[deque[float]] = [deque(maxlen=_SHARES) for _ in range(ranks)]
        self._told_late: set[int] = set()
        self._handed.clear()
        self._reduction.offered = self._offer
        self._feedback.lateness = self._lateness

    # --- the program's thread -----------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self._round_s = time.monotonic()
        self._crowd_s = None
        self._posted.clear()
        self._gifts.clear()

    def _begin_backward(self) -> None:
        self._began_s, self._began_step = time.monotonic(), self.steps
        self._spent.clear()

    @contextlib.contextmanager
    def _acts(self, *, at_home: bool = True) -> Iterator[None]:
        """Enters a context in which the program acts on the session, and the deputy does not.

        Args:
            at_home: Whether the model gets the latest parameters first: it is not computing with its own.
        """
        with self._turn:
            self._turn.wait_for(lambda: not self._deputising)
            if self._failure is not None:
                raise self._failure
            self._acting += 1
        try:
            if at_home:
                self._come_back()
            yield
        finally:
            with self._turn:
                self._acting -= 1

    def _come_back(self) -> None:
        if self.buckets and self.buckets[0].is_away:
            for bucket in self.buckets:
                bucket.come_back()
            self._shards.rehouse()

    def _start(self, bucket: Bucket) -> None:
        with self._turn:
            if self._deputising or self.steps != self._began_step or self._stalled:
                return  # too late for this round: `_finish` hands it over
            super()._start(bucket)
            self._posted.add(bucket.index)
            self._spent.add(bucket.index)

    def _finish(self) -> None:
        with self._acts(at_home=False):
            self._finished_s = time.monotonic()
            self._took_s = self._finished_s - self._began_s
            if self._unstepped:
                raise StormError(
                    "a deadline needs a step after every backward() that exchanges gradients: add gradients up "
                    "under no_sync(), or set deadline=None"
                )
            if self._stalled:
                # A view begins, which only the program can do. The deputy's round was given up.
                self._stalled = False
                self._come_back()
                for bucket in self.buckets:
                    self._reduction.start(bucket)
            elif self.steps != self._began_step:
                self._hand_over_gradients()
                self._skips = self._norms.idle = True
                return
            self._acting += 1  # until the step has ended
            try:
                super()._finish()
            except BaseException:
                self._acting -= 1
                raise

    def _hand_over_gradients(self) -> None:
        """Keeps the gradients of a backward that came too late, for the next round."""
        if not self._reduction.finite():
            self._row.events.append("the gradients of a late backward are not finite, and are dropped")
            return
        for bucket in self.buckets:
            if bucket.index in self._spent:
                continue
            if bucket.apart:
                for moment in bucket.fetch(bucket.host_grads, bucket.grads):
                    moment.synchronize()
            total, count = self._handed.get(bucket.index, (None, 0))
            total = bucket.host_grads.clone() if total is None else total.add_(bucket.host_grads)
            self._handed[bucket.index] = total, count + 1

    def before_step(self, *, closure: bool) -> None:
        """Waits for gradients. The step of a rank that is late does nothing: its deputy has made it."""
        if closure:
            raise StormError("a deadline takes no closure: compute gradients before step(), or set deadline=None")
        self._gradients.complete()
        self._clips, self._norms.clips = self._norms.clips, []
        if self._skips:
            with self._acts():
                self._shards.clear_gradients()
                self._shards.begin_step()
                self._acting += 1
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
        if not self._skips:
            super().gradients_final(within=within)

    def settle_gradients(self) -> None:
        """Does nothing: what a program changes was refused, and a deputy's gradients are not the program's."""

    @torch.no_grad()
    def after_step(self) -> None:
        """Begins the broadcast, or adopts the parameters of the steps that the deputy has made."""
        try:
            if self._skips:
                self._skips = self._norms.idle = False
                self._shards.end_step()
                for step in range(self._began_step + 1, self.steps + 1):
                    for callback in self._on_step:
                        callback(step)
                self._serve()
            else:
                super().after_step()
                self.deadlines.passed(time.monotonic() - self._finished_s)
                self._begin_round()
            self._begin_backward()
        finally:
            with self._turn:
                self._acting -= 1

    def _serve(self) -> None:
        """Takes part in calls that others have begun: a late rank never waits long enough to do so otherwise."""
        server = self.group.transport.servers.awaited()
        if server is not None:
            server.serve()

    def stepped(self) -> None:
        """Calls back, unless this is the deputy's thread: the program is told of these steps at its own next step."""
        if not self._deputising:
            super().stepped()

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients of the program; not those of a step that the deputy is about to make."""
        with self._acts(at_home=False):
            super().zero_grad(set_to_none)

    def _call(self, call: int, work: Callable[[object], T]) -> T:
        with self._acts():
            return super()._call(call, work)

    def change(self) -> bool:
        """Begins the latest view; see `Session.change`."""
        with self._acts():
            held = super().change()
            self._begin_round()
            self._began_step = self.steps
            return held

    def loaded(self) -> None:
        """Copies loaded parameters to the float32 values that the optimizer works on."""
        with self._acts():
            super().loaded()

    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a state dict of the whole optimizer."""
        with self._acts():
            return super().local_state(whole)

    def at_rest(self) -> bool:
        """Whether this rank is between two steps, and its deputy makes none."""
        return super().at_rest() and not self._deputising

    # --- a round, by whomever -----------------------------------------------------------------------------------------

    def _offer(self, bucket: Bucket) -> torch.Tensor:
        """Returns what this rank gives of a bucket in this round, weighed by the inverse of its chance to be there."""
        handed = self._handed.pop(bucket.index, None)
        if self._deputising and handed is None:
            if bucket.index not in self._zeros:
                self._zeros[bucket.index] = torch.zeros_like(bucket.host_grads, pin_memory=False)
            return self._zeros[bucket.index]
        self._gifts.add(bucket.index)
        weight = self.chances.weight(bucket.index, self.steps)
        if handed is None:
            return bucket.host_grads if weight == 1.0 else bucket.host_grads * weight
        total, count = handed
        if not self._deputising:
            total, count = total.add_(bucket.host_grads), count + 1
        return total.mul_(weight / count)

    def _deadline(self) -> tuple[float | None, bool]:
        """Returns the deadline of this round, None while it is not known or nobody is late; and whether it is given."""
        planned = self.policy.deadline_at(self.steps)
        return (self.deadlines.deadline_s, False) if planned == "auto" else (planned, True)

    def _lateness(self) -> tuple[float, float]:
        took_s = self._took_s
        if self._deputising:
            took_s = max(took_s, time.monotonic() - self._began_s)
        return len(self._gifts) / len(self.buckets), took_s

    def _is_finite(self) -> bool:
        # The deputy gives only what was looked at before.
        return self._deputising or super()._is_finite()

    def _give(self, used_P: torch.Tensor, not_finite: bool) -> None:
        if not self._deputising:
            super()._give(used_P, not_finite)
            self._note_versions()
            return
        self._used = used_P.tolist()
        self._shards.give_gradients(self._used, finite=not not_finite)

    def _note_versions(self) -> None:
        self._versions_given = [bucket.own_grads._version for bucket in self.buckets]

    def _hear(self, reports: Mapping[int, Report], row: Row) -> None:
        """Learns from a round how long ranks take, and notes who was late."""
        given, took_s = self._lateness()
        all_given = {self._rounds.here.rank: given, **{peer: each.given for peer, each in reports.items()}}
        all_took = {self._rounds.here.rank: took_s, **{peer: each.took_s for peer, each in reports.items()}}
        row.deadline_s = self._deadline()[0]
        self.deadlines.learn(all_took)
        labels = self.labels()
        row.late = {labels[peer]: each for peer, each in sorted(all_given.items()) if each < 1.0}
        row.effective_batch *= sum(all_given.values()) / len(all_given)
        for peer, each in all_given.items():
            self._shares[peer].append(each)
            self._note_straggler(peer, labels[peer], row)

    def _note_straggler(self, peer: int, label: int, row: Row) -> None:
        shares = self._shares[peer]
        if len(shares) < _SHARES:
            return
        share = mean(shares)
        if peer not in self._told_late and share < _LATE:
            self._told_late.add(peer)
            words = (
                f"rank {label} is late: its gradients are in {share:.0%} of the steps, as they take it "
                f"{self.deadlines.usual_s(peer):.3g} s and the middle rank {self.deadlines.typical_s:.3g} s"
            )
        elif peer in self._told_late and share > _IN_TIME:
            self._told_late.discard(peer)
            words = f"rank {label} is in time again"
        else:
            return
        row.events.append(words)
        if self._rounds.here.rank == 0:
            _log.warning("rank %d: %s", self.label(self.group.transport.rank), words)

    # --- the deputy ---------------------------------------------------------------------------------------------------

    def _look(self) -> float:
        """Makes a round in the program's place if that is due. Returns the seconds until it should look again."""
        with self._turn:
            pause_s = self._until_due()
            if pause_s > 0.0:
                return pause_s
            self._deputising = True
        try:
            self._deputise()
        except BaseException as error:
            self._failure = error
        finally:
            with self._turn:
                self._deputising = False
                self._turn.notify_all()
        return _LEAST_PAUSE_S

    def _until_due(self) -> float:
        (deadline_s, given), now = self._deadline(), time.monotonic()
        if self._acting or self._stalled or self._failure is not None or deadline_s is None:
            return _IDLE_S
        typical_s = self.deadlines.typical_s
        usual_s = self.deadlines.usual_s(self._rounds.here.rank)
        # A deadline that is given is used to its end: layers that are reached meanwhile count.
        hopeless = not given and self._began_s + usual_s > self._round_s + deadline_s
        early_s = self._round_s + min(0.5 * typical_s, deadline_s) - now
        if early_s > 0.0:
            return min(early_s, _IDLE_S)
        pause_s = min(max(_LEAST_PAUSE_S, 0.01 * deadline_s), _IDLE_S)
        # Others may be at something else, as an evaluation: the round begins when half of them wait in it. A deadline
        # that is given may be one that few meet.
        crowd = 1 if given else max(1, self._rounds.here.size // 2)
        if len(self._rounds.waiting()) < crowd:
            return pause_s
        if self._crowd_s is None:
            self._crowd_s = now
        overdue = now >= max(self._round_s + deadline_s, self._crowd_s + deadline_s - typical_s)
        return 0.0 if hopeless or overdue else pause_s

    @torch.no_grad()
    def _deputise(self) -> None:
        for bucket in self.buckets:
            bucket.go_away()
        self._shards.rehouse()
        self._row = Row(self.steps, events=self._row.events)
        self._exchanging = True
        try:
            for bucket in self.buckets:
                if bucket.index not in self._posted:
                    self._own_gradients_change(bucket)
                    self._reduction.start(bucket)
            if not self._round(self._row):
                self._stalled = True
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


def _watch(found: weakref.ref[TimedSession]) -> None:
    """Looks again and again whether a session needs its deputy, as long as the session lives."""
    while (session := found()) is not None and not session._ended:
        try:
            pause_s = session._look()
        except Closed:
            return
        del session
        time.sleep(pause_s)


@atexit.register
def _end() -> None:
    """Ends all deputies: Python must not stop a thread while it runs native code."""
    for session in list(_watched):
        session._ended = True
        session._deputy.join(_LAST_MOMENT_S)
