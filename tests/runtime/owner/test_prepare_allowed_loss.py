# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Training beside traffic that takes half of the bottleneck: steps lose `allowed_loss` instead of taking longer."""

import copy
import itertools
from statistics import median

import pytest
import torch

from stormtorch import EXACT, LOSSY, BoundedDrift, ModelAveraging, Options, Reliability, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.simulated import SimulatedNetwork, SimulatedTransport
from stormtorch.policies.policy import Policy
from stormtorch.runtime.session.adaptive_deadline import AdaptiveDeadline
from training import Vector, sgd

pytestmark = pytest.mark.pure

RANKS = 3
QUIET, BUSY = 12, 40
ELEMENTS = 100_000


def steps(policy: Policy) -> tuple[float, float, float, list[str]]:
    """Seconds of a step on an idle link and beside other traffic, the loss of the latter, and the guard's events."""
    network = SimulatedNetwork(RANKS, rate="100mbit", options=Options(datagram_bytes=1472), seed=3)
    model = Vector(ELEMENTS)

    def work(transport: SimulatedTransport) -> tuple[list[float], list[float], list[str]]:
        own = copy.deepcopy(model)
        _, optimizer = prepare(own, sgd(own), policy=policy, group=Group(transport))
        ends = [network.now_s]
        for step in range(QUIET + BUSY):
            if step == QUIET and transport.rank == 0:
                for rank in range(RANKS):
                    network.set_link_rate(rank, up="50mbit", down="50mbit")
            optimizer.zero_grad()
            own(torch.ones(ELEMENTS)).backward()
            optimizer.step()
            ends.append(network.now_s)
        rows = list(optimizer.ledger)  # type: ignore[attr-defined]
        lost = [1.0 - sum(row.gradients.values()) / (RANKS - 1) for row in rows if row.gradients]
        return (
            [b - a for a, b in itertools.pairwise(ends)],
            lost,
            [each for row in rows for each in row.events],
        )

    times, lost, events = network.run(work)[0]
    late = lost[-BUSY // 2 :]
    return median(times[8:QUIET]), median(times[-BUSY // 2 :]), sum(late) / len(late), events


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BoundedDrift, ModelAveraging])
def test_steps_beside_neighbours_lose_what_is_allowed_and_take_less_time(kind: type[Policy]) -> None:
    quiet, busy, loss, _ = steps(kind())
    assert busy > 1.8 * quiet, "without deadlines, a step on half a line takes twice as long"
    assert loss < 0.01
    allowed = 0.25
    hurried_quiet, hurried, loss, _ = steps(kind(allowed_loss=allowed))
    assert hurried_quiet < 1.05 * quiet, "on a quiet line nothing changes"
    assert hurried < 0.92 * busy
    assert 0.7 * allowed < loss < 1.2 * allowed


@pytest.mark.thorough
def test_exact_stages_and_deadlines_of_the_user_stay_as_they_are() -> None:
    quiet, busy, loss, _ = steps(BoundedDrift(gradients=EXACT, broadcast=LOSSY, allowed_loss=0.25))
    assert loss == 0.0
    assert busy > 1.5 * quiet
    pressure = AdaptiveDeadline(0.25)
    pressure.deadline_s = 1.0
    own = Reliability(budget=1.0, deadline_s=3.0)
    assert pressure.within(own) is own
    assert pressure.within(LOSSY, part=0.5) == Reliability(budget=1.0, deadline_s=0.5)
    assert AdaptiveDeadline(None).within(LOSSY) is LOSSY


def test_bad_fractions_are_named() -> None:
    for bad in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"allowed_loss must lie in \(0, 1\) or be None"):
            BoundedDrift(allowed_loss=bad)
    with pytest.raises(ValueError, match='priority must be "normal", "low" or None'):
        BoundedDrift(priority="high")  # type: ignore[arg-type]
