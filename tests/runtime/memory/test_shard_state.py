"""Repartition of shard state: records sliced in one view are assembled without loss in another."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.runtime.memory.layout import Layout, Piece, plan, repartition
from stormtorch.runtime.memory.shard_state import ShardRecord, ShardState, assemble

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")


def value_of(parameter: int, element: int) -> float:
    return 1000.0 * parameter + element


def state_of(piece: Piece, shape: tuple[int, ...], *, whole: bool) -> dict[str, Any]:
    """A moment per element, a step count, a number, and a name, as optimizers have them."""
    moment = torch.tensor([-value_of(piece.parameter, piece.offset + each) for each in range(piece.count)])
    return {
        "moment": moment.view(shape) if whole else moment,
        "step": torch.tensor(7.0),
        "eta": 0.5,
        "kind": "some",
        "mu": torch.tensor(3),
    }


def holdings(layouts: list[Layout], owners: int, shapes: list[tuple[int, ...]], *, whole: bool) -> list[ShardState]:
    found = []
    for shard in range(owners):
        masters = []
        for layout in layouts:
            begin, count = layout.spans[shard]
            values = torch.full((count,), torch.nan)
            for piece in layout.pieces(shard):
                for each in range(piece.count):
                    values[piece.first - begin + each] = value_of(piece.parameter, piece.offset + each)
            masters.append(values)
        found.append(
            ShardState(
                shard,
                layouts,
                masters,
                lambda _bucket, piece: state_of(piece, shapes[piece.parameter], whole=whole),
            )
        )
    return found


@given(
    counts=st.lists(st.integers(1, 120), min_size=1, max_size=6),
    owners=st.integers(1, 6),
    others=st.integers(1, 6),
    whole=st.booleans(),
    bucket_bytes=st.sampled_from([200.0, 1e6]),
)
def test_cutting_and_assembling_are_inverse_for_any_two_cuts(
    counts: list[int], owners: int, others: int, whole: bool, bucket_bytes: float
) -> None:
    planned = plan(counts, 4, bucket_bytes, 3, whole=whole)
    before, after = (
        [repartition(each, 4, size, whole=whole, first_owner=place % size) for place, each in enumerate(planned)]
        for size in (owners, others)
    )
    shapes: list[tuple[int, ...]] = [(count, 1) for count in counts]
    held = holdings(before, owners, shapes, whole=whole)
    for bucket, (old, new) in enumerate(zip(before, after, strict=True)):
        for shard in range(others):
            first, count = new.spans[shard]
            records: list[ShardRecord] = []
            for shard_state in held:
                old_first, old_count = old.spans[shard_state.shard]
                low, high = max(first, old_first), min(first + count, old_first + old_count)
                if low < high:
                    records += shard_state.partition(bucket, low, high - low, whole=whole)
            for piece in new.pieces(shard):
                values = torch.full((piece.count,), torch.nan)
                state = assemble(piece, records, values, whole=whole, device=CPU, counters=CPU)
                wanted = state_of(piece, shapes[piece.parameter], whole=whole)
                assert values.tolist() == [
                    value_of(piece.parameter, piece.offset + each) for each in range(piece.count)
                ]
                assert state.keys() == wanted.keys()
                assert torch.equal(state["moment"], wanted["moment"])
                assert state["step"].item() == 7.0 and state["mu"].item() == 3
                assert (state["eta"], state["kind"]) == (0.5, "some")


def test_piece_that_is_partly_without_state_begins_anew() -> None:
    piece = Piece(parameter=0, offset=0, first=0, count=6)
    records = [
        ShardRecord(0, 0, 4, torch.arange(4.0), {"moment": torch.ones(4), "step": torch.tensor(5.0)}),
        ShardRecord(0, 4, 2, torch.tensor([4.0, 5.0]), {}),
    ]
    values = torch.empty(6)
    state = assemble(piece, records, values, whole=False, device=CPU, counters=CPU)
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert state == {}


def test_assembled_state_shares_no_memory_with_what_it_came_from() -> None:
    step, moment = torch.tensor(5.0), torch.ones(4)
    record = ShardRecord(0, 0, 4, torch.arange(4.0), {"moment": moment, "step": step})
    state = assemble(Piece(0, 0, 0, 4), [record], torch.empty(4), whole=False, device=CPU, counters=CPU)
    state["moment"].add_(1.0)
    state["step"].add_(1.0)
    assert step.item() == 5.0 and moment.tolist() == [1.0] * 4


def test_single_element_is_told_from_a_number_of_the_whole_piece() -> None:
    """In some optimizers the step count has the shape of a one-element piece, and must not be sliced."""
    piece = Piece(0, 0, 0, 1)
    record = ShardRecord(0, 0, 1, torch.zeros(1), {"step": torch.tensor([9.0]), "moment": torch.tensor([2.0])})
    state = assemble(piece, [record], torch.empty(1), whole=False, device=CPU, counters=CPU)
    assert state["step"].item() == 9.0 and state["moment"].tolist() == [2.0]
