"""`stormtorch simulate`: errors, parsing of options, output and files."""

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import call
from stormtorch import EXACT, BoundedDrift, GradientAveraging, ModelAveraging, Reliability
from stormtorch.checks import BadSetting
from stormtorch.network.loss import Bernoulli, GilbertElliott, LossModel, PerLink, Shared, Stragglers, Trace
from stormtorch_lab.cli.networks import SimulatedNetworkOptions
from stormtorch_lab.cli.plots.simulate import plot_simulation
from stormtorch_lab.cli.tables.simulate import network_text, sentences, show_simulation
from stormtorch_lab.policies.presets import PRESETS, named, names
from stormtorch_lab.studies.on_workers import run_simulations
from stormtorch_lab.studies.results import SimReport, SimResult
from stormtorch_lab.studies.settings import LmSettings, SimSettings
from stormtorch_lab.tasks.kinds import TASKS

pytestmark = pytest.mark.pure

SMALL = ("--workers", "4", "--steps", "3", "--batch", "1", "--width", "16", "--layers", "1", "--context", "8")
# Rare exchanges of few steps have few fragments.
FEW = (("fragments", "2"), ("at_least", "1"))
SETTINGS = SimSettings(workers=5, steps=4, batch=1, width=16, layers=1, context=8, held_out=2, loss=0.3, lr=1e-3)


def typed(**options: Any) -> LossModel:
    network = SimulatedNetworkOptions(**options)
    settings = SimSettings(loss=network.plain_loss, burst=network.burst)
    return replace(settings, network=network.model()).loss_model()


# --- options ----------------------------------------------------------------------------------------------------------


def test_help_answers_without_torch_and_lists_what_exists() -> None:
    code = "import sys, stormtorch_lab.cli.app, stormtorch_lab.simulation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    code_, text = call("simulate", "--help")
    assert code_ == 0
    for panel in ("The network", "Policies", "The model", "How it is computed", "torchrun"):
        assert panel in text
    for name in (*names(), *TASKS):
        assert name in text, "not cut off"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "named", "problem"),
    [
        (("--workers", "1"), "--workers", "must lie in [2, 8192], got 1"),
        (("--steps", "0"), "--steps", "must lie in [1, 10000000], got 0"),
        (("--seeds", "0"), "--seeds", "got 0"),
        (("--first-seed", "-1"), "--first-seed", "got -1"),
        (("--policy", "lossy"), "--policy", "must be one of lossless, plain, lead"),
        (("--policy", "lead,lead"), "--policy", "must name each only once"),
        (("--policy", ","), "--policy", "must name at least one"),
        (("--lead", "far"), "--lead", "valid"),
        (("--lead", "11"), "--lead", "must lie in [0, 10], got 11"),
        (
            ("--lead", "2", "--policy", "plain"),
            "--lead",
            "belongs to lead, adel, partel, private-drift, salf, and --policy has plain",
        ),
        (("--max-lag", "3", "--policy", "lossless"), "--max-lag", "belongs to plain, lead"),
        (("--weights", "horvitz-thompson", "--policy", "model-averaging"), "--weights", "belongs to plain, lead"),
        (("--gradient-budget", "1", "--policy", "model-averaging"), "--gradient-budget", "belongs to plain, lead"),
        (("--every", "2"), "--every", "belongs to model-averaging"),
        (("--budget", "2"), "--budget", "must lie in [0, 1], got 2"),
        (
            ("--budget", "0.1", "--policy", "lossless"),
            "--budget",
            "belongs to plain, lead, model-averaging",
        ),
        (("--gradient-budget", "-1"), "--gradient-budget", "got -1"),
        (("--loss", "0.95"), "--loss", "must lie in [0, 0.9], got 0.95"),
        (("--loss", "0", "--burst", "4"), "--burst", "needs a --loss"),
        (("--loss", "0.9", "--burst", "2"), "--burst", "too short"),
        (("--burst", "5ms"), "--burst", "must be a number of packets, got '5ms': virtual workers have no clock"),
        (("--trace", "FILE", "--per-link", "FILE"), "--per-link", "cannot be combined with --trace"),
        (("--trace", "FILE", "--burst", "4"), "--burst", "cannot be combined with --trace"),
        (("--trace", "FILE", "--loss", "0.1"), "--loss", "cannot be combined with --trace"),
        (("--per-link", "FILE", "--shared", "0.1"), "--shared", "cannot be combined with --per-link"),
        (("--per-link", "FILE", "--burst", "4"), "--burst", "needs a --loss beside --per-link"),
        (("--trace", "/nowhere"), "--trace", "/nowhere"),
        (("--trace", "FILE"), "--trace", "cannot be used"),
        (("--per-link", "/nowhere"), "--per-link", "cannot be read"),
        (("--shared", "2"), "--shared", "must lie in [0, 1], got 2"),
        (("--stragglers", "2"), "--stragglers", "must lie in [0, 1], got 2"),
        (("--delivered", "0.5"), "--delivered", "needs --stragglers"),
        (("--stragglers", "0.1", "--delivered", "1"), "--delivered", "must be above 0 and below 1, got 1"),
        (("--model", "gpt"), "--model", "must be one of llama, stories15m"),
        (("--model", "lstm"), "--data", "must be given for lstm"),
        (("--model", "resnet20", "--width", "32"), "--width", "is a setting of llama"),
        (("--data", "/nowhere"), "--data", "/nowhere"),
        (("--redundancy", "much"), "--redundancy", "must be a number or auto, got 'much'"),
        (("--redundancy", "5"), "--redundancy", "must lie in [0, 4], got 5"),
        (("--policy", "model-averaging", "--redundancy", "1"), "--redundancy", "belongs to"),
        (("--at-once", "65"), "--at-once", "must lie in [1, 64], got 65"),
        (("--device", "tpu"), "--device", "tpu"),
        (("--json", "/dev/null/x.json"), "--json", "there is no folder /dev/null"),
        (("--ledger", "/dev/null/x.jsonl"), "--ledger", "there is no folder /dev/null"),
        (("--plot", "out.xyz"), "--plot", "must end with one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_bad_value_or_a_contradiction_names_the_option(
    options: tuple[str, ...], named: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "links.json"
    file.write_text('{"links": []}')
    code, text = call("simulate", *(str(file) if option == "FILE" else option for option in options))
    assert code == 2
    assert f"Invalid value for {named}" in text or f"Invalid value for '{named}'" in text
    assert problem in text


def test_a_budget_holds_for_gradients_too_unless_they_have_their_own() -> None:
    half, tenth = Reliability(budget=0.5), Reliability(budget=0.1)
    for settings in (SimSettings(budget=0.5), LmSettings(budget=0.5)):
        assert settings.policy_of("lead") == BoundedDrift(reliability=half)
        assert settings.policy_of("model-averaging") == ModelAveraging(reliability=half)
        assert settings.policy_of("gradient-averaging") == GradientAveraging(reliability=half)
        assert settings.policy_of("lossless") == BoundedDrift(reliability=EXACT)
        assert settings.to_json()["gradient_budget"] == 0.5
        apart = replace(settings, gradient_budget=0.1)
        assert apart.policy_of("lead") == BoundedDrift(gradients=tenth, reliability=half)
        assert apart.to_json()["gradient_budget"] == 0.1


@pytest.mark.parametrize("options", [("--budget", "0.1", "--gradient-budget", "0.1"), ("--gradient-budget", "1")])
def test_a_budget_of_gradients_may_be_that_of_all(options: tuple[str, ...]) -> None:
    assert call("simulate", *SMALL, "--steps", "1", "--policy", "lead", *options)[0] == 0


@pytest.mark.parametrize("guard", [0.0, 1.0, -0.1])
def test_a_guard_that_would_never_or_always_be_on_is_refused(guard: float) -> None:
    with pytest.raises(BadSetting) as caught:
        replace(SETTINGS, guard=guard)
    assert caught.value.name == "guard"
    assert replace(SETTINGS, guard=None).policy_of("lead") == BoundedDrift(guard=None)


def test_options_become_one_network(tmp_path: Path) -> None:
    assert typed() == Bernoulli(p=0.1)
    assert typed(loss=0.2, burst=8.0) == GilbertElliott(p=0.2, burst=8.0)
    assert typed(shared=0.5, burst=4.0) == Shared(p=0.1, share=0.5, burst=4.0)
    late = typed(loss=0.2, stragglers=0.1, delivered=0.5)
    assert late == Stragglers(chance=0.1, delivered=0.5, network=Bernoulli(p=0.2))
    assert typed(shared=0.5, stragglers=0.1) == Stragglers(chance=0.1, network=Shared(p=0.1, share=0.5))
    links = tmp_path / "links.json"
    links.write_text('{"links": [{"from": 0, "to": 1, "loss": 0.5}]}')
    assert typed(per_link=links) == PerLink(links={(0, 1): Bernoulli(p=0.5)})
    assert typed(per_link=links, loss=0.2, burst=4.0) == PerLink(
        default=GilbertElliott(p=0.2, burst=4.0), links={(0, 1): Bernoulli(p=0.5)}
    )
    traces = tmp_path / "traces.jsonl"
    traces.write_text('{"bits": "00000001"}\n{"bits": "00000000"}\n{"bits": "00010001"}\n')
    drawn = typed(trace=traces)
    assert isinstance(drawn, PerLink)
    assert len(drawn.links) == 64 * 63
    # The one without loss is left out.
    assert set(drawn.links.values()) == {Trace(bits="00000001"), Trace(bits="00010001")}
    assert network_text(drawn) == "links that replay 2 recorded ones"
    links.write_text('{"links": [{"from": 70, "to": 1, "loss": 0.5}]}')
    with pytest.raises(BadSetting, match="one of 0 to 63") as caught:
        typed(per_link=links)
    assert caught.value.name == "per_link"


# --- results ----------------------------------------------------------------------------------------------------------


def shown(report: SimReport) -> str:
    show_simulation(report, Console(file=(screen := io.StringIO()), width=200))
    return flat(screen.getvalue())


def flat(text: str) -> str:
    """Without the line breaks of a table's title."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def report() -> SimReport:
    return run_simulations(replace(SETTINGS, policies=PRESETS, seeds=2))


def test_the_report_is_that_of_train_with_workers(report: SimReport, tmp_path: Path) -> None:
    report.write(tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    assert set(data) == {"settings", "measured", "conditions", "results"}
    assert (data["settings"]["workers"], data["settings"]["loss"]) == (5, 0.3)
    assert data["settings"]["params"] > 0
    assert data["measured"]["loss"] == pytest.approx(0.3, abs=0.05)
    assert [(each["seed"], each["policy"]) for each in data["results"]] == report.settings.trainings
    for own in data["results"]:
        assert own["workers"] == 5
        assert [step for step, _ in own["curve"]] == [step for step, _, _ in own["val_curve"]] == [1, 2, 3, 4]
        assert own["perplexity"] > 1
        assert (own["accuracy"], own["peak_bytes"], own["step_s"] > 0) == (None, None, True)
    by_policy = {each["policy"]: each for each in data["results"]}
    assert by_policy["lossless"]["drift"] == 0.0
    assert by_policy["lossless"]["lag"] == {"0": 1.0}
    assert 0.05 < sum(int(age) * share for age, share in by_policy["lead"]["lag"].items()) < 2
    assert (by_policy["lead"]["lead"] > 0, by_policy["plain"]["lead"]) == (True, 0.0)
    assert by_policy["model-averaging"]["lag"] == {}
    assert report.against_lossless("lossless") == [0.0, 0.0]
    assert [SimResult.from_json(each) for each in data["results"]] == report.results


def test_the_table_the_words_and_the_plot_tell_of_every_policy(report: SimReport, tmp_path: Path) -> None:
    text = shown(report)
    for word in (*PRESETS, "5 virtual workers, 30 % loss", "drift", "lag", "lead", "arrived", "Means over 2 seeds"):
        assert word in text
    told = sentences(report)
    assert any("ended the same" in sentence for sentence in told)
    assert any("steps old on average, and parameters were sent" in sentence for sentence in told)
    assert any("Only loss is simulated, not time" in sentence for sentence in told)
    on_gpu = replace(report, results=[replace(each, peak_bytes=3_000_000_000) for each in report.results])
    assert "3 GB" in shown(on_gpu)
    pytest.importorskip("matplotlib")
    plot_simulation(report, tmp_path / "out.svg")
    assert "<svg" in (tmp_path / "out.svg").read_text()
    alone = replace(report, settings=replace(report.settings, policies=("plain",)), results=report.of("plain"))
    plot_simulation(alone, tmp_path / "plain.svg")
    assert "lossless was not trained" in (tmp_path / "plain.svg").read_text()
    alone = replace(report, settings=replace(report.settings, policies=("lossless",)), results=report.of("lossless"))
    plot_simulation(alone, tmp_path / "lossless.svg")
    assert "replicas were the same" in (tmp_path / "lossless.svg").read_text()


def test_steps_in_which_the_guard_repaired_are_told() -> None:
    found = run_simulations(replace(SETTINGS, policies=("plain",), loss=0.8, seeds=2))
    rounds = [each.guarded for each in found.results]
    assert all(0 < each <= SETTINGS.steps for each in rounds)
    assert any(f"guard repaired the broadcast in {sum(rounds)} of 8 steps" in sentence for sentence in sentences(found))
    calm = run_simulations(replace(SETTINGS, policies=("plain",), loss=0.0))
    assert not any("guard" in sentence for sentence in sentences(calm))


def test_a_training_that_diverged_is_told_and_written(report: SimReport, tmp_path: Path) -> None:
    nan = float("nan")
    last = replace(report.results[-1], val_loss=nan, perplexity=nan)
    diverged = replace(report, results=[*report.results[:-1], last])
    assert any("It diverged" in sentence for sentence in sentences(diverged))
    diverged.write(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["results"][-1]["perplexity"] is None


def test_networks_have_names() -> None:
    assert (
        network_text(Shared(p=0.1, share=0.5, burst=8))
        == "10 % loss in bursts of 8, 50 % of it shared by all receivers"
    )
    assert network_text(Trace(bits="0001")) == "a recorded link that loses 25.0 %"
    assert network_text(PerLink()) == "0 % loss"
    late = Stragglers(chance=0.1, network=PerLink(default=Bernoulli(p=0.1), links={(0, 1): Bernoulli(p=0.5)}))
    assert network_text(late) == (
        "1 link with its own loss, 10 % loss on the others, 10 % of the workers late in each exchange"
    )


@pytest.mark.thorough
def test_workers_that_own_nothing_do_not_count_as_arrived() -> None:
    settings = replace(SETTINGS, policies=("lead", "model-averaging"), workers=60, loss=0.2)
    for result in run_simulations(settings).results:
        assert result.arrived == pytest.approx(0.8, abs=0.03)
    lead = run_simulations(settings).of("lead")[0]
    assert lead.lead == pytest.approx(0.75 * 0.25, abs=0.05)  # 0 in the first of four steps, when no loss is known


def test_a_budget_holds_for_models_that_are_averaged_too() -> None:
    settings = replace(SETTINGS, policies=("model-averaging", "lead"), budget=0.01, workers=2, width=64)
    for result in run_simulations(settings).results:
        assert result.broadcast_lost <= 0.01


def test_chunks_of_another_size_are_cut_anew() -> None:
    settings = replace(SETTINGS, policies=("lossless", "model-averaging"), wire="bfloat16", steps=1)
    lossless, averaged = run_simulations(settings).results
    assert averaged.curve[0][1] == pytest.approx(lossless.curve[0][1], rel=1e-3)


def test_a_link_that_loses_everything_cannot_keep_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormtorch_lab.simulation.arrivals.repair._PATIENCE", 20)
    dead = PerLink(links={(0, 1): Bernoulli(p=1.0)})
    with pytest.raises(BadSetting, match="cannot be met: some link loses all") as caught:
        run_simulations(replace(SETTINGS, policies=("lead",), network=dead, budget=0.1))
    assert caught.value.name == "budget"


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_command_prints_a_table_and_writes_all_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, picture, lines = tmp_path / "out.json", tmp_path / "out.svg", tmp_path / "steps.jsonl"
    files = ("--json", str(out), "--plot", str(picture), "--ledger", str(lines), "--checkpoint", str(tmp_path / "run"))
    options = ("--loss", "0.2", "--burst", "4", "--stragglers", "0.1", "--policy", "lossless,plain", "--max-lag", "2")
    for _ in range(2):  # the second time from the folder
        code, text = call("simulate", *SMALL, *options, *files, "--device", "cpu")
        assert code == 0
        text = flat(text)
        assert "4 virtual workers, 20 % loss in bursts of 4, 10 % of the workers late in each exchange" in text
        assert "- plain takes loss as it comes" in text
        results = json.loads(out.read_text())["results"]
        assert [each["policy"] for each in results] == ["lossless", "plain"]
        assert "<svg" in picture.read_text()
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        assert [(row["policy"], row["step"]) for row in rows] == [
            (policy, step) for policy in ("lossless", "plain") for step in range(3)
        ]
    code, text = call("simulate", *SMALL, "--checkpoint", str(tmp_path / "run"))
    assert code == 2
    assert "--checkpoint" in text
    assert "belongs to other settings" in text


def test_pictures_and_other_optimizers_are_simulated() -> None:
    options = ("--workers", "2", "--steps", "1", "--batch", "2", "--policy", "lead", "--optimizer", "momentum")
    pytest.importorskip("sklearn")
    code, text = call("simulate", *options, "--model", "resnet20", "--how", "batched", "--at-once", "2")
    assert code == 0
    assert "accuracy" in text


@pytest.mark.thorough
@pytest.mark.parametrize("name", named())
def test_every_policy_of_a_file_trains_virtual_workers_by_its_name(name: str) -> None:
    report = run_simulations(
        replace(SETTINGS, policies=(name,), every=4, more=FEW, given=frozenset({"every"}), steps=6)
    )
    (result,) = report.results
    assert result.policy == name
    assert result.val_loss is not None
    assert result.val_loss < math.log(256) + 0.1, "no worse than guessing a byte"
    assert result.bytes_sent > 0
