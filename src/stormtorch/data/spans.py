"""Sets of positions as sorted spans, so that the rest of an epoch of any length is a few numbers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""Positions from the first number up to the second, which is excluded."""
Spans = tuple[Span, ...]


def size(spans: Iterable[Span]) -> int:
    """Returns the number of positions in spans."""
    return sum(end - first for first, end in spans)


def union(spans: Iterable[Span]) -> Spans:
    """Returns the same positions in ascending order, with adjacent spans merged."""
    found: list[Span] = []
    for first, end in sorted(each for each in spans if each[0] < each[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return tuple(found)


def without(spans: Iterable[Span], removed: Iterable[Span]) -> Spans:
    """Returns the positions of `spans` that are not in `removed`."""
    gaps = union(removed)
    found: list[Span] = []
    for begin, end in union(spans):
        first = begin
        for gap_first, gap_end in gaps[max(bisect.bisect_left(gaps, (begin, begin)) - 1, 0) :]:
            if gap_first >= end:
                break
            if gap_end > first:
                found.append((first, gap_first))
                first = gap_end
        found.append((first, end))
    return tuple((first, end) for first, end in found if first < end)


class ConcatenatedSpans:
    """Spans laid end to end, from which ranges are selected by their offset."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self._ends = list(itertools.accumulate(end - first for first, end in self.spans))
        self.size = self._ends[-1] if self._ends else 0

    def select(self, begin: int, count: int) -> Spans:
        """Returns the spans of `count` positions from the offset `begin`."""
        found: list[Span] = []
        number = bisect.bisect_right(self._ends, begin)
        while count > 0:
            first, end = self.spans[number]
            first = end - (self._ends[number] - begin)
            here = min(count, end - first)
            found.append((first, first + here))
            begin, count, number = begin + here, count - here, number + 1
        return tuple(found)
