# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Optimizer settings: the same on all ranks, compared at prepare() and at every step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from stormtorch import EXACT, BoundedDrift, ModelAveraging, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.policies.policy import Policy
from training import EXACTLY, Optimizer, Rank, assert_same, on_ranks, perceptron, plain, regression, sgd, vectors

pytestmark = pytest.mark.pure

RANK_0 = BoundedDrift(gradients=EXACT, broadcast=EXACT, settings="rank 0")


def each_own(
    make: Callable[[Any, int], Optimizer], work: Callable[[Rank], Any], *, policy: Policy = EXACTLY, world: int = 3
) -> list[Any]:
    """Returns the result of `work` on every rank, or the text of its ValueError. Every rank makes its own optimizer."""

    models = [copy.deepcopy(perceptron()) for _ in range(world)]

    def body(transport: Transport) -> Any:
        model = models[transport.rank]
        optimizer = make(model, transport.rank)
        try:
            prepare(model, optimizer, policy=policy, group=Group(transport))
            return work(Rank(transport.rank, world, model, optimizer))
        except ValueError as error:
            return str(error)

    return SimulatedNetwork(world, seed=1).run(body)


def nothing(_rank: Rank) -> None:
    """Only calls `prepare`."""


def groups(model: Any, **of_second: Any) -> list[dict[str, Any]]:
    one, *others = model.parameters()
    return [{"params": others}, {"params": [one], **of_second}]


DIFFERENT: dict[str, tuple[Callable[[Any, int], Optimizer], str]] = {
    "learning rate": (
        lambda model, rank: torch.optim.SGD(model.parameters(), lr=1.0 if rank == 1 else 0.1),
        "lr of parameter group 0 is 0.1 on ranks 0 and 2, 1.0 on rank 1",
    ),
    "tensor": (
        lambda model, rank: torch.optim.Adam(model.parameters(), lr=torch.tensor(1.0 + rank // 2)),
        "lr of parameter group 0 is 1.0 on ranks 0 and 1, 2.0 on rank 2",
    ),
    "second group": (
        lambda model, rank: torch.optim.AdamW(groups(model, weight_decay=rank / 2)),
        "weight_decay of parameter group 1 is 0.0 on rank 0, 0.5 on rank 1, 1.0 on rank 2",
    ),
    "tuple": (
        lambda model, rank: torch.optim.Adam(model.parameters(), betas=(0.9, 0.99 if rank else 0.9)),
        "betas of parameter group 0 is (0.9, 0.9) on rank 0, (0.9, 0.99) on ranks 1 and 2",
    ),
    "truth value": (
        lambda model, rank: torch.optim.Adam(model.parameters(), amsgrad=rank == 2),
        "amsgrad of parameter group 0 is False on ranks 0 and 1, True on rank 2",
    ),
    "one has it": (
        lambda model, rank: torch.optim.SGD(groups(model, **({"name": "head"} if rank == 0 else {})), lr=0.1),
        "name of parameter group 1 is 'head' on rank 0, absent on ranks 1 and 2",
    ),
}


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_different_settings_are_refused_at_prepare_and_named_on_every_rank(name: str) -> None:
    make, said = DIFFERENT[name]
    for rank, told in enumerate(each_own(make, nothing)):
        assert f"rank {rank}: optimizer settings differ between ranks at prepare(): {said}" in told
        assert 'BoundedDrift(settings="rank 0")' in told


def plateau(rank: Rank) -> Any:
    """A schedule by each rank's own loss: only rank 1's loss stagnates."""
    schedule = lr_scheduler.ReduceLROnPlateau(rank.optimizer, factor=0.5, patience=1)
    for step in range(8):
        rank.train(range(step, step + 1))
        schedule.step(1.0 if rank.rank == 1 else 1.0 / (1 + step))
    return rank.optimizer.session.steps, rank.values(), [row.events for row in rank.optimizer.ledger]


def test_a_schedule_by_local_losses_ends_with_an_error_before_a_step_uses_it() -> None:
    for rank, told in enumerate(each_own(lambda model, _: sgd(model), plateau)):
        assert f"rank {rank}: optimizer settings differ between ranks at step 3: lr of parameter group 0 is" in told
        assert "0.05 on ranks 0 and 2, 0.025 on rank 1" in told


def test_rank_0s_settings_hold_everywhere_where_the_policy_says_so() -> None:
    found = each_own(lambda model, _: sgd(model), plateau, policy=RANK_0, world=4)
    wanted = plain(perceptron(), sgd, 8)
    for rank, (steps, ours, events) in enumerate(found):
        assert steps == 8
        assert_same(ours, wanted)
        changed = [event for each in events for event in each]
        if rank == 1:
            assert changed[0] == "settings: lr of parameter group 0 was 0.025, is 0.05"
        else:
            assert not changed


def test_rank_0s_settings_hold_from_the_beginning() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(3)
        return rank.values()

    def make(model: Any, rank: int) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01 * (rank + 1)), betas=(0.9, 0.9 + 0.03 * rank))

    wanted = plain(perceptron(), lambda model: make(model, 0), 3)
    for ours in each_own(make, work, policy=RANK_0, world=4):
        assert_same(ours, wanted)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedules_that_all_ranks_run_alike_are_no_difference(name: str, tensor: bool) -> None:
    def work(rank: Rank) -> None:
        schedule = SCHEDULES[name](rank.optimizer)
        for step in range(5):
            rank.train(range(step, step + 1))
            schedule.step()
        rank.values()
        assert not any(row.events for row in rank.optimizer.ledger)

    make = lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05) if tensor else 0.05)  # noqa: E731
    on_ranks(perceptron(), make, work, world=2)


def test_a_tensor_that_is_changed_in_place_is_noticed() -> None:
    def work(rank: Rank) -> None:
        rank.train(2)
        if rank.rank == 2:
            rank.optimizer.param_groups[0]["lr"].fill_(3.0)
        rank.train(1)

    for told in each_own(lambda model, _: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5)), work):
        assert "at step 2: lr of parameter group 0 is 0.5 on ranks 0 and 1, 3.0 on rank 2" in told


def test_a_rank_without_gradients_does_not_take_a_change_before_the_step_for_a_difference() -> None:
    def work(rank: Rank) -> int:
        for step in range(6):
            if rank.rank != step % 3:  # without a backward, a rank exchanges in its step, when lr has changed
                regression(rank.model, vectors(rank.rank, step)).backward()
            rank.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        return int(rank.optimizer.session.steps)

    assert each_own(lambda model, _: sgd(model), work) == [6, 6, 6]


def own_rates(rank: Rank) -> float:
    rank.train(2)
    return float(rank.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("policy", [BoundedDrift(settings="any"), ModelAveraging()], ids=["any", "model averaging"])
def test_ranks_may_have_settings_of_their_own_where_that_is_meant(policy: Policy) -> None:
    make = lambda model, rank: torch.optim.SGD(model.parameters(), lr=0.1 + rank)  # noqa: E731
    assert each_own(make, own_rates, policy=policy) == [0.1, 1.1, 2.1]


def test_the_policy_knows_its_rules() -> None:
    with pytest.raises(ValueError, match='settings must be "same", "rank 0" or "any", got'):
        BoundedDrift(settings="mine")  # type: ignore[arg-type]


def test_what_happened_in_an_earlier_backward_of_a_step_is_in_its_row() -> None:
    def work(rank: Rank) -> list[str]:
        rank.train(1)
        if rank.rank == 1:
            rank.optimizer.param_groups[0]["lr"] = 3.0
        regression(rank.model, vectors(rank.rank, 1)).backward()
        rank.train(1)
        return [event for row in rank.optimizer.ledger for event in row.events]

    found = each_own(lambda model, _: sgd(model), work, policy=RANK_0)
    assert found == [[], ["settings: lr of parameter group 0 was 3.0, is 0.05"], []]
