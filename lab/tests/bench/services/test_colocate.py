"""A web service beside a training: settings, the order of runs, summaries, and a small one in a lab."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from commands import ENVIRONMENT, STORMTORCH, call, ranks_left, text_of
from stormtorch.checks import BadSetting
from stormtorch.exchange.reliability import EXACT
from stormtorch_lab.bench.services.colocate import NONE, TRAININGS, Case, ColocateSettings
from stormtorch_lab.bench.services.colocate_rank import policy_for
from stormtorch_lab.bench.services.colocate_results import ColocateReport, RunResult, TrainingResult, rate_at
from stormtorch_lab.bench.services.colocate_run import run_colocate
from stormtorch_lab.bench.services.service import ServiceResult, find_nginx
from stormtorch_lab.cli.plots.colocate import headline, plot_colocate
from stormtorch_lab.cli.tables.colocate import colocate_table
from stormtorch_lab.netns import Conditions
from stormtorch_lab.netns.access import LabUnavailable
from stormtorch_lab.netns.fixtures import lab_or_skip

SMALL = ColocateSettings(
    ranks=2,
    prefer=(None, 0.05),
    requests=(40.0,),
    seconds=1.5,
    steps=6,
    layers=1,
    width=64,
    batch=1,
    context=16,
    network=Conditions(rate="50mbit"),
    timeout_s=100,
)


def service_or_skip() -> None:
    lab_or_skip()
    try:
        find_nginx()
    except LabUnavailable as error:
        pytest.skip(str(error))


# --- settings and summaries ------------------------------------------------------------------------------------------


@pytest.mark.pure
def test_every_training_runs_alone_before_the_service_begins_and_preferences_take_turns() -> None:
    settings = replace(SMALL, train=("model-averaging", "ddp", NONE), requests=(10.0, 20.0), seeds=2)
    cases = settings.cases()
    alone = [case for case in cases if not case.requests]
    assert cases[: len(alone)] == alone
    assert [(case.train, case.seed, case.requests) for case in alone[:3]] == [
        ("model-averaging", 0, None),
        ("model-averaging", 0, 0.0),
        ("ddp", 0, None),
    ]
    rounds = [
        [case for case in cases if (case.seed, case.requests) == key] for key in [(0, 10.0), (0, 20.0), (1, 10.0)]
    ]
    assert len({str(case) for case in rounds[0]}) == len(rounds[0]) == 4  # two preferences; ddp and none once
    assert rounds[0][0].low_share != rounds[1][0].low_share  # the first case rotates
    assert sorted(case.prefer for case in rounds[0]) == sorted(case.prefer for case in rounds[1])


@pytest.mark.pure
def test_of_equal_priority_ddp_is_not_run_twice() -> None:
    cases = replace(SMALL, train=("ddp", "ddp-low")).cases()
    beside = [(case.train, case.prefer) for case in cases if case.requests]
    assert beside == [("ddp", "equal"), ("ddp-low", "0.05")]


@pytest.mark.pure
def test_a_deadline_ends_both_stages_and_none_is_exact() -> None:
    for train in ("model-averaging", "lead"):
        assert policy_for(train, None).up is EXACT
        for stage in (policy_for(train, 0.2).up, policy_for(train, 0.2).down):
            assert (stage.budget, stage.deadline_s) == (1.0, 0.2)
        spending = policy_for(train, None, 0.1)
        assert (spending.up.budget, spending.up.deadline_s, spending.allowed_loss) == (1.0, None, 0.1)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "value", "blamed"),
    [
        ("ranks", 1, "ranks"),
        ("train", ("nccl",), "train"),
        ("train", (), "train"),
        ("prefer", (1.0,), "prefer"),
        ("prefer", (-0.1,), "prefer"),
        ("prefer", (None, None), "prefer"),
        ("requests", (), "requests"),
        ("requests", (0.0,), "requests"),
        ("requests", (float("nan"),), "requests"),
        ("size", 0, "size"),
        ("seconds", 0.0, "seconds"),
        ("steps", 0, "steps"),
        ("slack", 0.0, "slack"),
        ("deadline_s", 0.0, "deadline"),
        ("at_latency_s", 0.0, "at_latency"),
        ("network", Conditions(), "rate"),
        ("width", 65, "width"),
        ("yield_to", "nobody", "yield_to"),
        ("allowed_loss", 0.0, "allowed_loss"),
        ("seeds", 0, "seeds"),
        ("request_timeout_s", 0.0, "request_timeout"),
    ],
)
def test_a_bad_setting_is_refused_by_name(name: str, value: object, blamed: str) -> None:
    with pytest.raises(BadSetting) as caught:
        ColocateSettings(**{name: value})  # type: ignore[arg-type]  # that is the point
    assert caught.value.name == blamed


@pytest.mark.pure
@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--prefer", "equal,much", "must be equal or numbers in [0, 1), separated by commas, got 'equal,much'"),
        ("--prefer", "1.5", "must lie in [0, 1), got 1.5"),
        ("--requests", "100,x", "must be numbers separated by commas, got '100,x'"),
        ("--requests", "-1", "must lie in [0.1, 100000], got -1"),
        ("--train", "horovod", f"must be one of {', '.join(TRAININGS)}, got 'horovod'"),
        ("--deadline", "soon", "must be a time such as 20ms"),
        ("--at-latency", "0ms", "must lie in"),
        ("--request-timeout", "-5s", "must be a time"),
        ("--rate", "fast", "must be a rate such as 400mbit"),
        ("--ranks", "1", "must lie in [2, 64], got 1"),
        ("--data", "/nowhere/at/all.txt", "cannot read /nowhere/at/all.txt"),
    ],
)
def test_a_bad_option_is_named_before_anything_runs(option: str, value: str, problem: str) -> None:
    code, text = call("bench", "colocate", option, value)
    assert code == 2
    assert option in text
    assert problem in text


@pytest.mark.pure
def test_requests_at_a_latency_lie_between_rates_that_were_measured() -> None:
    points = [(100.0, 0.010), (200.0, 0.020), (400.0, 0.060)]
    for latency_s, between in ((0.015, 150.0), (0.030, 250.0)):
        per_s, bound = rate_at(points, latency_s)
        assert per_s == pytest.approx(between)
        assert bound == ""
    assert rate_at(points, 0.005) == (100.0, "below")
    assert rate_at(points, 0.100) == (400.0, "at least")


def run_of(
    train: str, requests: float | None, mean_s: float, *, share: float | None = None, loss: float = 0.0, seed: int = 0
) -> RunResult:
    times = {"mean_s": mean_s, "p50_s": mean_s, "p99_s": 3 * mean_s, "max_s": 4 * mean_s}
    service = ServiceResult(
        requests=10, failed={"timeout": 1}, per_s=9.0, late_mean_s=0.001, late_p99_s=0.002, late_max_s=0.003, **times
    )
    training = TrainingResult(
        steps=8,
        measured_steps=4,
        step_s=0.5,
        loss=loss,
        loss_up=loss,
        loss_down=loss,
        bytes_per_step=1e6,
        deadline_s=None if requests is None else 0.2,
        exchange_s=0.3,
        validation=3.0,
        last_validation=2.9,
        validation_ratio=None if requests is None else 1.01,
    )
    return RunResult(
        case=Case(train=train, seed=seed, requests=requests, low_share=share),
        seconds=5.0,
        service=service if requests else None,
        training=None if train == NONE else training,
        line_use=0.5,
        low_share=share,
        drops={},
    )


def report_of(*runs: RunResult) -> ColocateReport:
    report = ColocateReport.begin(SMALL)
    report.runs.extend(runs)
    return report


@pytest.mark.pure
def test_a_summary_compares_with_equal_priority_and_with_the_service_alone(tmp_path: Path) -> None:
    report = report_of(
        run_of("model-averaging", None, 0.0),
        run_of("model-averaging", 0.0, 0.0, loss=0.02),
        run_of(NONE, 40.0, 0.010),
        run_of("model-averaging", 40.0, 0.030),
        run_of("model-averaging", 40.0, 0.034, seed=1),
        run_of("model-averaging", 40.0, 0.016, share=0.05, loss=0.1),
        run_of("ddp", 40.0, 0.048),
        run_of("ddp-low", 40.0, 0.024, share=0.05),
    )
    rows = {(row.train, row.prefer): row for row in report.rows()}
    low = rows["model-averaging", "0.05"]
    assert rows["model-averaging", "equal"].mean_s == pytest.approx(0.032)
    assert rows["model-averaging", "equal"].failed == 2
    assert low.speedup == pytest.approx(2.0)
    assert low.slowdown == pytest.approx(1.6)
    assert (low.loss, low.validation_ratio) == (0.1, 1.01)
    assert rows[NONE, "equal"].speedup is None
    assert rows["ddp-low", "0.05"].speedup == pytest.approx(2.0)  # of equal priority it is ddp
    assert report.alone()["model-averaging"] == (0.5, 0.2, 0.02)
    text = " ".join(text_of(colocate_table(report)).split())
    for word in (
        "model-averaging",
        "0.05",
        "10.0 %",
        "2.00",
        "2.0 % lost with deadlines of 200 ms for each stage",
        "below 40",
    ):
        assert word in text
    assert headline(report.rows()).startswith("beside model-averaging of low priority, which loses 10.0 %")
    pytest.importorskip("matplotlib")
    plot_colocate(report, tmp_path / "colocate.svg")
    drawn = (tmp_path / "colocate.svg").read_text()
    assert "<!-- model-averaging, 40/s -->" in drawn
    assert "<!-- loss of the training, % -->" in drawn
    report.write(tmp_path / "colocate.json")
    data = json.loads((tmp_path / "colocate.json").read_text())
    assert data["runs"][3]["service"]["done"] == 9
    assert data["carried"]["results"][0]["bound"] == "at least"


# --- in a lab --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.lab
def test_a_service_and_a_training_share_the_lines_and_both_are_measured() -> None:
    service_or_skip()
    settings = replace(SMALL, train=("model-averaging", "ddp-low", NONE))
    report = ColocateReport.begin(settings)
    run_colocate(settings, report.runs.append, describe=report.conditions.update)
    assert ranks_left() == []
    assert [run.case for run in report.runs] == settings.cases()
    assert report.conditions["nice"]["training"] > report.conditions["nice"]["service"]
    for run in report.runs:
        if run.service is not None:
            assert run.service.requests > 10
            assert run.service.failed == {}
            assert run.service.mean_s is not None
            assert run.service.mean_s > 8 * SMALL.size / 50e6
            assert run.seconds >= SMALL.seconds
        if run.training is not None:
            assert run.training.validation is not None
            assert run.training.validation < 5.6  # that of a model that knows nothing
            assert run.training.steps >= 8
            assert run.line_use is not None
            assert run.line_use > 0.01
        # Packets are marked if and only if a share was given.
        assert (run.drops["low_packets"] > 0) == (run.case.low_share is not None)
    alone, paced = report.runs[0].training, report.runs[1].training
    assert alone is not None
    assert paced is not None
    assert (alone.loss, alone.deadline_s) == (0.0, None)
    assert paced.deadline_s is not None
    gloo = [run.training for run in report.runs if run.case.train == "ddp-low" and run.case.requests]
    assert all(each is not None and each.validation_ratio == pytest.approx(1.0, abs=1e-3) for each in gloo)


@pytest.mark.thorough
@pytest.mark.lab
def test_ctrl_c_leaves_neither_servers_nor_clients_nor_ranks(tmp_path: Path) -> None:
    service_or_skip()
    words = [*STORMTORCH, "bench", "colocate", "--ranks", "2", "--requests", "50", "--train", "none"]
    words += ["--prefer", "equal", "--seconds", "60", "--json", str(tmp_path / "out.json")]
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + 60
        while not (servers := started(str(tmp_path), b"nginx")) or not started(str(tmp_path), b"service_client"):
            assert time.monotonic() < end, "nothing was started"
            assert process.poll() is None
            time.sleep(0.1)
        assert len(servers) == 2
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in errors
    assert started(str(tmp_path), b"nginx") == started(str(tmp_path), b"service_client") == []
    assert list(tmp_path.glob("stormtorch-service-*")) == []


def started(folder: str, name: bytes) -> list[int]:
    """Processes of that name with this folder for temporary files in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words, settings = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            inside = f"TMPDIR={folder}".encode() in settings.split(b"\0")
            # Only the command itself, not nsenter or a shell in front of it.
            first = os.path.basename(words.split(b"\0")[0])
            if inside and name in words and first not in (b"env", b"nsenter", b"sh", b"nice"):
                found.append(int(entry.name))
    return found
