"""A job of real processes that a test kills, stops and starts, and their reports."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from machine_rank import How, main


class Process:
    """A process of a rank."""

    def __init__(self, rank: int, how: How, folder: Path, number: int) -> None:
        self.rank = rank
        self._out = folder / f"rank{rank}-{number}.txt"
        # What is preloaded takes a fresh interpreter; all others are forked from one that has imported torch.
        kind: Any = SpawnProcess if how.environment else multiprocessing.get_context("spawn").Process
        self._process: BaseProcess = kind(
            target=main, args=(rank, how, str(folder / "store"), str(self._out)), daemon=True
        )
        with pytest.MonkeyPatch.context() as patch:
            for name, value in how.environment.items():
                patch.setenv(name, value)
            self._process.start()

    @property
    def said(self) -> list[dict[str, Any]]:
        if not self._out.exists():
            return []
        return [json.loads(line) for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    @property
    def code(self) -> int | None:
        return self._process.exitcode

    def reported(self, what: str) -> list[Any]:
        return [each[what] for each in self.said if what in each]

    def longest_pause_s(self) -> float:
        """The longest time between the ends of two steps."""
        at = [each["at"] for each in self.said if "step" in each]
        return max((later - earlier for earlier, later in itertools.pairwise(at)), default=0.0)

    def await_step(self, step: int, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while max(self.reported("step"), default=0) < step:
            assert self._process.is_alive(), f"rank {self.rank} has ended by {self.code}: {self.said[-5:]}"
            assert time.monotonic() < deadline, f"rank {self.rank} is not at step {step}: {self.said[-5:]}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self, within_s: float = 60.0) -> int | None:
        """Waits for its end; returns its exit code."""
        self._process.join(within_s)
        assert self.code is not None, f"rank {self.rank} has not ended: {self.said[-5:]}"
        return self.code

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


class MachineJob:
    """Ranks by number; `how` of a rank replaces that of all."""

    def __init__(self, folder: Path, how: How, ranks: dict[int, How] | None = None) -> None:
        self._folder, self._started = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        hows = {rank: (ranks or {}).get(rank, how) for rank in range(how.world)}
        self.ranks = [self.start(rank, each) for rank, each in hows.items()]

    def start(self, rank: int, how: How) -> Process:
        self._started += 1
        return Process(rank, how, self._folder, self._started)

    def __enter__(self) -> MachineJob:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.ranks:
            each.stop()
