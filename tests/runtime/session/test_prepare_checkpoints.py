# mypy: disable-error-code="attr-defined, no-untyped-call"
# torch.distributed has more than it declares, and torch's own backward is untyped.
"""Checkpoints are in torch's format: any number of ranks can load what any other number saved, as can plain torch."""

import copy
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from stormtorch import EXACT, BoundedDrift, GradientAveraging, ModelAveraging, Options, prepare
from stormtorch.policies.policy import Policy
from stormtorch_lab.jobs.ranks import Member, run_ranks
from training import (
    WORLD,
    MakeOptimizer,
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
    values,
    vectors,
)

pytestmark = pytest.mark.pure

BEFORE, AFTER = range(6), range(6, 12)


def groups(model: nn.Module) -> Optimizer:
    """Two groups, in another order than the model's, and one parameter that is not trained."""
    first, second, *others = model.parameters()
    second.requires_grad_(False)
    return torch.optim.AdamW([{"params": others, "lr": 0.01}, {"params": [second, first], "weight_decay": 0.5}])


def muon(model: nn.Module) -> Optimizer:
    return torch.optim.Muon([each for each in model.parameters() if each.dim() == 2], lr=0.01)


MAKES: dict[str, MakeOptimizer] = {
    "sgd": sgd,
    "adamw": adamw,
    "groups": groups,
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02),
    "muon": muon,
}


def save(model: nn.Module, optimizer: Optimizer) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return buffer.getvalue()


def load(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=True)


def restore(saved: bytes, model: nn.Module, optimizer: Optimizer) -> None:
    state = load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def flatten(state: Any) -> dict[str, Any]:
    """Flattens a nested dict, so that it can be compared."""
    if not isinstance(state, dict | list):
        return {"": state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {f"{key}/{name}": leaf for key, value in items for name, leaf in flatten(value).items()}


def assert_same_state(ours: Any, theirs: Any) -> None:
    one, other = flatten(ours), flatten(theirs)
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, (name, value, other[name])


def alone(model: nn.Module, make: MakeOptimizer, steps: range, saved: bytes | None = None) -> bytes:
    model = copy.deepcopy(model)
    optimizer = make(model)
    if saved is not None:
        restore(saved, model, optimizer)
    for step in steps:
        parts = [vectors(rank, step) for rank in range(WORLD)]
        plain_step(model, optimizer, mean_gradients(model, parts, regression))
    return save(model, optimizer)


def together(model: nn.Module, make: MakeOptimizer, steps: range, saved: bytes | None = None) -> bytes:
    def work(rank: Rank) -> bytes:
        if saved is not None:
            restore(saved, rank.model, rank.optimizer)
        rank.train(steps)
        return save(rank.model, rank.optimizer)

    found = on_ranks(model, make, work)
    for other in found[1:]:
        assert_same_state(load(other), load(found[0]))
    return found[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(MAKES))
def test_a_checkpoint_is_that_of_one_process_and_goes_on_in_one_or_in_many(name: str) -> None:
    model, make = perceptron(), MAKES[name]
    other = perceptron(seed=5)  # so that equal values can only come from the checkpoint
    half, whole = alone(model, make, BEFORE), alone(model, make, range(12))
    ours = together(model, make, BEFORE)
    assert_same_state(load(ours), load(half))
    assert list(load(ours)["model"]) == list(load(half)["model"])
    assert_same_state(load(alone(other, make, AFTER, ours)), load(whole))  # without us
    assert_same_state(load(together(other, make, AFTER, half)), load(whole))  # what was saved without us
    assert_same_state(load(together(other, make, AFTER, ours)), load(whole))  # as if it had not stopped


def test_state_from_before_prepare_is_kept() -> None:
    model = perceptron()
    half = alone(model, adamw, BEFORE)

    def begun(model: nn.Module) -> Optimizer:
        optimizer = adamw(model)
        restore(half, model, optimizer)
        return optimizer

    assert_same_state(load(together(model, begun, AFTER)), load(alone(model, adamw, range(12))))


@pytest.mark.parametrize("make", [adamw, muon], ids=["adamw", "muon"])
def test_two_ranks_go_on_where_four_have_stopped(make: MakeOptimizer) -> None:
    model = perceptron()
    saved = together(model, make, BEFORE)

    def both(rank: int, step: int) -> torch.Tensor:
        return torch.cat([vectors(2 * rank, step), vectors(2 * rank + 1, step)])

    def work(rank: Rank) -> tuple[list[float], list[torch.Tensor]]:
        data = vectors if rank.world == 4 else both
        restore(saved, rank.model, rank.optimizer)
        return rank.train(AFTER, data=data), rank.values()

    four = on_ranks(perceptron(seed=5), make, work, world=4)
    two = on_ranks(perceptron(seed=5), make, work, world=2)
    curves = [torch.tensor([losses for losses, _ in found]).mean(0) for found in (four, two)]
    torch.testing.assert_close(*curves)
    assert_close(two[0][1], four[0][1])


def test_resuming_makes_stale_replicas_the_same() -> None:
    model = perceptron()
    lossy: dict[str, Any] = {"policy": BoundedDrift(), "loss": 0.3, "options": Options(datagram_bytes=256)}

    def work(rank: Rank) -> tuple[list[torch.Tensor], bytes]:
        rank.train(BEFORE)
        stale = values(rank.model)
        return stale, save(rank.model, rank.optimizer)

    found = on_ranks(model, adamw, work, **lossy)
    assert any(not torch.equal(first, second) for first, second in zip(found[0][0], found[1][0], strict=True))
    for _, saved in found:
        assert_same_state(load(saved), load(found[0][1]))


# --- masters ----------------------------------------------------------------------------------------------------------


def slow(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def narrow(rank: int, step: int) -> torch.Tensor:
    return vectors(rank, step).bfloat16()


@pytest.mark.thorough
@pytest.mark.parametrize("make", [slow, muon], ids=["elements", "parameters"])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_masters_of_a_bfloat16_model_survive_in_the_checkpoint(order: str, make: MakeOptimizer) -> None:
    model = perceptron().bfloat16()

    def first(rank: Rank) -> tuple[bytes, bytes]:
        rank.train(BEFORE, data=narrow)
        half = save(rank.model, rank.optimizer)
        rank.train(AFTER, data=narrow)
        return half, save(rank.model, rank.optimizer)

    half, whole = on_ranks(model, make, first)[0]
    masters = load(half)["optimizer"]["state"][0]["master"]
    weights = load(half)["model"]["0.weight"]
    assert masters.dtype == torch.float32 and torch.equal(masters.bfloat16(), weights)
    assert not torch.equal(masters, weights.float())

    def second(rank: Rank) -> bytes:
        state = load(half)
        loads = [lambda: rank.model.load_state_dict(state["model"])]
        loads.append(lambda: rank.optimizer.load_state_dict(state["optimizer"]))
        for each in loads if order == "model first" else reversed(loads):
            each()
        rank.train(AFTER, data=narrow)
        return save(rank.model, rank.optimizer)

    for saved in on_ranks(perceptron(seed=5).bfloat16(), make, second):
        assert_same_state(load(saved), load(whole))


def test_a_load_that_would_replace_the_parameters_is_refused() -> None:
    state = perceptron(seed=5).state_dict()

    def work(rank: Rank) -> None:
        with pytest.raises(RuntimeError, match="assign"):
            rank.model.load_state_dict(state, assign=True)

    on_ranks(perceptron(), adamw, work)


POLICIES = [BoundedDrift(), BoundedDrift(overlap=True), ModelAveraging(), GradientAveraging()]


@pytest.mark.parametrize("use", ["forward", "backward", "step", "state_dict"])
@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_that_were_moved_are_noticed(policy: Policy, use: str) -> None:
    def work(rank: Rank) -> None:
        rank.train(1)
        rank.values()
        if use == "step":
            regression(rank.model, vectors(rank.rank, 1)).backward()
        elif use == "backward":
            rank.model.eval()  # torch checks no type until then
        rank.model.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match=r"parameter \d of shape .* was moved after prepare"):
            if use == "forward":
                rank.model(vectors(rank.rank, 1))
            elif use == "backward":
                rank.model(vectors(rank.rank, 1).bfloat16()).sum().backward()
                rank.optimizer.step()  # the first to notice, if gradients stay on their rank
            elif use == "step":
                rank.optimizer.step()
            else:
                rank.model.state_dict()

    on_ranks(perceptron(), adamw, work, policy=policy)


def renewed(model: nn.Module) -> None:
    for each in model.parameters():
        each.data = each.data.clone()


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("move", ["to", "cpu", "float", "there and back", "data"])
@pytest.mark.parametrize("policy", POLICIES)
def test_moving_a_model_to_where_it_is_changes_nothing(policy: Policy, move: str, when: str) -> None:
    moves: dict[str, Callable[[nn.Module], object]] = {
        "to": lambda model: model.to("cpu:0"),  # copies every tensor, as torch distinguishes "cpu:0" from "cpu"
        "cpu": lambda model: model.cpu(),
        "float": lambda model: model.float(),
        "there and back": lambda model: model.double().float(),
        "data": renewed,
    }

    def work(rank: Rank, *, moving: bool) -> list[torch.Tensor]:
        for step in range(4):
            rank.optimizer.session.wait()
            if moving and when == "before":
                moves[move](rank.model)
            regression(rank.model, vectors(rank.rank, step)).backward()
            if moving and when == "between":
                moves[move](rank.model)
            rank.optimizer.step()
            rank.optimizer.zero_grad(set_to_none=step % 2 == 0)
        rank.optimizer.session.wait()
        if moving:
            moves[move](rank.model)
        return rank.values()

    moved = on_ranks(perceptron(), adamw, lambda rank: work(rank, moving=True), policy=policy)
    for ours, theirs in zip(
        moved, on_ranks(perceptron(), adamw, lambda rank: work(rank, moving=False), policy=policy), strict=True
    ):
        assert_same(ours, theirs)


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def _with_dcp(member: Member, world: int, folder: str, saving: bool) -> list[torch.Tensor]:
    store = dist.PrefixStore(str(world), member.store)
    dist.init_process_group("storm", store=store, rank=member.rank, world_size=world)
    model = perceptron(seed=0 if saving else 5)
    optimizer = adamw(model)
    prepare(model, optimizer, policy=BoundedDrift(gradients=EXACT, broadcast=EXACT))
    rank = Rank(member.rank, world, model, optimizer)
    rank.train(BEFORE)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if saving:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    found = rank.values()
    rank.train(AFTER, rank=0)
    found += rank.values()
    dist.barrier()
    dist.destroy_process_group()
    return found


def _job(member: Member, folder: str) -> None:
    saved = _with_dcp(member, 3, folder, saving=True)
    half = len(saved) // 2
    assert_close(saved[:half], plain(perceptron(), adamw, BEFORE, world=3))
    if member.rank < 2:
        loaded = _with_dcp(member, 2, folder, saving=False)
        assert_same(loaded[:half], saved[:half])
        assert_close(loaded[half:], saved[half:])  # all ranks were given the same data: their number has no effect


@pytest.mark.thorough
def test_torchs_distributed_checkpoint_saves_on_three_ranks_and_loads_on_two() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_job, 3, (str(Path(folder, "it")),), timeout_s=60)
