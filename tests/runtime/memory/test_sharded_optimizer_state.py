"""State dicts of a sharded optimizer equal those of a whole one in torch, saved and loaded, for any world size."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from owners import SHAPES, Make, Optimizer, Owner, adamw, gradients, joined, momentum, numbers, owners, plain
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.runtime.members.prepared_optimizer import trained as parameters_of
from stormtorch.runtime.memory.sharded_optimizer import MASTER

pytestmark = pytest.mark.pure


def gathered(ranks: list[Owner]) -> list[dict[str, Any]]:
    """The state dict of the whole optimizer, as every rank gathers it."""

    def body(transport: Transport) -> dict[str, Any]:
        rank = ranks[transport.rank]
        return rank.shards.gather(rank.optimizer.state_dict(), Group(transport))

    return SimulatedNetwork(len(ranks), seed=1).run(body)


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for name, value in state.items():
            found = ours["state"][number][name]
            assert found.shape == value.shape and torch.equal(found, value), f"{name} of parameter {number}"


@pytest.mark.parametrize("whole", [False, True], ids=["elements", "parameters"])
@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("make", [adamw, momentum])
def test_gathered_state_is_what_torch_would_have_saved(make: Make, world: int, whole: bool) -> None:
    ranks = owners(world, make, whole=whole)
    for step in range(2):
        for rank in ranks:
            rank.step(gradients(rank.parameters, step))
    theirs = plain(make, 2).state_dict()
    for ours in gathered(ranks):
        assert_same_state(ours, theirs)


def test_gathered_state_of_an_optimizer_that_has_not_stepped_is_empty() -> None:
    for ours in gathered(owners(2, adamw)):
        assert_same_state(ours, adamw(numbers(SHAPES, 0)).state_dict())


@pytest.mark.parametrize("whole", [False, True], ids=["elements", "parameters"])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_an_optimizer_goes_on_from_what_plain_torch_saved(world: int, whole: bool) -> None:
    saved = plain(adamw, 2)
    ranks = owners(world, adamw, whole=whole)
    for rank in ranks:
        with torch.no_grad():
            for parameter, value in zip(rank.parameters, parameters_of(saved), strict=True):
                parameter.copy_(value)
        rank.optimizer.load_state_dict(rank.shards.scatter(saved.state_dict()))
        rank.step(gradients(rank.parameters, 2))
    for ours, theirs in zip(joined(ranks), parameters_of(plain(adamw, 3)), strict=True):
        assert torch.equal(ours, theirs.detach())
    assert_same_state(gathered(ranks)[0], plain(adamw, 3).state_dict())


def test_state_moves_from_a_world_of_one_size_to_another_with_its_masters() -> None:
    ranks = owners(3, adamw, dtype=torch.bfloat16)
    for rank in ranks:
        rank.step([torch.full(shape, 1e-3) for shape in SHAPES])
    saved = gathered(ranks)[0]
    masters = {number: state[MASTER] for number, state in saved["state"].items()}
    assert all(each.dtype == torch.float32 for each in masters.values())
    others = owners(2, adamw, dtype=torch.bfloat16)
    for rank in others:
        rank.optimizer.load_state_dict(rank.shards.scatter(saved))
        for _, piece, local_param in rank.shards.pieces:
            wanted = masters[piece.parameter].view(-1)[piece.offset : piece.offset + piece.count]
            assert torch.equal(local_param.detach(), wanted)
    assert_same_state(gathered(others)[1], saved)


def test_scattering_leaves_the_saved_state_as_it_was() -> None:
    saved = plain(adamw, 1).state_dict()
    before = copy.deepcopy(saved)
    (owner,) = owners(1, adamw)
    owner.optimizer.load_state_dict(owner.shards.scatter(saved))
    owner.step(gradients(owner.parameters, 1))
    assert_same_state(saved, before)


def test_settings_of_groups_and_further_entries_travel_with_the_state() -> None:
    (owner,) = owners(1, adamw)
    saved = {**plain(adamw, 1).state_dict(), "epoch": 3}
    saved["param_groups"][0]["lr"] = 0.5
    local = owner.shards.scatter(saved)
    assert local["epoch"] == 3
    owner.optimizer.load_state_dict(local)
    assert owner.optimizer.param_groups[0]["lr"] == 0.5
    assert gathered([owner])[0]["param_groups"][0]["lr"] == 0.5


def test_parameters_are_found_by_their_place_whatever_number_they_were_saved_under() -> None:
    saved = plain(adamw, 1).state_dict()
    renumbered = {
        "state": {10 * number: state for number, state in saved["state"].items()},
        "param_groups": [
            {**each, "params": [10 * number for number in each["params"]]} for each in saved["param_groups"]
        ],
    }
    for owner in owners(2, adamw):
        ours, theirs = owner.shards.scatter(renumbered), owner.shards.scatter(saved)
        assert_same_state(ours, theirs)


def test_a_state_of_other_parameter_groups_is_refused() -> None:
    (owner,) = owners(1, adamw)
    with pytest.raises(ValueError, match="other parameter groups"):
        owner.shards.scatter(adamw(numbers(SHAPES[:-1], 0)).state_dict())


class Counting(Optimizer):
    """Keeps state of every kind: of the parameter's shape, of another shape, and no tensor."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["sum"] = state.get("sum", 0.0) + parameter.grad
                    state["rows"] = torch.arange(2.0)
                    state["warm"] = True
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(0.1 * state["sum"])


@pytest.mark.parametrize("whole", [False, True], ids=["elements", "parameters"])
def test_state_that_is_not_as_long_as_the_parameter_belongs_to_every_piece(whole: bool) -> None:
    ranks = owners(3, Counting, whole=whole)
    for rank in ranks:
        rank.step(gradients(rank.parameters, 0))
    theirs = plain(Counting, 1).state_dict()["state"]
    saved = gathered(ranks)[0]
    others = owners(2, Counting, whole=whole)
    for rank in others:
        rank.optimizer.load_state_dict(rank.shards.scatter(saved))
    for ours in (saved, gathered(others)[0]):
        for number, state in theirs.items():
            found = ours["state"][number]
            assert torch.equal(found["sum"], state["sum"])
            assert torch.equal(found["rows"], state["rows"])
            assert (found["warm"], found["count"]) == (True, 1)
