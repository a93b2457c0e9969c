# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Messages for users: public names, the ledger's summary, the error of `model.module`, warnings of a full disk."""

import copy
import json
import logging
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from conftest import local_world
from torch import nn

import stormtorch
from stormtorch import BoundedDrift, GradientAveraging, ModelAveraging
from stormtorch.collectives import Group, barrier
from stormtorch.policies.policy import Policy
from stormtorch.telemetry.ledger import Ledger, LedgerRow
from stormtorch.udp.udp import UdpTransport
from training import EXACTLY, Rank, adamw, on_ranks, perceptron, sgd, vectors

pytestmark = pytest.mark.pure


def test_the_package_lists_its_public_names_and_nothing_else() -> None:
    assert dir(stormtorch) == sorted(stormtorch.__all__)
    script = "import stormtorch, sys; dir(stormtorch); assert 'torch' not in sys.modules; print(*dir(stormtorch))"
    listed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert listed.stdout.split() == sorted(stormtorch.__all__)
    for name in dir(stormtorch):
        assert getattr(stormtorch, name) is not None


# --- model.module -----------------------------------------------------------------------------------------------------


class Within(nn.Module):
    """Has a submodule of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 6)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(given)
        return out


def test_a_prepared_model_says_that_it_is_not_wrapped() -> None:
    def work(rank: Rank) -> None:
        model = rank.model
        assert not hasattr(model, "module")
        assert getattr(model, "module", model) is model
        with pytest.raises(AttributeError, match=r"wraps nothing, the model is itself\. Use model where"):
            _ = model.module
        with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'other'"):
            _ = model.other
        assert type(model).__name__ == "Sequential"
        assert isinstance(model, nn.Sequential)
        with pytest.raises(AttributeError, match=r"'Sequential' object has no attribute 'module'$"):
            _ = copy.deepcopy(model).module  # which is not prepared
        rank.train(1)
        model.module = nn.Identity()
        assert isinstance(model.module, nn.Identity)

    on_ranks(perceptron(), sgd, work, world=2)


def test_a_submodule_of_that_name_is_found() -> None:
    def work(rank: Rank) -> None:
        assert rank.model.module.weight.shape == (6, 8)
        rank.train(2)

    on_ranks(Within(), sgd, work, world=2)


class Registered(nn.Linear):
    """Keeps a list of its subclasses, as registries do, and refuses a name that is there, or none."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, called: str, **others: Any) -> None:
        super().__init_subclass__(**others)
        if called in Registered.known:
            raise ValueError(f"{called} is there already")
        Registered.known[called] = cls


class One(Registered, called="one"):
    pass


class Sealed(type):
    """Refuses a class that has another base beside its own."""

    def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> "Sealed":
        if len(bases) > 1:
            raise TypeError("one base is enough")
        return super().__new__(mcs, name, bases, members)


class Alone(nn.Linear, metaclass=Sealed):
    pass


@pytest.mark.parametrize("kind", [One, Alone])
def test_classes_that_watch_their_subclasses_can_be_prepared(kind: type[nn.Linear]) -> None:
    def work(rank: Rank) -> None:
        rank.train(2)
        assert isinstance(rank.model, kind)
        assert not hasattr(rank.model, "module")

    on_ranks(kind(8, 6), sgd, work, world=2)
    assert Registered.known == {"one": One}
    if kind is One:
        with pytest.raises(ValueError, match="is there already"):  # its own subclasses are still watched

            class Again(One, called="one"):
                pass


# --- the ledger in words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging(), GradientAveraging(), EXACTLY], ids=repr)
def test_the_last_step_is_in_the_summary(policy: Policy) -> None:
    def work(rank: Rank) -> None:
        ledger = rank.optimizer.ledger
        assert repr(ledger) == "<Ledger: no steps yet>"
        rank.train(3)
        assert ledger.summary()["steps"] == 3
        assert [row.step for row in ledger] == [0, 1, 2]
        rank.model(vectors(rank.rank, 3))  # which must not count the step twice
        assert ledger.summary()["steps"] == 3

    on_ranks(perceptron(), adamw, work, policy=policy, world=2)


def test_what_was_written_or_told_has_the_last_step_too(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        rank.train(3)
        rank.optimizer.ledger.write(tmp_path / str(rank.rank))
        assert len((tmp_path / str(rank.rank)).read_text().splitlines()) == 3
        rank.train(1)
        assert len(rank.optimizer.ledger.to_json()) == 4

    on_ranks(perceptron(), adamw, work, policy=BoundedDrift(), world=2)


def test_a_summary_after_the_end_of_the_job_does_without_what_never_came() -> None:
    def work(transport: UdpTransport) -> int:
        model = nn.Linear(8, 6)
        optimizer = adamw(model)
        stormtorch.prepare(model, optimizer, group=Group(transport))
        rank = Rank(transport.rank, 2, model, optimizer)
        rank.train(3)
        barrier(Group(transport)).wait()
        transport.close(0.2)
        return int(rank.optimizer.ledger.summary()["steps"])

    assert all(steps in (2, 3) for steps in local_world(2, work))


def test_the_ledger_and_its_summary_can_be_read() -> None:
    ledger = Ledger()
    for step in range(20):
        row = LedgerRow(step, gradients={1: 0.9}, broadcast={1: 0.8}, lag={0: 9, 3: 1}, bytes_sent=123_456)
        row.events = [f"event {step}"] if step % 2 else []
        row.guarded = step == 7
        row.gradient_wait_s = 0.01
        ledger.add(row)
    assert repr(ledger) == "<Ledger: 20 steps, 85.00% arrived, 1 guarded, 10 events>"
    summary = ledger.summary()
    lines = str(summary).splitlines()
    assert lines[:5] == [
        "steps    20, waiting 0.2 s for gradients and 0 s for parameters; the guard made 1 of them exact",
        "arrived  85.00% of the chunks; the oldest copy was 3 steps old",
        "sent     2.47 MB",
        "drift    none",
        "events   10",
    ]
    assert lines[-10:] == [f"  event {step}" for step in range(1, 20, 2)]
    assert all(len(line) < 100 for line in lines)
    # It is a dictionary as before.
    assert summary["steps"] == 20
    assert json.loads(json.dumps(summary)) == summary


def test_a_summary_names_the_latest_of_many_events() -> None:
    ledger = Ledger()
    ledger.add(LedgerRow(0, events=[f"event {number}" for number in range(50)]))
    lines = str(ledger.summary()).splitlines()
    assert lines[-11:] == ["  the last 10 of them:", *(f"  event {number}" for number in range(40, 50))]
    assert "events   50" in lines


def test_expected_drift_is_told_with_its_scatter_unless_chance_decides() -> None:
    many, few = Ledger(), Ledger()
    for step in range(200):
        drift = 2e-8 if step % 40 < 20 else 1e-8
        many.add(LedgerRow(step, lag={0: 90, 1: 10}, pair_drift=drift, pair_bound=1.6e-8))
        few.add(LedgerRow(step, lag={0: 2}, pair_drift=drift, pair_bound=1.6e-8))
    line = "drift    1.5e-08 between two replicas, expected 1.6e-08 ± 2e-09 (mean squares)"
    assert line in str(many.summary()).splitlines()
    assert "drift    1.5e-08 between two replicas (mean squares)" in str(few.summary()).splitlines()


def test_a_ledger_can_be_copied_and_pickled_without_what_follows_it(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        ledger = rank.optimizer.ledger
        ledger.follow(tmp_path / str(rank.rank))
        ledger.to_tensorboard(SimpleNamespace(add_scalar=lambda *_: None, add_text=lambda *_: None))
        rank.train(3)
        for copied in (copy.deepcopy(ledger), copy.copy(ledger), pickle.loads(pickle.dumps(ledger))):
            assert repr(copied) == repr(ledger)
            assert copied.summary() == ledger.summary()
            copied.add(LedgerRow(9))
        assert len(ledger) == 3
        assert len((tmp_path / str(rank.rank)).read_text().splitlines()) == 3
        rank.train(1)
        assert len((tmp_path / str(rank.rank)).read_text().splitlines()) == 4

    on_ranks(perceptron(), adamw, work, policy=BoundedDrift(), world=2)


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_under_follow_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: Rank) -> int:
        rank.optimizer.ledger.follow("/dev/full")
        rank.train(4)
        rank.values()
        return len(rank.optimizer.ledger)

    assert on_ranks(perceptron(), adamw, work, policy=BoundedDrift(), world=2) == [4, 4]
    for rank in range(2):
        (warning,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith(f"rank {rank}: ")]
        assert "cannot write to /dev/full" in warning
        assert "No space left on device" in warning
        assert "Rows from step 0 on are lost there" in warning


def test_a_file_that_can_be_written_again_has_whole_lines_and_a_warning_of_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, ledger = tmp_path / "followed", Ledger()
    ledger.follow(path)
    ledger.add(LedgerRow(0))
    room = path.stat().st_size
    # Room for a row and a half: the kernel writes a part of the next one.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room + room // 2, before[1]))
    try:
        for step in (1, 2, 3):
            ledger.add(LedgerRow(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    ledger.add(LedgerRow(4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 4]
    assert [row.step for row in ledger] == [0, 1, 2, 3, 4]
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert "Rows from step 1 on are lost" in warnings[0]
    assert "it lacks 3 rows, those of steps 1 to 3" in warnings[1]


def test_tensorboard_without_room_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def add_scalar(self, *_: Any) -> None:
            raise OSError(28, "No space left on device")

    ledger = Ledger()
    ledger.to_tensorboard(Full())
    for step in range(3):
        ledger.add(LedgerRow(step))
    assert len(ledger) == 3
    assert len([each for each in caplog.records if "TensorBoard" in each.getMessage()]) == 1
