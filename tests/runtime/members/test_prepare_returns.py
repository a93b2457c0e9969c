"""Processes of a job that are killed, stopped, ended or cut off, and rejoin; others that join late and leave."""
# mypy: disable-error-code="no-untyped-call"

import json
import os
import queue
import signal
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

HERE = Path(__file__).parents[2] / "helpers"
WORLD = 4
PATIENCE_S = 120.0


class Job:
    """Ranks as processes, and a store that outlives them."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        self._said: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._ranks: dict[int, warm_scripts.Script] = {}

    def start(self, rank: int, **how: Any) -> None:
        given = {"rank": rank, "world": WORLD, "port": self._store.port, "silence_s": 3.0, "loss": 0.1}
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
        """Returns a rank's output line with this key and at least this value."""
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            said = self._said[rank].get(timeout=max(give_up_at - time.monotonic(), 0.1))
            if key in said and (not isinstance(said[key], int | float) or said[key] >= least):
                return said
            assert "error" not in said, said

    def signal(self, rank: int, number: int) -> None:
        os.kill(self._ranks[rank].pid, number)

    def ended(self, rank: int) -> int | None:
        """Exit status of a rank that ends by itself."""
        process = self._ranks.pop(rank)
        process.wait(PATIENCE_S)
        return process.returncode

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
    """Validation loss of the same training in one process, on all ranks' batches."""
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
    """Whether all wanted events occurred, in this order; a busy machine may report more events."""
    left = iter(events)
    return all(any(each in event for event in left) for each in wanted)


def assert_equal(told: dict[int, dict[str, Any]], steps: int, members: list[int]) -> None:
    """All ranks have the same values, in the same view, and have learned as much as without faults."""
    first, *others = told.values()
    for each in (first, *others):
        assert each["values"] == first["values"]
        assert (each["view"], each["members"]) == (first["view"], members)
    assert first["loss"] < 1.5 * undisturbed_loss(steps) + 0.02


@pytest.mark.thorough
def test_training_goes_on_without_a_killed_rank_and_with_another_that_was_started_again(job: Job) -> None:
    steps = 200
    for rank in range(WORLD):
        job.start(rank, steps=steps)
    job.hear(0, "step", 50)
    job.kill(2)
    job.start(2, steps=steps)
    assert job.hear(2, "begins_at")["begins_at"] >= 50
    job.hear(2, "step")
    job.kill(3)
    told = {rank: job.hear(rank, "values") for rank in (0, 1, 2)}
    assert_equal(told, steps, [0, 1, 2])
    assert in_order(told[0]["events"], ["rank 2 is", "rank 3 is gone"])
    assert not any("no standby left" in event for event in told[0]["events"])


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_that_share_machines_are_killed_and_started_again(job: Job, overlap: bool) -> None:
    steps = 160
    for rank in range(WORLD):
        job.start(rank, steps=steps, machines="aabb", overlap=overlap)
    assert job.hear(0, "step", 40)["by_machines"]
    job.kill(3)
    assert not job.hear(0, "step", 60)["by_machines"]  # two and one: the other ranks continue with a flat exchange
    job.start(3, steps=steps, machines="aabb", overlap=overlap)
    assert job.hear(3, "begins_at")["begins_at"] >= 60
    told = {rank: job.hear(rank, "values") for rank in range(WORLD)}
    assert_equal(told, steps, [0, 1, 2, 3])
    assert all(each["by_machines"] for each in told.values())
    assert in_order(told[0]["events"], ["rank 3 is gone", "rank 3 is new"])


@pytest.mark.slow
def test_rank_that_was_stopped_comes_back_when_it_continues(job: Job) -> None:
    steps = 250
    for rank in range(WORLD):
        job.start(rank, steps=steps)
    job.hear(0, "step", 40)
    job.signal(1, signal.SIGSTOP)
    job.hear(0, "step", 70)
    job.signal(1, signal.SIGCONT)
    told = {rank: job.hear(rank, "values") for rank in range(WORLD)}
    assert_equal(told, steps, [0, 1, 2, 3])
    assert in_order(told[0]["events"], ["rank 1 is gone", "rank 1 is"])


@pytest.mark.thorough
def test_rank_that_is_told_to_end_hands_over_and_exits_with_success(job: Job) -> None:
    steps = 150
    for rank in range(WORLD):
        job.start(rank, steps=steps, loss=0.0)
    job.hear(0, "step", 40)
    job.signal(2, signal.SIGTERM)
    assert job.ended(2) == 0
    told = {rank: job.hear(rank, "values") for rank in (0, 1, 3)}
    assert_equal(told, steps, [0, 1, 3])
    assert in_order(told[0]["events"], ["rank 2 is gone"])
    assert not any("lost" in event or "no standby" in event for event in told[0]["events"])


@pytest.mark.slow
def test_process_that_joins_trains_with_the_others_and_one_leaves_by_wish(job: Job) -> None:
    steps = 160
    for rank in range(WORLD):
        job.start(rank, steps=steps, leave_at=110 if rank == 0 else None)
    address = job.hear(1, "address")["address"]
    job.hear(0, "step", 20)
    job.start(9, steps=steps, join=address)
    came = job.hear(9, "begins_at")
    assert came["rank"] >= WORLD and came["begins_at"] >= 20
    assert job.hear(0, "left")["left"] == 110
    assert job.ended(0) == 0
    told = {rank: job.hear(rank, "values") for rank in (1, 2, 3, 9)}
    assert_equal(told, steps, [1, 2, 3, came["rank"]])
    assert in_order(told[1]["events"], [f"rank {came['rank']} is new", "rank 0 is gone"])


@pytest.mark.slow
def test_rank_that_was_cut_off_waits_and_comes_back(job: Job) -> None:
    steps = 250
    for rank in range(WORLD):
        job.start(rank, steps=steps, silence_s=2.0, deaf=(50, 5.0) if rank == 1 else (None, 0.0))
    told = {rank: job.hear(rank, "values") for rank in range(WORLD)}
    assert_equal(told, steps, [0, 1, 2, 3])
    assert in_order(told[0]["events"], ["rank 1 is gone", "rank 1 is"])


@pytest.mark.thorough
def test_rank_without_a_majority_gives_up_and_names_whom_it_misses(job: Job) -> None:
    for rank in range(WORLD):
        job.start(rank, steps=100_000, silence_s=1.5, give_up_s=3.0)
    job.hear(0, "step", 10)
    for rank in (1, 2, 3):
        job.kill(rank)
    said = job.hear(0, "error")["error"]
    assert "give_up_s" in said and "rank 1, 2, 3" in said and "without a majority" in said
