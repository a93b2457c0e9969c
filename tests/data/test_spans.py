"""Spans behave as sets of positions."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.data.spans import ConcatenatedSpans, Span, size, union, without

pytestmark = pytest.mark.pure

some_spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda each: (each[0], sum(each))))


def positions(spans: list[Span] | tuple[Span, ...]) -> list[int]:
    return [position for first, end in spans for position in range(first, end)]


@given(some_spans)
def test_a_union_has_each_position_once_in_order(spans: list[Span]) -> None:
    found = union(spans)
    assert positions(found) == sorted(set(positions(spans)))
    assert size(found) == len(set(positions(spans)))
    assert all(end < first for (_, end), (first, _) in itertools.pairwise(found))


@given(some_spans, some_spans)
def test_what_is_removed_is_gone(spans: list[Span], removed: list[Span]) -> None:
    assert positions(without(spans, removed)) == sorted(set(positions(spans)) - set(positions(removed)))


@given(some_spans, st.data())
def test_a_cut_is_a_stretch_of_the_line(spans: list[Span], data: st.DataObject) -> None:
    line = ConcatenatedSpans(spans)
    whole = positions(spans)
    begin = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - begin))
    assert positions(line.select(begin, count)) == whole[begin : begin + count]
