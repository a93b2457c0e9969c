# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""The simulator against ranks that train over UDP: the same task at the same loss, and no difference but chance.

Weights and batches are the same for the same seed, so what is left between the two is which datagrams are lost.
"""

import functools
import statistics
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

import stormtorch
from mask_statistics import within
from stormtorch import BoundedDrift, Options
from stormtorch.collectives import Group
from stormtorch.telemetry.statistics import mean
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.simulation import simulate
from stormtorch_lab.simulation.run import DATAGRAM_BYTES
from stormtorch_lab.studies.settings import LmSettings
from stormtorch_lab.tasks.task import Task

pytestmark = pytest.mark.slow

RANKS, STEPS, SEEDS = 4, 60, 3
LOSSES = (0.1, 0.3)
SETTINGS = LmSettings(ranks=RANKS, steps=STEPS, batch=4, context=32, layers=1, width=64, lr=3e-3)
POLICY = BoundedDrift(guard=None, drift_samples=4096)
# Number of steps after which copies are independent, at these losses.
APART = 6


@dataclass
class Trained:
    """Compared values."""

    curve: list[float]
    """Training loss, mean over the ranks."""
    pair_drift: list[float]
    """After each broadcast but the last."""
    lag: list[Counter[int]]
    """After each broadcast."""
    arrived: float


def train_over_udp(member: Member) -> dict[tuple[float, int], Trained]:
    """One rank's part of all trainings."""
    torch.set_num_threads(1)
    task = SETTINGS.open_task()
    found = {}
    for number, (loss, seed) in enumerate((loss, seed) for loss in LOSSES for seed in range(SEEDS)):
        options = Options(datagram_bytes=DATAGRAM_BYTES, interface=member.interface)
        transport = stormtorch.connect(member.store, member.rank, member.world, options, prefix=f"trainings/{number}")
        with stormtorch.faults(loss=loss, seed=seed):
            found[loss, seed] = train(member.rank, Group(transport), task, seed)
        transport.close()
    return found


def train(rank: int, group: Group, task: Task, seed: int) -> Trained:
    model = task.model(seed)
    model, optimizer = stormtorch.prepare(model, task.optimizer(model.parameters()), policy=POLICY, group=group)
    curve = []
    for step in range(STEPS):
        for parameters in optimizer.param_groups:
            parameters["lr"] = task.rate(step, STEPS)
        found = task.loss(model, task.batch(seed, step, rank, RANKS))
        found.backward()
        assert task.clip is not None
        stormtorch.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(float(found.detach()))
    with stormtorch.exact(model):
        pass  # barrier: no rank leaves before all are done, or the others would see less loss
    rows = list(optimizer.ledger)  # type: ignore[attr-defined]  # given by prepare
    drift = [row.pair_drift for row in rows[1:]]  # reported with the next gradients
    return Trained(curve, drift, [Counter(row.lag) for row in rows], mean([row.arrived for row in rows]))


def together(ranks: list[Trained]) -> Trained:
    """Results of all ranks of a training."""
    return Trained(
        [mean(list(each)) for each in zip(*(rank.curve for rank in ranks), strict=True)],
        [mean(list(each)) for each in zip(*(rank.pair_drift for rank in ranks), strict=True)],
        [sum(each, Counter()) for each in zip(*(rank.lag for rank in ranks), strict=True)],
        mean([rank.arrived for rank in ranks]),
    )


@functools.cache
def over_udp() -> dict[tuple[float, int], Trained]:
    ranks = run_ranks(train_over_udp, RANKS, (), timeout_s=100)
    return {key: together([rank[key] for rank in ranks]) for key in ranks[0]}


@functools.cache
def in_the_simulator(loss: float, seed: int) -> Trained:
    task = SETTINGS.open_task()
    done = simulate(
        task.model(seed),
        task.loss,
        lambda step, first, last: task.batches(seed, step, RANKS, first, last),
        task.optimizer,
        workers=RANKS,
        steps=STEPS,
        network=loss,
        policy=POLICY,
        seed=seed,
        rate=lambda step: task.rate(step, STEPS),
        clip=task.clip,
    )
    rows = list(done.ledger)
    drift = [row.pair_drift or 0.0 for row in rows[:-1]]
    curve = [found for _, found in done.curve]
    return Trained(curve, drift, [Counter(row.lag) for row in rows], mean([row.arrived for row in rows]))


def both(loss: float) -> tuple[list[Trained], list[Trained]]:
    return [over_udp()[loss, seed] for seed in range(SEEDS)], [in_the_simulator(loss, seed) for seed in range(SEEDS)]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_fall_alike(loss: float) -> None:
    real, simulated = both(loss)
    for ours, theirs in zip(real, simulated, strict=True):
        assert theirs.curve[0] == pytest.approx(ours.curve[0], rel=1e-5)  # nothing was lost yet
        for begin in range(0, STEPS, 10):
            there, here = (mean(each.curve[begin : begin + 10]) for each in (ours, theirs))
            # Two trainings of one seed differ by about 0.01, by which datagrams were lost.
            assert here == pytest.approx(there, abs=0.06), begin
    finals = [[mean(each.curve[-10:]) for each in many] for many in (real, simulated)]
    spread = statistics.stdev(finals[0])
    assert 0.03 < spread < 0.2  # of seeds
    assert mean(finals[1]) == pytest.approx(mean(finals[0]), abs=0.03)


@pytest.mark.parametrize("loss", LOSSES)
def test_replicas_drift_alike(loss: float) -> None:
    real, simulated = both(loss)
    drifts = [mean([drift for each in many for drift in each.pair_drift]) for many in (real, simulated)]
    # Of three seeds, each is known to about 3 %.
    assert drifts[1] == pytest.approx(drifts[0], rel=0.15)


@pytest.mark.parametrize("loss", LOSSES)
def test_copies_are_equally_old(loss: float) -> None:
    real, simulated = both(loss)
    ours, theirs = (sum((lag for each in many for lag in each.lag[APART::APART]), Counter()) for many in both(loss))
    for age in range(5):
        q = loss**age * (1.0 - loss)
        deviation = (q * (1.0 - q) * (1.0 / ours.total() + 1.0 / theirs.total())) ** 0.5
        assert within(theirs[age] / theirs.total(), ours[age] / ours.total(), deviation), age
    arrived = [mean([each.arrived for each in many]) for many in (real, simulated)]
    assert arrived == pytest.approx([1.0 - loss] * 2, abs=0.01)
