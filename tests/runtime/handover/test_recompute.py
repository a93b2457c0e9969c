"""Jobs whose ranks die at any moment of a step equal a single-process recomputation from recorded contributions."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recompute import recompute
from recompute_check import check
from recompute_program import Event, Program, Schedule
from recompute_recordings import Differs

# Deaths within a step, one after the other: while gradients are in flight, before the standby has the owner's
# gradients, and while parameters are in flight.
WITHIN_STEPS = (
    Event("die", 4, 4, "bucket", place=1),
    Event("die", 1, 7, "taking", members=4),
    Event("die", 2, 10, "sending", place=1, members=3),
)
# Rank 1 dies when its standby has its gradients and no rank has its parameters: no rank clamps these after that step.
EXACTLY = Schedule(
    1,
    4,
    Program(clip=0.05, micro=2, clamp=True),
    (Event("die", 2, 4, "reduced", seconds=0.2), Event("die", 1, 9, "stepping", members=4)),
)
LOSSY = Schedule(2, 5, Program(loss=0.1), WITHIN_STEPS)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings of the ranks of `EXACTLY`."""
    folder = tmp_path_factory.mktemp("kept")
    counts = recompute(EXACTLY, folder)
    assert (folder / str(EXACTLY.seed) / "book-2-1").exists(), "a rank has come back"
    assert counts["named: last update lost"] == counts["named: unequal"] == counts["named: norm lacks a shard"] == 1
    assert counts["rounds"] > 10 and counts["norms"] > 0
    assert not counts["rounded: mean"] and not counts["rounded: step"]
    return folder / str(EXACTLY.seed)


@pytest.mark.thorough
def test_job_with_a_death_and_a_return_is_recomputed_bit_for_bit(kept: Path) -> None:
    counts = check(EXACTLY, kept)
    assert counts["standby"] >= 4 and counts["shard"] >= 4, "shards and standbys were compared"


@pytest.mark.thorough
def test_deaths_within_steps_under_loss_leave_the_numbers_that_are_promised() -> None:
    """Despite loss, means are of what arrived, owners' steps use these means, and copies equal what was sent."""
    counts = recompute(LOSSY)
    assert counts["views"] == 3
    assert counts["named: last update lost"] <= 2, "only the two that had their gradients may take an update with them"
    assert counts["copies"] > 50 and counts["gradient given"] > 50


@pytest.mark.thorough
def test_outer_step_of_an_owner_that_dies_before_its_answer_is_the_standbys() -> None:
    counts = recompute(Schedule(3, 4, Program(diloco=True), (Event("die", 1, 8, "followed"),)))
    assert counts["views"] == 2 and counts["anchors"] > 8


@pytest.mark.thorough
def test_a_standby_that_is_new_says_that_it_lacks_what_the_program_has_changed() -> None:
    """It has followed only one step, and owns nothing that could show the program's changes."""
    events = Event("join", 5, 4), Event("die", 4, 5, "sending", members=6)
    counts = recompute(Schedule(5, 5, Program(clamp=True, optimizer="rmsprop"), events))
    assert counts["named: unequal"] == 1


@pytest.mark.thorough
def test_ranks_die_one_after_the_other_also_where_all_wait_for_the_same_view() -> None:
    """Each dies at its own step, so that a majority of every view remains, and ranks rejoin before the end."""
    events = (
        Event("join", 4, 3),
        Event("die", 3, 5, seconds=0.2, members=5),
        Event("die", 1, 7, "arrived", seconds=0.2, members=5),
        Event("die", 2, 9, "arrived", members=5),
    )
    counts = recompute(Schedule(4, 4, Program(diloco=True), events))
    assert counts["views"] >= 4 and counts["ends"] == 4


def change(kind: str, name: str) -> Callable[[list[dict[str, Any]]], None]:
    """Returns a function that changes the last bits of a number in the fifth record of a kind."""

    def work(records: list[dict[str, Any]]) -> None:
        values = [each for each in records if each["kind"] == kind][4][name]
        first = values[0] if isinstance(values, list) else values
        first[0] = torch.nextafter(first[0], torch.tensor(9.0))

    return work


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change("given", "grads"), "gradient given of 0-0 differs"),
        (change("round", "means"), "mean of 0-0 differs"),
        (change("stepped", "masters"), "step of 0-0 differs"),
        (change("arrived", "flats"), "copies of 0-0 differs"),
    ],
    ids=["gradient", "mean", "step", "copy"],
)
def test_a_single_wrong_number_is_found(
    kept: Path, tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], said: str
) -> None:
    for book in kept.glob("book-*"):
        records = []
        with book.open("rb") as file:
            while True:
                try:
                    records.append(pickle.load(file))
                except EOFError:
                    break
        if book.name == "book-0-0":
            change(records)
        (tmp_path / book.name).write_bytes(b"".join(pickle.dumps(each) for each in records))
    with pytest.raises(Differs, match=said):
        check(EXACTLY, tmp_path)


@pytest.mark.thorough
def test_models_that_are_averaged_rarely_and_their_anchors_are_recomputed() -> None:
    """A rank dies while parameters of an outer step are in flight, and another joins with a member's model."""
    events = (Event("die", 1, 4, "bucket", place=1), Event("die", 2, 11, "rest", seconds=0.2, members=3))
    counts = recompute(Schedule(3, 4, Program(diloco=True, optimizer="adam", micro=2), events))
    assert counts["outer step"] > 20 and counts["anchors"] > 20 and counts["model"] > 50
    assert counts["models handed over"] == 1
    assert not counts["rounded: outer step"] and not counts["rounded: model"]


@pytest.mark.thorough
def test_rank_that_returns_waits_for_the_next_view_where_another_dies_meanwhile() -> None:
    events = (Event("die", 2, 7, seconds=0.2), Event("die", 1, 9, seconds=0.2))
    counts = recompute(Schedule(4, 3, Program(diloco=True, optimizer="rmsprop"), events))
    assert counts["models handed over"] >= 2


@pytest.mark.thorough
def test_rank_that_leaves_while_others_have_begun_to_average_takes_part_once_more() -> None:
    """The members could neither end that round without it nor begin a view before."""
    leave = Event("leave", 1, 8, seconds=0.5, members=3)
    counts = recompute(Schedule(5, 3, Program(diloco=True), (leave,)))
    assert counts["ends"] == 2 and counts["views"] == 2
