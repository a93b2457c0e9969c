"""Bucket layout and partition of parameters into shards: offsets and owners. Numbers only, no tensors."""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stormtorch.collectives.base.spans import shards

# Every parameter begins at a multiple of this, as a separate tensor would.
_ALIGNMENT_BYTES = 64
SHARE_UNITS = 1 << 12
"""Units of all shares together. Shares are integers, so that all ranks compute the same partition."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Offset and size of a parameter in its bucket."""

    parameter: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter in one owner's shard."""

    parameter: int
    offset: int
    """First element of the piece, counted in the parameter."""
    first: int
    """First element of the piece, counted in the bucket."""
    count: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one bucket: a flat vector, divided into parameters and, independently, into shards."""

    elements: int
    slots: tuple[Slot, ...]
    spans: tuple[tuple[int, int], ...]
    """First element and number of elements of each owner's shard."""

    def pieces(self, owner: int) -> list[Piece]:
        """Returns the pieces of an owner, parameter by parameter. Padding belongs to no piece."""
        first, count = self.spans[owner]
        pieces = []
        for slot in self.slots:
            begin, end = max(slot.first, first), min(slot.first + slot.count, first + count)
            if begin < end:
                pieces.append(Piece(slot.parameter, begin - slot.first, begin, end - begin))
        return pieces


def repartition(
    layout: Layout,
    element_bytes: int,
    owners: int,
    *,
    whole: bool,
    first_owner: int = 0,
    parts: Sequence[int] | None = None,
) -> Layout:
    """Returns a layout with the same parameter offsets, partitioned for other owners.

    Args:
        layout: The current layout.
        element_bytes: Bytes per element.
        owners: Number of shards of the new layout.
        whole: Whether shards must not split parameters.
        first_owner: Owner of the first shard if shards are whole parameters. It should differ between buckets with few
            parameters, so that they do not all belong to the same owner.
        parts: Share of each owner, in units of 1/`SHARE_UNITS`; None for equal shares.
    """
    if not whole:
        if parts is None:
            spans = shards(layout.elements, element_bytes, owners)
        else:
            spans = _spans_by_share(layout.elements, max(_ALIGNMENT_BYTES // element_bytes, 1), parts)
        return Layout(layout.elements, layout.slots, tuple(spans))
    ends = [slot.first for slot in layout.slots[1:]] + [layout.elements]
    cuts = [0]
    given = 0
    for shard in range(1, owners):
        given += 0 if parts is None else parts[(shard - 1 + first_owner) % owners]
        wanted = layout.elements * (shard / owners if parts is None else given / SHARE_UNITS)
        nearest = min((0, *ends), key=lambda end: abs(end - wanted))
        cuts.append(max(nearest, cuts[-1]))
    cuts.append(layout.elements)
    spans = [(0, 0)] * owners
    for shard, (begin, end) in enumerate(itertools.pairwise(cuts)):
        spans[(shard + first_owner) % owners] = (begin, end - begin)
    return Layout(layout.elements, layout.slots, tuple(spans))


def _spans_by_share(elements: int, align: int, parts: Sequence[int]) -> list[tuple[int, int]]:
    """Partitions a vector into shards of the given shares, at multiples of `align`. Some may be empty."""
    units = -(-elements // align)
    ends = [min(round(units * sum(parts[: place + 1]) / SHARE_UNITS) * align, elements) for place in range(len(parts))]
    return [(begin, end - begin) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def plan(counts: Sequence[int], element_bytes: int, bucket_bytes: float, owners: int, *, whole: bool) -> list[Layout]:
    """Plans the buckets for parameters of one dtype and device, the last parameter first: its gradient is ready first.

    Args:
        counts: Number of elements of each parameter.
        element_bytes: Bytes per element.
        bucket_bytes: Size at which a bucket is full.
        owners: Number of shards per bucket.
        whole: Whether shards must not split parameters.
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
    slots, elements = _align_slots(bucket, counts, element_bytes, 0)
    return Layout(elements, tuple(slots), tuple(shards(elements, element_bytes, len(loads))))


def _by_parameters(
    bucket: list[int], counts: Sequence[int], element_bytes: int, loads: list[tuple[int, int]]
) -> Layout:
    """Assigns each parameter, the largest first, to the owner with the fewest elements so far over all buckets."""
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
        more, end = _align_slots(parameters, counts, element_bytes, begin)
        slots += more
        spans.append((begin, end - begin))
    return Layout(end, tuple(slots), tuple(spans))


def _align_slots(bucket: list[int], counts: Sequence[int], element_bytes: int, first: int) -> tuple[list[Slot], int]:
    align = max(_ALIGNMENT_BYTES // element_bytes, 1)
    slots = []
    for parameter in bucket:
        slots.append(Slot(parameter, first, counts[parameter]))
        first += -(-counts[parameter] // align) * align
    return slots, first
