"""A process that joins a job whose model was pruned gets the masks too."""

import os
import signal
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_prepare_pruning import model_of, train, zeros_of
from torch import nn

from machine_job import MachineJob
from machine_rank import How, Rank
from returning import with_a_rank_that_returns
from stormtorch import EXACT, BoundedDrift, GradientAveraging, ModelAveraging, Policy, prepare, prune
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport


@pytest.mark.parametrize(
    "policy", [BoundedDrift(give_up_s=20.0), ModelAveraging(give_up_s=20.0), GradientAveraging(give_up_s=20.0)]
)
def test_a_process_that_joins_prunes_what_the_others_have_pruned(policy: Policy) -> None:
    def begin(transport: Transport, again: bool) -> tuple[Any, Any]:
        model = model_of()
        if again:
            with torch.no_grad():
                for each in model.parameters():
                    each.fill_(7.0)
        return prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), policy=policy, group=Group(transport))

    def first(model: nn.Module) -> None:
        prune(model, keep=0.25)

    def step(model: nn.Module, optimizer: Any) -> None:
        train(model, optimizer, 0, range(1))

    found = with_a_rank_that_returns(begin, step, zeros_of, first=first)
    assert float(found[0].float().mean()) > 0.5
    for zeros in found:
        assert torch.equal(zeros, found[0])


AT, STEPS = 6, 16


def prune_at(rank: Rank, step: int) -> None:
    if step == AT:
        prune(rank.model, keep=0.5)


def prune_and_die(rank: Rank, step: int) -> None:
    prune_at(rank, step)
    if step == AT:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_all(rank: Rank, step: int) -> None:
    """Waits within the step until the successor of rank 2 has started, however long that takes."""
    end = time.monotonic() + 60.0
    while step == AT and not dict(rank.transport.view().members).get(2) and time.monotonic() < end:
        time.sleep(0.05)


def tell_masks(rank: Rank, step: int) -> None:
    if step == STEPS - 1:
        rank.report(masks=[zlib.crc32(each.kept.numpy().tobytes()) for each in rank.session.buckets])


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    # Lossy means are summed in order of arrival, so replicas may differ by rounding and stay different.
    [BoundedDrift(), ModelAveraging(), GradientAveraging(reliability=EXACT)],
    ids=lambda policy: type(policy).__name__,
)
def test_a_rank_that_returns_at_the_very_step_of_the_pruning_waits_for_nobody(policy: Policy, tmp_path: Path) -> None:
    """Its program prunes at the same step as the other ranks, which pruned before it joined."""
    how = How(steps=STEPS, silence_s=30.0, policy=policy, before=prune_at, within=wait_for_all, after=tell_masks)
    with MachineJob(tmp_path, how, {2: replace(how, before=prune_and_die)}) as job:
        assert job.ranks[2].end() == -signal.SIGKILL
        job.ranks[2] = job.start(2, how)
        assert [each.end() for each in job.ranks] == [0, 0, 0]
        for each in job.ranks:
            assert each.reported("masks") == job.ranks[0].reported("masks") != []
            assert each.reported("values") == job.ranks[0].reported("values")
            assert each.reported("members") == [[0, 1, 2]]
        assert job.ranks[2].reported("begins_at") in ([AT], [AT + 1])
