"""Experiments: what is there is gone on from only if it is what is asked for, and diverged runs are told of."""

import argparse
import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch import EXACT, BoundedDrift, Reliability
from stormtorch.network.loss import Bernoulli
from stormtorch_lab import simulate
from stormtorch_lab.studies.settings import SimSettings

pytestmark = pytest.mark.pure


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "papers" / "experiments"))
    import grid

    yield grid
    del sys.modules["grid"]


def test_a_result_of_other_settings_is_not_gone_on_from(grid: Any) -> None:
    run = grid.Run(key="lead/0", settings=SimSettings(policies=("lead",), steps=3), lead_steps=(0, 2))
    found = {"lead/0": {"settings": json.loads(json.dumps(grid._asked(run)))}}
    grid.check("x", [run], found)
    grid.check("x", [dataclasses.replace(run, settings=SimSettings(policies=("lead",), steps=3, fuse=True))], found)
    with pytest.raises(ValueError, match="its steps is 3, not 4"):
        grid.check("x", [dataclasses.replace(run, settings=SimSettings(policies=("lead",), steps=4))], found)
    with pytest.raises(ValueError, match="its smooth is None"):
        grid.check("x", [dataclasses.replace(run, smooth=0.5)], found)
    elsewhere = SimSettings(policies=("lead",), steps=3, network=Bernoulli(p=0.1))
    with pytest.raises(ValueError, match="over another network"):
        grid.check("x", [dataclasses.replace(run, settings=elsewhere)], found)


def test_a_setting_that_a_policy_was_given_later_does_not_part_runs(grid: Any) -> None:
    run = grid.Run(key="sparse/0", settings=SimSettings(policies=("sparse-diloco",), more=(("block", "1024"),)))
    asked = grid._asked(run)
    text = asked["policy_settings"]["sparse-diloco"]
    assert "reliability=Reliability(" in text and "block=1024" in text
    earlier = text.replace(", redundancy='auto'", "").replace("settings='any', ", "")
    assert len(text) - len(earlier) == len(", redundancy='auto'") + len("settings='any', ")
    for known, matches in ((earlier, True), (text.replace("block=1024", "block=4096"), False), (f"X{text}", False)):
        found = {"sparse/0": {"settings": asked | {"policy_settings": {"sparse-diloco": known}}}}
        if matches:
            grid.check("x", [run], found)
        else:
            with pytest.raises(ValueError, match="its policy_settings is"):
                grid.check("x", [run], found)


def test_a_run_with_other_data_is_not_put_beside_those_that_are_kept(
    grid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "RESULTS", tmp_path)
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be, that is the question " * 6000)

    def run(seed: int) -> Any:
        small: dict[str, Any] = {"workers": 2, "width": 16, "layers": 1, "context": 16, "batch": 1, "held_out": 2}
        settings = SimSettings(policies=("lossless",), data=text, first_seed=seed, steps=1, **small)
        return grid.Run(key=f"lossless/{seed}", settings=settings)

    grid.run_all("x", [run(0), run(1)], 1, math.inf)
    text.write_bytes(text.read_bytes().replace(b"question", b"quarrels"))
    grid._last.clear()
    with pytest.raises(ValueError, match=r"with another text: its sha256 is .*lossless/2"):
        grid.run_all("x", [run(0), run(1), run(2)], 1, math.inf)
    assert sorted(grid.load("x")) == ["lossless/0", "lossless/1"]


@pytest.mark.thorough
def test_what_was_lost_of_a_gradient_is_sent_with_the_next_and_counts_once(grid: Any) -> None:
    workers, steps = 4, 40

    class Place(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = torch.nn.Parameter(torch.zeros(workers * 500 * 360))

    def moved(carry: bool) -> float:
        """How far owners have gone, where every gradient is one at every step and half of the others' are lost."""
        with grid._carrying(carry, workers):
            done = simulate(
                Place(),
                lambda model, push: (model.place * push).sum(),
                lambda step, first, last: torch.ones(last - first, 1),
                lambda parameters: torch.optim.SGD(parameters, lr=1.0),
                workers=workers,
                steps=steps,
                network=0.5,
                policy=BoundedDrift(gradients=Reliability(budget=1.0), broadcast=EXACT, guard=None),
                evaluate=lambda model: (-float(model.place.mean()), 0.0),
            )
        return float(done.validations[-1][1])

    # The mean of what arrived is one as well. What is sent later is late by a step on average, for three of four.
    assert moved(False) == pytest.approx(steps)
    assert moved(True) == pytest.approx(steps - 0.75, abs=0.06)


def test_a_lead_can_follow_a_mean_of_updates_or_look_ahead_without_loss(grid: Any, tmp_path: Path) -> None:
    before, first, second = torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([4.0])
    policy = BoundedDrift()
    with grid._smoothing(0.5):
        assert float(policy.publish(before.clone(), first, 2.0)) == pytest.approx(1.0 + 2.0 * 1.0)
        # Updates of 1 and 3, the older with half the weight of the newer.
        assert float(policy.publish(first.clone(), second, 2.0)) == pytest.approx(4.0 + 2.0 * (0.5 * 1 + 3) / 1.5)
    assert float(policy.publish(first.clone(), second, 2.0)) == pytest.approx(4.0 + 2.0 * 3.0)

    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be, that is the question " * 6000)
    small: dict[str, Any] = {"workers": 2, "width": 16, "layers": 1, "context": 16, "batch": 1, "held_out": 2}

    def loss(lost: float, **hook: Any) -> float:
        settings = SimSettings(policies=("lead",), data=text, steps=20, loss=lost, **small)
        return float(grid.run_one(grid.Run(key="lead/0", settings=settings, **hook))["result"]["val_loss"])

    # The simulation takes them up.
    assert len({loss(0.4), loss(0.4, smooth=0.5), loss(0.4, smooth=0.8)}) == 3
    assert len({loss(0.0), loss(0.0, lookahead=1.0)}) == 2


EXPERIMENTS = (
    "averaging bursts drift finetuning gradients large lead networks pareto perplexity qsdp rarely redundancy tokens "
    "workers"
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXPERIMENTS.split())
def test_the_command_of_an_experiment_makes_every_run_that_is_kept(grid: Any, name: str, tmp_path: Path) -> None:
    if name == "networks":  # its networks are recorded ones: any will do, as they are no part of a run's settings
        (tmp_path / "rutgers.jsonl").write_text('{"bits": "0001"}\n')
    runs = importlib.import_module(name).runs(argparse.Namespace(data=tmp_path, device="cpu"))
    kept = grid.load(name)
    grid.check(name, runs, kept)
    assert kept and kept.keys() <= {run.key for run in runs}


def test_two_runs_with_one_key_are_refused(grid: Any) -> None:
    run = grid.Run(key="lead/0", settings=SimSettings(policies=("lead",)))
    with pytest.raises(ValueError, match="several runs with the key lead/0"):
        grid.check("x", [run, run], {})


def test_a_run_that_diverged_is_without_end_and_not_left_out(grid: Any) -> None:
    over_seeds = importlib.import_module("over_seeds")  # `grid` is where it is found
    runs = {
        f"{kind}/{seed}": {"result": {"seed": seed, "val_loss": loss}}
        for kind, seed, loss in (("base", 0, 2.0), ("base", 1, 2.0), ("lead", 0, 2.1), ("lead", 1, None))
    }
    found = over_seeds.above(runs, "lead", "base")
    assert found == [pytest.approx(100 * math.expm1(0.1)), math.inf]
    assert math.isnan(over_seeds.standard_error(found))
    runs["base/0"]["result"]["val_loss"] = None
    assert math.isnan(over_seeds.above(runs, "lead", "base")[0])


def test_the_page_about_rare_exchanges_shows_the_results_that_are_kept(grid: Any) -> None:
    rarely = importlib.import_module("rarely")
    page = (Path(__file__).parents[1] / "experiments" / "policies.md").read_text()
    rows = rarely.table(grid.load("rarely"))
    assert len(rows) >= 9
    for row in rows:
        assert row in page


def test_who_sends_less_learns_longer_for_the_same_bytes_and_seconds(grid: Any, tmp_path: Path) -> None:
    pareto = importlib.import_module("pareto")
    shares = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.25, "int4": 0.125}
    more = {"exact": 0.0, "plain": 0.04, "lead": 0.01, "parity": 0.0, "broadcast": 0.0}

    def result(wire: str, way: str, steps: int, seed: int) -> dict[str, Any]:
        bytes_sent = 100.0 * shares[wire] * (2.0 if way == "parity" else 1.0)
        return {"seed": seed, "bytes_sent": bytes_sent, "val_loss": 2.0 + more[way] - 0.1 * math.log(steps / 300)}

    found = {}
    for run in pareto.runs(argparse.Namespace(data=Path("data"), device="cpu")):
        wire, way, *_, steps, seed = run.key.split("/")
        found[run.key] = {"result": result(wire, way, int(steps), int(seed))}
    # What is lost is sent again by those that are exact, in one stage or in both.
    assert pareto.steps_for(found, "int8", "lead", 0.4, None) == pytest.approx(300 / 0.6 / 0.25)
    assert pareto.steps_for(found, "int8", "broadcast", 0.4, None) == pytest.approx(300 / 0.8 / 0.25)
    assert pareto.steps_for(found, "int8", "exact", 0.4, None) == pytest.approx(300 / 0.25)
    after = pareto.above_after(found, "int8", "lead", 0.4, 2000)
    assert after == pytest.approx([100 * math.expm1(0.01 - 0.1 * math.log(2000 / 300))] * 3)
    assert pareto.above_after(found, "int8", "lead", 0.4, 2500) == []
    # Where computation takes most of a step, bytes buy few steps; over a thin line, nearly all.
    steps = [pareto.steps_for(found, "int8", "lead", 0.4, network) for network in pareto.NETWORKS]
    assert 300 < steps[0] < 400 < steps[1] < steps[2] < 300 / 0.6 / 0.25 * 1.01
    # A round trip for what is missing of one stage, or of both.
    internet = pareto.NETWORKS["internet"][1]
    lead, broadcast, exact = (pareto.step_s(1.0, way, 0.4, internet) for way in ("lead", "broadcast", "exact"))
    assert exact - lead == pytest.approx(2 * (broadcast - lead))
    assert broadcast - lead > 0.08
    rows = pareto.table(found)
    assert len(rows) == 20 + 1 + 16
    assert "| int8, lead | 0.25 | +1.0 ± 0.0 % | 0.25 | +1.0 ± 0.0 % |" in rows
    pareto.draw(found, tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").stat().st_size > 10_000


def test_words_of_a_text_are_learned_and_what_each_loss_rate_costs_is_drawn(grid: Any, tmp_path: Path) -> None:
    tokens = importlib.import_module("tokens")
    line = " the dog sees the <unk> , and the cat sees the dog . \n"
    for part in ("train", "valid"):
        (tmp_path / f"wiki.{part}.tokens").write_text(f" \n = Dogs = \n \n{line * 20}")
    text, words = tokens.read_words(tmp_path)
    kinds = set(line.split()) | {"=", "Dogs", "<eos>"}
    assert words == len(kinds) == len(text.training.unique())
    assert len(text.training) == 3 + 3 + 20 * (len(line.split()) + 1)

    small: dict[str, Any] = {"workers": 2, "width": 32, "layers": 1, "context": 16, "batch": 1, "held_out": 4}
    chosen = argparse.Namespace(data=tmp_path, device="cpu")
    asked = {run.key: run for run in tokens.runs(chosen)}
    assert list(asked)[:3] == ["lossless/0", "lead/0.1/0", "lead/0.4/0"]
    found = {}
    for key in ("lossless/0", "lead/0.4/0", "plain/0.4/0"):
        settings = dataclasses.replace(asked[key].settings, data=tmp_path, steps=2, **small)
        found[key] = grid.run_one(dataclasses.replace(asked[key], settings=settings))
    run = found["lead/0.4/0"]
    assert (run["settings"]["data"]["words"], run["settings"]["data"]["vocabulary"]) == (words, 64)
    # It knows nothing yet, and that per word.
    assert run["result"]["perplexity"] == pytest.approx(64, rel=0.1)
    assert [row.split(" | ")[0] for row in tokens.table(found)] == ["| lead, 40 %", "| plain, 40 %"]
    tokens.draw(found, tmp_path / "tokens.png")
    assert (tmp_path / "tokens.png").stat().st_size > 10_000


SLEEPER = """
import os, time
from pool import pool

def sleep():
    print(os.getpid(), flush=True)
    time.sleep(100)

if __name__ == "__main__":
    with pool(1) as computing:
        computing.submit(sleep).result()
"""


@pytest.mark.thorough
def test_processes_of_an_experiment_end_with_its_command(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    command = subprocess.Popen(
        [sys.executable, str(tmp_path / "sleeper.py")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "papers" / "experiments")},
        stdout=subprocess.PIPE,
    )
    with command:
        assert command.stdout is not None
        child = int(command.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        command.kill()
        # The child holds the pipe, too: reading ends when both are gone.
        assert command.stdout.read() == b""
    until = time.monotonic() + 10.0
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize("name", ["free", "paced", "fast-paced"])
def test_a_step_in_racks_takes_a_little_more_than_its_lines_need(grid: Any, name: str) -> None:
    racks = importlib.import_module("rack_steps")
    step = racks.Steps(racks.Case(network=name, hosts=16, exact=False)).run(0)
    assert 1.0 < step["times_ideal"] < 2.0
    assert 1.0 < step["bytes"] < 1.1
    assert step["lost"] == step["port_drops"] == step["trunk_drops"] == 0


def test_racks_have_the_hardships_that_their_networks_name(grid: Any) -> None:
    racks = importlib.import_module("rack_steps")

    def step(name: str, *, exact: bool = False) -> Any:
        return racks.Steps(racks.Case(network=name, hosts=16, exact=exact)).run(0)

    assert step("incast")["trunk_drops"] > 0
    assert 0.01 < step("bursts")["lost"] < 0.1
    assert step("bursts", exact=True)["repaired_per_message"] > 0
    # Of the pairs of 16 hosts in racks of 4, 2 in 5 have one end in the first rack.
    assert step("lossy")["lost"] == pytest.approx(0.2 * 2 * 4 * 12 / (16 * 15), rel=0.1)
    # The slow trunk sets the pace, and the ideal knows it: 12 hosts' shards, ten times slower, against 15.
    free, slow = (racks.ideal_s(racks.Case(network=name, hosts=16, exact=False)) for name in ("free", "slow"))
    assert slow / free == pytest.approx(10 * 12 / 15, rel=0.01)
    assert step("slow")["times_ideal"] > 1.0


@pytest.mark.parametrize("name", ["participation", "private"])
def test_the_page_about_uneven_ranks_shows_the_results_that_are_kept(grid: Any, name: str) -> None:
    pytest.importorskip("sklearn")
    experiment = importlib.import_module(name)
    page = (Path(__file__).parents[1] / "experiments" / "policies.md").read_text()
    rows = experiment.table(grid.load(name))
    assert len(rows) >= 7
    for row in rows:
        assert row in page


def test_what_the_page_says_of_planned_deadlines_is_what_was_kept(grid: Any) -> None:
    pytest.importorskip("sklearn")
    page = (Path(__file__).parents[1] / "experiments" / "policies.md").read_text()
    ratios = [
        row.split("|")[-2].strip()
        for row in importlib.import_module("deadlines").table(grid.load("deadlines"))
        if row.split("|")[3].strip() == "ADEL"
    ]
    assert len(ratios) == 6
    for ratio in ratios:
        assert ratio in page
