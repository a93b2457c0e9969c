# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Typical user models: with frozen or unused parameters, with buffers, or tiny."""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore  # torch.distributed has it, but its types do not
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from stormtorch import EXACT, BoundedDrift, GradientAveraging, ModelAveraging, Options, exact, prepare
from stormtorch.collectives import Group
from stormtorch.collectives.wire import WIRES
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.policies.policy import Policy
from training import (
    EXACTLY,
    WORLD,
    Optimizer,
    Rank,
    adamw,
    assert_close,
    assert_same,
    mean_gradients,
    next_word,
    on_ranks,
    perceptron,
    plain,
    plain_step,
    regression,
    sgd,
    trained,
    values,
    vectors,
    words,
)

pytestmark = pytest.mark.pure

STEPS = 6


# --- which parameters -------------------------------------------------------------------------------------------------


def test_frozen_parameters_stay_and_are_rank_zeros() -> None:
    model = perceptron()
    model[0].weight.requires_grad_(False)
    for ours in trained(model, adamw, STEPS):
        assert_same(ours, plain(model, adamw, STEPS))
        assert_same(ours[:1], values(model)[:1])


def test_parameters_may_be_frozen_and_thawed_after_prepare() -> None:
    def phases(model: Any, train: Callable[[range], object]) -> None:
        for phase, frozen in enumerate((False, True, False)):
            model[0].weight.requires_grad_(not frozen)
            train(range(STEPS * phase, STEPS * (phase + 1)))

    alone = perceptron()
    optimizer = sgd(alone)

    def train(steps: range) -> None:
        for step in steps:
            parts = [vectors(rank, step) for rank in range(WORLD)]
            plain_step(alone, optimizer, mean_gradients(alone, parts, regression))

    phases(alone, train)

    def work(rank: Rank) -> list[torch.Tensor]:
        phases(rank.model, rank.train)
        return rank.values()

    for ours in on_ranks(perceptron(), sgd, work):
        assert_same(ours, values(alone))


def test_what_was_frozen_at_prepare_cannot_be_thawed() -> None:
    model = perceptron()
    model[0].weight.requires_grad_(False)

    def work(rank: Rank) -> None:
        rank.train(1)
        rank.model[0].weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match="frozen when the model was prepared"):
            rank.train(1)

    on_ranks(model, sgd, work)


def test_sparse_gradients_of_an_embedding_are_added_up() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 20))
    data = lambda rank, step: words(rank, step, count=20)  # noqa: E731
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    dense: Any = copy.deepcopy(model)
    dense[0].sparse = False
    for ours in trained(model, make, STEPS, objective=next_word, data=data):
        assert_same(ours, plain(dense, make, STEPS, objective=next_word, data=data))


def test_all_ranks_begin_with_the_parameters_and_buffers_of_rank_zero() -> None:
    models = [nn.Sequential(*perceptron(seed=rank), nn.BatchNorm1d(6)) for rank in range(WORLD)]
    for rank, model in enumerate(models):
        next(model.parameters()).requires_grad_(False)
        next(model.buffers()).fill_(rank + 1.0)  # the running mean

    def body(transport: Transport) -> list[torch.Tensor]:
        model = models[transport.rank]
        prepare(model, adamw(model), policy=EXACTLY, group=Group(transport, range(WORLD)))
        return [*values(model), next(model.buffers()).clone()]

    for ours in SimulatedNetwork(WORLD).run(body):
        assert_same(ours, [*values(perceptron(seed=0)), torch.ones(6), torch.zeros(6), torch.ones(6)])


class Choice(nn.Module):
    """Rank r uses branch r modulo 2; no rank uses the last."""

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


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_one_rank_trains_as_plain_torch_does() -> None:
    for policy in (EXACTLY, BoundedDrift(max_lag=2)):
        (ours,) = trained(perceptron(), adamw, STEPS, world=1, policy=policy)
        assert_same(ours, plain(perceptron(), adamw, STEPS, world=1))


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_model_smaller_than_a_datagram_survives_loss(wire: torch.dtype, dtype: torch.dtype) -> None:
    network: dict[str, Any] = {"loss": 0.3, "options": Options(datagram_bytes=1472)}
    policy = BoundedDrift(wire=wire, max_lag=3, weights="horvitz-thompson" if wire == torch.int8 else "mean")
    data = lambda rank, step: vectors(rank, step).to(dtype)  # noqa: E731
    found = trained(perceptron().to(dtype), adamw, 20, data=data, policy=policy, **network)
    for ours in found:
        assert_same(ours, found[0])
        assert all(bool(each.isfinite().all()) for each in ours)


def test_a_model_that_is_distributed_already_is_refused() -> None:
    def work(transport: Transport) -> None:
        inner = perceptron()
        wrapped = DistributedDataParallel.__new__(DistributedDataParallel)  # making one takes a process group
        nn.Module.__init__(wrapped)
        wrapped.module = inner
        with pytest.raises(ValueError, match="takes the place of DistributedDataParallel"):
            prepare(wrapped, sgd(inner), group=Group(transport))

    SimulatedNetwork(2).run(work)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("part", ["all", "layer"])
@pytest.mark.parametrize("use", ["step", "state_dict"])
def test_a_model_that_is_sharded_after_prepare_is_refused(part: str, use: str, mesh: DeviceMesh) -> None:
    def work(rank: Rank) -> None:
        rank.train(1)
        fully_shard(rank.model if part == "all" else rank.model[2], mesh=mesh)
        with pytest.raises(ValueError, match=r"takes the place of fully_shard\(\): .* do not wrap it afterwards"):
            if use == "step":
                rank.train(1)
            else:
                rank.model.state_dict()

    on_ranks(perceptron(), adamw, work, world=1, policy=BoundedDrift())


def test_a_model_that_was_sharded_before_is_refused(mesh: DeviceMesh) -> None:
    def work(transport: Transport) -> None:
        model: Any = fully_shard(perceptron(), mesh=mesh)
        with pytest.raises(ValueError, match=r"takes the place of fully_shard\(\)"):
            prepare(model, sgd(model), group=Group(transport))

    SimulatedNetwork(1).run(work)


@pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging(), GradientAveraging()], ids=repr)
def test_parameters_that_are_replaced_after_prepare_are_noticed_and_named(policy: Policy) -> None:
    def work(rank: Rank) -> None:
        rank.train(1)
        rank.model[2].bias = nn.Parameter(torch.zeros(6))
        with pytest.raises(RuntimeError, match=r"parameter 3 is prepared, and the model no longer has it"):
            rank.train(1)

    on_ranks(perceptron(), adamw, work, world=1, policy=policy)


def test_parameters_may_get_another_name_and_others_may_be_put_in_their_place_for_a_call() -> None:
    def work(rank: Rank) -> None:
        rank.train(1)
        others = {name: torch.zeros_like(each) for name, each in rank.model.named_parameters()}
        assert not functional_call(rank.model, others, (vectors(0, 0),)).any()
        parametrize.register_parametrization(rank.model[2], "weight", nn.Identity())
        before = rank.model[2].weight.clone()
        rank.train(2)
        assert not torch.equal(rank.model[2].weight, before)

    on_ranks(perceptron(), adamw, work, world=2, policy=BoundedDrift())


@pytest.mark.parametrize(
    "what, make, policies",
    [
        # All of them have the same number of bytes on both ranks, once they are aligned.
        ("model", lambda rank: (nn.Linear(10, 10 + rank), sgd), (EXACTLY, EXACTLY)),
        ("optimizer", lambda rank: (perceptron(), adamw if rank else sgd), (EXACTLY, EXACTLY)),
        ("policy", lambda rank: (perceptron(), sgd), (BoundedDrift(), BoundedDrift(max_lag=2))),
        ("policy", lambda rank: (perceptron(), sgd), (BoundedDrift(), ModelAveraging())),
    ],
)
def test_ranks_that_prepare_different_things_are_told(what: str, make: Any, policies: tuple[Any, Any]) -> None:
    def work(transport: Transport) -> None:
        model, make_optimizer = make(transport.rank)
        with pytest.raises(ValueError, match=f"rank 1 has prepared another {what} than rank 0"):
            prepare(model, make_optimizer(model), policy=policies[transport.rank], group=Group(transport))

    SimulatedNetwork(2).run(work)


@pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging()], ids=["drift", "averaging"])
def test_an_optimizer_of_another_model_is_refused(policy: Any) -> None:
    def work(transport: Transport) -> None:
        with pytest.raises(ValueError, match="the optimizer has none of the model's parameters"):
            prepare(perceptron(), sgd(perceptron()), policy=policy, group=Group(transport))

    SimulatedNetwork(2).run(work)


def test_the_model_comes_before_its_optimizer() -> None:
    model = perceptron()
    with pytest.raises(TypeError, match=r"prepare\(model, optimizer\): .* got SGD and Sequential"):
        prepare(sgd(model), model)  # type: ignore[type-var]


@pytest.mark.parametrize("second", [False, True], ids=["left out", "of another optimizer"])
def test_parameters_that_no_optimizer_has_are_named(second: bool, caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: Transport) -> None:
        model = perceptron()
        first, last = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
        prepare(model, first, group=Group(transport))
        if second:
            prepare(model, last, group=Group(transport))
        for step in range(2):
            regression(model, vectors(transport.rank, step)).backward()
            first.step()
            last.step()

    with caplog.at_level(logging.WARNING, "stormtorch"):
        SimulatedNetwork(2).run(work)
    told = [each.getMessage() for each in caplog.records]
    if second:
        assert not told
    else:
        assert len(told) == 2  # once on each rank
        assert all("2.weight, 2.bias" in each and "0.weight" not in each for each in told)
