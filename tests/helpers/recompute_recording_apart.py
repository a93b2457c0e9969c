"""The book of a rank that trains a model of its own (DiLoCo): what it gives, what owners make of it, and what comes."""

from __future__ import annotations

import threading
from typing import Any

import torch

from recompute_recording import RankRecording
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.rank.averages import Averages
from stormtorch.runtime.rank.model_session import ModelSession

MEMORIES = ("anchor", "speed")


def view(recording: RankRecording, session: Any, *, held: bool) -> None:
    """Writes down what this rank has at the beginning of a view."""
    memories = session._memories.held
    place = memories.partition.members.index(recording.rank)
    stores = {"own": memories.owned, "followed": memories.followed}
    recording.write(
        "view",
        **recording.of(session),
        number=session.view.number,
        members=session.view.members,
        base=session.view.base,
        held=held,
        place=place,
        slots=[bucket.layout.slots for bucket in session.buckets],
        elements=[bucket.layout.elements for bucket in session.buckets],
        spans=[layout.spans for layout in memories.partition.layouts],
        per_chunk=[wire.per_chunk for wire in session._averages._wires],
        flats=[bucket.flat.clone() for bucket in session.buckets],
        **{
            what: [{name: each.vector(name).clone() for name in MEMORIES} for each in found]
            for what, found in stores.items()
        },
    )


def watch(recording: RankRecording) -> None:
    """Has sessions of this process that average models write into a book what they give and get."""
    kind, entering = ModelSession, ModelSession._try_view
    start_before, finish_before, take_before = Averages.start, Averages.finish, Averages._take
    give_before, update_before, view_before = Averages._send_answer, Averages._update, kind._begin_view
    follow_before = Averages._send_to_standby
    now = threading.local()

    def about(averages: Any, round_: int) -> dict[str, Any]:
        number = recording.of(averages.book_session)["session"]
        return {"session": number, "round": round_, "view": averages.book_view}

    def begin_view(self: Any) -> None:
        view_before(self)
        self._averages.book_session, self._averages.book_view = self, self.view.number

    def enter(self: Any, latest: Any) -> bool | None:
        held = entering(self, latest)
        if held is not None:
            view(recording, self, held=held)
        return held

    def start(self: Any, bucket: Bucket, group: Any, participation: Any, seed: int = 0) -> None:
        number = self._memories.call.round
        recording.write("given", **about(self, number), bucket=bucket.index, values=bucket.flat.clone())
        start_before(self, bucket, group, participation, seed)
        self._rounds[bucket.index].book_round = number
        recording.reach(self.book_session, "bucket", len(self._rounds))

    def give_back(self: Any, bucket: Bucket, round_: Any, call: Any) -> Any:
        now.bucket, now.round, now.call = bucket, round_, call
        try:
            return give_before(self, bucket, round_, call)
        finally:
            now.bucket = None

    def about_mean(self: Any, bucket: Bucket, mean: torch.Tensor) -> dict[str, Any]:
        ranks = now.round.group.ranks
        masks = {
            ranks.index(rank): up.mask(rank) for up in now.round.up for rank in up.links() if rank != recording.rank
        }
        return {**about(self, now.call.round), "bucket": bucket.index, "masks": masks, "mean": mean.clone()}

    def let_follow(self: Any, bucket: Bucket, round_: Any, combined: torch.Tensor) -> Any:
        recording.write("combined", **about_mean(self, bucket, combined))
        begun = follow_before(self, bucket, round_, combined)
        if recording.due(self.book_session, "followed") is not None:
            begun[0].wait()
            recording.reach(self.book_session, "followed")
        return begun

    def update(self: Any, memory: Any, per_chunk: int, combined: torch.Tensor) -> torch.Tensor:
        mean = combined.clone()
        found = update_before(self, memory, per_chunk, combined)
        bucket = getattr(now, "bucket", None)
        if bucket is not None:
            recording.write("updated", **about_mean(self, bucket, mean), answer=found.clone())
        return found

    def finish(self: Any, bucket: Bucket) -> None:
        number = self._rounds[bucket.index].book_round
        now.masks = {}
        finish_before(self, bucket)
        recording.write(
            "arrived", **about(self, number), bucket=bucket.index, masks=now.masks, values=bucket.flat.clone()
        )
        recording.reach(self.book_session, "arrived")

    def take(self: Any, bucket: Bucket, own: Any, buffer: Any, arrived_C: torch.Tensor, first: int) -> None:
        now.masks[first] = arrived_C.clone()
        take_before(self, bucket, own, buffer, arrived_C, first)

    Averages.start, Averages.finish, Averages._take = start, finish, take  # type: ignore[method-assign]
    Averages._send_answer, Averages._update = give_back, update  # type: ignore[method-assign]
    Averages._send_to_standby = let_follow  # type: ignore[method-assign]
    kind._begin_view, kind._try_view = begin_view, enter  # type: ignore[method-assign]
