# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Models as people have them: frozen, unused, shared, recomputed, compiled, copied, tiny, or two at once."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stormtorch
from conftest import local_world
from stormtorch import EXACT, BoundedDrift, Options, exact, prepare
from stormtorch.collectives import Group
from stormtorch.sim import SimNetwork
from stormtorch.transport import Transport
from training import (
    EXACTLY,
    WORLD,
    Optimizer,
    Rank,
    adamw,
    assert_close,
    assert_same,
    mean_gradients,
    on_ranks,
    perceptron,
    plain,
    plain_step,
    regression,
    sgd,
    trained,
    values,
    vectors,
)

STEPS = 6


# --- which parameters -------------------------------------------------------------------------------------------------


def test_frozen_parameters_stay_and_are_rank_zeros() -> None:
    model = perceptron()
    model[0].weight.requires_grad_(False)
    for ours in trained(model, adamw, STEPS):
        assert_same(ours, plain(model, adamw, STEPS))
        assert_same(ours[:1], values(model)[:1])


def test_all_ranks_begin_with_the_parameters_and_buffers_of_rank_zero() -> None:
    models = [nn.Sequential(*perceptron(seed=rank), nn.BatchNorm1d(6)) for rank in range(WORLD)]
    for rank, model in enumerate(models):
        next(model.parameters()).requires_grad_(False)
        next(model.buffers()).fill_(rank + 1.0)  # the running mean

    def body(transport: Transport) -> list[torch.Tensor]:
        model = models[transport.rank]
        prepare(model, adamw(model), policy=EXACTLY, group=Group(transport, range(WORLD)))
        return [*values(model), next(model.buffers()).clone()]

    for ours in SimNetwork(WORLD).run(body):
        assert_same(ours, [*values(perceptron(seed=0)), torch.ones(6), torch.zeros(6), torch.ones(6)])


class Choice(nn.Module):
    """Rank r uses branch r modulo 2; nobody uses the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(8, 6) for _ in range(3))
        self.chosen = 0

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.branches[self.chosen](given)
        return out


@pytest.mark.parametrize("ownership", ["elements", "parameters"])
def test_parameters_unused_somewhere_count_as_zero_there_and_unused_everywhere_are_not_touched(ownership: Any) -> None:
    model = Choice()

    def make(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)

    alone = copy.deepcopy(model)
    optimizer = make(alone)
    for step in range(STEPS):
        total: list[torch.Tensor | None] = [None] * 6
        for rank in range(WORLD):
            alone.chosen = rank % 2
            for place, gradient in enumerate(mean_gradients(alone, [vectors(rank, step)], regression)):
                if gradient is not None:
                    sofar = total[place]
                    total[place] = gradient if sofar is None else sofar + gradient
        plain_step(alone, optimizer, [None if each is None else each / WORLD for each in total])

    def work(rank: Rank) -> list[torch.Tensor]:
        rank.model.chosen = rank.rank % 2
        rank.train(STEPS)
        return rank.values()

    policy = BoundedDrift(gradients=EXACT, broadcast=EXACT, ownership=ownership)
    for ours in on_ranks(model, make, work, policy=policy):
        assert_same(ours, values(alone))
        assert_same(ours[-2:], values(model)[-2:])


def test_every_rank_has_a_gradient_of_what_any_rank_has_used() -> None:
    def work(rank: Rank) -> list[bool]:
        rank.model.chosen = rank.rank % 2
        regression(rank.model, vectors(rank.rank, 0)).backward()
        return [each.grad is not None for each in rank.model.parameters()]

    assert on_ranks(Choice(), adamw, work) == [[True, True, True, True, False, False]] * WORLD


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_exact_gives_batch_normalisation_the_mean_of_all_ranks_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 6))
    expected = torch.zeros(8)
    for rank in range(WORLD):
        alone = nn.BatchNorm1d(8)
        for step in range(STEPS):
            alone(vectors(rank, step))
        assert alone.running_mean is not None
        expected += alone.running_mean / WORLD

    def work(rank: Rank) -> torch.Tensor:
        rank.train(STEPS)
        with exact(rank.model):
            assert int(rank.model[0].num_batches_tracked) == STEPS
            found: torch.Tensor = rank.model[0].running_mean.clone()
        return found

    found = on_ranks(model, sgd, work)
    for ours in found:
        assert_close([ours], [expected])
        assert torch.equal(ours, found[0])


def test_buffers_that_are_the_same_everywhere_stay_as_they_are() -> None:
    model = perceptron()
    model.register_buffer("table", torch.randn(500, generator=torch.Generator().manual_seed(1)))
    model.register_buffer("mask", torch.full((4,), -math.inf))
    before = [each.clone() for each in model.buffers()]

    def work(rank: Rank) -> list[torch.Tensor]:
        for _ in range(3):
            rank.model.state_dict()
        return list(rank.model.buffers())

    for ours in on_ranks(model, sgd, work, world=3):
        assert_same(ours, before)


# --- how it is run ----------------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """Its layers are run again in backward instead of being remembered."""

    def __init__(self, reentrant: bool | None, first: bool) -> None:
        super().__init__()
        self.layers = perceptron()
        self.reentrant, self.first = reentrant, first

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        given = given.clone().requires_grad_(self.first)
        if self.reentrant is None:
            out: torch.Tensor = self.layers(given)
            return out
        inside = self.layers[:2] if not self.first else self.layers
        y: torch.Tensor = checkpoint(inside, given.requires_grad_(), use_reentrant=self.reentrant)
        return y if self.first else self.layers[2](y)


@pytest.mark.parametrize("everything", [True, False], ids=["all of it", "a part"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_may_be_recomputed(reentrant: bool, everything: bool) -> None:
    expected = plain(Recomputed(None, everything), adamw, STEPS)
    policy = BoundedDrift(gradients=EXACT, broadcast=EXACT, bucket_mb=1e-4)

    def work(rank: Rank) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # it looks at gradients before the step
        for step in range(STEPS):
            scaler.scale(regression(rank.model, vectors(rank.rank, step))).backward()
            scaler.step(rank.optimizer)
            scaler.update()
            rank.optimizer.zero_grad()
        return rank.values()

    for ours in on_ranks(Recomputed(reentrant, everything), adamw, work, policy=policy):
        assert_same(ours, expected)


class Twice(nn.Module):
    """One layer in two parts that are recomputed: one backward brings it two gradients."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 6), reentrant

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        y = given.clone().requires_grad_()
        for _ in range(2):
            y = checkpoint(self.layer, y, use_reentrant=self.reentrant)
        out: torch.Tensor = self.out(y)
        return out


@pytest.mark.parametrize("bucket_mb", [8.0, 1e-5], ids=["one bucket", "many"])
def test_a_shared_parameter_may_be_recomputed_twice(bucket_mb: float) -> None:
    policy = BoundedDrift(gradients=EXACT, broadcast=EXACT, bucket_mb=bucket_mb)
    models = [Twice(True), Twice(True)]

    def body(transport: Transport) -> list[torch.Tensor]:
        model = models[transport.rank]
        _, optimizer = prepare(model, adamw(model), policy=policy, group=Group(transport, range(2)))
        rank = Rank(transport.rank, 2, model, optimizer)
        rank.train(STEPS)
        return rank.values()

    for ours in local_world(2, body):  # sockets read at once what the simulator reads when it is waited for
        assert_close(ours, plain(Twice(False), adamw, STEPS, world=2))


class Attention(nn.Module):
    """nn.MultiheadAttention reads the parameters of a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 6)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.attention(given, given, given, need_weights=False)[0])
        return out


@pytest.mark.parametrize("overlap", [True, False])
def test_every_module_waits_for_what_it_reads(overlap: bool) -> None:
    policy = BoundedDrift(gradients=EXACT, broadcast=EXACT, overlap=overlap, bucket_mb=1e-5)
    for ours in trained(Attention(), adamw, STEPS, policy=policy):
        assert_same(ours, plain(Attention(), adamw, STEPS))


def test_a_copy_of_a_prepared_model_is_a_plain_model() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(STEPS)
        with exact(rank.model):
            copied = copy.deepcopy(rank.model)
        before = values(copied)
        rank.train(range(STEPS, 2 * STEPS))
        assert_same(values(copied), before)
        regression(copied, vectors(0, 0)).backward()
        assert all(type(each.grad) is torch.Tensor for each in copied.parameters())
        copied.load_state_dict(rank.model.state_dict())
        torch.optim.SGD(copied.parameters(), lr=0.1).step()
        return rank.values()

    for ours in on_ranks(perceptron(), adamw, work):
        assert_same(ours, plain(perceptron(), adamw, 2 * STEPS))


def adversaries(maker: nn.Module, judge: nn.Module, optimizers: tuple[Any, Any], noise: torch.Tensor) -> None:
    making, judging = optimizers
    judging.zero_grad()
    (judge(noise[:, :6]).square().mean() - judge(maker(noise).detach()).tanh().mean()).backward()
    judging.step()
    making.zero_grad()
    judge(maker(noise)).square().mean().backward()  # which leaves gradients in the judge, too
    making.step()


def test_two_models_are_trained_against_each_other() -> None:
    torch.manual_seed(0)
    made = perceptron(), nn.Linear(6, 1)
    alone = copy.deepcopy(made)
    optimizers = adamw(alone[0]), adamw(alone[1])
    for step in range(STEPS):
        adversaries(*alone, optimizers, vectors(0, step))
    models = [copy.deepcopy(made) for _ in range(WORLD)]

    def body(transport: Transport) -> list[torch.Tensor]:
        maker, judge = models[transport.rank]
        group = Group(transport, range(WORLD))
        _, making = prepare(maker, adamw(maker), policy=EXACTLY, group=group)
        _, judging = prepare(judge, adamw(judge), policy=EXACTLY, group=group)
        for step in range(STEPS):
            adversaries(maker, judge, (making, judging), vectors(0, step))  # the same on all, so that means are exact
        with exact(maker), exact(judge):
            return [*values(maker), *values(judge)]

    for ours in SimNetwork(WORLD).run(body):
        assert_same(ours, [*values(alone[0]), *values(alone[1])])


def matrices_and_others(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    matrices = [each for each in model.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if each.dim() != 2]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)


@pytest.mark.parametrize("clip", [stormtorch.clip_grad_norm_, nn.utils.clip_grad_norm_], ids=["ours", "torch's"])
def test_a_model_may_have_two_optimizers(clip: Callable[..., torch.Tensor]) -> None:
    alone = perceptron()
    optimizers = matrices_and_others(alone)
    for step in range(STEPS):
        parts = [vectors(rank, part) for rank in range(WORLD) for part in (2 * step, 2 * step + 1)]
        for parameter, gradient in zip(alone.parameters(), mean_gradients(alone, parts, regression), strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        for each in optimizers:
            each.step()
    models = [perceptron() for _ in range(WORLD)]

    def body(transport: Transport) -> list[torch.Tensor]:
        model: Any = models[transport.rank]
        ours = matrices_and_others(model)
        for each in ours:
            prepare(model, each, policy=EXACTLY, group=Group(transport, range(WORLD)))
        with pytest.raises(ValueError, match="already"):
            prepare(model, adamw(model), policy=EXACTLY, group=Group(transport, range(WORLD)))
        for step in range(STEPS):
            with model.no_sync():
                (regression(model, vectors(transport.rank, 2 * step)) / 2).backward()
            (regression(model, vectors(transport.rank, 2 * step + 1)) / 2).backward()
            assert clip(model.parameters(), 0.1) > 0.1
            for each in ours:
                each.step()
                each.zero_grad()
        with exact(model):
            return values(model)

    for ours in SimNetwork(WORLD).run(body):
        assert_close(ours, values(alone))


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_one_rank_trains_as_plain_torch_does() -> None:
    for policy in (EXACTLY, BoundedDrift(max_lag=2)):
        (ours,) = trained(perceptron(), adamw, STEPS, world=1, policy=policy)
        assert_same(ours, plain(perceptron(), adamw, STEPS, world=1))


@pytest.mark.parametrize("ownership", ["elements", "parameters"])
@pytest.mark.parametrize("policy", [{"gradients": EXACT, "broadcast": EXACT}, {"max_lag": 2}], ids=["exact", "lossy"])
def test_there_may_be_more_ranks_than_numbers(policy: Any, ownership: Any) -> None:
    model = nn.Linear(8, 1, bias=False)
    nn.init.ones_(model.weight)

    def loss(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(given).square().mean()
        return found

    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(STEPS, objective=loss)
        found = rank.values()
        rank.optimizer.load_state_dict(rank.optimizer.state_dict())
        for row in rank.optimizer.ledger:
            numbers = [row.pair_drift, row.owner_drift, row.update_variance, row.pair_bound]
            assert all(each is None or math.isfinite(each) for each in numbers), row
        return found

    found = on_ranks(model, sgd, work, world=12, policy=BoundedDrift(**policy, ownership=ownership))
    for ours in found:
        assert_close(ours, plain(model, sgd, STEPS, objective=loss, world=12))
        assert_same(ours, found[0])


def test_a_model_smaller_than_a_datagram_survives_loss() -> None:
    network: dict[str, Any] = {"loss": 0.3, "options": Options(datagram_bytes=1472)}
    found = trained(perceptron(), adamw, 30, policy=BoundedDrift(), **network)
    for ours in found:
        assert_same(ours, found[0])
        assert all(bool(each.isfinite().all()) for each in ours)
