"""Where parameters lie in flat buckets, and which rank owns what. Numbers only: no tensors."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from stormtorch.collectives.spans import shards

# Every parameter begins at a multiple of this, as a tensor of its own would.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in its bucket."""

    parameter: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one owner has of one parameter."""

    parameter: int
    offset: int
    """Where it begins in the parameter."""
    first: int
    """Where it begins in the bucket."""
    count: int


@dataclass(frozen=True, slots=True)
class Layout:
    """One bucket: a vector cut into parameters one way and into shards the other."""

    elements: int
    slots: tuple[Slot, ...]
    spans: tuple[tuple[int, int], ...]
    """First element and number of elements of each owner's shard."""

    def pieces(self, owner: int) -> list[Piece]:
        """What an owner has, parameter by parameter. Padding belongs to no piece."""
        first, count = self.spans[owner]
        pieces = []
        for slot in self.slots:
            begin, end = max(slot.first, first), min(slot.first + slot.count, first + count)
            if begin < end:
                pieces.append(Piece(slot.parameter, begin - slot.first, begin, end - begin))
        return pieces


def plan(counts: Sequence[int], element_bytes: int, bucket_bytes: float, owners: int, *, whole: bool) -> list[Layout]:
    """Buckets for parameters of one kind, numbered in the order given; gradients come in the reverse order.

    Args:
        counts: Elements of each parameter.
        element_bytes: Of each element.
        bucket_bytes: A bucket is closed when it has reached this.
        owners: Number of shards per bucket.
        whole: Shards do not cut through parameters.
    """
    loads = [(0, owner) for owner in range(owners)]
    layouts = []
    bucket: list[int] = []
    size = 0.0
    for parameter in reversed(range(len(counts))):
        bucket.append(parameter)
        size += counts[parameter] * element_bytes
        if size >= bucket_bytes or parameter == 0:
            make = _by_parameters if whole else _by_elements
            layouts.append(make(bucket, counts, element_bytes, loads))
            bucket, size = [], 0.0
    return layouts


def _by_elements(bucket: list[int], counts: Sequence[int], element_bytes: int, loads: list[tuple[int, int]]) -> Layout:
    slots, elements = _line_up(bucket, counts, element_bytes, 0)
    return Layout(elements, tuple(slots), tuple(shards(elements, element_bytes, len(loads))))


def _by_parameters(
    bucket: list[int], counts: Sequence[int], element_bytes: int, loads: list[tuple[int, int]]
) -> Layout:
    """Each parameter to the owner with the least so far, over all buckets, the largest first."""
    owned: list[list[int]] = [[] for _ in loads]
    for parameter in sorted(bucket, key=lambda each: -counts[each]):
        load, owner = heapq.heappop(loads)
        owned[owner].append(parameter)
        heapq.heappush(loads, (load + counts[parameter], owner))
    slots: list[Slot] = []
    spans = []
    end = 0
    for parameters in owned:
        begin = end
        more, end = _line_up(parameters, counts, element_bytes, begin)
        slots += more
        spans.append((begin, end - begin))
    return Layout(end, tuple(slots), tuple(spans))


def _line_up(bucket: list[int], counts: Sequence[int], element_bytes: int, first: int) -> tuple[list[Slot], int]:
    align = max(_ALIGNMENT_BYTES // element_bytes, 1)
    slots = []
    for parameter in bucket:
        slots.append(Slot(parameter, first, counts[parameter]))
        first += -(-counts[parameter] // align) * align
    return slots, first
