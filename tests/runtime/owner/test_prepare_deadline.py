# mypy: disable-error-code="no-untyped-call, attr-defined"
# torch's own backward is untyped, and a prepared optimizer has more than torch's.
"""Training with a rank that computes slowly, under a deadline: over UDP, each rank a thread, in real time."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import local_world

import stormtorch
from stormtorch import EXACT, BoundedDrift, clip_grad_norm_, exact, prepare
from stormtorch.checks import BadSetting
from stormtorch.collectives import Group
from stormtorch.errors import StormError
from stormtorch.exchange.exchange import Transport
from stormtorch.policies.policy import Deadline
from stormtorch_lab import ADEL, SALF
from training import Vector, assert_same, on_ranks, perceptron, plain, regression, sgd, values, vectors

pytestmark = pytest.mark.pure

RANKS, SLOW = 4, 3
COUNT = 4096  # so that every rank owns some
COMPUTE_S, SLOW_S = 0.05, 0.25
AUTO = BoundedDrift(deadline="auto", bucket_mb=1e-4)


class Trained:
    """Trains one rank, of a job in which each rank moves its own number, and keeps what it has observed."""

    def __init__(
        self,
        transport: Transport,
        steps: int,
        clip: float | None = None,
        policy: BoundedDrift = AUTO,
        slow_s: float = SLOW_S,
    ) -> None:
        model = Vector(RANKS)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        prepare(model, optimizer, policy=policy, group=Group(transport))
        session, rank = optimizer.session, transport.rank
        own = torch.nn.functional.one_hot(torch.tensor(rank), RANKS).float()
        self.backwards, self.read = 0, 0
        began = time.monotonic()
        while session.steps < steps:
            optimizer.zero_grad()
            before = model.numbers.detach().clone()
            loss = model(own)
            time.sleep(slow_s if rank == SLOW else COMPUTE_S)
            self.read += not torch.equal(before, model.numbers)  # parameters must not change while the program computes
            loss.backward()
            if clip is not None:
                self.norm = float(clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            self.backwards += 1
        self.seconds = time.monotonic() - began
        with exact(model):
            self.numbers = model.numbers.detach().clone()
        self.rows = list(optimizer.ledger)
        self.inverse_probability: Any = session.inverse_probability


def test_slow_rank_keeps_nobody_waiting_and_counts_as_much_as_the_others() -> None:
    steps = 160
    found = local_world(RANKS, lambda transport: Trained(transport, steps))
    assert [each.backwards for each in found[:SLOW]] == [steps] * SLOW
    assert steps / 10 < found[SLOW].backwards < 0.9 * steps
    # Waiting for the slow rank would take steps * SLOW_S.
    assert found[0].seconds < 0.9 * steps * SLOW_S
    assert not any(each.read for each in found)
    # Each rank's number moves by 1/4 in each step. The slow rank's moves more rarely and further, and what it computes
    # in the last steps is not used.
    for each in found:
        assert torch.equal(each.numbers, found[0].numbers)
    assert found[0].numbers[:SLOW].tolist() == pytest.approx([-steps / RANKS] * SLOW, rel=0.1)
    assert float(found[0].numbers[SLOW]) == pytest.approx(-steps / RANKS, rel=0.15)
    # The ledger of every rank names it.
    for each in found:
        assert any(row.late.get(SLOW) == 0.0 for row in each.rows)
        often = sum(row.late.get(SLOW, 1.0) for row in each.rows) > 0.7 * steps
        assert often or any(f"rank {SLOW} is late" in event for row in each.rows for event in row.events)
        assert [row.step for row in each.rows] == list(range(steps))
    assert found[SLOW].inverse_probability.chance(0) < 0.9
    assert min(row.effective_batch for row in found[0].rows) == pytest.approx((RANKS - 1) / RANKS)


def test_deadline_changes_nothing_where_ranks_are_equally_fast() -> None:
    found = local_world(RANKS, lambda transport: Trained(transport, 20, slow_s=COMPUTE_S))
    late = sum(bool(row.late) for row in found[0].rows)
    assert late < 10
    assert found[0].numbers.tolist() == pytest.approx([-20 / RANKS] * RANKS, rel=0.15)


@pytest.mark.thorough
def test_clipping_is_repeated_for_a_slow_rank() -> None:
    steps, most = 40, 0.05
    found = local_world(RANKS, lambda transport: Trained(transport, steps, clip=most))
    assert found[SLOW].backwards < steps
    moved = found[0].numbers.norm()
    # Three or four numbers move in a step, by `most` together. If the slow rank did not clip, its number would move
    # by a quarter.
    assert 0.8 * steps * most < float(moved) < 1.01 * steps * most
    assert all(each.norm > 0.3 for each in found)


def test_misuse_is_an_error_that_names_the_setting() -> None:
    def torchs_own(model: Vector, optimizer: Any) -> None:
        model(torch.ones(COUNT)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def twice(model: Vector, optimizer: Any) -> None:
        model(torch.ones(COUNT)).backward()
        model(torch.ones(COUNT)).backward()

    def scaled(model: Vector, optimizer: Any) -> None:
        model(torch.ones(COUNT)).backward()
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.mul_(0.5)
        optimizer.step()

    def replaced(model: Vector, optimizer: Any) -> None:
        model(torch.ones(COUNT)).backward()
        assert model.numbers.grad is not None
        model.numbers.grad = model.numbers.grad * 0.5
        optimizer.step()

    def removed(model: Vector, optimizer: Any) -> None:
        model(torch.ones(COUNT)).backward()
        model.numbers.grad = None
        optimizer.step()

    def closure(model: Vector, optimizer: Any) -> None:
        optimizer.step(lambda: 0.0)

    cases: list[Callable[[Vector, Any], None]] = [torchs_own, twice, scaled, replaced, removed, closure]

    def work(transport: Transport) -> list[str]:
        errors = []
        for case in cases:
            model = Vector(COUNT)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
            prepare(model, optimizer, policy=AUTO, group=Group(transport))
            try:
                case(model, optimizer)
                errors.append("")
            except StormError as error:
                errors.append(str(error))
            optimizer.zero_grad()
        return errors

    for errors in local_world(2, work):
        assert len(errors) == len(cases)
        assert all("deadline" in each for each in errors), errors
        assert "stormtorch.clip_grad_norm_" in errors[0]


def test_deadline_needs_real_time_and_whole_steps() -> None:
    with pytest.raises(BadSetting, match="overlap must be False"):
        BoundedDrift(deadline="auto", overlap=True)
    for wrong in (0.0, -1.0, float("inf"), "soon"):
        with pytest.raises(BadSetting, match="deadline"):
            BoundedDrift(deadline=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="real time"):
        on_ranks(perceptron(), sgd, lambda rank: None, policy=AUTO)
    assert stormtorch.BoundedDrift().deadline is None


class Planned(BoundedDrift):
    """A user's policy whose deadlines alternate."""

    def deadline_at(self, step: int) -> Deadline:
        """Returns a deadline that the slow rank misses, and in every fourth step one that it meets."""
        return 2.0 if step % 4 == 3 else 0.1


def test_a_policy_sets_the_deadline_of_each_step() -> None:
    steps = 12
    policy = Planned(deadline="auto", bucket_mb=1e-4)
    found = local_world(RANKS, lambda transport: Trained(transport, steps, policy=policy))
    for each in found:
        assert [row.deadline_s for row in each.rows] == [2.0 if step % 4 == 3 else 0.1 for step in range(steps)]
        late = [row.step for row in each.rows if SLOW in row.late]
        # Its gradients take 0.25 s, so it is late in the steps of 0.1 s, except where its late gradients contribute.
        assert len(late) > steps / 4
        assert torch.equal(each.numbers, found[0].numbers)
    assert found[SLOW].backwards < steps


@pytest.mark.parametrize(
    "policy",
    [
        SALF(deadline=60.0, reliability=EXACT),
        ADEL(total_s=600.0, steps=10, ranks=RANKS, layers=2, layer_s=0.01, reliability=EXACT),
    ],
    ids=["SALF", "ADEL"],
)
def test_where_nobody_is_late_layers_by_deadline_are_plain_training_bit_for_bit(policy: SALF) -> None:
    model, steps = perceptron(inside=100), 10

    def work(transport: Transport) -> tuple[list[torch.Tensor], list[Any]]:
        own = copy.deepcopy(model)
        optimizer: Any = sgd(own)
        prepare(own, optimizer, policy=policy, group=Group(transport))
        for step in range(steps):
            optimizer.zero_grad()
            regression(own, vectors(transport.rank, step)).backward()
            optimizer.step()
        with exact(own):
            return values(own), list(optimizer.ledger)

    expected = plain(model, sgd, steps, world=RANKS)
    for found, rows in local_world(RANKS, work):
        assert_same(found, expected)
        assert not any(row.late for row in rows)
        assert [row.deadline_s for row in rows] == pytest.approx([60.0] * steps)


class Deep(torch.nn.Module):
    """Two layers of one number each; computing the gradient of the first one is slow."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Parameter(torch.zeros(64)), torch.nn.Parameter(torch.zeros(64))
        self.pause_s = pause_s

    def forward(self) -> torch.Tensor:
        found: torch.Tensor = (self.last + _Pause.apply(self.first, self.pause_s)).sum()
        return found


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, pause_s: float) -> torch.Tensor:
        ctx.pause_s = pause_s
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        time.sleep(ctx.pause_s)
        return given[0], None


def test_layers_that_a_late_rank_has_reached_at_a_given_deadline_count() -> None:
    """Three of four ranks are late: the deadline does not wait for half of them."""
    policy = SALF(deadline=0.1, bucket_mb=1e-4, reliability=EXACT)
    steps = 12

    def work(transport: Transport) -> list[Any]:
        model = Deep(0.01 if transport.rank == 0 else 0.35)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        prepare(model, optimizer, policy=policy, group=Group(transport))
        while optimizer.session.steps < steps:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        return list(optimizer.ledger)

    began = time.monotonic()
    rows = local_world(RANKS, work)[0]
    assert time.monotonic() - began < 0.8 * steps * 0.35
    late = [row for row in rows if row.late]
    assert len(late) > steps / 2
    assert any(len(row.late) == 3 for row in late)
    assert any(share == 0.5 for row in late for share in row.late.values())


@pytest.mark.parametrize("deadline", [0.05, "auto"])
def test_a_rank_alone_makes_no_step_by_itself(deadline: Any) -> None:
    """No rank waits for it: a program that evaluates for long must not find its model changed."""

    def work(transport: Transport) -> tuple[int, bool]:
        model = Vector(COUNT)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        prepare(model, optimizer, policy=BoundedDrift(deadline=deadline, bucket_mb=1e-4), group=Group(transport))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(COUNT)).backward()
            optimizer.step()
        before = model.numbers.detach().clone()
        time.sleep(0.6)
        return optimizer.session.steps, torch.equal(before, model.numbers)

    assert local_world(1, work) == [(3, True)]
