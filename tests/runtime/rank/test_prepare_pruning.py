# mypy: disable-error-code="no-untyped-call, attr-defined"
# torch's own backward is untyped, and a prepared optimizer has more than torch's.
"""Pruning of a prepared model: all ranks keep the same weights; the others stay zero and are not sent."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import OPTIONS, local_world
from torch import nn

import stormtorch
from stormtorch import EXACT, BoundedDrift, GradientAveraging, ModelAveraging, Policy, exact, prepare, prune
from stormtorch.collectives import Group, hierarchy
from stormtorch.errors import Interrupted
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.runtime.rank import pruning
from stormtorch.runtime.rank.pruning import _largest
from training import MakeOptimizer, adamw, assert_close, assert_same, mean_gradients, regression, sgd, values, vectors

pytestmark = pytest.mark.pure

WORLD, HALF, STEPS = 4, 3, 7
DRIFT = BoundedDrift(reliability=EXACT, bucket_mb=5e-4)
POLICIES: dict[str, Policy] = {
    "drift": DRIFT,
    "overlap": replace(DRIFT, overlap=True, bucket_mb=16.0),
    "bfloat16": replace(DRIFT, wire=torch.bfloat16),
    "models": ModelAveraging(reliability=EXACT, bucket_mb=5e-4),
    "gradients": GradientAveraging(reliability=EXACT, bucket_mb=5e-4),
}
DYING = stormtorch.Options(datagram_bytes=1472, silence_s=2.0)
Work = Callable[[Any, Any, Any], Any]


class Gone(Exception):
    """Ends the program of a rank that the others count as dead."""


class Spreading(torch.optim.Optimizer):
    """A user's optimizer that changes all elements of a parameter if one of them has a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    momentum = self.state[each].setdefault("momentum", torch.zeros_like(each))
                    momentum.mul_(0.9).add_(each.grad)
                    each.sub_((momentum + momentum.mean()) * each.norm(), alpha=group["lr"])


def spreading(model: nn.Module) -> torch.optim.Optimizer:
    return Spreading(model.parameters())


def model_of(wide: int = 24) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, 6))
    random = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
    for each in model.parameters():
        nn.init.uniform_(each, -0.5, 0.5, generator=random)
    return model


def on_ranks(policy: Policy, work: Work, make: MakeOptimizer = sgd, world: int = WORLD, **network: Any) -> list[Any]:
    def body(transport: Transport) -> Any:
        model = model_of()
        optimizer = make(model)
        prepare(model, optimizer, policy=policy, group=Group(transport))
        return work(transport, model, optimizer)

    return SimulatedNetwork(world, seed=1, **network).run(body)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        regression(model, vectors(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def zeros_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([(each.detach() == 0.0).flatten() for each in model.parameters()])


def by_magnitude(model: nn.Module, keep: float) -> list[torch.Tensor]:
    """The expected masks, by sorting all weights, without the library's code."""
    weights = [each.detach() for each in model.parameters() if each.dim() > 1]
    order = torch.cat([each.flatten() for each in weights]).abs().argsort(descending=True, stable=True)
    kept = torch.zeros(order.numel(), dtype=torch.bool)
    kept[order[: round(keep * order.numel())]] = True
    parts = iter(kept.split([each.numel() for each in weights]))
    return [
        next(parts).view(each.shape) if each.dim() > 1 else torch.ones_like(each, dtype=torch.bool)
        for each in model.parameters()
    ]


def without_us(make: MakeOptimizer, keep: float, dying: tuple[int, int] = (0, STEPS)) -> list[torch.Tensor]:
    """One process that averages gradients, and prunes by plain tensor arithmetic.

    Args:
        make: Makes the optimizer.
        keep: Fraction of weights to keep.
        dying: Rank that dies, and its first step without it.
    """
    model = model_of()
    optimizer = make(model)
    masks = [torch.ones_like(each, dtype=torch.bool) for each in model.parameters()]
    for step in range(STEPS):
        if step == HALF:
            masks = by_magnitude(model, keep)
            for each, mask in zip(model.parameters(), masks, strict=True):
                each.data *= mask
                for value in optimizer.state[each].values():
                    if isinstance(value, torch.Tensor) and value.shape == each.shape:
                        value *= mask
        there = [rank for rank in range(WORLD) if rank != dying[0] or step < dying[1]]
        gradients = mean_gradients(model, [vectors(rank, step) for rank in there], regression)
        for each, gradient, mask in zip(model.parameters(), gradients, masks, strict=True):
            assert gradient is not None
            each.grad = gradient * mask
        optimizer.step()
        optimizer.zero_grad()
        for each, mask in zip(model.parameters(), masks, strict=True):
            each.data *= mask
    return values(model)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [sgd, adamw, spreading], ids=["sgd", "adamw", "whole parameters"])
def test_owners_train_as_one_process_does_that_prunes(make: MakeOptimizer) -> None:
    def work(transport: Any, model: Any, optimizer: Any) -> list[torch.Tensor]:
        train(model, optimizer, transport.rank, range(HALF))
        prune(model, keep=0.5)
        train(model, optimizer, transport.rank, range(HALF, STEPS))
        with exact(model):
            return values(model)

    for ours in on_ranks(DRIFT, work, make):
        assert_same(ours, without_us(make, 0.5))


@pytest.mark.thorough
@pytest.mark.parametrize("make", [sgd, adamw, spreading], ids=["sgd", "adamw", "whole parameters"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_pruned_is_the_same_everywhere_and_stays_zero(policy: Policy, make: MakeOptimizer) -> None:
    def work(transport: Any, model: Any, optimizer: Any) -> tuple[torch.Tensor, torch.Tensor, bool]:
        train(model, optimizer, transport.rank, range(HALF))
        travels = prune(model, keep=0.25)
        zeros = zeros_of(model)
        weights = sum(each.numel() for each in model.parameters() if each.dim() > 1)
        assert int(zeros.sum()) == round(0.75 * weights)
        assert travels == pytest.approx(1.0 - int(zeros.sum()) / zeros.numel())
        for step in range(HALF, STEPS):
            train(model, optimizer, transport.rank, range(step, step + 1))
            assert bool((zeros_of(model) >= zeros).all())
        idle = True
        state = copy.deepcopy(optimizer.state_dict()["state"])
        for number, each in enumerate(model.parameters()):
            for value in state[number].values():
                if isinstance(value, torch.Tensor) and value.shape == each.shape:
                    idle = idle and not bool(value[each.detach() == 0.0].any())
        with exact(model):
            return zeros, zeros_of(model), idle

    found = on_ranks(policy, work, make)
    for zeros, afterwards, idle in found:
        assert torch.equal(zeros, found[0][0])
        assert torch.equal(afterwards, zeros)  # kept weights are trained on, and none of them is zero by chance
        assert idle


def test_ranks_that_share_machines_train_as_one_process_does_that_prunes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "_SMALLEST_BYTES", 0)  # lets small models use the hierarchical exchange

    def work(transport: Any, model: Any, optimizer: Any) -> list[torch.Tensor]:
        train(model, optimizer, transport.rank, range(HALF))
        prune(model, keep=0.5)
        assert optimizer.session._broadcast._hierarchical is not None
        train(model, optimizer, transport.rank, range(HALF, STEPS))
        optimizer.session.wait()
        return values(model)

    for ours in on_ranks(DRIFT, work, machines="aabb"):
        assert_close(ours, without_us(sgd, 0.5))


def sent_per_step(policy: Policy, keep: float | None, standbys: int, world: int) -> float:
    """Bytes that all ranks send in a step, on average."""

    def work(transport: Any) -> int:
        model = nn.Linear(400, 300)
        random = torch.Generator().manual_seed(0)
        nn.init.normal_(model.weight, generator=random)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare(model, optimizer, policy=policy, group=Group(transport))
        if keep is not None:
            prune(model, keep=keep)
        before = int(transport.health()["bytes_sent"])
        for _ in range(3):
            model(torch.ones(1, 400)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return int(transport.health()["bytes_sent"]) - before

    return sum(SimulatedNetwork(world, seed=1).run(work)) / 3


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 3], ids=["no standby", "standby"])
@pytest.mark.parametrize(
    "policy",
    [BoundedDrift(), BoundedDrift(wire=torch.int8), ModelAveraging(), GradientAveraging()],
    ids=["drift", "int8", "models", "gradients"],
)
def test_bytes_fall_by_the_fraction_that_is_pruned(policy: Policy, world: int) -> None:
    whole = sent_per_step(policy, None, 1, world)
    for keep in (0.5, 0.1):
        assert sent_per_step(policy, keep, 1, world) / whole == pytest.approx(keep, abs=0.04)


def test_lost_datagrams_over_loopback_leave_pruned_weights_zero() -> None:
    def work(transport: Transport) -> tuple[torch.Tensor, float]:
        model = model_of(400)
        optimizer: Any = sgd(model)
        prepare(model, optimizer, policy=BoundedDrift(max_lag=2), group=Group(transport))
        train(model, optimizer, transport.rank, range(HALF))
        prune(model, keep=0.3)
        train(model, optimizer, transport.rank, range(HALF, 20))
        with exact(model):
            return zeros_of(model), optimizer.ledger.summary()["arrived"]

    with stormtorch.faults(loss=0.2, seed=3):
        found = local_world(WORLD, work, options=replace(OPTIONS, datagram_bytes=512))
    for zeros, arrived in found:
        assert torch.equal(zeros, found[0][0])
        assert float(zeros.float().mean()) == pytest.approx(0.7, abs=0.1)
        assert arrived < 0.95


@pytest.mark.thorough
@pytest.mark.parametrize("victim", range(WORLD))
def test_the_standby_of_a_dead_owner_has_pruned_what_the_owner_had(victim: int) -> None:
    def work(transport: Any, model: Any, optimizer: Any) -> list[torch.Tensor] | None:
        train(model, optimizer, transport.rank, range(HALF))
        prune(model, keep=0.5)
        for step in range(HALF, STEPS):
            if (step, transport.rank) == (STEPS - 1, victim):
                optimizer.session.wait()
                transport.network.set_unreachable(victim, True)
                return None
            train(model, optimizer, transport.rank, range(step, step + 1))
        with exact(model):
            return values(model)

    found = on_ranks(DRIFT, work, spreading, options=DYING)
    for ours in (each for each in found if each is not None):
        assert_same(ours, without_us(spreading, 0.5, (victim, STEPS - 1)))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_those_who_live_go_on_pruned_when_a_rank_dies(policy: Policy) -> None:
    def work(transport: Any, model: Any, optimizer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        train(model, optimizer, transport.rank, range(HALF))
        prune(model, keep=0.5)
        zeros = zeros_of(model)
        for step in range(HALF, STEPS):
            if (step, transport.rank) == (5, 1):
                optimizer.session.wait()
                transport.network.set_unreachable(1, True)
                return None
            train(model, optimizer, transport.rank, range(step, step + 1))
        assert optimizer.session.view.members == (0, 2, 3)
        with exact(model):
            return zeros, zeros_of(model)

    found = [each for each in on_ranks(policy, work, options=DYING) if each is not None]
    assert len(found) == 3
    for zeros, afterwards in found:
        assert torch.equal(zeros, afterwards) and bool(zeros.any())


def test_a_rank_that_a_death_keeps_from_pruning_clears_its_state_when_it_gets_the_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    victim, late = 1, 3
    agreed = pruning._agreed

    def broken(sessions: Any, *others: Any) -> Any:
        masks, transport = agreed(sessions, *others), sessions[0].group.transport
        if transport.rank == victim:
            transport.network.set_unreachable(victim, True)
            raise Gone
        if transport.rank == late and sessions[0].view.number == 1:
            raise Interrupted  # the victim's message has not arrived here
        return masks

    def work(transport: Any, model: Any, optimizer: Any) -> bool | None:
        train(model, optimizer, transport.rank, range(HALF))
        try:
            prune(model, keep=0.5)
        except Gone:
            return None
        train(model, optimizer, transport.rank, range(HALF, HALF + 1))
        zeros = zeros_of(model)
        state = optimizer.state_dict()["state"]
        momentum = torch.cat([state[each]["momentum_buffer"].flatten() for each in sorted(state)])
        assert optimizer.session.view.members == (0, 2, 3)
        return bool(zeros.any()) and not bool(momentum[zeros].any())

    monkeypatch.setattr(pruning, "_agreed", broken)
    assert on_ranks(DRIFT, work, options=DYING) == [True, None, True, True]


@pytest.mark.parametrize("policy", [DRIFT, ModelAveraging()], ids=["drift", "models"])
def test_pruning_again_prunes_more_and_never_brings_back(policy: Policy) -> None:
    def work(transport: Any, model: Any, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for round_, keep in enumerate((0.6, 0.3, 0.3)):
            train(model, optimizer, transport.rank, range(round_, round_ + 1))
            prune(model, keep=keep)
            found.append(zeros_of(model))
        train(model, optimizer, transport.rank, range(3, 5))
        assert torch.equal(zeros_of(model), found[-1])
        return found

    for first, second, third in on_ranks(policy, work):
        assert bool((second >= first).all()) and int(second.sum()) > int(first.sum())
        assert torch.equal(second, third)


@pytest.mark.parametrize("policy", [DRIFT, ModelAveraging()], ids=["drift", "models"])
def test_loaded_values_are_pruned_too(policy: Policy) -> None:
    def work(transport: Any, model: Any, optimizer: Any) -> bool:
        prune(model, keep=0.5)
        zeros = zeros_of(model)
        model.load_state_dict({name: torch.ones_like(each) for name, each in model.state_dict().items()})
        assert torch.equal(zeros_of(model), zeros)
        train(model, optimizer, transport.rank, range(2))
        return torch.equal(zeros_of(model), zeros)

    assert on_ranks(policy, work) == [True] * WORLD


def test_of_equal_values_the_first_are_kept() -> None:
    values = torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0, 1.0])
    assert _largest(values, 0.5).tolist() == [True, True, False, False, True, False]
    assert _largest(values, 1.0).tolist() == [True] * 6
    assert _largest(values, 1e-9).tolist() == [False] * 4 + [True, False]


def test_only_given_parameters_are_pruned() -> None:
    def work(transport: Any, model: Any, _optimizer: Any) -> list[float]:
        prune(model, keep=0.5, parameters=[model[0].weight])
        return [float((each.detach() == 0.0).float().mean()) for each in model.parameters()]

    assert on_ranks(DRIFT, work) == [[0.5, 0.0, 0.0, 0.0]] * WORLD


def test_misuse_is_an_error_that_says_what_to_do() -> None:
    def work(transport: Any, model: Any, optimizer: Any) -> None:
        with pytest.raises(ValueError, match=r"keep must lie in \(0, 1\]"):
            prune(model, keep=0.0)
        with pytest.raises(ValueError, match="nothing to prune"):
            prune(model, keep=0.5, parameters=[])
        with pytest.raises(ValueError, match="another `keep` on other ranks"):
            prune(model, keep=0.5 if transport.rank else 0.25)
        regression(model, vectors(transport.rank, 0)).backward()
        with pytest.raises(RuntimeError, match="call it after step"):
            prune(model, keep=0.5)

    on_ranks(DRIFT, work)
    with pytest.raises(ValueError, match="not prepared"):
        prune(nn.Linear(2, 2), keep=0.5)
