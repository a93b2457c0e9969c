# mypy: disable-error-code="no-untyped-call, attr-defined"
# torch's own backward is untyped, and a prepared optimizer has more than torch's.
"""Personal parts of a prepared model: each rank trains its own, and they are never sent."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import OPTIONS, local_world
from torch import nn

import stormtorch
from stormtorch import (
    EXACT,
    BoundedDrift,
    GradientAveraging,
    ModelAveraging,
    Policy,
    clip_grad_norm_,
    exact,
    prepare,
)
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from training import MakeOptimizer, adamw, assert_close, assert_same, regression, sgd, vectors

pytestmark = pytest.mark.pure

WORLD, STEPS = 4, 6
DRIFT = BoundedDrift(reliability=EXACT, bucket_mb=5e-4)
POLICIES: dict[str, Policy] = {
    "drift": DRIFT,
    "whole parameters": replace(DRIFT, ownership="parameters"),
    "overlap": replace(DRIFT, overlap=True),
    "models": ModelAveraging(reliability=EXACT),
    "gradients": GradientAveraging(reliability=EXACT),
}


class Body(nn.Module):
    """A shared body, and a head with statistics and a frozen number, initialised differently on each rank."""

    def __init__(self, rank: int, wide: int = 12) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, wide), nn.Tanh())
        self.head = nn.Sequential(nn.BatchNorm1d(wide), nn.Linear(wide, 6))
        self.head.register_parameter("frozen", nn.Parameter(torch.zeros(1), requires_grad=False))
        for part, seed in ((self.body, 0), (self.head, 1 + rank)):
            random = torch.Generator().manual_seed(seed)  # ranks are threads, which share torch's own
            for each in part.parameters():
                nn.init.uniform_(each, -0.5, 0.5, generator=random)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(given))
        return out


def body_of(model: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.body.parameters()]


def head_of(model: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in (*model.head.parameters(), *model.head.buffers())]


def prepared(transport: Transport, policy: Policy, make: MakeOptimizer = sgd) -> tuple[Any, Any]:
    model = Body(transport.rank)
    return prepare(model, make(model), policy=policy, personal=[model.head], group=Group(transport))


def train(model: nn.Module, optimizer: Any, rank: int, steps: range = range(STEPS)) -> None:
    for step in steps:
        regression(model, vectors(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def mean_of(models: list[Any], of: Callable[[nn.Parameter], torch.Tensor]) -> list[torch.Tensor]:
    bodies = [model.body.parameters() for model in models]
    return [torch.stack([of(each) for each in ranks]).mean(0) for ranks in zip(*bodies, strict=True)]


def without_us(make: MakeOptimizer, steps: int, *, averages: str, clip: float | None = None) -> list[Any]:
    """A reference in one process and plain torch: all ranks, averaging bodies or gradients of bodies."""
    models: list[Any] = [Body(rank) for rank in range(WORLD)]
    optimizers = [make(each) for each in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            regression(model, vectors(rank, step)).backward()
        if averages == "gradients":
            means = mean_of(models, lambda each: each.grad.clone())  # type: ignore[union-attr]
            for model in models:
                for each, mean in zip(model.body.parameters(), means, strict=True):
                    each.grad = mean.clone()
        for model, optimizer in zip(models, optimizers, strict=True):
            if clip is not None:
                for part in (model.body, model.head):
                    nn.utils.clip_grad_norm_(part.parameters(), clip)
            optimizer.step()
        if averages == "parameters":
            means = mean_of(models, lambda each: each.detach())
            for model in models:
                for each, mean in zip(model.body.parameters(), means, strict=True):
                    each.data.copy_(mean)
    return models


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_each_rank_trains_its_own_head_on_a_common_body(policy: Policy, make: MakeOptimizer) -> None:
    def work(transport: Transport) -> list[list[torch.Tensor]]:
        model, optimizer = prepared(transport, policy, make)
        train(model, optimizer, transport.rank)
        before = head_of(model)
        with exact(model):
            assert_same(head_of(model), before)
            return [body_of(model), head_of(model), [model.body[0].running_mean.clone()]]

    found = SimulatedNetwork(WORLD, seed=1).run(work)
    averages = "parameters" if isinstance(policy, ModelAveraging) else "gradients"
    for rank, (model, (body, head, _)) in enumerate(
        zip(without_us(make, STEPS, averages=averages), found, strict=True)
    ):
        assert_close(body, body_of(model))
        assert_close(head, head_of(model))
        assert float(head[-1]) == STEPS  # batches that batch normalisation has counted
        assert any(not torch.allclose(own, other) for own, other in zip(head, found[rank - 1][1], strict=True))
    if not isinstance(policy, GradientAveraging):  # which has no common values
        for body, _, statistics in found:
            assert_same(body, found[0][0])
            assert_same(statistics, found[0][2])


def test_heads_are_trained_over_loopback_while_datagrams_are_lost() -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        model, optimizer = prepared(transport, BoundedDrift(reliability=EXACT))
        train(model, optimizer, transport.rank)
        return head_of(model) + body_of(model)

    with stormtorch.faults(loss=0.1, seed=3):
        found = local_world(WORLD, work, options=replace(OPTIONS, datagram_bytes=1472))
    for ours, model in zip(found, without_us(sgd, STEPS, averages="gradients"), strict=True):
        assert_close(ours, head_of(model) + body_of(model))


class Large(nn.Module):
    def __init__(self, personal: int) -> None:
        super().__init__()
        self.common = nn.Parameter(torch.zeros(3000))
        self.own = nn.Parameter(torch.zeros(personal))
        self.table: torch.Tensor
        self.kept = nn.Module()
        self.kept.register_buffer("table", torch.zeros(personal))

    def forward(self) -> torch.Tensor:
        return self.common.sum() + self.own.sum()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_no_call_sends_a_byte_of_what_is_personal(policy: Policy) -> None:
    def sent(personal: int) -> list[int]:
        def work(transport: Any) -> int:
            model = Large(personal)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            prepare(model, optimizer, policy=policy, personal=[model.own, model.kept], group=Group(transport))
            for _ in range(3):
                model().backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            with exact(model):
                pass
            assert model.state_dict()["own"].numel() == personal
            assert len(optimizer.state_dict()["state"]) == 2
            return int(transport.health()["bytes_sent"])

        return SimulatedNetwork(3, seed=1).run(work)

    few, many = sent(2), sent(50_000)
    # A message of a settled transport may fall on either side of the count; a head of 200 kB may not.
    assert many == pytest.approx(few, abs=2000)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_checkpoint_of_each_rank_holds_its_own_head_and_goes_on_from_there(policy: Policy) -> None:
    half = STEPS // 2

    def whole(transport: Transport) -> tuple[Any, Any, list[torch.Tensor]]:
        model, optimizer = prepared(transport, policy, adamw)
        train(model, optimizer, transport.rank, range(half))
        with exact(model):
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        own = [saved[0][f"head.{name}"] for name, _ in model.head.named_parameters()]
        assert_same(own, [each.detach() for each in model.head.parameters()])
        train(model, optimizer, transport.rank, range(half, STEPS))
        return saved[0], saved[1], head_of(model)

    saved = SimulatedNetwork(WORLD, seed=1).run(whole)

    def resumed(transport: Transport) -> list[torch.Tensor]:
        model, optimizer = prepared(transport, policy, adamw)
        mine = copy.deepcopy(saved[transport.rank])
        model.load_state_dict(mine[0])
        optimizer.load_state_dict(mine[1])
        assert set(optimizer.state_dict()["state"]) == set(mine[1]["state"])
        train(model, optimizer, transport.rank, range(half, STEPS))
        return head_of(model)

    for ours, (_, _, theirs) in zip(SimulatedNetwork(WORLD, seed=1).run(resumed), saved, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("policy", [DRIFT, GradientAveraging(reliability=EXACT)], ids=["drift", "gradients"])
def test_heads_are_clipped_by_a_norm_of_their_own(policy: Policy) -> None:
    clip = 0.05

    def work(transport: Transport) -> tuple[list[torch.Tensor], float]:
        model, optimizer = prepared(transport, policy)
        norm = 0.0
        for step in range(STEPS):
            regression(model, vectors(transport.rank, step)).backward()
            norm = float(clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
        return head_of(model) + body_of(model), norm

    found = SimulatedNetwork(WORLD, seed=1).run(work)
    for (ours, _), model in zip(found, without_us(sgd, STEPS, averages="gradients", clip=clip), strict=True):
        assert_close(ours, head_of(model) + body_of(model))
    assert all(norm == pytest.approx(found[0][1]) for _, norm in found) and found[0][1] > clip


def test_torchs_clipping_sees_the_norm_of_the_shared_gradient_also_beside_personal_ones() -> None:
    def work(transport: Transport) -> list[float]:
        model, _ = prepared(transport, DRIFT)
        regression(model, vectors(transport.rank, 0)).backward()
        shared = [each.grad for each in model.body.parameters()]
        own = [each.grad for each in model.head.parameters() if each.grad is not None]
        alone = [float(each.norm()) for each in own]
        found = [float(each) for each in torch._foreach_norm([*shared, *own])]
        assert found[len(shared) :] == pytest.approx(alone)
        return found[: len(shared)]

    found = SimulatedNetwork(WORLD, seed=1).run(work)
    reference = without_us(lambda model: torch.optim.SGD(model.parameters(), lr=0.0), 1, averages="gradients")[0]
    for ours in found:
        assert ours == pytest.approx([float(each.grad.norm()) for each in reference.body.parameters()], rel=1e-4)


def test_all_ranks_skip_a_step_in_which_one_head_overflows() -> None:
    def work(transport: Transport) -> tuple[float, bool]:
        model, optimizer = prepared(transport, DRIFT)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(STEPS):
            loss = regression(model, vectors(transport.rank, step))
            if (step, transport.rank) == (2, 1):
                loss = loss + model.head[1].bias.sum() * torch.inf  # of the head alone
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), all(bool(each.isfinite().all()) for each in model.parameters())

    assert SimulatedNetwork(WORLD, seed=1).run(work) == [(128.0, True)] * WORLD


def test_those_who_live_keep_their_heads_when_a_rank_dies() -> None:
    def work(transport: Any) -> list[torch.Tensor] | None:
        model, optimizer = prepared(transport, DRIFT, adamw)
        for step in range(STEPS):
            if (step, transport.rank) == (3, 1):
                optimizer.session.wait()
                transport.network.set_unreachable(1, True)
                return None
            train(model, optimizer, transport.rank, range(step, step + 1))
        assert optimizer.session.view.members == (0, 2, 3)
        steps = {int(state["step"]) for state in copy.deepcopy(optimizer.state_dict()["state"]).values()}
        assert steps == {STEPS}
        return head_of(model)

    options = stormtorch.Options(datagram_bytes=1472, silence_s=2.0)
    found = [each for each in SimulatedNetwork(WORLD, seed=1, options=options).run(work) if each is not None]
    assert len(found) == 3
    assert len({float(each[-1]) for each in found}) == 1
    assert not torch.equal(found[0][0], found[1][0])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [DRIFT, ModelAveraging()], ids=["drift", "models"])
def test_ranks_that_disagree_on_what_is_personal_are_told_so(policy: Policy) -> None:
    def work(transport: Transport) -> str:
        model = Body(0)
        parts = [model.head] if transport.rank != 2 else [model.head[1]]
        with pytest.raises(ValueError, match="rank 2 has prepared another choice of personal parts than rank 0"):
            prepare(model, sgd(model), policy=policy, personal=parts, group=Group(transport))
        return "refused"

    assert SimulatedNetwork(3, seed=1).run(work) == ["refused"] * 3


@pytest.mark.parametrize("policy", [DRIFT, ModelAveraging()], ids=["drift", "models"])
def test_heads_may_have_a_shape_and_a_number_format_of_their_own(policy: Policy) -> None:
    def work(transport: Transport) -> torch.Tensor:
        model: Any = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 2 + transport.rank).double())
        model, optimizer = prepare(model, adamw(model), policy=policy, personal=[model[1]], group=Group(transport))
        for step in range(3):
            model[1](model[0](vectors(transport.rank, step)).double()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with exact(model):
            return model[0].weight.detach().clone()  # type: ignore[no-any-return]

    found = SimulatedNetwork(3, seed=1).run(work)
    assert_same(found[0:1], found[2:3])


def test_what_cannot_be_personal_is_refused() -> None:
    def refused(error: type[Exception], words: str, parts: Callable[[Any], Any], twice: bool = False) -> None:
        def work(transport: Transport) -> None:
            model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            if twice:
                prepare(model, torch.optim.SGD(model[0].parameters()), group=Group(transport))
            with pytest.raises(error, match=words):
                optimizer = torch.optim.SGD((model[1] if twice else model).parameters())
                prepare(model, optimizer, personal=parts(model), group=Group(transport))

        SimulatedNetwork(1, seed=1).run(work)

    refused(TypeError, r"personal\[1\] must be a module or a parameter, got str", lambda model: [model[0], "1"])
    refused(ValueError, r"personal\[0\] is not part of the model", lambda _: [nn.Linear(2, 2)])
    refused(ValueError, r"personal\[0\] is not part of the model", lambda _: [nn.Parameter(torch.ones(2))])
    refused(ValueError, "requires a gradient and is not personal", lambda model: [model])
    refused(ValueError, r"personal\[0\] comes too late", lambda model: [model[1]], twice=True)
