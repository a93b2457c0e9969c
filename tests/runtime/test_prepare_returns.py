# mypy: disable-error-code="no-untyped-call"
"""Ranks of a training that die, stay away, are cut off, and come back."""

import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but its types do not

import warm_scripts
from training_rank import batch, new_model, validation_loss

HERE = Path(__file__).parents[1] / "helpers"
WORLD = 4
PATIENCE_S = 120.0


class Job:
    """Ranks as processes, and a store that outlives them."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        self._said: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._ranks: dict[int, warm_scripts.Script] = {}

    def start(self, rank: int, *, again: bool = False, **how: Any) -> None:
        given = {"rank": rank, "world": WORLD, "port": self._store.port, "again": again, "silence_s": 3.0, "loss": 0.1}
        self._ranks[rank] = warm_scripts.start(
            [str(HERE / "training_rank.py"), json.dumps({"give_up_s": 90.0, **given, **how})],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said[rank] = queue.Queue()
        threading.Thread(target=self._listen, args=(self._ranks[rank], self._said[rank]), daemon=True).start()

    def _listen(self, process: warm_scripts.Script, said: queue.Queue[dict[str, Any]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(json.loads(line))

    def hear(self, rank: int, key: str, least: float = float("-inf")) -> dict[str, Any]:
        """What a rank says that has this key, of at least this value."""
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            said = self._said[rank].get(timeout=max(give_up_at - time.monotonic(), 0.1))
            if key in said and (not isinstance(said[key], int | float) or said[key] >= least):
                return said
            assert "error" not in said, said

    def kill(self, rank: int) -> None:
        process = self._ranks.pop(rank)
        process.kill()
        process.wait()

    def close(self) -> None:
        for process in self._ranks.values():
            process.kill()
            process.wait()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def undisturbed_loss(steps: int) -> float:
    """What the same training comes to in one process, on all ranks' batches."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        for rank in range(WORLD):
            inputs, targets = batch(rank, step)
            (nn.functional.cross_entropy(model(inputs), targets) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return validation_loss(model)


def in_order(events: list[str], wanted: list[str]) -> bool:
    """Whether all that is wanted was told, in this order; a busy machine may have had more to tell."""
    left = iter(events)
    return all(any(each in event for event in left) for each in wanted)


def test_training_goes_on_without_a_killed_rank_and_with_another_that_was_started_again(job: Job) -> None:
    steps = 250
    for rank in range(WORLD):
        job.start(rank, steps=steps)
    job.hear(0, "step", 50)
    job.kill(2)
    job.start(2, again=True, steps=steps)
    assert job.hear(2, "begins_at")["begins_at"] > 50
    job.hear(2, "step")
    job.kill(3)
    told = {rank: job.hear(rank, "values") for rank in (0, 1, 2)}
    # Of the shard of the one that is dead, each has the copy that it last got: they are some updates apart.
    for rank in (1, 2):
        assert told[rank]["values"] == pytest.approx(told[0]["values"], rel=0.02, abs=0.1)
    assert {2, 3} <= set(told[0]["missing"])
    assert {2, 3} <= set(told[1]["missing"])
    assert 3 in told[2]["missing"]
    assert in_order(
        [event for _, event in told[0]["events"]],
        ["rank 2 is missing", "rank 2 as a new process returns", "rank 2 is back", "rank 3 is missing"],
    )
    # Copies of a dead rank's shard grow old, which no guard can help.
    assert not any(event.startswith("guard") for _, event in told[0]["events"])
    # Of a quarter of the parameters, no update came for a part of the time.
    assert told[0]["loss"] < 1.5 * undisturbed_loss(steps) + 0.02


@pytest.mark.slow
def test_a_rank_that_was_cut_off_waits_and_comes_back_with_what_it_knows(job: Job) -> None:
    steps = 220
    for rank in range(WORLD):
        job.start(rank, steps=steps, deaf=(50, 4.0) if rank == 1 else (None, 0.0))
    told = {rank: job.hear(rank, "values") for rank in range(WORLD)}
    assert all(told[rank]["values"] == told[0]["values"] for rank in range(WORLD))
    story = [event for _, event in told[0]["events"]]
    assert in_order(story, ["rank 1 is missing", "rank 1 returns", "rank 1 is back"])
    assert told[0]["loss"] < 1.5 * undisturbed_loss(steps) + 0.02


@pytest.mark.slow
def test_a_rank_that_stays_away_too_long_ends_the_job_and_is_named(job: Job) -> None:
    for rank in range(WORLD):
        job.start(rank, steps=100_000, give_up_s=3.0)
    job.hear(0, "step", 10)
    job.kill(1)
    for rank in (0, 2, 3):
        said = job.hear(rank, "error")
        assert said["culprit"] == 1 or "rank 1" in said["error"], said
