"""The benchmark of DistributedDataParallel: a small model on loopback and in a lab."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stormtorch.bench.backends import BACKENDS
from stormtorch.bench.ddp import DdpReport, DdpSettings, StepResult, run_ddp
from stormtorch.bench.plot import plot_ddp
from stormtorch.bench.replicas import NO_SYNC, transformer
from stormtorch.bench.settings import BadSetting
from stormtorch.bench.tables import ddp_table
from stormtorch.lab import Conditions
from stormtorch.lab.fixtures import lab_or_skip
from test_bench import ranks_left
from test_bench_lab import text_of

SMALL = DdpSettings(hosts=2, params=0.5, tokens=4, iters=4, warmup=1, timeout_s=100)


def parameters(params_m: float) -> int:
    return sum(parameter.numel() for parameter in transformer(params_m).parameters())


@pytest.mark.parametrize("params_m", [0.5, 5.0, 25.0])
def test_the_model_has_about_the_parameters_asked_for(params_m: float) -> None:
    assert parameters(params_m) == pytest.approx(params_m * 1e6, rel=0.15)


def test_the_model_is_the_same_every_time_and_leaves_the_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    first, second = transformer(0.1), transformer(0.1)
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def report() -> DdpReport:
    steps: list[tuple[str, int]] = []
    report = run_ddp(SMALL, lambda what, done: steps.append((what, done)))
    assert [done for _, done in steps] == [1, 2, 3, 4]
    assert steps[0][0].endswith("M parameters on 2 ranks")
    assert ranks_left() == []
    return report


def test_the_report_holds_conditions_and_one_result_per_backend(report: DdpReport, tmp_path: Path) -> None:
    report.write(tmp_path / "ddp.json")
    data = json.loads((tmp_path / "ddp.json").read_text())
    conditions = data["conditions"]
    assert (conditions["hosts"], conditions["iters"], conditions["network"]) == (2, 4, "loopback")
    assert conditions["params"] == parameters(0.5)
    assert conditions["no_sync_s"] > 0
    assert {"machine", "commit", "date", "versions", "model", "step", "barrier", "kernel_drops"} <= set(conditions)
    assert [each["backend"] for each in data["results"]] == list(BACKENDS)
    gloo_s = data["results"][-1]["median_s"]
    for each in data["results"]:
        assert len(each["times_s"]) == each["rounds"] == 4
        assert 0 < min(each["times_s"]) <= each["median_s"] <= each["worst_s"]
        assert each["over_gloo"] == pytest.approx(each["median_s"] / gloo_s)
        assert each["speedup"] * each["over_gloo"] == pytest.approx(1.0)
        assert each["adds_s"] == pytest.approx(each["median_s"] - conditions["no_sync_s"])
        assert (each["gave_up"], each["gloo_gave_up"], each["cpu_s"] > 0) == (False, False, True)
        assert (each["tcp"] is None) == (each["backend"] != "gloo")


def test_backends_and_the_step_without_communication_take_turns(report: DdpReport) -> None:
    names = [*BACKENDS, NO_SYNC]
    expected = [(turn, names[(turn + position) % 4]) for turn in range(4) for position in range(4)]
    assert [(call.round, call.backend) for call in report.calls] == expected


def test_the_table_and_the_plot_show_every_backend(report: DdpReport, tmp_path: Path) -> None:
    text = text_of(ddp_table(report))
    for name in (*BACKENDS, NO_SYNC, "loopback", "speed-"):
        assert name in text
    pytest.importorskip("matplotlib")
    plot_ddp(report, tmp_path / "ddp.svg")
    assert "<svg" in (tmp_path / "ddp.svg").read_text()


def test_a_gloo_that_was_given_up_leaves_bounds(report: DdpReport) -> None:
    def given_up(result: StepResult) -> StepResult:
        gloo = {"gave_up": True, "rounds": 1} if result.backend == "gloo" else {}
        return replace(result, gloo_gave_up=True, over_gloo=0.25, speedup=4.0, **gloo)  # type: ignore[arg-type]

    text = text_of(ddp_table(replace(report, results=[given_up(result) for result in report.results])))
    assert "<0.25" in text
    assert ">4.00" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hosts", 1),
        ("params", 0.0),
        ("tokens", 0),
        ("iters", 0),
        ("warmup", -1),
        ("backends", ("nccl",)),
        ("backends", ("gloo-bbr",)),
        ("patience_s", 0.0),
        ("timeout_s", 0.0),
    ],
)
def test_a_bad_setting_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadSetting) as caught:
        DdpSettings(**{name: value})  # type: ignore[arg-type]  # that is the point
    assert caught.value.name == name


@pytest.mark.lab
def test_loss_in_a_lab_meets_all_backends_and_a_step_over_tcp_that_takes_too_long_is_given_up() -> None:
    lab_or_skip()
    settings = replace(
        SMALL,
        params=1.0,
        iters=2,
        backends=("storm", "storm-lossy", "gloo-cubic"),
        # Ideal are 0.36 s a step; under this loss TCP comes to a stop.
        network=Conditions(rate="100mbit", loss=0.3),
        patience_s=3.0,
    )
    report = run_ddp(settings)
    conditions = report.conditions
    assert conditions["requested"] == Conditions(rate="100mbit", loss=0.3).to_json()
    assert conditions["loss_measured"] == pytest.approx(0.3, abs=0.03)
    assert conditions["line_s"] == pytest.approx(conditions["params"] * 32 / 100e6)
    storm, lossy, gloo = report.results
    assert (storm.rounds, storm.arrived) == (2, 1.0)
    assert lossy.arrived == pytest.approx(0.7, abs=0.06)
    assert (gloo.tcp, gloo.gave_up, gloo.rounds, gloo.median_is_bound) == ("cubic", True, 1, True)
    assert gloo.worst_s == pytest.approx(3.0, abs=0.5)
    assert storm.gloo_gave_up
    assert storm.speedup is not None
    assert storm.speedup > 1
    assert "100 Mbit/s" in text_of(ddp_table(report))
    assert ranks_left() == []
