"""Merging of records: bounded time series, restarted processes, hostile records, snapshots as plain data."""

import json
import math
import random

import pytest

from records import START, job_of, make_records
from stormtorch.watch.columns import as_csv
from stormtorch.watch.job import Job, named
from stormtorch.watch.job_snapshot import JobSnapshot, State
from stormtorch.watch.series import MOST_BINS, Series
from stormtorch.watch.snapshot_json import snapshot

pytestmark = pytest.mark.pure


def test_a_series_keeps_means_and_extremes_however_long_it_runs() -> None:
    series = Series()
    values = [float(second % 7) for second in range(20_000)]
    for second, value in enumerate(values):
        series.add(START + second, {"x": value})
    assert len(series.bins) <= MOST_BINS
    cells = [cells["x"] for cells in series.bins.values()]
    assert sum(cell.count for cell in cells) == len(values)
    assert math.isclose(sum(cell.total for cell in cells), sum(values))
    assert (min(cell.low for cell in cells), max(cell.high for cell in cells)) == (min(values), max(values))


def test_a_series_takes_a_rank_whose_records_begin_earlier() -> None:
    series = Series()
    series.add(START, {"x": 1.0})
    series.add(START - 5000, {"x": 2.0})
    series.add(START + 1, {"x": 3.0})
    columns = series.columns()
    assert columns["time"] == sorted(columns["time"], key=lambda each: each or 0.0)
    assert len(series.bins) <= MOST_BINS
    assert columns["x"] == [2.0, 2.0]  # the last two share a bin of 16 s
    assert columns["x_high"] == [2.0, 3.0]


def test_only_bins_that_are_asked_for_are_returned_unless_they_have_become_wider() -> None:
    job = job_of(make_records(2, seconds=30))
    part = snapshot(job, START + 30, "here", since=25, width_s=1.0)["series"]
    assert len(part["columns"]["time"]) == 5
    everything = snapshot(job, START + 30, "here", since=25, width_s=0.5)["series"]
    assert everything["since"] == 0
    assert len(everything["columns"]["time"]) == 30


def test_waiting_is_split_between_the_slowest_rank_and_the_network() -> None:
    job_snapshot = JobSnapshot(
        job_of(make_records(compute_s=lambda rank: 0.3 if rank == 2 else 0.1, wait_s=0.05)), START + 20
    )
    assert job_snapshot.slowest == 2
    assert job_snapshot.breakdowns[0] == pytest.approx((0.1, 0.2, 0.05, 0.0))
    assert job_snapshot.breakdowns[2] == pytest.approx((0.3, 0.0, 0.05, 0.0))


def test_waiting_for_views_is_counted_once() -> None:
    split = JobSnapshot(job_of(make_records(wait_s=0.05, view_wait_s=0.08)), START + 20).breakdowns[0]
    assert split == pytest.approx((0.1, 0.0, 0.03, 0.02))


def test_loss_belongs_to_the_receiver_and_rate_to_the_sender() -> None:
    records = make_records(3, loss=lambda s, r: (10 * s + r) / 1000, rate=lambda s, r: 1000.0 * s + r + 1)
    matrix = snapshot(job_of(records), START + 20, "here")["matrix"]
    assert matrix["loss"][1][2] == 0.021  # row: rank 1 receives; column: rank 2 sends
    assert matrix["rate"][1][2] == 2002.0
    assert matrix["loss"][1][1] is None


def test_a_process_that_returns_takes_the_place_of_the_one_that_died() -> None:
    records = make_records(3, until=lambda rank: 5 if rank == 1 else None)
    job = job_of(records)
    again = make_records(3, rank_incarnation=4, rank_started=START + 9)[1]
    for record in again:
        job.add("another process", {**record, "time": START + 9 + record["time"] - START})
    job_snapshot = JobSnapshot(job, START + 30)
    assert job_snapshot.everyone[1].incarnation == 4
    assert job_snapshot.states[1] is State.RUNNING
    assert any("incarnation 4" in note.text for note in job.timeline.values())


def test_what_all_ranks_tell_of_a_view_is_one_note() -> None:
    records = make_records(4)
    for rank, mine in records.items():
        mine.append({"kind": "event", "time": START + 5, "step": 19, "text": "the guard closed"})
        mine.append(
            {"kind": "view", "time": START + 6, "number": 2, "step": 20 + rank, "members": [0, 1, 2], "left": [3]}
        )
    timeline = snapshot(job_of(records), START + 20, "here")["notes"]
    assert [(note["text"], note["who"]) for note in timeline] == [
        ("View 1: ranks 0 to 3", ""),
        ("the guard closed", "ranks 0 to 3"),
        ("View 2: ranks 0 to 2, without rank 3", ""),
    ]


def test_ranks_are_named_in_short() -> None:
    assert named([0, 1, 2, 3, 7, 9, 10]) == "ranks 0 to 3, 7, 9, 10"
    assert named([5]) == "rank 5"
    assert named([]) == "no rank"


NONSENSE: list[object] = [
    None, True, -1, 1e400, float("nan"), 10**400, "x" * 10_000, "\x1b[2J", [], [[]] * 5000, {}, {"x": {"y": []}},
    {"-1": 1}, {str(key): None for key in range(5000)}, "<script>",
]  # fmt: skip


def test_records_that_hold_anything_change_nothing_worse() -> None:
    job, draw = job_of(make_records(2)), random.Random(3)
    names = [
        *("time", "kind", "rank", "host", "step", "steps", "seconds", "links", "health", "members", "number", "why")
    ]
    names += ["text", "arrived", "lag", "loss", "cpu_s", "waits", "settings", "incarnation", "pair_drift", "missing"]
    for trial in range(2000):
        record = {name: draw.choice(NONSENSE) for name in draw.sample(names, draw.randrange(len(names)))}
        record["kind"] = draw.choice(["rank", "steps", "links", "view", "event", "end", "else"])
        if draw.random() < 0.9:
            record["time"] = START + 10
        job.add(f"process {trial % 50}", record)
    text = json.dumps(snapshot(job, START + 20, "\x1b[31mhere"), allow_nan=False)
    assert len(text) < 300_000
    assert "\\u001b" not in text


def test_a_process_that_trains_again_after_its_end_runs() -> None:
    job = job_of(make_records(2))
    origin = next(iter(job.processes))
    job.add(origin, {"kind": "end", "time": START + 21, "why": "RuntimeError: x"})
    assert JobSnapshot(job, START + 22).states[0] is State.FAILED
    job.add(origin, {"kind": "steps", "time": START + 23, "step": 1, "steps": 2, "seconds": 0.2})
    assert JobSnapshot(job, START + 24).states[0] is State.RUNNING


def test_an_earlier_run_in_the_same_folder_does_not_hide_the_one_that_runs() -> None:
    job = Job()
    for each in make_records(1, rank_incarnation=2)[0]:
        job.add("earlier", each)
    job.add("earlier", {"kind": "end", "time": START + 30, "why": "RuntimeError: x"})
    for each in make_records(1)[0]:
        job.add("now", each | {"time": each["time"] + 1000, **({"started": START + 1000} if "started" in each else {})})
    assert job.current[0].why is None


@pytest.mark.parametrize("odd", [{"seconds": 1e-320, "bytes_sent": 10**18}])
def test_numbers_beyond_all_bounds_still_make_plain_data(odd: dict[str, float]) -> None:
    job = job_of(make_records(2, rank_settings={"max_lag": 0}))
    job.add(
        next(iter(job.processes)), {"kind": "steps", "time": START + 21, "step": 90, "steps": 1, "seconds": 1.0} | odd
    )
    json.dumps(snapshot(job, START + 22, "here"), allow_nan=False)


def test_a_flood_of_processes_views_and_events_takes_bounded_memory() -> None:
    job = Job()
    for number in range(10_000):
        job.add(
            f"process {number}", {"kind": "event", "time": START + number, "step": number, "text": f"event {number}"}
        )
        job.add("one", {"kind": "view", "time": START + number, "number": number, "members": [0]})
    assert len(job.processes) <= 4096
    assert len(job.timeline) <= 500
    assert len(job.views) <= 500
    assert len(job.series.bins) <= MOST_BINS


def test_the_time_series_become_a_table() -> None:
    lines = as_csv(snapshot(job_of(make_records(2, seconds=3, train_loss=1.5)), START + 3, "here")).splitlines()
    head = lines[0].split(",")
    assert len(lines) == 4
    assert head[0] == "time"
    assert {"step", "step_low", "step_high", "train_loss"} <= set(head)
    assert lines[1].split(",")[head.index("train_loss")] == "1.5"
