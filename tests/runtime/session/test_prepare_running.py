# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Models as people run them: activation checkpointing, copies, inference mode, two models, two optimizers."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import local_world
from torch import nn
from torch.utils.checkpoint import checkpoint

import stormtorch
from stormtorch import EXACT, BoundedDrift, exact, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
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
    regression,
    trained,
    values,
    vectors,
)

pytestmark = pytest.mark.pure

STEPS = 6


class Recomputed(nn.Module):
    """Uses activation checkpointing: its layers run again in backward."""

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
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # it reads gradients before the step
        for step in range(STEPS):
            scaler.scale(regression(rank.model, vectors(rank.rank, step))).backward()
            scaler.step(rank.optimizer)
            scaler.update()
            rank.optimizer.zero_grad()
        return rank.values()

    for ours in on_ranks(Recomputed(reentrant, everything), adamw, work, policy=policy):
        assert_same(ours, expected)


class Twice(nn.Module):
    """Uses one layer in two recomputed parts, so that one backward computes two gradients of it."""

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

    for ours in local_world(2, body):  # sockets receive at once; the simulator receives only during waits
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
            adversaries(maker, judge, (making, judging), vectors(0, step))  # equal on all ranks, so means are exact
        with exact(maker), exact(judge):
            return [*values(maker), *values(judge)]

    for ours in SimulatedNetwork(WORLD).run(body):
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

    for ours in SimulatedNetwork(WORLD).run(body):
        assert_close(ours, values(alone))


def test_gradients_are_copied_and_saved_as_plain_tensors() -> None:
    def work(rank: Rank) -> None:
        regression(rank.model, vectors(0, 0)).backward()
        gradient = next(rank.model.parameters()).grad
        buffer = io.BytesIO()
        torch.save(gradient, buffer)
        buffer.seek(0)
        # A clone is a `PartialGradient`, so that sums over it are found. A copy of it must be plain, too.
        for copied in (copy.deepcopy(gradient), copy.deepcopy(gradient.clone()), torch.load(buffer, weights_only=True)):
            assert type(copied) is torch.Tensor
            assert_same([copied], [gradient])

    on_ranks(perceptron(), adamw, work)


@pytest.mark.filterwarnings("ignore:Using backward")  # of a cycle, which the copy into a bucket breaks
def test_backward_may_keep_its_graph() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        for step in range(STEPS):
            loss = regression(rank.model, vectors(rank.rank, step))
            loss.backward(create_graph=True)
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        return rank.values()

    for ours in on_ranks(perceptron(), adamw, work):
        assert_same(ours, plain(perceptron(), adamw, STEPS))


def test_looking_at_a_model_in_inference_mode_does_no_harm() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        for step in range(STEPS):
            rank.train(range(step, step + 1))
            with torch.inference_mode():
                rank.model(vectors(0, 0))
                with exact(rank.model):
                    rank.model(vectors(0, 0))
        return rank.values()

    for ours in on_ranks(perceptron(), adamw, work):
        assert_same(ours, plain(perceptron(), adamw, STEPS))
    on_ranks(perceptron(), adamw, work, policy=BoundedDrift(max_lag=1), loss=0.3)


class Branches(nn.Module):
    """Uses one of two layers; each has an optimizer of its own."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.chosen = nn.ModuleList([nn.Linear(8, 6), nn.Linear(8, 6)]), chosen

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[self.chosen](given)
        return out


def test_ranks_may_use_what_different_optimizers_train() -> None:
    models = [Branches(rank % 2) for rank in range(WORLD)]

    def body(transport: Transport) -> list[torch.Tensor]:
        model = models[transport.rank]
        ours = [adamw(each) for each in model.layers]
        for each in ours:
            prepare(model, each, policy=EXACTLY, group=Group(transport, range(WORLD)))
        for step in range(STEPS):
            regression(model, vectors(transport.rank, step)).backward()
            for each in ours:
                each.step()
                each.zero_grad()
        with exact(model):
            return values(model)

    found = SimulatedNetwork(WORLD).run(body)
    for ours in found:
        assert_same(ours, found[0])
    assert all(not torch.equal(one, other) for one, other in zip(found[0], values(Branches(0)), strict=True))
