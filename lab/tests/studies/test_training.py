"""`stormtorch train`: errors, and very short trainings of two ranks."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from commands import call, ranks_left
from stormtorch.checks import BadSetting
from stormtorch_lab.cli.plots.train import plot_training
from stormtorch_lab.cli.tables.train import sentences, show_training
from stormtorch_lab.netns import Conditions
from stormtorch_lab.netns.fixtures import lab_or_skip
from stormtorch_lab.policies.presets import PRESETS, named
from stormtorch_lab.studies.on_ranks import run_training
from stormtorch_lab.studies.results import TrainReport
from stormtorch_lab.studies.settings import ImageSettings, LmSettings
from stormtorch_lab.tasks.task import cosine
from task_files import write_cifar10_batches

pytestmark = pytest.mark.pure

SMALL = LmSettings(
    ranks=2,
    steps=4,
    batch=2,
    context=16,
    layers=1,
    width=32,
    policies=("lossless", "plain"),
    loss=0.2,
    timeout_s=100,
)
# Rare exchanges of few steps have few fragments.
FEW = (("fragments", "2"), ("at_least", "1"))


# --- settings and tasks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ranks", 1),
        ("policies", ()),
        ("policies", ("lossy",)),
        ("policies", ("plain", "plain")),
        ("seeds", 0),
        ("steps", 0),
        ("batch", 0),
        ("lr", 0.0),
        ("loss", 1.0),
        ("first_seed", -1),
        ("burst", 0.5),
        ("wire", "float64"),
        ("budget", 1.5),
        ("gradient_budget", -0.1),
        ("lead", 11.0),
        ("weights", "median"),
        ("guard", 1.0),
        ("every", 0),
        ("max_lag", 0),
        ("context", 1),
        ("layers", 0),
        ("width", 100),
        ("timeout_s", 0.0),
    ],
)
def test_a_bad_setting_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadSetting) as caught:
        LmSettings(**{name: value})  # type: ignore[arg-type]  # that is the point
    assert caught.value.name == {"policies": "policy"}.get(name, name)


def test_bursts_must_go_with_the_loss() -> None:
    for loss, burst in ((0.0, 8.0), (0.9, 2.0)):
        with pytest.raises(BadSetting) as caught:
            LmSettings(loss=loss, burst=burst)
        assert caught.value.name == "burst"


def test_batches_depend_on_seed_step_and_rank_alone() -> None:
    task, again = SMALL.open_task(), SMALL.open_task()
    first = task.batch(1, 2, 0, 2)
    assert first.inputs.shape == first.targets.shape == (2, 16)
    assert torch.equal(first.inputs[:, 1:], first.targets[:, :-1])
    assert torch.equal(first.inputs, again.batch(1, 2, 0, 2).inputs)
    for other in (task.batch(0, 2, 0, 2), task.batch(1, 3, 0, 2), task.batch(1, 2, 1, 2)):
        assert not torch.equal(first.inputs, other.inputs)
    state = torch.get_rng_state()
    weights = [list(each.model(3).parameters()) for each in (task, again)]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_epoch_shows_every_picture_once_on_one_of_the_ranks(tmp_path: Path) -> None:
    write_cifar10_batches(tmp_path, images_per_batch=8)
    task = ImageSettings(ranks=2, batch=4, data=tmp_path).open_task()
    seen = torch.cat([task.batch(0, step, rank, 2).inputs[:, 0, 0] for step in range(5) for rank in range(2)])
    assert len({tuple(picture.flatten().tolist()) for picture in seen}) == 40
    assert sum(len(batch.targets) for rank in range(2) for batch in task.held_out(rank, 2)) == 8


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [cosine(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[5] == pytest.approx(1.0)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11


# --- trainings --------------------------------------------------------------------------------------------------------


def shown(report: TrainReport) -> str:
    show_training(report, Console(file=(screen := io.StringIO()), width=100))
    return screen.getvalue()


@pytest.fixture(scope="module")
def report() -> TrainReport:
    told: list[tuple[str, int]] = []
    report = run_training(SMALL, lambda what, done: told.append((what, done)))
    assert [done for _, done in told] == list(range(1, 9))
    assert told[0][0].startswith("lossless, seed 0: loss ")
    assert ranks_left() == []
    return report


@pytest.mark.thorough
def test_the_report_holds_settings_and_one_result_per_policy_and_seed(report: TrainReport, tmp_path: Path) -> None:
    report.write(tmp_path / "lm.json")
    data = json.loads((tmp_path / "lm.json").read_text())
    assert set(data) == {"settings", "measured", "conditions", "results"}
    assert (data["settings"]["ranks"], data["settings"]["loss"]) == (2, 0.2)
    assert data["settings"]["policies"] == ["lossless", "plain"]
    assert data["settings"]["data"]["name"] == "Python's standard library"
    assert data["measured"]["loss"] == pytest.approx(0.2, abs=0.1)
    assert {"machine", "commit", "date", "versions"} <= set(data["conditions"])
    lossless, plain = data["results"]
    for result in (lossless, plain):
        assert result["seed"] == 0
        assert [step for step, _ in result["curve"]] == [1, 2, 3, 4]
        assert [step for step, _, _ in result["val_curve"]] == [1, 2, 3, 4]
        assert result["loss"] == pytest.approx(result["curve"][-1][1], abs=1e-4)
        assert result["perplexity"] == pytest.approx(np.exp(result["val_loss"]))
        assert (result["accuracy"], result["step_s"] > 0) == (None, True)
    # The same weights and the same batch, whatever is lost afterwards.
    assert lossless["curve"][0] == plain["curve"][0]
    assert (lossless["policy"], lossless["arrived"], lossless["drift"]) == ("lossless", 1.0, 0.0)
    assert (plain["policy"], plain["drift"] > 0) == ("plain", True)
    assert 0.5 < plain["arrived"] < 1.0


def test_the_table_the_words_and_the_plot_tell_of_every_policy(report: TrainReport, tmp_path: Path) -> None:
    text = shown(report)
    for word in ("lossless", "plain", "20 % loss injected on loopback", "against", "drift", "one seed"):
        assert word in text
    assert any("ended the same" in sentence for sentence in sentences(report))
    pytest.importorskip("matplotlib")
    plot_training(report, tmp_path / "lm.svg")
    assert "<svg" in (tmp_path / "lm.svg").read_text()


def test_a_training_that_diverged_is_told_and_written(report: TrainReport, tmp_path: Path) -> None:
    lossless, plain = report.results
    nan = float("nan")
    diverged = replace(report, results=[lossless, replace(plain, val_loss=nan, perplexity=nan)])
    assert "plain" in diverged.settings.policies
    assert any("It diverged" in sentence for sentence in sentences(diverged))
    diverged.write(tmp_path / "lm.json")
    assert json.loads((tmp_path / "lm.json").read_text())["results"][1]["perplexity"] is None


@pytest.mark.slow
def test_pictures_are_learned_under_every_policy(tmp_path: Path) -> None:
    write_cifar10_batches(tmp_path)
    settings = ImageSettings(
        ranks=2, steps=2, batch=2, seeds=2, policies=PRESETS, data=tmp_path, loss=0.2, timeout_s=100
    )
    report = run_training(settings)
    assert [(result.seed, result.policy) for result in report.results] == settings.trainings
    assert all(result.perplexity is None and result.accuracy is not None for result in report.results)
    text = " ".join(shown(report).split())
    assert "accuracy" in text
    assert "Means over 2 seeds" in text
    assert ranks_left() == []


@pytest.mark.slow
@pytest.mark.lab
def test_loss_in_a_lab_is_real() -> None:
    lab_or_skip()
    report = run_training(replace(SMALL, policies=("lead",), network=Conditions(rate="100mbit", loss=0.2)))
    assert report.measured["loss"] == pytest.approx(0.2, abs=0.06)
    assert report.results[0].loss_measured is None
    assert 0.5 < report.results[0].arrived < 1.0
    assert ranks_left() == []


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("lm", "--ranks", "1"),
        ("lm", "--policy", "lossy"),
        ("lm", "--burst", "0.5"),
        ("lm", "--data", "/dev/null"),
        ("lm", "--rate", "fast"),
        ("lm", "--gradient-budget", "2"),
        ("lm", "--policy", "lossless", "--max-lag", "3"),
        ("lm", "--policy", "lead", "--every", "2"),
        ("lm", "--plot", "out.xyz"),
        ("lm", "--json", "/dev/null/x.json"),
        ("image", "--data", "/nowhere"),
        ("image", "--max-lag", "0"),
    ],
)
def test_a_bad_value_names_the_option_and_exits_with_2(command: tuple[str, ...]) -> None:
    code, text = call("train", *command)
    assert code == 2
    assert command[-2] in text


@pytest.mark.thorough
def test_the_command_prints_a_table_and_writes_json_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "lm.json", tmp_path / "lm.svg"
    small = ("--ranks", "2", "--steps", "2", "--batch", "1", "--context", "8", "--layers", "1", "--width", "16")
    code, text = call("train", "lm", *small, "--policy", "lead", "--json", str(out), "--plot", str(picture))
    assert code == 0
    assert "10 % loss injected on loopback" in text
    assert [each["policy"] for each in json.loads(out.read_text())["results"]] == ["lead"]
    assert "<svg" in picture.read_text()


@pytest.mark.thorough
def test_every_policy_of_a_file_trains_ranks_by_its_name() -> None:
    settings = replace(
        SMALL, policies=tuple(named()), every=4, more=FEW, given=frozenset({"every"}), steps=8, ranks=3, timeout_s=300
    )
    report = run_training(settings)
    assert ranks_left() == []
    assert [result.policy for result in report.results] == list(named())
    for result in report.results:
        assert result.val_loss < math.log(256), f"{result.policy} is worse than guessing a byte"
        # Retransmissions arrive, and all of the few datagrams of sparse messages may.
        assert result.arrived < 1.0 or result.policy in ("qsdp", "sparse-diloco"), result.policy
