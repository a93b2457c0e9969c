"""The benchmark of convergence: a tiny language model on loopback and in a lab."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from commands import ranks_left, text_of
from stormtorch.checks import BadSetting
from stormtorch_lab.bench.convergence import ConvergenceReport, ConvergenceSettings, Curve
from stormtorch_lab.bench.learning import run_convergence
from stormtorch_lab.cli.plots.convergence import headline, plot_convergence
from stormtorch_lab.cli.tables.steps import convergence_table
from stormtorch_lab.netns import Conditions
from stormtorch_lab.netns.fixtures import lab_or_skip
from stormtorch_lab.policies.presets import PolicySettings

SMALL = ConvergenceSettings(
    ranks=2, seconds=1.5, every_s=0.3, layers=1, width=64, batch=2, context=16, wires=("bfloat16",), timeout_s=100
)


def measure(settings: ConvergenceSettings) -> ConvergenceReport:
    report = ConvergenceReport.begin(settings)
    report.curves.extend(run_convergence(settings))
    assert ranks_left() == []
    return report


@pytest.mark.slow
def test_all_backends_learn_from_the_same_start_against_the_clock(tmp_path: Path) -> None:
    done: list[int] = []
    report = ConvergenceReport.begin(SMALL)
    report.curves.extend(run_convergence(SMALL, lambda _what, seconds: done.append(seconds)))
    assert ranks_left() == []
    assert done == sorted(done)
    report.write(tmp_path / "learning.json")
    data = json.loads((tmp_path / "learning.json").read_text())
    assert data["conditions"]["network"] == "loopback"
    assert {"clock", "step", "corpus", "machine", "commit", "target_loss"} <= set(data["conditions"])
    gloo, drift = data["results"]
    assert (gloo["backend"], drift["backend"]) == ("gloo", "storm-drift-bf16")
    assert gloo["losses"][0] == drift["losses"][0]
    for each in (gloo, drift):
        assert each["clock_s"][-1] >= 1.5
        assert each["clock_s"] == sorted(each["clock_s"])
        assert len(each["clock_s"]) == len(each["steps"]) == len(each["losses"]) > 2
        assert each["losses"][-1] < each["losses"][0] - 0.2
        assert each["reached_s"] is not None
        assert not each["gave_up"]
    assert gloo["speedup"] == 1.0
    text = text_of(convergence_table(report))
    for word in ("gloo", "storm-drift-bf16", "loopback", "reached"):
        assert word in text
    pytest.importorskip("matplotlib")
    plot_convergence(report, tmp_path / "learning.svg")
    assert "<svg" in (tmp_path / "learning.svg").read_text()


def curve(name: str, losses: list[float], *, gave_up: bool = False) -> Curve:
    clock_s = [2.0 * index for index in range(len(losses))]
    steps = list(range(len(losses)))
    return Curve(
        backend=name,
        clock_s=clock_s,
        steps=steps,
        losses=losses,
        params=1,
        arrived=1.0,
        gave_up=gave_up,
        tcp=None,
    )


@pytest.mark.thorough
@pytest.mark.pure
def test_the_picture_shows_who_never_made_a_step_as_a_line_through_the_time_that_it_was_given(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    settings = replace(SMALL, patience_s=3.0)
    curves = [curve("gloo-cubic", [5.0], gave_up=True), curve("storm-drift", [5.0, 4.0, 3.0, 2.0, 1.5])]
    report = ConvergenceReport(ConvergenceReport.begin(settings).conditions, curves)
    assert headline(report) == "storm-drift reaches a loss of 1.50 in 8 s"
    plot_convergence(report, tmp_path / "learning.svg")
    drawn = (tmp_path / "learning.svg").read_text()
    assert "<!-- gloo-cubic: no step -->" in drawn
    assert "<!-- in 3 s -->" in drawn
    assert "stroke-dasharray" in drawn


def test_the_target_is_what_all_came_to_and_is_met_between_evaluations() -> None:
    slow, fast = curve("gloo", [5.0, 4.0, 3.0]), curve("storm-drift", [5.0, 2.0, 1.0])
    stuck = curve("gloo-cubic", [5.0], gave_up=True)
    report = ConvergenceReport({}, [slow, fast, stuck])
    assert report.target == 3.0
    assert report.reached_s(slow) == 4.0
    assert report.reached_s(fast) == pytest.approx(2.0 * 2 / 3)
    assert report.reached_s(stuck) is None
    assert report.speedup(fast) == pytest.approx(3.0)
    assert report.speedup(stuck) is None
    assert ConvergenceReport({}, [stuck, slow, fast]).speedup(fast) == pytest.approx(3.0)
    assert ConvergenceReport({}).target is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ranks", 1),
        ("seconds", 0.0),
        ("every_s", 0.0),
        ("layers", 0),
        ("width", 65),
        ("batch", 0),
        ("context", 0),
        ("lr", 0.0),
        ("backends", ("nccl",)),
        ("wires", ("float64",)),
        ("patience_s", 0.0),
        ("timeout_s", 0.0),
    ],
)
def test_a_bad_setting_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadSetting) as caught:
        ConvergenceSettings(**{name: value})  # type: ignore[arg-type]  # that is the point
    assert caught.value.name == {"wires": "wire"}.get(name, name)


@pytest.mark.slow
@pytest.mark.lab
def test_in_a_lab_a_backend_that_stands_still_is_given_up_and_the_next_one_learns() -> None:
    lab_or_skip()
    settings = replace(
        SMALL,
        backends=("gloo-cubic", "storm-drift"),
        # Under this loss TCP stalls.
        network=Conditions(rate="20mbit", loss=0.4),
        patience_s=2.0,
    )
    report = measure(settings)
    gloo, drift = report.curves
    assert (gloo.tcp, gloo.gave_up) == ("cubic", True)
    assert drift.measured is not None
    assert drift.measured["loss"] == pytest.approx(0.4, abs=0.05)
    assert drift.arrived < 1.0
    assert drift.losses[-1] < drift.losses[0]
    assert "aborted" in text_of(convergence_table(report))


@pytest.mark.thorough
def test_policies_race_by_name_to_a_loss_that_is_given() -> None:
    policy = PolicySettings(every=5, more=(("momentum", "0.5"),), given=frozenset({"every"}))
    settings = replace(SMALL, backends=("storm-drift", "diloco", "gossip"), policy=policy, target=5.0, faults=0.05)
    report = measure(settings)
    assert [curve.backend for curve in report.curves] == ["storm-drift-bf16", "diloco", "gossip"]
    assert "every=5" in report.conditions["policy"]["diloco"]
    assert "momentum=0.5" in report.conditions["policy"]["diloco"]
    for each in report.curves:
        assert each.losses[0] == report.curves[0].losses[0]
        assert each.losses[-1] < each.losses[0] - 0.2
        assert each.arrived < 1.0
    assert report.target == 5.0
    assert "loss of 5.000;" in text_of(convergence_table(report)) or "loss of 5.000." in text_of(
        convergence_table(report)
    )


@pytest.mark.pure
def test_a_policy_that_does_not_exist_is_no_backend() -> None:
    with pytest.raises(BadSetting, match=r"must be .*diloco.*got"):
        replace(SMALL, backends=("dilocco",))


@pytest.mark.pure
def test_a_loss_that_nobody_came_to_is_said() -> None:
    conditions = ConvergenceReport.begin(replace(SMALL, target=0.1)).conditions
    report = ConvergenceReport(conditions, [curve("storm-drift", [5.0, 4.0]), curve("gloo", [5.0, 4.5])])
    assert headline(report) == "no backend reaches a loss of 0.10"
    assert report.speedup(report.curves[0]) is None
