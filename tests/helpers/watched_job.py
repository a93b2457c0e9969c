"""A small training that makes records: real transports and sessions, whose ranks are threads of one process, as torch
takes long to import.
"""
# mypy: disable-error-code="no-untyped-call"

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but its types do not

import stormtorch
from stormtorch import BoundedDrift, Options
from stormtorch.collectives import Group
from stormtorch.network.loss import Bernoulli, PerLink


class WatchedJob:
    """Ranks that train together until stopped.

    Args:
        world: Number of ranks.
        folder: Where records go; None keeps them in memory only.
        links: Loss of links, by (sender, receiver).
        slow: Rank that takes longer than the others.
        slow_s: Seconds by which each of its steps is longer.
        pause_s: Seconds that each step takes anyway.
        every_s: Seconds between two records.
        key: Key that seals the job.
    """

    def __init__(
        self,
        world: int,
        folder: Path | None = None,
        *,
        links: dict[tuple[int, int], float] | None = None,
        slow: int | None = None,
        slow_s: float = 0.0,
        pause_s: float = 0.01,
        every_s: float = 0.1,
        key: bytes | None = None,
    ) -> None:
        self.addresses: dict[int, str] = {}
        self.steps = 0
        self._settings = (world, folder, slow, slow_s, pause_s, every_s, key)
        self._loss = PerLink(links={link: Bernoulli(p=p) for link, p in (links or {}).items()})
        self._store = HashStore()
        self._store.set_timeout(timedelta(seconds=60))
        self._until: int | None = None
        self._threads = [threading.Thread(target=self._train, args=(rank,), daemon=True) for rank in range(world)]

    def __enter__(self) -> "WatchedJob":
        self._faults = stormtorch.faults(loss=self._loss, seed=1)
        self._faults.start()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, steps: int, timeout_s: float = 60.0) -> None:
        """Waits until so many steps are made."""
        until = time.monotonic() + timeout_s
        while self.steps < steps:
            assert time.monotonic() < until, f"only {self.steps} steps in {timeout_s} s"
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends the job: all ranks make the same number of steps, so that none waits for another."""
        if self._until is None:
            self._until = self.steps + 10
            for thread in self._threads:
                thread.join(60)
            self._faults.stop()

    def _train(self, rank: int) -> None:
        world, folder, slow, slow_s, pause_s, every_s, key = self._settings
        options = Options(interface="lo", linger_s=0.2, timeout_s=30.0, datagram_bytes=1472, key=key)
        transport = stormtorch.connect(self._store, rank, world, options)
        model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = stormtorch.prepare(model, optimizer, policy=BoundedDrift(), group=Group(transport))
        if folder is not None:
            optimizer.session.record(folder, every_s=every_s)
        elif optimizer.session.recorder is not None:
            optimizer.session.recorder.every_s = every_s
        if optimizer.session.recorder is not None:
            self.addresses[rank] = optimizer.session.recorder.latest()["rank"]["address"]
        generator = torch.Generator().manual_seed(rank)
        truth = torch.randn(64, 10, generator=torch.Generator().manual_seed(9))
        step = 0
        while self._until is None or step < self._until:
            inputs = torch.randn(16, 64, generator=generator)
            loss = nn.functional.cross_entropy(model(inputs), (inputs @ truth).argmax(1))
            loss.backward()
            time.sleep(pause_s + (slow_s if rank == slow else 0.0))
            optimizer.step()
            optimizer.zero_grad()
            optimizer.session.note(loss=loss)
            step += 1
            if rank == 0:
                self.steps = step
        transport.close()


if __name__ == "__main__":
    # watched_job.py FOLDER WORLD STEPS [KEYWORDS], to try things by hand.
    made = WatchedJob(int(sys.argv[2]), Path(sys.argv[1]), **eval(f"dict({','.join(sys.argv[4:])})"))
    with made:
        made.wait(int(sys.argv[3]), 600)
