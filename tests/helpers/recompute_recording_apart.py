"""The book of a rank that trains a model of its own (DiLoCo): what it gives, what owners make of it, and what comes."""

from __future__ import annotations

import threading
from typing import Any

import torch

from recompute_recording import Book
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.rank.averages import Averages
from stormtorch.runtime.rank.model_session import ModelSession

MEMORIES = ("anchor", "speed")


def view(book: Book, session: Any, *, held: bool) -> None:
    """Writes down what this rank has at the beginning of a view."""
    memories = session._memories.held
    place = memories.cut.members.index(book.rank)
    stores = {"own": memories.owned, "followed": memories.followed}
    book.write(
        "view",
        **book.of(session),
        number=session.view.number,
        members=session.view.members,
        base=session.view.base,
        held=held,
        place=place,
        slots=[bucket.layout.slots for bucket in session.buckets],
        elements=[bucket.layout.elements for bucket in session.buckets],
        spans=[layout.spans for layout in memories.cut.layouts],
        per_chunk=[wire.per_chunk for wire in session._averages._wires],
        flats=[bucket.flat.clone() for bucket in session.buckets],
        **{
            what: [{name: each.vector(name).clone() for name in MEMORIES} for each in found]
            for what, found in stores.items()
        },
    )


def watch(book: Book) -> None:
    """Has sessions of this process that average models write into a book what they give and get."""
    kind, entering = ModelSession, ModelSession._enter
    start_before, finish_before, take_before = Averages.start, Averages.finish, Averages._take
    give_before, update_before, view_before = Averages._give_back, Averages._update, kind._begin_view
    follow_before = Averages._let_follow
    now = threading.local()

    def about(averages: Any, round_: int) -> dict[str, Any]:
        number = book.of(averages.book_session)["session"]
        return {"session": number, "round": round_, "view": averages.book_view}

    def begin_view(self: Any) -> None:
        view_before(self)
        self._averages.book_session, self._averages.book_view = self, self.view.number

    def enter(self: Any, latest: Any) -> bool | None:
        held = entering(self, latest)
        if held is not None:
            view(book, self, held=held)
        return held

    def start(self: Any, bucket: Bucket, group: Any, standing: Any, seed: int = 0) -> None:
        number = self._memories.call.round
        book.write("given", **about(self, number), bucket=bucket.index, values=bucket.flat.clone())
        start_before(self, bucket, group, standing, seed)
        self._rounds[bucket.index].book_round = number
        book.reach(self.book_session, "bucket", len(self._rounds))

    def give_back(self: Any, bucket: Bucket, round_: Any, call: Any) -> Any:
        now.bucket, now.round, now.call = bucket, round_, call
        try:
            return give_before(self, bucket, round_, call)
        finally:
            now.bucket = None

    def about_mean(self: Any, bucket: Bucket, mean: torch.Tensor) -> dict[str, Any]:
        ranks = now.round.group.ranks
        masks = {ranks.index(rank): up.mask(rank) for up in now.round.up for rank in up.links() if rank != book.rank}
        return {**about(self, now.call.round), "bucket": bucket.index, "masks": masks, "mean": mean.clone()}

    def let_follow(self: Any, bucket: Bucket, round_: Any, combined: torch.Tensor) -> Any:
        book.write("combined", **about_mean(self, bucket, combined))
        begun = follow_before(self, bucket, round_, combined)
        if book.due(self.book_session, "followed") is not None:
            begun[0].wait()
            book.reach(self.book_session, "followed")
        return begun

    def update(self: Any, memory: Any, per_chunk: int, combined: torch.Tensor) -> torch.Tensor:
        mean = combined.clone()
        found = update_before(self, memory, per_chunk, combined)
        bucket = getattr(now, "bucket", None)
        if bucket is not None:
            book.write("updated", **about_mean(self, bucket, mean), answer=found.clone())
        return found

    def finish(self: Any, bucket: Bucket) -> None:
        number = self._rounds[bucket.index].book_round
        now.masks = {}
        finish_before(self, bucket)
        book.write("arrived", **about(self, number), bucket=bucket.index, masks=now.masks, values=bucket.flat.clone())
        book.reach(self.book_session, "arrived")

    def take(self: Any, bucket: Bucket, own: Any, room: Any, arrived_C: torch.Tensor, first: int) -> None:
        now.masks[first] = arrived_C.clone()
        take_before(self, bucket, own, room, arrived_C, first)

    Averages.start, Averages.finish, Averages._take = start, finish, take  # type: ignore[method-assign]
    Averages._give_back, Averages._update = give_back, update  # type: ignore[method-assign]
    Averages._let_follow = let_follow  # type: ignore[method-assign]
    kind._begin_view, kind._enter = begin_view, enter  # type: ignore[method-assign]
