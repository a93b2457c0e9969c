"""A training and a service on the same links, in virtual time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stormtorch.checks import BadSetting
from stormtorch_lab._engine import SharedNetwork
from stormtorch_lab.studies.colocation.run import Colocated, Colocation, colocate
from stormtorch_lab.studies.colocation.sweep import Seeds, Sweep, run_sweep

# Few hosts and little time, so that a run takes a fraction of a second.
SMALL = Colocation(hosts=4, training=200e6, every_s=0.1, requests_per_s=1000.0, seconds=0.6, warm_s=0.2, seed=5)
ALONE = replace(SMALL, training=0)


def test_rare_requests_take_what_their_bytes_take_on_an_idle_line() -> None:
    result = colocate(replace(ALONE, requests_per_s=20.0, seconds=2.0))
    assert result.p50_s is not None
    serialised_s = (100_000 + 70 * 66) * 8 / 1e9
    # The request's way and the response's, and at most a handshake and two windows that wait for acknowledgements.
    assert serialised_s + 100e-6 < result.p50_s < serialised_s + 500e-6
    assert result.drops == result.resent == result.unanswered == 0


def test_hosts_add_their_own_time_to_every_request() -> None:
    quick, slow = (colocate(replace(ALONE, host_s=seconds)) for seconds in (0.0, 0.005))
    assert quick.mean_s is not None and quick.p99_s is not None
    assert slow.mean_s == pytest.approx(quick.mean_s + 0.005)
    assert slow.p99_s == pytest.approx(quick.p99_s + 0.005)


def test_a_training_alone_arrives_whole_and_keeps_its_pace() -> None:
    settings = replace(SMALL, requests_per_s=0.0, slack=None)
    result = colocate(settings)
    assert result.loss == 0.0
    assert result.mean_s is None
    assert result.exchanges == 4 * 6  # each rank every tenth of a second
    assert result.exchange_s is not None
    assert settings.alone_s < result.exchange_s < 4 * settings.alone_s


@pytest.mark.thorough
def test_a_training_of_low_priority_leaves_the_service_as_fast_as_alone() -> None:
    alone, low, equal = (
        colocate(each).mean_s for each in (ALONE, replace(SMALL, low_share=0.0), replace(SMALL, low_share=None))
    )
    assert alone is not None and low is not None and equal is not None
    assert low < 1.05 * alone
    assert equal > 1.2 * alone


@pytest.mark.thorough
def test_the_stronger_the_preference_the_faster_the_service() -> None:
    means = [colocate(replace(SMALL, low_share=share)).mean_s for share in (0.7, 0.3, 0.0)]
    assert means == sorted(means, key=lambda mean: -(mean or 0.0))


@pytest.mark.thorough
def test_a_tighter_deadline_costs_the_training_more_and_ends_its_exchanges_in_time() -> None:
    busy = replace(SMALL, requests_per_s=2500.0, low_share=0.0)
    losses = []
    for slack in (1.2, 2.0, 4.0):
        settings = replace(busy, slack=slack)
        result = colocate(settings)
        assert result.exchange_s is not None and settings.deadline_s is not None
        assert result.exchange_s <= 2 * settings.deadline_s + 1e-3
        losses.append(result.loss or 0.0)
    assert losses[0] > losses[1] > losses[2]
    assert losses[0] > 0.05


def test_a_short_queue_of_low_priority_overflows_and_the_other_does_not() -> None:
    result = colocate(replace(SMALL, low_share=0.0, low_queue_bytes=16 << 10))
    assert result.low_drops > 100
    assert result.drops == 0
    assert result.loss is not None and result.loss > 0.01


@pytest.mark.thorough
def test_a_seed_repeats_a_run() -> None:
    settings = replace(SMALL, low_share=0.1, seconds=0.2)
    assert colocate(settings) == colocate(settings)
    assert colocate(settings) != colocate(replace(settings, seed=6))


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("hosts", 1),
        ("low_share", 1.0),
        ("slack", 0.0),
        ("requests_per_s", -1.0),
        ("seconds", 0.0),
        ("every_s", 0.0),
        ("rate", "fast"),
        ("training", -5.0),
        ("sending", "soon"),
        ("queue_bytes", -1),
        ("request_bytes", 2000),
    ],
)
def test_bad_settings_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(ValueError, match=knob if knob != "sending" else "rate"):
        replace(SMALL, **{knob: value})


def test_neither_training_nor_service_is_refused() -> None:
    with pytest.raises(BadSetting, match="training"):
        replace(ALONE, requests_per_s=0.0)


def test_the_lab_has_slower_lines_whose_shapers_pass_bursts() -> None:
    lab = Colocation.of_the_lab(low_share=0.05)
    assert (lab.hosts, lab.rate, lab.burst_s, lab.low_share) == (8, 100e6, 1e-3, 0.05)


@pytest.mark.thorough
def test_the_best_case_is_the_fastest_whose_loss_is_allowed(tmp_path: Path) -> None:
    brief = replace(SMALL, seconds=0.3)
    sweep = Sweep(
        base=brief, requests=(2500.0,), shares=(0.4, 0.0), slacks=(1.2, 4.0), more_requests=(1000.0,), seeds=2
    )
    counts: list[int] = []
    study = run_sweep(sweep, counts.append)
    assert counts == list(range(1, len(sweep.runs()) + 1))
    assert len(counts) == 2 * (2 * 3 + 2), "with one queue and with each share, and two more, for each seed"
    gains = {gain.allowed: gain.best for gain in study.gains()}
    best = gains[0.05]
    assert best is not None and best.loss <= 0.05
    rivals = [each for each in study.cases() if each.low_share is not None and each.requests_per_s == 2500.0]
    assert len(rivals) == 4
    assert best == max((each for each in rivals if each.loss <= 0.05), key=lambda each: each.speedup)
    assert len(best.speedups) == 2
    assert all(gain is None or gain.speedup >= best.speedup for allowed, gain in gains.items() if allowed >= 0.05)
    path = tmp_path / "made" / "study.json"
    study.write(path, (0.002,))
    written = json.loads(path.read_text())
    assert written["gains"][1]["best"]["speedup"] == best.speedup
    assert written["settings"]["base"]["hosts"] == brief.hosts


def case(rate: float, mean_s: float, loss: float, share: float | None) -> tuple[Colocation, Colocated]:
    settings = replace(SMALL, requests_per_s=rate, slack=2.0, low_share=share)
    other = dict.fromkeys(("p50_s", "p99_s", "requests", "unanswered", "resent", "timeouts", "stage_loss"), 0)
    more = dict.fromkeys(("exchanges", "exchange_s", "drops", "low_drops"), 0)
    return settings, Colocated(mean_s=mean_s, loss=loss, **other, **more)  # type: ignore[arg-type]


def test_requests_at_a_mean_lie_between_the_rates_that_were_run() -> None:
    runs = [(100.0, 0.001, 0.0), (200.0, 0.002, 0.1), (300.0, 0.004, 0.3)]
    results = dict(case(*run, share) for run in runs for share in (None, 0.0))
    study = Seeds(sweep=Sweep(base=SMALL, shares=(0.0,), slacks=(2.0,), seeds=1), results=results)
    assert study.carried(0.003, None) == pytest.approx(250.0)
    assert study.carried(0.003, 0.0, most_loss=0.05) == pytest.approx(150.0)
    assert study.carried(0.0005, None) == 0.0, "no rate is fast enough"
    assert study.carried(1.0, None) == 300.0, "the highest rate that was run"


def test_bad_sweeps_are_refused_by_name() -> None:
    with pytest.raises(BadSetting, match="seeds"):
        Sweep(base=SMALL, seeds=0)
    with pytest.raises(BadSetting, match="shares"):
        Sweep(base=SMALL, shares=())
    with pytest.raises(BadSetting, match="low_share"):
        Sweep(base=SMALL, shares=(1.5,))


def test_there_is_nothing_to_ask_before_a_service_runs() -> None:
    network = SharedNetwork(2, SMALL.lines, 50e-6)
    with pytest.raises(RuntimeError, match="no service"):
        network.answered()
    network.serve(100.0, 1000, 100, 0, 0.0)
    with pytest.raises(RuntimeError, match="runs already"):
        network.serve(100.0, 1000, 100, 0, 0.0)
