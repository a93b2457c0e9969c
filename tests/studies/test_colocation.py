"""A training and a service on the same lines, in virtual time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stormtorch._engine as _engine
from stormtorch.checks import BadSetting
from stormtorch.network.faults import faults
from stormtorch.studies.colocation.run import Colocation, colocate
from stormtorch.studies.colocation.sweep import ColocationStudy, Runs, best_within, carry, compare, most_requests
from stormtorch.transport.simulated import core_settings

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


def test_a_training_alone_arrives_whole_and_keeps_its_pace() -> None:
    settings = replace(SMALL, requests_per_s=0.0, slack=None)
    result = colocate(settings)
    assert result.loss == 0.0
    assert result.mean_s is None
    assert result.exchanges == 4 * 6  # each rank every tenth of a second
    assert result.exchange_s is not None
    assert settings.alone_s < result.exchange_s < 4 * settings.alone_s


def test_a_training_of_low_priority_leaves_the_service_as_fast_as_alone() -> None:
    alone, low, equal = (
        colocate(each).mean_s for each in (ALONE, replace(SMALL, low_share=0.0), replace(SMALL, low_share=None))
    )
    assert alone is not None and low is not None and equal is not None
    assert low < 1.05 * alone
    assert equal > 1.2 * alone


def test_the_stronger_the_preference_the_faster_the_service() -> None:
    means = [colocate(replace(SMALL, low_share=share)).mean_s for share in (0.7, 0.3, 0.0)]
    assert means == sorted(means, key=lambda mean: -(mean or 0.0))


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


def test_the_best_pair_is_the_fastest_whose_loss_is_allowed(tmp_path: Path) -> None:
    told = []
    runs = Runs(lambda settings, _: told.append(settings))
    brief = replace(SMALL, seconds=0.3)
    pairs = compare(brief, rates=(2500.0,), shares=(0.4, 0.0), slacks=(1.2, 4.0), runs=runs)
    assert len(pairs) == 4
    assert len(told) == 6  # two of them without classes
    best = best_within(pairs, 0.05)
    assert best is not None
    assert best.loss <= 0.05
    assert all(pair.speedup <= best.speedup for pair in pairs if pair.loss <= 0.05)
    assert best_within(pairs, -1.0) is None
    path = tmp_path / "study.json"
    ColocationStudy(base=brief, pairs=pairs).write(path)
    read = json.loads(path.read_text(encoding="utf-8"))
    assert [row["allowed"] for row in read["best"]] == [0.01, 0.05, 0.10, 0.20]
    assert read["best"][1]["speedup"] == best.speedup


def test_bisection_finds_where_the_mean_time_passes_the_target() -> None:
    runs = Runs()
    top = 5000.0
    found = most_requests(ALONE, 0.0015, step=250.0, top=top, runs=runs)
    assert 0 < found < top
    within, beyond = (runs(replace(ALONE, requests_per_s=rate)).mean_s for rate in (found, found + 250.0))
    assert within is not None and beyond is not None
    assert within <= 0.0015 < beyond


def test_a_service_that_is_preferred_carries_more_requests_in_the_same_time() -> None:
    (carried,) = carry(replace(SMALL, seconds=0.3), targets_s=(0.0015,), step=500.0)
    assert carried.preferred > carried.equal


def test_a_service_needs_lines_that_it_can_share() -> None:
    core = core_settings(2, SMALL.options, unlimited=False, seed=0)
    sim = _engine.Sim(2, core, dict(faults(loss=0.0, seed=0).settings), 50e-6, 1e6, 1 << 19)
    with pytest.raises(RuntimeError, match="shared lines"):
        sim.serve(100.0, 1000, 100, 0)
    with pytest.raises(RuntimeError, match="no service"):
        sim.answered()
