"""Benchmarks end to end on two ranks of this machine, and the processes they leave behind: none."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from commands import ranks_left
from stormtorch.checks import BadSetting
from stormtorch.cli.plots import check_plot
from stormtorch.telemetry.json_files import write_json
from stormtorch.telemetry.statistics import median, percentile
from stormtorch.telemetry.text import loss_text, oversubscription_text, share_text, size_text, time_text
from stormtorch_lab.bench.allreduce import AllReduceSettings, run_allreduce
from stormtorch_lab.bench.backends import BACKENDS, Copies
from stormtorch_lab.bench.latency import SIZES_BYTES, LatencySettings, run_latency
from stormtorch_lab.bench.pattern import Pattern
from stormtorch_lab.bench.results import AllReduceReport
from stormtorch_lab.cli.plots.bench import plot_allreduce
from stormtorch_lab.cli.tables.bench import allreduce_table, latency_table
from stormtorch_lab.jobs.counters import Counters, Log, Sample, merge
from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.jobs.ranks import Member, run_ranks


def greet(member: Member, greeting: str) -> tuple[str, int]:
    member.store.set(f"greeting/{member.rank}", greeting + str(member.rank))
    member.report(f"hello from {member.rank}")
    other = member.store.get(f"greeting/{(member.rank + 1) % member.world}")
    return other.decode(), torch.get_num_threads()


def fail_on_one(member: Member) -> None:
    if member.rank == 1:
        raise ValueError("the cat sat on the switch")
    member.store.get("never set")


def die_on_one(member: Member) -> None:
    if member.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    member.store.get("never set")


def sleep_on_one(member: Member) -> None:
    # SIGTERM is ignored, so that only the last resort helps.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if member.rank == 1:
        time.sleep(600)


def test_ranks_share_a_store_and_return_in_order() -> None:
    heard: list[tuple[int, object]] = []
    results = run_ranks(
        greet, 2, ("good day ",), timeout_s=60, on_message=lambda rank, what: heard.append((rank, what))
    )
    assert results == [("good day 1", 1), ("good day 0", 1)]
    assert sorted(heard, key=str) == [(0, "hello from 0"), (1, "hello from 1")]
    assert ranks_left() == []


@pytest.mark.thorough
def test_a_rank_that_raises_is_named_and_takes_the_others_with_it() -> None:
    with pytest.raises(RankFailed, match=r"^rank 1: ValueError: the cat sat on the switch$") as caught:
        run_ranks(fail_on_one, 2, timeout_s=60)
    assert caught.value.rank == 1
    assert "in fail_on_one" in caught.value.details
    assert ranks_left() == []


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(RankFailed, match=r"^rank 1: was killed by SIGKILL"):
        run_ranks(die_on_one, 2, timeout_s=60)
    assert ranks_left() == []


@pytest.mark.slow
def test_ranks_that_do_not_end_are_ended_at_the_time_out() -> None:
    with pytest.raises(RankFailed, match=r"^timed out after 15 s, waiting for rank 1: "):
        run_ranks(sleep_on_one, 2, timeout_s=15)
    assert ranks_left() == []


@pytest.fixture(scope="module")
def report() -> AllReduceReport:
    settings = AllReduceSettings(
        ranks=2, mb=(1.0, 0.5), iters=4, warmup=1, faults=0.1, datagram_bytes=1472, timeout_s=100
    )
    steps: list[int] = []
    report = run_allreduce(settings, lambda _what, done: steps.append(done))
    assert steps == list(range(1, 9))
    assert ranks_left() == []
    return report


def test_the_report_holds_conditions_and_one_result_per_backend_and_size(
    report: AllReduceReport, tmp_path: Path
) -> None:
    path = tmp_path / "new folder" / "out.json"
    report.write(path)
    data = json.loads(path.read_text())
    assert set(data) == {"conditions", "results"}
    conditions = data["conditions"]
    assert (conditions["ranks"], conditions["mb"], conditions["iters"]) == (2, [1.0, 0.5], 4)
    assert (conditions["network"], conditions["faults_requested"]) == ("loopback", 0.1)
    assert conditions["faults_apply_to"] == ["storm", "storm-lossy"]
    assert conditions["loss_measured"] == pytest.approx(0.1, abs=0.03)
    assert 0 < conditions["chunk_bytes"] < conditions["datagram_bytes"] == 1472
    assert conditions["machine"]["cores"] >= 1
    assert {"cpu", "kernel"} <= set(conditions["machine"])
    assert set(conditions["versions"]) == {"stormtorch", "torch", "python"}
    assert {"date", "commit", "tcp_congestion_control", "ideal", "kernel_drops", "processors_withheld"} <= set(
        conditions
    )
    assert [(each["mb"], each["backend"]) for each in data["results"]] == [
        (mb, backend) for mb in (1.0, 0.5) for backend in BACKENDS
    ]
    for each in data["results"]:
        assert len(each["times_s"]) == each["rounds"] == 4
        assert (each["gave_up"], each["worst_over_median"]) == (False, each["worst_s"] / each["median_s"])
        assert (each["tcp"] is None) == (each["backend"] != "gloo")
        assert 0 < min(each["times_s"]) <= each["median_s"] <= each["p99_s"] == each["worst_s"]
        assert each["ideal_s"] > 0
        assert each["cpu_s_per_gb"] > 0


def test_exact_backends_get_everything_and_the_lossy_one_what_arrives(report: AllReduceReport) -> None:
    for result in report.results:
        if result.backend == "storm-lossy":
            assert result.arrived == pytest.approx(0.9, abs=0.04)
            assert result.repaired == 0
        else:
            assert result.arrived == 1.0
            assert (result.repaired > 0) == (result.backend == "storm")
        assert (result.loss_measured is None) == (result.backend == "gloo")


def test_backends_take_turns_and_each_round_begins_with_another(report: AllReduceReport) -> None:
    names = [*BACKENDS, Copies.name]
    expected = [
        (size, turn, names[(turn + position) % 4])
        for size in (1_000_000, 500_000)
        for turn in range(4)
        for position in range(4)
    ]
    assert [(call.bytes, call.round, call.backend) for call in report.calls] == expected


def test_the_table_says_that_gloo_felt_no_loss(report: AllReduceReport) -> None:
    table = allreduce_table(report)
    assert table.row_count == 8
    assert "gloo ran without loss" in str(table.caption)


@pytest.mark.thorough
def test_a_plot_is_drawn_where_matplotlib_is_there(
    report: AllReduceReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    check_plot(tmp_path / "out.png")
    plot_allreduce(report, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BadSetting, match=r"^plot must end with one of"):
        check_plot(tmp_path / "out.txt")
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(BadSetting, match=r"^plot needs matplotlib: pip install matplotlib"):
        check_plot(tmp_path / "out.png")


@pytest.mark.thorough
def test_latency_covers_all_sizes_an_empty_exchange_and_idling(tmp_path: Path) -> None:
    report = run_latency(LatencySettings(ranks=2, iters=5, warmup=2, idle_s=0.3, timeout_s=100))
    assert [(each.bytes, each.backend) for each in report.results] == [(s, b) for s in SIZES_BYTES for b in BACKENDS]
    assert all(0 < each.median_s <= each.p99_s <= each.worst_s for each in report.results)
    assert set(report.empty_exchange_s) == set(report.idle_cpu_percent) == {"storm", "gloo"}
    assert all(0 < seconds < 1 for seconds in report.empty_exchange_s.values())
    assert report.idle_cpu_percent["storm"] < 20
    for each in report.results:
        assert 0 < each.cpu_s == pytest.approx(each.cpu_s_per_gb * each.bytes / 1e9)
    assert latency_table(report).row_count == len(SIZES_BYTES) * len(BACKENDS)
    assert "10^9 bytes of the tensor" in report.conditions["cpu"]
    report.write(tmp_path / "latency.json")
    assert set(json.loads((tmp_path / "latency.json").read_text())) == {
        "conditions",
        "results",
        "empty_exchange_s",
        "idle_cpu_percent",
    }
    assert ranks_left() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ranks", 1),
        ("mb", ()),
        ("mb", (0.0,)),
        ("mb", (1.0, 1.0)),
        ("mb", (float("nan"),)),
        ("iters", 0),
        ("warmup", -1),
        ("backends", ("nccl",)),
        ("backends", ()),
        ("backends", ("gloo", "gloo")),
        ("backends", ("gloo-bbr",)),
        ("faults", 1.0),
        ("patience_s", 0.0),
        ("dtype", "int8"),
        ("datagram_bytes", 100),
        ("timeout_s", 0.0),
    ],
)
def test_a_bad_setting_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadSetting) as caught:
        AllReduceSettings(**{name: value})  # type: ignore[arg-type]  # that is the point
    assert caught.value.name == name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_wrong_sum_is_noticed(dtype: str) -> None:
    world = 64
    members = [Member(rank, world, None, print, print) for rank in range(world)]  # type: ignore[arg-type]  # needs no store
    patterns = [Pattern(1000, dtype, member) for member in members]
    total = patterns[0].own.clone()
    for pattern in patterns[1:]:
        total += pattern.own
    patterns[5].check("storm", total)
    patterns[5].check_range("storm-lossy", total)
    total[7] += 2
    with pytest.raises(RuntimeError, match=r"^storm gave a wrong sum in 1 of "):
        patterns[5].check("storm", total)
    total[7] = 1000
    with pytest.raises(RuntimeError, match=r"^storm-lossy gave values that no mean of contributions can have, in 1"):
        patterns[5].check_range("storm-lossy", total)


@pytest.mark.parametrize("world", [2, 4])
def test_copies_change_nothing(world: int) -> None:
    tensor = torch.arange(700_000, dtype=torch.float32)
    before = tensor.clone()
    Copies(world).all_reduce(tensor)
    assert torch.equal(tensor, before)


def test_merging_takes_the_slowest_rank_and_adds_the_rest() -> None:
    first = Log([Sample("storm", 8, 0, 1.0, 0.5, 1.0, 3)], {("storm", 8): Counters(1, 10, 0)}, 64)
    second = Log([Sample("storm", 8, 0, 2.0, 0.25, 0.5, 4)], {("storm", 8): Counters(2, 10, 5)}, 64)
    merged = merge([first, second])
    assert merged == Log([Sample("storm", 8, 0, 2.0, 0.75, 0.75, 7)], {("storm", 8): Counters(3, 20, 5)}, 64)
    assert merged.counters["storm", 8].loss == 0.15
    with pytest.raises(RuntimeError, match="disagree on the order"):
        merge([first, Log([Sample("gloo", 8, 0, 2.0, 0.25, 0.5, 4)])])


def test_statistics_of_few_times_are_times_that_were_seen() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert percentile([1.0, 2.0, 3.0], 99) == 3.0
    assert percentile([float(i) for i in range(1, 201)], 99) == 198.0
    assert percentile([1.0], 0) == 1.0


def test_numbers_are_shown_with_three_digits_and_a_unit() -> None:
    assert [time_text(s) for s in (1.5e-6, 850e-6, 0.99996e-3, 0.0913, 1.237)] == [
        "1.50 µs",
        "850 µs",
        "1.00 ms",
        "91.3 ms",
        "1.24 s",
    ]
    assert [size_text(b) for b in (12, 4000, 25_000_000)] == ["12 B", "4 KB", "25 MB"]
    assert [loss_text(f) for f in (0.0, 0.0012, 0.1)] == ["0.0 %", "0.12 %", "10.0 %"]
    assert oversubscription_text(2, 2) == ""
    assert "4 ranks share 2 cores" in oversubscription_text(4, 2)
    assert [share_text(f) for f in (1.0, 0.999999, 0.9)] == ["100 %", "99.99 %", "90.00 %"]


def test_json_keeps_lists_of_numbers_on_one_line(tmp_path: Path) -> None:
    data = {"times_s": [0.1, 2e-05, 3], "names": ["a", "b"]}
    write_json(tmp_path / "x.json", data)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == data
    assert "[ 0.1, 2e-05, 3 ]" in text
