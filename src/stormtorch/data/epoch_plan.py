"""Partition of an epoch's remaining samples over the members of one view: which rank uses which samples in which step.

The plan follows from a few numbers that every member knows, so all ranks compute the same one without a message.
Samples are positions in the epoch's order. Steps use them in that order: after a number of steps, the used samples are
one span from the start, except for batches that were drawn before the plan was made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stormtorch.data.spans import ConcatenatedSpans, Spans, size, union, without

Cursor = tuple[int, int]
"""Position among the batches of one rank: step, and batch within the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of one rank in a plan."""

    done: int
    """Complete steps."""
    drawn: Cursor
    """The first batch that the rank has not drawn."""
    hand: int
    """Batches of the step in progress that the training loop has taken; 0 between steps."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of all members: how many kept batches each uses, and the sizes of its new batches."""

    offset: int
    """Begin of the new batches within the plan's remaining samples."""
    kept_from: tuple[int, ...]
    kept_to: tuple[int, ...]
    new: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """Batches of all members until the end of the epoch. Every member makes the same number of steps.

    A member without samples in a step has an empty batch there. That happens only if fewer samples than members are
    left for the last steps.
    """

    members: tuple[int, ...]
    """Ranks, ascending."""
    batch_size: int
    """Most samples of a batch."""
    global_batch: int | None
    """Samples of a step over all members, for any number of them; None gives each member one batch per step."""
    drop_last: bool = False
    """Whether to omit the last steps if they have too few samples."""
    left: Spans
    """Samples that no member has drawn."""
    kept: Mapping[int, Sequence[Spans]] = field(default_factory=dict)
    """Batches that members drew before the plan was made and have not used, in the order of their use."""
    hands: Mapping[int, int] = field(default_factory=dict)
    """For a member in the middle of a step: how many of its kept batches the first step must use."""

    def __post_init__(self) -> None:
        line = ConcatenatedSpans(self.left)
        head, offset = self._head(line.size)
        target = self.samples_per_step
        whole, rest = divmod(line.size - offset, target)
        tail = [rest] if rest and not self.drop_last else []
        # If the rest has too few samples for all members, the last whole step and it become two smaller steps.
        if tail and whole and rest < len(self.members) and target + rest >= 2 * len(self.members):
            whole -= 1
            tail = [(target + rest + 1) // 2, (target + rest) // 2]
        set_ = object.__setattr__  # the dataclass is frozen
        set_(self, "_line", line)
        set_(self, "_head_steps", head)
        set_(self, "_body", (offset, whole))
        set_(self, "_ordinary", self._regular(0, target))
        ends: list[_Step] = []
        offset += whole * target
        for samples in tail:
            ends.append(self._regular(offset, samples))
            offset += samples
        set_(self, "_tail_steps", ends)
        set_(self, "steps", len(head) + whole + len(ends))

    # Set above.
    steps: int = field(init=False, compare=False)
    _line: ConcatenatedSpans = field(init=False, repr=False, compare=False)
    _head_steps: list[_Step] = field(init=False, repr=False, compare=False)
    _body: tuple[int, int] = field(init=False, repr=False, compare=False)
    _ordinary: _Step = field(init=False, repr=False, compare=False)
    _tail_steps: list[_Step] = field(init=False, repr=False, compare=False)

    @property
    def samples_per_step(self) -> int:
        """Samples of an ordinary step, over all members."""
        return self.global_batch or self.batch_size * len(self.members)

    def batches(self, step: int, rank: int) -> list[Spans]:
        """Returns the batches of a member in a step: one, unless `global_batch` needs more of them."""
        index = self.members.index(rank)
        plan = self._step(step)
        begin = plan.offset + sum(map(sum, plan.new[:index]))
        found = list(self.kept.get(rank, ())[plan.kept_from[index] : plan.kept_to[index]])
        for count in plan.new[index]:
            found.append(self._line.select(begin, count))
            begin += count
        return found or [()]

    def samples(self, step: int) -> int:
        """Returns how many samples all members together use in a step."""
        plan = self._step(step)
        kept = (
            size(batch)
            for rank, begin, end in zip(self.members, plan.kept_from, plan.kept_to, strict=True)
            for batch in self.kept.get(rank, ())[begin:end]
        )
        return sum(kept) + sum(map(sum, plan.new))

    def weight(self, step: int, samples: int) -> float:
        """Returns the factor for the mean loss of a batch that makes the mean over ranks one over samples."""
        return len(self.members) * samples / max(self.samples(step), 1)

    def count(self, rank: int, steps: int | None = None) -> int:
        """Returns how many batches a member has in the first `steps` steps; None: in all."""
        steps = self.steps if steps is None else steps
        head, whole = len(self._head_steps), self._body[1]
        explicit = [*range(min(steps, head)), *range(head + whole, steps)]
        middle = min(max(steps - head, 0), whole)
        each = len(self.batches(head, rank)) if middle else 0
        return middle * each + sum(len(self.batches(step, rank)) for step in explicit)

    def after(self, cursor: Cursor, rank: int) -> Cursor:
        """Returns the position of the batch after the one at `cursor`."""
        step, batch = cursor
        return (step, batch + 1) if batch + 1 < len(self.batches(step, rank)) else (step + 1, 0)

    def cursor(self, count: int, rank: int) -> Cursor:
        """Returns the position after a member's first `count` batches."""
        place = (0, 0)
        for _ in range(count):
            place = self.after(place, rank)
        return place

    def unused(self, done: int) -> Spans:
        """Returns the samples that are not used when all members have completed the first `done` steps."""
        return self._unused({}, done)

    def follow(
        self,
        members: Sequence[int],
        progress: Mapping[int, Progress],
        busy: Sequence[int] = (),
    ) -> EpochPlan:
        """Returns the plan for the members of the next view.

        Complete steps count for all earlier members. Batches that a member has drawn stay with it; all other unused
        samples are distributed again, including those that lost ranks had drawn.

        Args:
            members: Ranks of the next view.
            progress: Progress of the earlier members that report it.
            busy: New members in the middle of a step whose samples others have: their part of the first step is empty.
        """
        most = max(each.done for each in progress.values())
        kept: dict[int, Sequence[Spans]] = {}
        hands: dict[int, int] = {}
        for rank in sorted(set(members) & progress.keys()):
            if found := self._drawn(rank, progress[rank]):
                kept[rank] = found
            if progress[rank].hand:
                hands[rank] = progress[rank].hand
        for rank in busy:
            kept[rank], hands[rank] = [()], 1
        left = without(
            self._unused({rank: each.done for rank, each in progress.items()}, most),
            (span for batches in kept.values() for batch in batches for span in batch),
        )
        return EpochPlan(
            members=tuple(sorted(members)),
            batch_size=self.batch_size,
            global_batch=self.global_batch,
            drop_last=self.drop_last,
            left=left,
            kept=kept,
            hands=hands,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the numbers from which the plan follows."""
        return {
            "members": self.members,
            "batch_size": self.batch_size,
            "global_batch": self.global_batch,
            "drop_last": self.drop_last,
            "left": self.left,
            "kept": [[rank, batches] for rank, batches in self.kept.items()],
            "hands": list(self.hands.items()),
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> EpochPlan:
        """Restores a plan from the result of `to_json`."""
        kept = {rank: [_spans(batch) for batch in batches] for rank, batches in given["kept"]}
        changed = {"members": tuple(given["members"]), "left": _spans(given["left"]), "hands": dict(given["hands"])}
        return cls(**{**given, **changed, "kept": kept})

    # --- how steps are laid out -------------------------------------------------------------------------------------

    def _step(self, step: int) -> _Step:
        head, (offset, whole) = len(self._head_steps), self._body
        if step < head:
            return self._head_steps[step]
        if step >= head + whole:
            return self._tail_steps[step - head - whole]
        return replace(self._ordinary, offset=offset + (step - head) * self.samples_per_step)

    def _regular(self, offset: int, samples: int) -> _Step:
        """A step of new batches only, whose sizes per member differ by at most one sample."""
        count = len(self.members)
        kept = tuple(len(self.kept.get(rank, ())) for rank in self.members)
        return _Step(offset, kept, kept, tuple(self._cut(share) for share in _parts(samples, count)))

    def _cut(self, share: int) -> tuple[int, ...]:
        return tuple(_parts(share, math.ceil(share / self.batch_size)))

    def _head(self, available: int) -> tuple[list[_Step], int]:
        """The steps that use kept batches, and how many new samples these steps use in addition."""
        sizes = [[size(batch) for batch in self.kept.get(rank, ())] for rank in self.members]
        used = [0] * len(sizes)
        steps: list[_Step] = []
        offset = 0
        while any(begin < len(each) for begin, each in zip(used, sizes, strict=True)):
            hands = [self.hands.get(rank, 0) if not steps else 0 for rank in self.members]
            taken = self._take(sizes, used, hands)
            fixed = [sum(each[a:b]) for each, a, b in zip(sizes, used, taken, strict=True)]
            new = self._fill(sizes, used, taken, hands, fixed, available - offset)
            steps.append(_Step(offset, tuple(used), tuple(taken), tuple(self._cut(share) for share in new)))
            offset += sum(new)
            used = taken
        return steps, offset

    def _take(self, sizes: list[list[int]], used: list[int], hands: list[int]) -> list[int]:
        """End of each member's kept batches in this step: one batch each, and more if they fit the global batch."""
        taken = [
            begin + hand if hand else min(begin + 1, len(each))
            for begin, hand, each in zip(used, hands, sizes, strict=True)
        ]
        shares = [sum(each[a:b]) for each, a, b in zip(sizes, used, taken, strict=True)]
        while self.global_batch is not None:
            room = self.global_batch - sum(shares)
            fitting = [
                index
                for index, each in enumerate(sizes)
                if not hands[index] and taken[index] < len(each) and each[taken[index]] <= room
            ]
            if not fitting:
                break
            index = min(fitting, key=lambda each: (shares[each], each))
            shares[index] += sizes[index][taken[index]]
            taken[index] += 1
        return taken

    def _fill(
        self,
        sizes: list[list[int]],
        used: list[int],
        taken: list[int],
        hands: list[int],
        fixed: list[int],
        available: int,
    ) -> list[int]:
        """New samples of each member in a step with kept batches. Only members without more kept ones get any."""
        free = [
            index
            for index, each in enumerate(sizes)
            if not hands[index]
            and taken[index] == len(each)
            and (self.global_batch is not None or taken[index] == used[index])
        ]
        new = [0] * len(sizes)
        if not free:
            return new
        wanted = max(self.samples_per_step - sum(fixed), 0)
        if self.global_batch is None:
            wanted = self.batch_size * len(free)
        # Other members go on with kept batches: reserve a sample for each of these steps, so that no member is idle.
        later = max(len(each) - end for each, end in zip(sizes, taken, strict=True))
        count = min(wanted, max(min(len(free), available), available - later * len(free)))
        for index, share in zip(free, _level([fixed[index] for index in free], count), strict=True):
            new[index] = share
        return new

    # --- unused samples ---------------------------------------------------------------------------------------------

    def _unused(self, done: Mapping[int, int], most: int) -> Spans:
        """Samples of steps that are not complete. Members that report no progress count with `most` steps."""
        counts = {rank: done.get(rank, most) for rank in self.members}
        first = min(counts.values())
        if first >= self.steps:
            offset = sum(map(sum, (share for step in self._tail_steps for share in step.new)))
            offset += self._body[0] + self._body[1] * self.samples_per_step
        else:
            offset = self._step(first).offset
        rest = list(self._line.select(offset, self._line.size - offset))
        for step in range(first, len(self._head_steps)):
            plan = self._head_steps[step]
            for rank, begin, end in zip(self.members, plan.kept_from, plan.kept_to, strict=True):
                rest.extend(span for batch in self.kept.get(rank, ())[begin:end] for span in batch)
        used = (
            span
            for rank, count in counts.items()
            for step in range(first, count)
            for batch in self.batches(step, rank)
            for span in batch
        )
        return without(union(rest), used)

    def _drawn(self, rank: int, progress: Progress) -> list[Spans]:
        """Batches that a member has drawn and not used."""
        found: list[Spans] = []
        step, end = progress.done, progress.drawn
        while (step, 0) < end:
            batches = self.batches(step, rank)
            found.extend(batches if step < end[0] else batches[: end[1]])
            step += 1
        return found


def _parts(total: int, count: int) -> list[int]:
    """Splits a total into parts that differ by at most one, the larger ones first."""
    return [total // count + (index < total % count) for index in range(count)]


def _level(have: Sequence[int], count: int) -> list[int]:
    """Distributes `count` more to those with the least, until all are equal or nothing is left."""
    low, high = 0, max(have) + count
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(middle - each, 0) for each in have) <= count:
            low = middle
        else:
            high = middle - 1
    given = [max(low - each, 0) for each in have]
    rest = count - sum(given)
    for index, each in enumerate(have):
        if rest and each + given[index] == low:
            given[index] += 1
            rest -= 1
    return given


def _spans(given: Sequence[Sequence[int]]) -> Spans:
    return tuple((first, end) for first, end in given)
