"""A rank of a training on a machine in trouble: its memory or disk is full, its clock jumps, others are killed."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TextIO

import torch
from torch import nn
from torch._C._distributed_c10d import FileStore  # torch.distributed has it, but its types do not

import stormtorch
from stormtorch import BoundedDrift, Options, Policy
from stormtorch.collectives import Group


@dataclass(kw_only=True)
class How:
    """How a rank trains."""

    world: int = 3
    steps: int = 40
    compute_s: float = 0.02
    silence_s: float = 2.0
    policy: Policy = field(default_factory=lambda: BoundedDrift(bucket_mb=0.05))
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """What the process begins with, beside what it inherits."""
    begin: Callable[[Rank], None] | None = None
    """Called before anything else, in the process of the rank."""
    prepared: Callable[[Rank], None] | None = None
    before: Callable[[Rank, int], None] | None = None
    """Called before each step with its number."""
    within: Callable[[Rank, int], None] | None = None
    """Called in each step with its number, between forward and backward."""
    after: Callable[[Rank, int], None] | None = None
    """Called after each step."""


class Rank:
    """The state of a rank, and the file of its reports."""

    def __init__(self, rank: int, how: How, out: TextIO) -> None:
        self.rank, self.how, self._out = rank, how, out
        self.kept: list[Any] = []
        self.model: Any = None
        self.optimizer: Any = None
        self.transport: Any = None

    @property
    def session(self) -> Any:
        return self.optimizer.session

    def report(self, **what: Any) -> None:
        self._out.write(json.dumps({"at": time.monotonic(), **what}) + "\n")
        self._out.flush()

    def train(self, path: str) -> None:
        how = self.how
        if how.begin:
            how.begin(self)
        options = Options(silence_s=how.silence_s, interface="lo", linger_s=0.2, rejoin="auto", **how.options)
        store = FileStore(path, -1)
        store.set_timeout(timedelta(seconds=60))
        self.transport = stormtorch.connect(store, self.rank, how.world, options)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(20, 1000), nn.Tanh(), nn.Linear(1000, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        stormtorch.prepare(self.model, self.optimizer, policy=how.policy, group=Group(self.transport))
        self.report(begins_at=self.session.steps)
        if how.prepared:
            how.prepared(self)
        while self.session.steps < how.steps:
            self.step(self.session.steps)
        with stormtorch.exact(self.model):
            values = [float(each.detach().double().sum()) for each in self.model.parameters()]
        events = [event for row in self.session.ledger.rows for event in row.events]
        self.report(values=values, events=events, members=self.session.view.members)
        self.transport.drain()
        self.transport.close()

    def step(self, number: int) -> None:
        if self.how.before:
            self.how.before(self, number)
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        inputs = torch.randn(32, 20, generator=generator)
        loss = nn.functional.cross_entropy(self.model(inputs), inputs[:, :3].argmax(1))
        time.sleep(self.how.compute_s)
        if self.how.within:
            self.how.within(self, number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.report(step=self.session.steps)
        if self.how.after:
            self.how.after(self, number)


class _ReportHandler(logging.Handler):
    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        self._rank.report(log=record.getMessage())


def main(number: int, how: How, path: str, out: str) -> None:
    torch.set_num_threads(1)
    with open(out, "a", encoding="utf-8") as file:
        rank = Rank(number, how, file)
        logging.getLogger("stormtorch").addHandler(_ReportHandler(rank))
        try:
            rank.train(path)
        except Exception as error:
            rank.report(error=f"{type(error).__name__}: {error}")
            sys.excepthook(*sys.exc_info())  # as at the end of a script: the others are told
            raise SystemExit(1) from error
