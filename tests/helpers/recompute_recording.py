"""The book of a rank whose job is recomputed: contributions, arrivals, and its injected death."""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recompute_program import Event
from stormtorch.collectives import Group
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.shard_state import ShardState
from stormtorch.runtime.owner.gradient_reduction import GradientReduction
from stormtorch.runtime.owner.parameter_broadcast import ParameterBroadcast
from stormtorch.runtime.owner.sharded import ShardedSession

MOST_RANKS = 32
"""Most ranks of a job."""
EVENTS = 16
"""Most events of a job."""
_ROW = struct.Struct("qqd")


class SharedProgress:
    """A page that all processes of a job share: each rank's steps, what has happened, and the step at which all end."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_ROW.size * (MOST_RANKS + 1 + EVENTS)))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)

    def report(self, place: int, steps: int, state: int = 0, seconds: float = 0.0) -> None:
        """Writes a row: of a rank its steps, what it does (1: it is paused, 2: it has ended), and for how long."""
        _ROW.pack_into(self._page, place * _ROW.size, steps, state, seconds)

    def read(self, place: int) -> tuple[int, int, float]:
        """Returns a row."""
        return _ROW.unpack_from(self._page, place * _ROW.size)

    @property
    def end(self) -> int:
        """Step at which all end; 0 until announced."""
        return self.read(MOST_RANKS)[0]

    def happen(self, number: int, steps: int, view: int = 0) -> None:
        """Writes that an event happens, at some step and in some view."""
        self.report(MOST_RANKS + 1 + number, steps, 1, view)

    def happened(self) -> list[tuple[int, int]]:
        """Returns steps and views of the events that have happened: each waits for those before it."""
        rows = [self.read(MOST_RANKS + 1 + number) for number in range(EVENTS)]
        return [(steps, int(view)) for steps, there, view in rows if there]

    def reaches(self, events: Sequence[Event], number: int, steps: int) -> bool:
        """Whether an event is next, and as many steps after the one before as its schedule says."""
        happened = self.happened()
        if len(happened) != number or steps < events[number].step:
            return False
        return not number or steps - happened[-1][0] >= events[number].step - events[number - 1].step


class RankRecording(logging.Handler):
    """Writes records to a file, each at once, so that a process that is killed leaves what it has given.

    Args:
        path: The file.
        events: What befalls the ranks.
        mine: Numbers of those that befall this one.
        board: What has happened so far.
    """

    def __init__(self, path: Path, events: Sequence[Event], mine: list[int], progress: SharedProgress) -> None:
        super().__init__(logging.INFO)
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._events, self._mine = events, mine
        self.progress = progress
        self.rank = -1
        self.order: list[Any] = []
        """Sessions, in the order in which they were prepared."""
        self._masks: dict[int, dict[str, dict[int, Any]]] = {}

    def write(self, kind: str, **what: Any) -> None:
        with self._lock:
            self._file.write(pickle.dumps({"kind": kind, "at": time.monotonic(), **what}))

    def emit(self, record: logging.LogRecord) -> None:
        self.write("log", words=record.getMessage(), level=record.levelno)

    # --- what befalls this rank ---------------------------------------------------------------------------------------

    def due(self, session: Any, point: str) -> Event | None:
        """Returns what befalls this rank at a point of the present step, once.

        Of each view, a majority must be left to agree on the next one. So what may make a member fewer, and the ranks
        have not seen yet, counts.
        """
        for number in self._mine:
            event, members = self._events[number], len(session.view.members)
            if event.point != point or members < event.members:
                continue
            unseen = sum(view >= session.view.number for _, view in self.progress.happened())
            enough = not unseen or 2 * (members - unseen - 1) > members
            if enough and self.progress.reaches(self._events, number, session.steps):
                return event
        return None

    def begin(self, event: Event, session: Any) -> None:
        """Writes that an event happens."""
        number = next(each for each in self._mine if self._events[each] is event)
        self._mine.remove(number)
        self.progress.happen(number, session.steps, session.view.number)

    def reach(self, session: Any, point: str, place: int = 0) -> None:
        """Dies here if it is time."""
        if self.order and session is not self.order[0]:
            return
        event = self.due(session, point)
        if event is not None and event.kind == "die" and place >= event.place * (point in ("bucket", "sending")):
            self.begin(event, session)
            self.die(session.steps, point)

    def die(self, steps: int, point: str) -> None:
        self.write("died", steps=steps, point=point)
        os.kill(os.getpid(), signal.SIGKILL)

    # --- what it gives and gets ---------------------------------------------------------------------------------------

    def of(self, session: Any) -> dict[str, Any]:
        number = int(session.name.rsplit("/", 1)[-1])
        return {"session": number, "round": session.membership.round, "steps": session.steps}

    def listen(self, session: Any) -> None:
        """Takes down which chunks arrive in the exchanges of the view that the session has begun."""
        masks: dict[str, dict[int, Any]] = {"up": {}, "down": {}}
        self._masks[id(session)] = masks
        for way, part in (("up", session._reduction), ("down", session._broadcast)):
            groups, links = part.groups, part.links
            part.book_session = session

            def add(group: Group, arrival: Any, links: Any = links, way: str = way, groups: Any = groups) -> None:
                index = next(place for place, each in enumerate(groups) if each is group)
                masks[way][index] = {
                    group.ranks.index(rank): arrival.mask(rank)
                    for rank in arrival.links()
                    if rank != group.transport.rank
                }
                type(links).add(links, group, arrival)

            links.add = add

    def took(self, session: Any, way: str) -> dict[int, Any]:
        return dict(self._masks[id(session)][way])

    def view(self, session: Any, **what: Any) -> None:
        """Writes down what this rank has at the beginning of a view."""
        cut = session._partitioner.now
        standby = session._standby
        self.write(
            "view",
            **self.of(session),
            number=session.view.number,
            members=session.view.members,
            base=session.view.base,
            slots=[bucket.layout.slots for bucket in session.buckets],
            elements=[bucket.layout.elements for bucket in session.buckets],
            spans=[layout.spans for layout in cut.layouts],
            per_chunk=[wire.per_chunk for wire in session._broadcast.wires],
            own=_held(session._shards.shard_state()),
            followed=None if standby is None else _held(standby.shard_state()),
            flats=[bucket.flat.clone() for bucket in session.buckets],
            **what,
        )


def _held(shard_state: ShardState) -> dict[str, Any]:
    states = {
        (bucket, piece.first, piece.count): {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in shard_state.state_of(bucket, piece).items()
        }
        for bucket, layout in enumerate(shard_state.layouts)
        for piece in layout.pieces(shard_state.shard)
    }
    return {"shard": shard_state.shard, "masters": [each.clone() for each in shard_state.masters], "states": states}


def watch(recording: RankRecording) -> None:
    """Has sessions of this process, which begin from now on, write into a book what they give and get."""
    contribute_before, sent_before = GradientReduction.start, ParameterBroadcast._published
    kind: Any = ShardedSession
    before = {name: getattr(kind, name) for name in ("_round", "_begin_view", "_tell", "gradients_final", "after_step")}
    before |= {name: getattr(kind, name) for name in ("_passed", "change")}

    def start(self: Any, bucket: Bucket) -> None:
        session = self.book_session
        recording.write("given", **recording.of(session), bucket=bucket.index, grads=bucket.grads.clone())
        contribute_before(self, bucket)
        recording.reach(session, "bucket", len(self._begun))

    def published(self: Any, bucket: Bucket, lead: float) -> torch.Tensor:
        found = sent_before(self, bucket, lead)
        session = self.book_session
        own = {"masters": bucket.masters.clone(), "values": found.clone(), "lead": lead}
        recording.write("sent", **recording.of(session), bucket=bucket.index, **own)
        recording.reach(session, "sending", len(self._begun))
        return found

    def round_(self: Any, row: Any) -> bool:
        if not before["_round"](self, row):
            return False
        means = [bucket.own_grads.clone() for bucket in self.buckets]
        recording.write(
            "round", **recording.of(self), view=self.view.number, masks=recording.took(self, "up"), means=means
        )
        recording.reach(self, "reduced")
        return True

    def begin_view(self: Any, followed: Any) -> None:
        before["_begin_view"](self, followed)
        recording.listen(self)

    def report(self: Any, cut: Any, after: Any, moved: Any, hello: Any) -> None:
        before["_tell"](self, cut, after, moved, hello)
        lacks = {"lost": moved.lost, "late": moved.late, "unequal": moved.unequal}
        recording.view(self, before=cut.members, spans_before=[each.spans for each in cut.layouts], **lacks)

    def final(self: Any, *, within: bool = False) -> None:
        grads = [bucket.step_grads.clone() for bucket in self.buckets]
        recording.reach(self, "taking")
        recording.write("final", **recording.of(self), grads=grads)
        before["gradients_final"](self, within=within)
        recording.reach(self, "stepping")

    def after_step(self: Any) -> None:
        masters = [bucket.masters.clone() for bucket in self.buckets]
        recording.write("stepped", **recording.of(self), masters=masters)
        before["after_step"](self)

    def passed(self: Any) -> None:
        before["_passed"](self)
        flats = [bucket.flat.clone() for bucket in self.buckets]
        recording.write("arrived", **recording.of(self), masks=recording.took(self, "down"), flats=flats)
        recording.reach(self, "arrived")

    def change(self: Any) -> bool:
        held = before["change"](self)
        recording.write("changed", **recording.of(self), held=held)
        return bool(held)

    GradientReduction.start, ParameterBroadcast._published = start, published  # type: ignore[method-assign]
    kind._round, kind._begin_view, kind._tell, kind.gradients_final = round_, begin_view, report, final
    kind.after_step, kind._passed, kind.change = after_step, passed, change
