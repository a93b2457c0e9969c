"""Benchmarks in a lab: loss that affects every backend, wait limits for TCP under loss, and sweeps."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from test_bench import die_on_one, fail_on_one, greet, sleep_on_one

from commands import ranks_left, text_of
from stormtorch.checks import BadSetting
from stormtorch_lab.bench.allreduce import AllReduceSettings, run_allreduce
from stormtorch_lab.bench.results import AllReduceReport, AllReduceResult, ideal_bytes, ideal_s, summarize
from stormtorch_lab.bench.sweep import SweepPoint, SweepReport, SweepSettings, run_sweep
from stormtorch_lab.bench.tcp import streams
from stormtorch_lab.cli.plots.bench import COLOURS, plot_allreduce
from stormtorch_lab.cli.plots.sweep import plot_sweep
from stormtorch_lab.cli.tables.bench import allreduce_table, sweep_table
from stormtorch_lab.cli.tables.captions import troubles_text
from stormtorch_lab.jobs.counters import Log, Sample
from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.netns import BadCondition, Conditions, Lab
from stormtorch_lab.netns.fixtures import lab_or_skip

STORMTORCH = (sys.executable, "-m", "stormtorch.cli")
ENVIRONMENT = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


# --- without a lab ----------------------------------------------------------------------------------------------------


def test_the_ideal_is_what_a_rank_must_send_at_the_rate_of_its_line() -> None:
    assert ideal_s(4, 25e6, 400e6) == pytest.approx(0.75)
    assert ideal_s(2, 1e6, 100e6) == pytest.approx(0.08)
    assert ideal_bytes(4, 0.75, 400e6) == pytest.approx(25e6)


def result(backend: str, times_s: list[float], *, gave_up: bool = False) -> AllReduceResult:
    samples = [Sample(backend, 1_000_000, turn, seconds, 0.01, 1.0, 0) for turn, seconds in enumerate(times_s)]
    samples[-1] = samples[-1]._replace(gave_up=gave_up)
    (found,) = summarize(Log(samples, tcp={"gloo-bbr": "bbr"}), (backend, "gloo"), (1.0,), 2, 100e6)
    return found


def test_a_result_tells_how_far_the_worst_round_is_off_and_whether_its_median_is_only_a_bound() -> None:
    usual = result("storm", [0.1, 0.2, 0.4])
    assert (usual.rounds, usual.worst_over_median, usual.median_is_bound, usual.tcp) == (3, 2.0, False, None)
    assert usual.over_ideal == pytest.approx(0.2 / 0.08)
    assert result("gloo-bbr", [0.1]).tcp == "bbr"
    # The aborted call would be the longest in any case, so the median of three is known.
    assert not result("gloo-bbr", [0.1, 0.2, 30.0], gave_up=True).median_is_bound
    assert result("gloo-bbr", [0.1, 30.0], gave_up=True).median_is_bound
    assert result("gloo-bbr", [30.0], gave_up=True).median_is_bound


def point(rate: str, delay: str, loss: float, *results: AllReduceResult) -> SweepPoint:
    measured = {"loss": loss, "overflow": 0.0, "round_trips_s": [0.0001]}
    return SweepPoint(
        requested=Conditions(rate=rate, delay=delay, loss=loss, burst=8 if loss else 1).to_json(),
        mb=1.0,
        measured=measured,
        network="lab: made up",
        results=list(results),
    )


@pytest.fixture
def swept() -> SweepReport:
    settings = SweepSettings(rates=("100mbit",), backends=("storm", "gloo-bbr"), iters=3)
    slow = result("gloo-bbr", [30.0], gave_up=True)
    failed = SweepPoint(requested=Conditions(rate="100mbit", delay="20ms").to_json(), mb=1.0, error="rank 1: it rained")
    report = SweepReport.begin(settings)
    report.points.append(point("100mbit", "0ms", 0.0, result("storm", [0.1] * 3), result("gloo-bbr", [0.2] * 3)))
    report.points.append(point("100mbit", "0ms", 0.1, result("storm", [0.12] * 3), slow))
    report.points.append(failed)
    return report


def test_a_sweep_is_a_table_of_conditions_and_backends(swept: SweepReport) -> None:
    table = sweep_table(swept)
    text = text_of(table)
    assert table.row_count == 3
    for cell in ("100 Mbit/s", "40 ms", "10 %", " 8 ", "1.25", "1.50", ">375.0", "failed"):
        assert cell in text
    assert "*" not in text


def test_a_sweep_marks_what_was_measured_while_others_had_the_processors(swept: SweepReport) -> None:
    swept.points[1] = replace(swept.points[1], processors_withheld=0.3)
    swept.points[0] = replace(swept.points[0], processors_withheld=0.01)
    text = text_of(sweep_table(swept))
    assert text.count("* 100 Mbit/s") == 1
    assert "*: the" in text and "withheld" in text


def test_a_caption_tells_of_dropped_datagrams_and_of_processors_that_others_had() -> None:
    assert troubles_text({"kernel_drops": 0, "processors_withheld": 0.04}) == ""
    assert troubles_text({"kernel_drops": 0, "processors_withheld": None}) == ""
    assert "dropped 7 datagrams" in troubles_text({"kernel_drops": 7})
    assert "withheld 30%" in troubles_text({"kernel_drops": 0, "processors_withheld": 0.3})


def test_a_sweep_is_written_as_plain_data_and_drawn(swept: SweepReport, tmp_path: Path) -> None:
    swept.write(tmp_path / "new" / "sweep.json")
    data = json.loads((tmp_path / "new" / "sweep.json").read_text())
    assert set(data) == {"conditions", "points"}
    assert {"machine", "commit", "ideal", "patience_s", "points_asked"} <= set(data["conditions"])
    assert data["points"][1]["requested"]["loss"] == {"p": 0.1, "burst": 8.0}
    assert data["points"][2]["error"] == "rank 1: it rained"
    pytest.importorskip("matplotlib")
    plot_sweep(swept, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_points_of_a_sweep_are_all_combinations_those_of_one_lab_together() -> None:
    settings = SweepSettings(rates=("100mbit", "1gbit"), delays=("0ms", "20ms"), losses=(0.0, 0.1), ideal_s=0.6)
    points = settings.points()
    assert [(each.network.rate_bits, each.network.delay_s) for each in points if each.network] == [
        (rate, delay) for rate in (1e8, 1e9) for delay in (0.0, 0.02) for _ in range(2)
    ]
    assert [each.mb for each in points] == [(5.0,)] * 4 + [(50.0,)] * 4
    assert {each.mb for each in replace(settings, mb=7.0).points()} == {(7.0,)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rates", ()),
        ("rates", ("fast",)),
        ("delays", ("20",)),
        ("losses", (2.0,)),
        ("bursts", (0.5,)),
        ("bursts", ("5",)),
        ("bursts", ()),
        ("queue", "1b"),
        ("mb", 0.0),
        ("ideal_s", 0.0),
        ("ranks", 1),
        ("backends", ("nccl",)),
        ("patience_s", 0.0),
    ],
)
def test_a_bad_setting_of_a_sweep_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises((BadSetting, BadCondition)) as caught:
        SweepSettings(**{name: value})  # type: ignore[arg-type]  # that is the point
    assert getattr(caught.value, "name", None) == name


def test_injected_faults_are_for_loopback_only() -> None:
    with pytest.raises(BadSetting, match=r"^faults are for loopback"):
        AllReduceSettings(faults=0.1, network=Conditions(loss=0.1))


def test_connections_can_be_found_changed_and_cut() -> None:
    before = streams()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        far_end, _ = server.accept()
        found = streams() - before
        assert {stream.descriptor for stream in found} == {client.fileno(), far_end.fileno()}
        for stream in found:
            stream.choose("reno")  # the one that every kernel has
            assert stream.congestion_control() == "reno"
            stream.abort()
        assert client.recv(1) == b""
        client.close()
        far_end.close()
        assert {stream.congestion_control() for stream in found} == {""}


# --- in a lab ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> AllReduceReport:
    lab_or_skip()
    settings = AllReduceSettings(
        ranks=2,
        mb=(1.0,),
        iters=2,
        warmup=1,
        backends=("storm", "storm-lossy", "gloo", "gloo-cubic"),
        network=Conditions(rate="100mbit", loss=0.1),
        patience_s=3.0,
        timeout_s=100,
    )
    steps: list[int] = []
    report = run_allreduce(settings, lambda _what, done: steps.append(done))
    assert steps == [1, 2]
    assert ranks_left() == []
    return report


@pytest.mark.thorough
@pytest.mark.lab
def test_loss_in_a_lab_is_measured_and_meets_all_backends(report: AllReduceReport) -> None:
    conditions = report.to_json()["conditions"]
    assert conditions["network"] == "lab: bridge, tbf, nft"
    assert conditions["requested"] == Conditions(rate="100mbit", loss=0.1).to_json()
    assert conditions["loss_measured"] == conditions["measured"]["loss"] == pytest.approx(0.1, abs=0.02)
    assert conditions["overflow_measured"] < 0.1
    assert {"ideal", "patience_s", "tcp_congestion_control"} <= set(conditions)
    by_name = {each.backend: each for each in report.results}
    assert list(by_name) == ["storm", "storm-lossy", "gloo", "gloo-cubic"]
    assert by_name["storm"].repaired > 0
    assert by_name["storm-lossy"].arrived == pytest.approx(0.9, abs=0.04)
    assert by_name["storm"].tcp is None
    assert by_name["gloo"].tcp == conditions["tcp_congestion_control"]
    assert by_name["gloo-cubic"].tcp == "cubic"
    for each in report.results:
        assert each.ideal_s == pytest.approx(0.08)
        assert 1 <= each.rounds <= 2
        # No backend is faster than the link, except for its burst after a pause.
        assert each.median_s > 0.07


@pytest.mark.thorough
@pytest.mark.lab
def test_the_table_and_the_plot_of_a_lab_name_its_conditions(report: AllReduceReport, tmp_path: Path) -> None:
    text = text_of(allreduce_table(report))
    assert "over 2 ranks, 100 Mbit/s" in text
    assert "10.0 % requested" in text
    assert set(COLOURS) > {each.backend for each in report.results}
    pytest.importorskip("matplotlib")
    plot_allreduce(report, tmp_path / "out.svg")
    assert "<svg" in (tmp_path / "out.svg").read_text()


@pytest.mark.lab
@pytest.mark.slow
def test_a_backend_that_is_too_slow_is_given_up_and_the_others_go_on() -> None:
    lab_or_skip()
    settings = AllReduceSettings(
        ranks=2,
        mb=(1.0, 4.0),
        iters=2,
        warmup=1,
        backends=("storm", "gloo"),
        # 4 MB take 3.2 s, more than the wait limit even without loss.
        network=Conditions(rate="10mbit"),
        patience_s=0.4,
        timeout_s=100,
    )
    by_name = {(each.backend, each.mb): each for each in run_allreduce(settings).results}
    slow = by_name["gloo", 4.0]
    assert (slow.gave_up, slow.rounds, slow.median_is_bound) == (True, 1, True)
    assert slow.worst_s == pytest.approx(2.0, abs=0.5)
    assert not by_name["storm", 1.0].gave_up
    lossy = replace(settings, mb=(0.5,), patience_s=2.0, network=Conditions(rate="10mbit", loss=0.5))
    slow = run_allreduce(lossy).results[-1]
    assert (slow.backend, slow.gave_up, slow.rounds) == ("gloo", True, 1)
    assert slow.worst_s == pytest.approx(2.0, abs=0.5)


@pytest.mark.thorough
@pytest.mark.lab
def test_ranks_on_hosts_share_a_store_and_know_their_interfaces() -> None:
    lab_or_skip()
    with Lab(2, management=True, probe=False) as lab:
        assert run_ranks(greet, 2, ("good day ",), timeout_s=60, lab=lab) == [("good day 1", 1), ("good day 0", 1)]
        assert run_ranks(interfaces, 2, timeout_s=60, lab=lab) == [("eth0", "mgmt0")] * 2
    assert ranks_left() == []


@pytest.mark.lab
@pytest.mark.slow
def test_ranks_on_hosts_end_with_the_one_that_fails() -> None:
    lab_or_skip()
    with Lab(2, management=True, probe=False) as lab:
        with pytest.raises(RankFailed, match=r"^rank 1: ValueError: the cat sat on the switch$"):
            run_ranks(fail_on_one, 2, timeout_s=60, lab=lab)
        with pytest.raises(RankFailed, match=r"^rank 1: was killed by SIGKILL"):
            run_ranks(die_on_one, 2, timeout_s=60, lab=lab)
        with pytest.raises(RankFailed, match=r"^timed out after 15 s, waiting for rank 1: "):
            run_ranks(sleep_on_one, 2, timeout_s=15, lab=lab)
        # The port is free again.
        assert run_ranks(interfaces, 2, timeout_s=60, lab=lab) == [("eth0", "mgmt0")] * 2
    assert ranks_left() == []


def interfaces(member: Member) -> tuple[str, str]:
    assert {member.interface, member.control_interface} < {name for _, name in socket.if_nameindex()}
    assert member.request("what for?") is None
    return member.interface, member.control_interface


SMALL = SweepSettings(
    ranks=2,
    rates=("100mbit",),
    delays=("0ms",),
    losses=(0.0, 0.1),
    backends=("storm", "gloo"),
    ideal_s=0.05,
    iters=2,
    patience_s=3,
    timeout_s=60,
)


@pytest.mark.lab
@pytest.mark.slow
def test_a_sweep_measures_each_point_in_turn() -> None:
    lab_or_skip()
    steps: list[int] = []
    points = list(run_sweep(SMALL, lambda _what, done: steps.append(done)))
    assert steps == [0, 1, 2, 2, 3, 4]
    assert [each.error for each in points] == [None, None]
    assert [each.requested["loss"] for each in points] == [0.0, 0.1]
    for each, loss in zip(points, (0.0, 0.1), strict=True):
        assert each.measured is not None
        assert each.measured["loss"] == pytest.approx(loss, abs=0.03)
        assert [found.backend for found in each.results] == ["storm", "gloo"]
        assert "results" in asdict(each)


@pytest.mark.lab
@pytest.mark.slow
def test_a_point_that_fails_says_why_and_the_next_one_is_measured() -> None:
    lab_or_skip()
    # The slow link would need more than half a minute.
    settings = replace(SMALL, rates=("1mbit", "100mbit"), losses=(0.0,), mb=4.0, iters=1, timeout_s=25)
    first, second = run_sweep(settings)
    assert first.error is not None
    assert first.error.startswith("timed out after 25 s")
    assert (second.error, len(second.results)) == (None, 2)


@pytest.mark.lab
@pytest.mark.slow
def test_ctrl_c_keeps_the_points_that_were_measured(tmp_path: Path) -> None:
    lab_or_skip()
    out = tmp_path / "sweep.json"
    options = ["--ranks", "2", "--rates", "100mbit", "--delays", "0ms", "--losses", "0,0.01,0.02,0.03,0.04,0.05"]
    options += ["--mb", "1", "--iters", "1", "--backends", "storm", "--json", str(out)]
    process = subprocess.Popen(
        [*STORMTORCH, "bench", "sweep", *options],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not out.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    shown, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "interrupted: all ranks were stopped\n"
    assert "all-reduce under real loss" in shown
    data = json.loads(out.read_text())
    assert 1 <= len(data["points"]) < data["conditions"]["points_asked"] == 6
