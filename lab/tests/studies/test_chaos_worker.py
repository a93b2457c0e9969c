"""The training script of chaos: its end, its views, and its digests."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import prepare
from stormtorch.collectives import Group
from stormtorch.runtime.members.membership import View
from stormtorch_lab.studies.chaos.program import Program
from stormtorch_lab.studies.chaos.worker import STOP, Log, Stop, digest_of, prints_of, view_of
from training import adamw, perceptron, regression, vectors
from views import EXACTLY, Member, with_members

pytestmark = pytest.mark.pure


def test_end_is_where_the_file_says_and_the_rate_falls_to_zero_until_then(tmp_path: Path) -> None:
    stop = Stop(tmp_path / STOP)
    assert stop.at() == float("inf") and not stop.decays(10**9)
    assert [stop.rate(step, 1.0) for step in (0, 24, 49, 5000)] == [0.02, 0.5, 1.0, 1.0]
    (tmp_path / STOP).write_text(json.dumps({"decay_at": 1000, "stop_at": 1100}))
    assert stop.at() == 1100
    assert [stop.decays(step) for step in (999, 1000)] == [False, True]
    assert [stop.rate(step, 1.0) for step in (999, 1000, 1050, 1099, 1100)] == [1.0, 1.0, 0.5, 0.01, 0.0]


def test_view_is_the_sessions() -> None:
    session = SimpleNamespace(view=View(number=7, members=(0, 1, 3), step=120))
    assert view_of(session) == {"view": 7, "members": [0, 1, 3], "since": 120}


def test_digest_tells_one_bit_apart() -> None:
    model = nn.Linear(3, 2)
    first = nn.Linear(2, 2)
    before = digest_of(first, model)
    assert digest_of(first, model) == before
    with torch.no_grad():
        model.bias[0] = torch.nextafter(model.bias[0], torch.tensor(9.0))
    assert digest_of(first, model) != before


def test_program_is_repeated_by_standbys_and_ends_with_one_loss_scale() -> None:
    """Ranks begin with different scales, make a step by closure and changes by `.data`, and train a second model."""

    def work(member: Member) -> tuple[dict[int, list[int]], float | None, list[str]]:
        second: Any = perceptron(seed=1)
        its_optimizer: Any = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
        prepare(second, its_optimizer, policy=EXACTLY, group=Group(member.transport))
        optimizers = (member.optimizer, its_optimizer)
        program = Program((member.model, second), optimizers, EXACTLY, again=member.rank == 1)
        while (number := member.session.steps) < 12:
            batch = vectors(member.rank, number)
            program.step(number, number == 11, functools.partial(regression, given=batch))
        assert its_optimizer.session.steps == 13, "the first model leaves out a step, as loss scales differ"
        return prints_of([each.session for each in optimizers]), program.scale(), member.events()

    found = with_members(work, world=3, make=adamw)
    for rank, (shards, scale, events) in enumerate(found):
        assert scale == 512.0  # the least, halved as all have left out one step
        assert not any("different from it" in each for each in events), events
        before = (rank - 1) % 3
        assert shards[before] == found[before][0][before] and len(set(shards[before])) == 4


def test_log_has_a_time_on_every_line_and_takes_warnings(tmp_path: Path) -> None:
    import logging

    log = Log(tmp_path / "log.jsonl")
    try:
        log.write(step=3)
        logging.getLogger("anyone").warning("rank %d is missing", 2)
    finally:
        logging.getLogger().removeHandler(log)
        logging.captureWarnings(False)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all(line.pop("t") > 0 for line in lines)
    assert lines == [{"step": 3}, {"warning": "rank 2 is missing"}]
    with pytest.raises(FileExistsError):  # a second process of a host has a file of its own
        Log(tmp_path / "log.jsonl")
