"""Checkpoints of simulations: a resumed one is bit-identical to an uninterrupted one."""

import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commands import ENVIRONMENT, STORMTORCH
from full_disk import files_up_to
from stormtorch import BoundedDrift, GradientAveraging, ModelAveraging
from stormtorch.checks import BadSetting
from stormtorch.network.loss import Bernoulli, GilbertElliott, LossModel, PerLink, Stragglers, Trace
from stormtorch.policies.policy import Policy
from stormtorch.telemetry.ledger import PackedLinks
from stormtorch_lab import simulate
from stormtorch_lab.simulation import ProgressPoint, Simulated
from stormtorch_lab.simulation.checkpoints import digest
from stormtorch_lab.studies.on_workers import run_simulations
from stormtorch_lab.studies.settings import SimSettings

WORKERS, STEPS = 5, 12
BURSTS = GilbertElliott(p=0.2, burst=4)
POLICIES = [
    BoundedDrift(weights="horvitz-thompson", max_lag=4),
    ModelAveraging(every=2),
    GradientAveraging(),
]
SMALL = SimSettings(
    workers=4, steps=4, batch=1, width=16, layers=1, context=8, held_out=2, loss=0.2, policies=("lossless", "lead")
)


def net() -> nn.Module:
    """With buffers of its own for every worker, and random numbers of its own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 40))


def batches(step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(max(WORKERS, last), 4, 8, generator=torch.Generator().manual_seed(step))
    return x[first:last], x[first:last, :, 0].abs().mul(10).long().clamp(max=39)


class Run:
    """A simulation, and the last parameters and buffers that it had judged."""

    def __init__(self, policy: Policy, network: LossModel = BURSTS) -> None:
        self.policy, self.network = policy, network
        self.weights: list[torch.Tensor] = []

    def __call__(self, **others: Any) -> Simulated:
        torch.manual_seed(1)
        return simulate(
            net(),
            lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            batches,
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            **{"workers": WORKERS, "steps": STEPS, "seed": 3, "clip": 1.0} | others,
            network=self.network,
            policy=self.policy,
            evaluate=self.judge,
        )

    def judge(self, model: nn.Module) -> tuple[float, float]:
        self.weights = [each.clone() for each in model.state_dict().values()]
        return sum(float(each.double().abs().sum()) for each in self.weights), 0.0


def stop_after(steps: int, error: type[BaseException]) -> Callable[[ProgressPoint], None]:
    def advance(spot: ProgressPoint) -> None:
        if spot.step == steps:
            raise error

    return advance


def assert_same(run: Run, found: Simulated, other: Run, expected: Simulated) -> None:
    assert found.curve == expected.curve
    assert found.validations == expected.validations
    assert found.drift == expected.drift
    assert list(found.ledger) == list(expected.ledger)
    assert all(torch.equal(own, given) for own, given in zip(run.weights, other.weights, strict=True))
    assert len(found.times_s) == STEPS


@pytest.mark.pure
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_who_goes_on_after_an_interrupt_comes_to_the_same_bits(policy: Policy, tmp_path: Path) -> None:
    undisturbed, stopped = Run(policy), Run(policy)
    expected = undisturbed()
    state = tmp_path / "states" / "one.pt"
    with pytest.raises(KeyboardInterrupt):
        stopped(checkpoint=state, advance=stop_after(5, KeyboardInterrupt))
    assert state.exists()
    told: list[int] = []
    found = stopped(checkpoint=state, advance=lambda spot: told.append(spot.step))
    assert told == list(range(6, STEPS + 1))
    assert_same(stopped, found, undisturbed, expected)
    assert list(state.parent.iterdir()) == []


@pytest.mark.pure
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_who_goes_on_after_a_crash_repeats_from_the_last_state(policy: Policy, tmp_path: Path) -> None:
    undisturbed, stopped = Run(policy), Run(policy)
    expected = undisturbed()
    for crash in (4, 9):
        with pytest.raises(ArithmeticError):
            stopped(checkpoint=tmp_path / "x", checkpoint_every_s=0.0, advance=stop_after(crash, ArithmeticError))
    told: list[int] = []
    found = stopped(checkpoint=tmp_path / "x", advance=lambda spot: told.append(spot.step))
    assert told[0] == 9
    assert_same(stopped, found, undisturbed, expected)


@pytest.mark.pure
@pytest.mark.parametrize("policy", [BoundedDrift(), GradientAveraging()], ids=lambda policy: type(policy).__name__)
def test_rows_of_many_workers_are_small_and_say_the_same(policy: Policy, tmp_path: Path) -> None:
    many: dict[str, Any] = {"workers": 70, "steps": 3}
    expected = Run(policy)(**many)
    row = expected.ledger[-1]
    assert isinstance(row.gradients, PackedLinks)
    assert list(row.gradients) == list(range(70))
    assert 70 not in row.gradients
    assert expected.ledger.to_json()[-1]["gradients"] == dict(zip(range(70), row.gradients.values(), strict=True))
    with pytest.raises(KeyboardInterrupt):
        Run(policy)(**many, checkpoint=tmp_path / "x", advance=stop_after(2, KeyboardInterrupt))
    found = Run(policy)(**many, checkpoint=tmp_path / "x")
    assert list(found.ledger) == list(expected.ledger)
    assert found.ledger.summary() == expected.ledger.summary()


@pytest.mark.pure
def test_an_interrupt_after_the_last_step_loses_nothing(tmp_path: Path) -> None:
    undisturbed, stopped = Run(BoundedDrift()), Run(BoundedDrift())
    expected = undisturbed()
    with pytest.raises(KeyboardInterrupt):
        stopped(checkpoint=tmp_path / "x", advance=stop_after(STEPS, KeyboardInterrupt))
    found = stopped(checkpoint=tmp_path / "x", advance=stop_after(1, AssertionError))
    assert_same(stopped, found, undisturbed, expected)


@pytest.mark.pure
def test_a_signal_waits_for_the_end_of_the_step_and_a_second_one_does_not(tmp_path: Path) -> None:
    def rate_with_signals(count: int) -> Callable[[int], float]:
        def rate(step: int) -> float:  # asked for at the beginning of a step
            for _ in range(count if step == 2 else 0):
                signal.raise_signal(signal.SIGINT)
            return 1e-3

        return rate

    before = signal.getsignal(signal.SIGINT)
    state = tmp_path / "x"
    with pytest.raises(KeyboardInterrupt):
        Run(BoundedDrift())(checkpoint=state, rate=rate_with_signals(1))
    assert len(torch.load(state, weights_only=True)["found"]["curve"]) == 3
    assert signal.getsignal(signal.SIGINT) == before
    state.unlink()
    with pytest.raises(KeyboardInterrupt):
        Run(BoundedDrift())(checkpoint=state, rate=rate_with_signals(2))
    assert not state.exists()
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.pure
def test_a_state_of_another_simulation_is_refused_by_what_differs(tmp_path: Path) -> None:
    state = tmp_path / "x"
    with pytest.raises(KeyboardInterrupt):
        Run(BoundedDrift())(checkpoint=str(state), advance=stop_after(1, KeyboardInterrupt))
    for run, others, name in (
        (Run(BoundedDrift()), {"seed": 4}, "seed"),
        (Run(BoundedDrift()), {"steps": 13}, "steps"),
        (Run(BoundedDrift()), {"clip": 2.0}, "clip"),
        (Run(BoundedDrift()), {"precision": "bfloat16"}, "precision"),
        (Run(BoundedDrift(lead=0.0)), {}, "policy"),
        (Run(BoundedDrift(), Bernoulli(p=0.1)), {}, "network"),
    ):
        with pytest.raises(ValueError, match=f"its {name} is"):
            run(checkpoint=state, **others)
    state.write_text("nonsense")
    with pytest.raises(ValueError, match="cannot be read, remove it"):
        Run(BoundedDrift())(checkpoint=state)
    torch.save({"model": torch.ones(3)}, state)
    with pytest.raises(ValueError, match="cannot be read, remove it"):
        Run(BoundedDrift())(checkpoint=state)


@pytest.mark.pure
def test_numbers_of_numpy_do_not_keep_a_state_from_being_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    given: dict[str, Any] = {"rate": lambda step: numpy.float64(1e-3), "clip": numpy.float64(1.0)}
    expected = Run(BoundedDrift())(**given)
    with pytest.raises(KeyboardInterrupt):
        Run(BoundedDrift())(**given, checkpoint=tmp_path / "x", advance=stop_after(5, KeyboardInterrupt))
    assert Run(BoundedDrift())(**given, checkpoint=tmp_path / "x").curve == expected.curve


@pytest.mark.pure
def test_a_full_disk_keeps_the_last_whole_state_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed, full = Run(BoundedDrift()), Run(BoundedDrift())
    expected, state = undisturbed(), tmp_path / "x"
    with pytest.raises(KeyboardInterrupt):
        full(checkpoint=state, advance=stop_after(2, KeyboardInterrupt))
    before = state.read_bytes()
    # Each of the next steps would save, and so would Ctrl-C.
    with files_up_to(len(before) // 2), pytest.raises(KeyboardInterrupt):
        full(checkpoint=state, checkpoint_every_s=0.0, advance=stop_after(6, KeyboardInterrupt))
    assert state.read_bytes() == before
    assert list(tmp_path.iterdir()) == [state]
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert said and all(each.startswith(f"cannot write checkpoint {state}: ") for each in said)
    assert all(each.endswith("; the previous one is kept") for each in said)
    told: list[int] = []
    found = full(checkpoint=state, advance=lambda spot: told.append(spot.step))
    assert told[0] == 3
    assert_same(full, found, undisturbed, expected)


@pytest.mark.thorough
@pytest.mark.pure
def test_results_that_a_full_disk_does_not_take_are_still_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, steps, folder = run_simulations(SMALL), tmp_path / "steps.jsonl", tmp_path / "run"
    run_simulations(SMALL, checkpoints=folder, ledger=steps)
    settings = folder / "settings.json"
    room = 2 * settings.stat().st_size
    assert room < min(each.stat().st_size for each in (steps, *folder.glob("*-0.json")))
    for each in folder.glob("*-0.json"):
        each.unlink()
    with files_up_to(room):
        found = run_simulations(SMALL, checkpoints=folder, ledger=steps)
    assert [each.curve for each in found.results] == [each.curve for each in expected.results]
    assert list(folder.iterdir()) == [settings]
    assert all(json.loads(line) for line in steps.read_text().splitlines())  # no half a row
    said = "\n".join(each.getMessage() for each in caplog.records)
    assert "cannot write to" in said and "it lacks all rows of lead, seed 0" in said
    assert "lead-0.json" in said and "repeating the command will compute it again" in said


class Hostile:
    """What a file may hold that runs when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.pure
def test_a_state_that_would_run_something_is_refused(tmp_path: Path) -> None:
    state, harmed = tmp_path / "x", tmp_path / "harmed"
    torch.save({"identity": Hostile(harmed)}, state)
    with pytest.raises(ValueError, match="cannot be read, remove it"):
        Run(BoundedDrift())(checkpoint=state)
    assert not harmed.exists()


@pytest.mark.pure
def test_networks_are_told_apart_by_their_digests() -> None:
    trace, other = Trace(bits="0001"), Trace(bits="0010")
    networks: list[LossModel] = [
        Bernoulli(p=0.1),
        Bernoulli(p=0.2),
        trace,
        PerLink(links={(0, 1): trace, (1, 0): other}),
        PerLink(links={(0, 1): other, (1, 0): trace}),
        PerLink(links={(0, 1): trace, (1, 0): other}, default=trace),
        Stragglers(chance=0.1),
        Stragglers(chance=0.1, network=PerLink(links={(0, 1): trace})),
        Stragglers(chance=0.1, network=PerLink(links={(0, 1): other})),
    ]
    assert len({digest(network) for network in networks}) == len(networks)
    # Whatever the order they were named in.
    assert digest(PerLink(links={(1, 0): other, (0, 1): trace})) == digest(networks[3])


# --- trainings that are done ------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.pure
def test_trainings_that_are_done_are_not_repeated(tmp_path: Path) -> None:
    told: list[int] = []

    def stop(_what: str, done: int) -> None:
        told.append(done)
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_simulations(SMALL, stop, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lead-0.pt", "lossless-0.json", "settings.json"]
    again: list[int] = []
    found = run_simulations(SMALL, lambda _, done: again.append(done), tmp_path)
    assert (told, again) == ([1, 2, 3, 4, 5, 6], [7, 8])
    assert [result.curve for result in found.results] == [result.curve for result in run_simulations(SMALL).results]
    # More seeds and policies may be requested; existing results are reused, with their times.
    more = replace(SMALL, policies=("lead", "plain"))
    third = run_simulations(more, checkpoints=tmp_path)
    assert third.of("lead") == found.of("lead")
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.thorough
@pytest.mark.pure
def test_checkpoints_of_other_settings_are_refused_by_what_differs(tmp_path: Path) -> None:
    run_simulations(SMALL, checkpoints=tmp_path)
    ledger = tmp_path / "before.jsonl"
    ledger.write_text("of another folder")
    for other, name in (
        (replace(SMALL, steps=5), "steps"),
        (replace(SMALL, lr=1.0), "data"),
        (replace(SMALL, network=PerLink(links={(0, 1): Trace(bits="01")})), "burst"),
    ):
        with pytest.raises(BadSetting, match=f"its {name} is") as caught:
            run_simulations(other, checkpoints=tmp_path, ledger=ledger)
        assert caught.value.name == "checkpoint"
        assert ledger.read_text() == "of another folder"
    (tmp_path / "lead-0.json").write_text("{}")
    with pytest.raises(BadSetting, match=r"holds lead-0\.json, which cannot be read"):
        run_simulations(SMALL, checkpoints=tmp_path)
    with pytest.raises(BadSetting, match="--ledger must be given from the first run on"):
        run_simulations(SMALL, checkpoints=tmp_path, ledger=tmp_path / "steps.jsonl")


def cpu_s(pid: int) -> float:
    """Time that a process has computed."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.thorough
@pytest.mark.parametrize("kept", [True, False], ids=["with --checkpoint", "without"])
def test_ctrl_c_tells_how_to_go_on_and_exits_with_130(kept: bool, tmp_path: Path) -> None:
    small: tuple[str, ...]
    small = ("--workers", "4", "--batch", "1", "--width", "16", "--layers", "1", "--context", "8", "--device", "cpu")
    folder = tmp_path / "run"
    steps = tmp_path / "steps.jsonl"  # made when all is read and the first training begins
    small += ("--steps", "1000000", "--ledger", str(steps))
    command = [*STORMTORCH, "simulate", *small, *(("--checkpoint", str(folder)) if kept else ())]
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not steps.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # Some steps later, however busy the machine is: imports are not over yet.
        begun_s = cpu_s(process.pid)
        while cpu_s(process.pid) < begun_s + 3.0 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output) == (130, "")
    if kept:
        # On a busy machine, progress may also have been printed.
        last = f"interrupted: the same command resumes from the checkpoint in {folder}"
        assert errors.splitlines()[-1] == last
        assert {each.name for each in folder.iterdir()} == {"settings.json", "lossless-0.pt"}
    else:
        assert "with --checkpoint DIR the same command can resume" in errors
