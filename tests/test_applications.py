"""The applications of examples/applications: each learns something under loss, and the page says what was measured."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import warm_scripts
from backend_job import free_ports
from example_runs import EXAMPLES

FOLDER = EXAMPLES / "applications"
ROOT = EXAMPLES.parent
RUN = [sys.executable, str(FOLDER / "run.py")]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """The script that a test names, as a module, with the parts that it imports from its own folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("parts", request.param):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield __import__(request.param)
    for name in ("parts", request.param):
        sys.modules.pop(name, None)


def run(name: str, folder: Path, *arguments: str) -> dict[str, float]:
    """Runs an application on two ranks that lose a tenth of their datagrams, and returns its numbers."""
    (port,) = free_ports(1)
    found = folder / "found.json"
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [str(Path(__file__).parent / "helpers" / "one_thread.py"), str(FOLDER / f"{name}.py"), *arguments]
    command += ["--loss", "0.1", "--json", str(found)]
    ranks, logs = [], [folder / f"{rank}.log" for rank in range(2)]
    for number, log in enumerate(logs):
        with log.open("wb") as file:
            own = environment | {"RANK": str(number), "LOCAL_RANK": str(number), "OMP_NUM_THREADS": "1"}
            ranks.append(warm_scripts.start(command, env=own, stdout=file, stderr=file))
    try:
        codes = [rank.wait(100.0) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], [log.read_text() for log in logs]
    told = json.loads(found.read_text())
    assert told["ranks"] == 2
    (numbers,) = told["runs"]
    assert numbers["replicas"] == 1  # under exact(model)
    return dict(numbers)


@pytest.mark.slow
@pytest.mark.pure
def test_clients_denoise_with_embeddings_of_their_own_and_new_ones_learn_nothing_else(tmp_path: Path) -> None:
    found = run("diffusion", tmp_path, "--steps", "80", "--adapt", "60")
    assert found["embeddings differ"] == 2
    assert found["with embeddings"] < found["without embeddings"] < 0.3  # an untrained model: about 1
    assert found["new client with its embedding"] < 0.97 * found["with embeddings, new client"]
    assert 0.85 < found["with arrived"] < 0.95
    assert found["with kilobytes"] == pytest.approx(found["without kilobytes"], rel=0.05)  # embeddings do not travel


@pytest.mark.thorough
@pytest.mark.pure
def test_adapters_learn_to_find_anomalies_for_a_fraction_of_the_bytes(tmp_path: Path) -> None:
    found = run("anomalies", tmp_path, "--pretrain", "60", "--steps", "50")
    assert found["adapters parameters"] < 0.1 * found["full parameters"]
    assert found["adapters kilobytes"] < 0.2 * found["full kilobytes"]
    assert found["adapters AUROC"] > found["frozen AUROC"] + 0.05
    assert found["full AUROC"] > found["frozen AUROC"] + 0.05


@pytest.mark.thorough
@pytest.mark.pure
def test_penalties_that_are_not_convex_keep_fewer_variables_without_effect(tmp_path: Path) -> None:
    found = run("quantiles", tmp_path, "--steps", "80")
    for penalty in ("SCAD", "MCP"):
        assert found[f"{penalty} found"] == 8
        assert found[f"{penalty} wrong"] < 0.5 * found["L1 wrong"]
        assert found[f"{penalty} error"] < found["L1 error"]
        assert found[f"{penalty} excess"] < 0.02


@pytest.mark.thorough
@pytest.mark.pure
def test_kernels_tell_unknown_digits_better_than_a_softmax(tmp_path: Path) -> None:
    found = run("uncertainty", tmp_path, "--steps", "60")
    assert found["kernel accuracy"] > 0.9
    assert found["kernel AUROC"] > 0.9
    assert found["kernel AUROC"] > found["softmax AUROC"]


# --- parts of them ----------------------------------------------------------------------------------------------------


def penalty_of(name: str, size: torch.Tensor, weight: float) -> torch.Tensor:
    """The penalties as their papers define them."""
    if name == "L1":
        return weight * size
    if name == "MCP":
        return torch.where(size <= 3.0 * weight, weight * size - size**2 / 6.0, torch.tensor(1.5 * weight**2))
    middle = (2 * 3.7 * weight * size - size**2 - weight**2) / (2 * 2.7)
    last = torch.tensor(weight**2 * 4.7 / 2)
    return torch.where(size <= weight, weight * size, torch.where(size <= 3.7 * weight, middle, last))


@pytest.mark.pure
@pytest.mark.parametrize("module", ["quantiles"], indirect=True)
@pytest.mark.parametrize("name", ["L1", "SCAD", "MCP"])
def test_a_proximal_step_minimises_penalty_and_distance(module: Any, name: str) -> None:
    weight, lr = 0.3, 0.5
    given = torch.linspace(-2.0, 2.0, 401, dtype=torch.float64)
    tried = torch.linspace(-2.1, 2.1, 8401, dtype=torch.float64)
    cost = (tried - given[:, None]) ** 2 / (2 * lr) + penalty_of(name, tried.abs(), weight)
    best = tried[cost.argmin(1)]
    assert torch.allclose(module.proximal(given, name, weight, lr), best, atol=1e-3)


@pytest.mark.pure
@pytest.mark.parametrize("module", ["quantiles"], indirect=True)
def test_the_smooth_loss_is_the_quantile_loss_away_from_its_kink(module: Any) -> None:
    away = torch.tensor([[-3.0], [-0.6], [0.7], [5.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(module.smooth_loss(away, 0.75), away)
    assert torch.allclose(slope, torch.tensor([[-0.25], [-0.25], [0.75], [0.75]]) / 4)


@pytest.mark.pure
@pytest.mark.parametrize("module", ["parts"], indirect=True)
def test_auroc_counts_pairs_in_the_right_order(module: Any) -> None:
    assert module.auroc(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])) == 1.0
    assert module.auroc(torch.tensor([1.0, 0.5]), torch.tensor([0.5, 2.0])) == (1 + 0.5) / 4


@pytest.mark.pure
@pytest.mark.parametrize("module", ["diffusion"], indirect=True)
def test_every_picture_is_dealt_once_and_new_clients_have_pairs_of_their_own(module: Any) -> None:
    clients = module.deal(0)
    assert len(clients) == len(module.CLIENTS) + len(module.NEW_CLIENTS)
    assert sum(len(learned) + len(held_out) for learned, held_out in clients) == 1797
    assert not set(module.CLIENTS) & set(module.NEW_CLIENTS)
    assert {digit for pair in module.CLIENTS for digit in pair} == set(range(10))


@pytest.mark.pure
@pytest.mark.parametrize("module", ["anomalies"], indirect=True)
def test_anomalies_lie_behind_what_a_forecast_needs(module: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.cat([module.machine(plant, 50, generator) for plant in range(4)])
    changed = module.strange(normal, generator) != normal
    assert not changed[:, : (module.SEEN_BEFORE + 1) * module.PATCH].any()
    assert changed.any(1).all()


# --- the page and the runner ------------------------------------------------------------------------------------------


@pytest.mark.pure
@pytest.mark.parametrize("module", ["run"], indirect=True)
def test_the_tables_of_the_page_are_those_of_the_results(module: Any) -> None:
    runs = module.load(module.RESULTS)
    wanted = {f"{name}/{loss:g}" for name in module.APPLICATIONS for loss in module.LOSSES}
    assert set(runs) == wanted
    assert all(len(each["runs"]) == 3 and each["ranks"] == 4 for each in runs.values())
    text = (ROOT / "examples" / "applications" / "README.md").read_text(encoding="utf-8")
    assert text == module.renewed(text, runs), "run: python examples/applications/run.py --renew"


@pytest.mark.pure
@pytest.mark.parametrize("module", ["run"], indirect=True)
def test_a_run_with_other_settings_is_not_taken_for_the_one_that_is_asked_for(module: Any) -> None:
    runs = {"quantiles/0.1": {"settings": {"seeds": 3, "steps": 200, "policy": "lead"}}}
    asked = argparse.Namespace(seeds=3, steps=None, policy="lead", json=Path("x.json"))
    module.check("quantiles/0.1", runs, asked)
    module.check("quantiles/0.4", runs, asked)
    asked.policy = "plain"
    with pytest.raises(SystemExit, match="was run with --policy lead, not plain"):
        module.check("quantiles/0.1", runs, asked)


def runner(path: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """Runs the runner briefly, as a reader would, and returns what it has kept."""
    command = [*RUN, "--only", "quantiles", "--losses", "0.4", "--seeds", "1", "--steps", "20", "--json", str(path)]
    environment = os.environ | variables
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, timeout=110, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "| variables found, of 8: L1 |" in done.stdout
    kept = json.loads(path.read_text())["runs"]["quantiles/0.4"]
    assert (kept["ranks"], len(kept["runs"]), kept["settings"]["steps"]) == (4, 1, 20)
    assert kept["runs"][0]["arrived"] == pytest.approx(0.6, abs=0.1)
    return dict(kept)


@pytest.mark.lab
@pytest.mark.slow
def test_the_runner_measures_in_a_lab(lab: Any, tmp_path: Path) -> None:
    kept = runner(tmp_path / "found.json")
    assert kept["network"].startswith("lab: ")
    assert kept["loss_measured"] == pytest.approx(0.4, abs=0.02)


@pytest.mark.slow
def test_without_a_lab_the_runner_says_that_loss_is_injected(tmp_path: Path) -> None:
    kept = runner(tmp_path / "found.json", PATH=str(tmp_path))
    assert kept["network"] == "loopback, loss injected"
    assert "loss_measured" not in kept
