"""Virtual workers whose backward is cut off at a deadline: arrivals, and unbiased steps under SALF and ADEL."""

import math
from typing import Any

import pytest
import torch

from mask_statistics import owners
from simulating import outcome, simulated
from stormtorch import EXACT, LOSSY, BoundedDrift, OwnerPolicy
from stormtorch.checks import BadSetting
from stormtorch.exchange.reliability import Reliability
from stormtorch.network.loss import Bernoulli, LossModel, SlowBackward, Stragglers
from stormtorch.policies.memory import MemoryStore
from stormtorch.policies.policy import applied
from stormtorch.theory import Backward, layer_probabilities, layers_missed
from stormtorch_lab import ADEL, SALF
from stormtorch_lab.simulation.arrivals.masks import Masks
from stormtorch_lab.simulation.checkpoints import digest
from stormtorch_lab.simulation.exchanges import seconds_of
from training import assert_close, assert_same, perceptron, plain, sgd

pytestmark = pytest.mark.pure

LATE: dict[str, Any] = {"reliability": EXACT, "gradients": LOSSY, "guard": None}
WORKERS = 5


@pytest.mark.parametrize("part_s", [1.0, (0.4, 1.0, 1.0, 2.0, 4.0)], ids=["equal", "unequal"])
def test_parts_come_from_the_last_backwards_as_often_as_theory_says(part_s: float | tuple[float, ...]) -> None:
    parts, deadline_s, exchanges = 4, 1.7, 2000
    masks = Masks(SlowBackward(part_s=part_s, parts=parts), WORKERS, owners(*[8] * WORKERS), 1, "cpu")
    masks.deadline_s = deadline_s
    drawn = torch.stack([masks.up() for _ in range(exchanges)]).view(exchanges, WORKERS, parts, -1)
    assert (drawn == drawn[..., :1]).all(), "a part comes whole"
    has = drawn[..., 0].flip(-1)  # the last part first
    assert not bool((has[..., 1:] & ~has[..., :-1]).any()), "no part without those behind it"
    each_s = part_s if isinstance(part_s, tuple) else (part_s,) * WORKERS
    chance_WP = torch.tensor([layer_probabilities(parts, deadline_s, each) for each in each_s])
    error_WP = (chance_WP * (1.0 - chance_WP) / exchanges).sqrt()
    assert bool(((has.float().mean(0) - chance_WP).abs() < 4.5 * error_WP + 1e-9).all())
    missed = layers_missed(Backward(layers=parts, layer_s=each_s), deadline_s)
    for part, chance in enumerate(missed):
        share = float((~has[:, :, part].any(1)).float().mean())
        assert abs(share - chance) < 4.5 * math.sqrt(chance * (1.0 - chance) / exchanges) + 1e-9


def test_nobody_is_late_in_a_broadcast_a_repair_or_without_a_deadline() -> None:
    masks = Masks(SlowBackward(part_s=1.0, parts=4), WORKERS, owners(*[4] * WORKERS), 1, "cpu")
    assert bool(masks.up().all())
    masks.deadline_s = 0.1
    assert not bool(masks.up().all())
    assert bool(masks.down().all())
    missing = ~masks.up()
    assert torch.equal(masks.retransmitted(missing, up=True), missing)


@pytest.mark.parametrize(
    ("policy", "network"),
    [
        (SALF(deadline=None, **LATE), Bernoulli(p=0.0)),
        (SALF(deadline=1e6, **LATE), SlowBackward(part_s=0.1, parts=3)),
        (ADEL(total_s=1e7, steps=8, ranks=4, layers=3, layer_s=0.1, **LATE), SlowBackward(part_s=0.1, parts=3)),
    ],
    ids=["SALF", "SALF, a long deadline", "ADEL, much time"],
)
def test_where_nobody_is_late_it_is_plain_training_bit_for_bit(policy: OwnerPolicy, network: Any) -> None:
    model = perceptron(inside=100)
    found = simulated(model, sgd, 8, policy=policy, network=network)
    assert_same(found, simulated(model, sgd, 8, policy=BoundedDrift(lead=0.0, **LATE)))
    assert_close(found, plain(model, sgd, 8), rtol=1e-5, atol=1e-6)


def moved(policy: OwnerPolicy, steps: int) -> torch.Tensor:
    """How far each of four parts goes under gradients of 1, as a part of that without stragglers."""
    masks, memory = (
        Masks(SlowBackward(part_s=1.0, parts=4), 4, torch.arange(4), 1, "cpu"),
        MemoryStore(4, torch.device("cpu")),
    )
    total = torch.zeros(4, 1)
    for step in range(steps):
        masks.deadline_s = seconds_of(policy, step)
        count = masks.up().sum(0).unsqueeze(-1)
        total += applied(policy.combine, (count > 0).float(), count, 4, memory.chunks(0, 4, 1))
    return total.flatten() / steps


def test_layers_that_are_often_missed_move_as_far_as_the_others() -> None:
    steps = 800
    missed = layers_missed(Backward(layers=4, layer_s=(1.0,) * 4), 2.0)[-1]
    assert missed > 0.5
    for policy in (
        SALF(deadline=2.0),
        ADEL(total_s=2.0 * steps, steps=steps, ranks=4, layers=4, layer_s=1.0),
    ):
        found = moved(policy, steps)
        assert float(found[-1]) == pytest.approx(1.0, abs=0.01)
        # Without the weights it would be 1 - missed. They are learned, and the inverse of what is learned is biased.
        assert float(found[0]) == pytest.approx(1.0, abs=0.08)


def test_the_ledger_has_the_deadline_of_each_step() -> None:
    policy = ADEL(total_s=12.0, steps=6, ranks=4, layers=2, layer_s=0.5, **LATE)
    done, _ = outcome(perceptron(), sgd, 6, policy=policy, network=SlowBackward(part_s=0.5, parts=2))
    assert tuple(row.deadline_s for row in done.ledger) == policy.schedule_s
    assert min(row.effective_batch for row in done.ledger) < 1.0


def test_what_has_no_clock_is_refused_by_name() -> None:
    slow = SlowBackward(part_s=1.0, parts=2)
    for policy, network, words in (
        (SALF(), slow, "deadline must be None or in seconds"),
        (SALF(deadline=1.0), Bernoulli(p=0.1), "deadline must be None in a simulation whose network"),
        (BoundedDrift(gradients=Reliability(budget=1.0, redundancy=0.5), deadline=1.0), slow, "redundancy must be 0"),
        (SALF(deadline=1.0, reliability=EXACT), slow, "gradients must have a budget of 1"),
        (SALF(deadline=1.0, gradients=Reliability(budget=0.5)), slow, "gradients must have a budget of 1"),
    ):
        with pytest.raises(BadSetting, match=words):
            outcome(perceptron(), sgd, 1, policy=policy, network=network)
    with pytest.raises(ValueError, match="part_s must have one number for each of 4"):
        outcome(perceptron(), sgd, 1, network=SlowBackward(part_s=(1.0, 2.0), parts=2))
    for wrong in ({"part_s": 0.0}, {"part_s": ()}, {"part_s": math.inf}, {"parts": 0}, {"network": slow}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SlowBackward(**{"part_s": 1.0, "parts": 2, **wrong})  # type: ignore[arg-type]


def test_digests_tell_slow_networks_apart() -> None:
    kinds: list[LossModel] = [
        SlowBackward(part_s=1.0, parts=2),
        SlowBackward(part_s=1.0, parts=3),
        SlowBackward(part_s=2.0, parts=2),
        Stragglers(chance=0.5),
        Stragglers(chance=0.5, backwards=True),
        Bernoulli(p=0.0),
    ]
    assert len({digest(each) for each in kinds}) == len(kinds)


def test_a_step_without_a_deadline_waits_for_all_also_after_one_that_had_it() -> None:
    def policy(step: int) -> SALF:
        return SALF(deadline=0.01 if step == 0 else None, **LATE)

    done, _ = outcome(perceptron(), sgd, 3, policy=policy, network=SlowBackward(part_s=1.0, parts=2))
    assert [row.deadline_s for row in done.ledger] == [0.01, None, None]
    first, *others = (row.effective_batch for row in done.ledger)
    assert first < 0.5
    assert others == [1.0, 1.0]
