"""Sharded optimizer on one rank: which pieces and gradients it gets, and what its step does to them."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from owners import SHAPES, Make, Optimizer, Owner, adamw, gradients, joined, momentum, numbers, owners, plain
from stormtorch.runtime.members.prepared_optimizer import trained as parameters_of
from stormtorch.runtime.memory.sharded_optimizer import owns_whole

pytestmark = pytest.mark.pure


def nan_somewhere(optimizer: Optimizer) -> bool:
    grads = [each.grad for each in parameters_of(optimizer) if each.grad is not None]
    return any(bool(each.isnan().any()) for each in grads)


# --- which optimizers may be given parts of parameters ----------------------------------------------------------------


class Own(torch.optim.AdamW):
    """A class derived from torch's may need whole parameters: only known classes may get parts."""


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (torch.optim.SGD, False),
        (torch.optim.AdamW, False),
        (torch.optim.Rprop, False),
        (torch.optim.Adafactor, True),
        (Own, True),
    ],
)
def test_only_optimizers_known_to_work_element_by_element_are_given_parts(make: Any, whole: bool) -> None:
    optimizer = make([nn.Parameter(torch.zeros(4, 4))])
    assert owns_whole(optimizer, "auto") == whole
    assert owns_whole(optimizer, "parameters")
    assert not owns_whole(optimizer, "elements")


@pytest.mark.parametrize("ownership", ["auto", "elements", "parameters"])
def test_optimizers_that_cannot_work_on_shards_are_refused_with_a_way_out(ownership: str) -> None:
    for make, advice in ((torch.optim.LBFGS, "use another"), (torch.optim.SparseAdam, "use Adam")):
        with pytest.raises(ValueError, match=advice):
            owns_whole(make([nn.Parameter(torch.zeros(4))]), ownership)


# --- pieces -----------------------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6),
    world=st.integers(1, 5),
    bucket_bytes=st.sampled_from([1.0, 300.0, 1e6]),
    whole=st.booleans(),
)
def test_every_number_has_exactly_one_owner(
    shapes: list[tuple[int, ...]], world: int, bucket_bytes: float, whole: bool
) -> None:
    counted = [torch.zeros(shape) for shape in shapes]
    for rank in range(world):
        owner = Owner(rank, world, adamw(numbers(shapes, 0)), whole=whole, bucket_bytes=bucket_bytes)
        for _, piece, local_param in owner.shards.pieces:
            counted[piece.parameter].view(-1)[piece.offset : piece.offset + piece.count] += 1
            assert local_param.numel() == piece.count
            if whole:
                assert local_param.shape == shapes[piece.parameter]
    assert all(bool((each == 1).all()) for each in counted)


def test_a_piece_is_the_memory_of_the_model_itself() -> None:
    for owner in owners(3, adamw):
        for _, piece, local_param in owner.shards.pieces:
            part = owner.parameters[piece.parameter].detach().view(-1)[piece.offset : piece.offset + piece.count]
            assert torch.equal(local_param.detach(), part)
            assert local_param.data_ptr() == part.data_ptr()


def test_a_piece_of_fewer_bits_is_its_float32_master() -> None:
    for owner in owners(2, adamw, dtype=torch.bfloat16):
        for bucket, piece, local_param in owner.shards.pieces:
            part = owner.parameters[piece.parameter].detach().view(-1)[piece.offset : piece.offset + piece.count]
            assert local_param.dtype == torch.float32
            assert torch.equal(local_param.detach(), part.float())
            assert local_param.data_ptr() == bucket.within_own(piece, bucket.masters).data_ptr()


def test_pieces_stay_in_the_group_of_their_parameter_with_its_settings() -> None:
    first = numbers(SHAPES, 0)
    for rank in range(2):
        given = copy.deepcopy(first)
        optimizer = torch.optim.AdamW([{"params": given[:2], "lr": 0.1}, {"params": given[2:], "lr": 0.2}])
        owner = Owner(rank, 2, optimizer)
        for number, group in enumerate(optimizer.param_groups):
            assert group["lr"] == (0.1, 0.2)[number]
            held = {id(each) for each in group["params"]}
            for _, piece, local_param in owner.shards.pieces:
                assert (id(local_param) in held) == ((piece.parameter >= 2) == (number == 1))


# --- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["elements", "parameters"])
@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("make", [adamw, momentum])
def test_shards_together_step_as_the_whole_does(make: Make, world: int, whole: bool) -> None:
    ranks = owners(world, make, whole=whole)
    for step in range(3):
        for rank in ranks:
            rank.step(gradients(rank.parameters, step))
    for ours, theirs in zip(joined(ranks), parameters_of(plain(make, 3)), strict=True):
        assert torch.equal(ours, theirs.detach())


def test_parameters_of_fewer_bits_step_in_float32_and_keep_what_their_own_bits_would_lose() -> None:
    ranks = owners(2, momentum, dtype=torch.bfloat16)
    wide = momentum([nn.Parameter(each.detach().float()) for each in numbers(SHAPES, 0, torch.bfloat16)])
    for _ in range(4):
        for parameter in parameters_of(wide):
            parameter.grad = torch.full_like(parameter, 1e-4)  # each update is less than a bfloat16 can show
        wide.step()
        for rank in ranks:
            rank.step([torch.full(shape, 1e-4) for shape in SHAPES])
    for ours, theirs in zip(joined(ranks), parameters_of(wide), strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs.detach().bfloat16())
    for rank in ranks:
        for _, piece, local_param in rank.shards.pieces:
            exact = parameters_of(wide)[piece.parameter].detach().view(-1)[piece.offset : piece.offset + piece.count]
            assert torch.equal(local_param.detach(), exact)


def test_an_optimizer_that_has_stepped_before_goes_on_with_its_state() -> None:
    def begun(parameters: Iterable[Any]) -> Optimizer:
        optimizer = adamw(parameters)
        for parameter, grad in zip(parameters_of(optimizer), gradients(parameters_of(optimizer), 0), strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    ranks = [Owner(rank, 3, begun(numbers(SHAPES, 0))) for rank in range(3)]
    for rank in ranks:
        rank.step(gradients(rank.parameters, 1))
    for ours, theirs in zip(joined(ranks), parameters_of(plain(adamw, 2)), strict=True):
        assert torch.equal(ours, theirs.detach())


def test_state_that_was_made_for_fewer_bits_gets_the_bits_of_the_masters() -> None:
    optimizer = plain(adamw, 1, torch.bfloat16)
    owner = Owner(0, 2, optimizer)
    for _, _, local_param in owner.shards.pieces:
        assert optimizer.state[local_param]["exp_avg"].dtype == torch.float32
        assert optimizer.state[local_param]["step"] == 1.0
    assert len(optimizer.state) == len(owner.shards.pieces)


# --- gradients --------------------------------------------------------------------------------------------------------


def test_pieces_of_parameters_that_nobody_used_have_no_gradient() -> None:
    used = [True, False, True, False, True]
    for owner in owners(2, momentum):
        for given_as in (used, torch.tensor(used)):
            owner.shards.assign_gradients([True] * 5, finite=True)
            owner.shards.assign_gradients(given_as, finite=True)
            for _, piece, local_param in owner.shards.pieces:
                assert (local_param.grad is not None) == used[piece.parameter]


def test_a_gradient_is_the_memory_that_the_exchange_writes_to() -> None:
    (owner,) = owners(1, momentum)
    owner.shards.assign_gradients([True] * 5, finite=True)
    for bucket in owner.buckets:
        bucket.own_grads.fill_(3.0)
    for _, _, local_param in owner.shards.pieces:
        assert local_param.grad is not None and bool((local_param.grad == 3.0).all())


@pytest.mark.parametrize("used", [[True] * 5, [False] * 5, [False, False, True, False, False]])
def test_every_rank_finds_a_nan_where_any_ranks_gradient_was_not_finite(used: list[bool]) -> None:
    # GradScaler skips a step if it finds a NaN, and all ranks must skip the same steps, also one with an empty shard.
    ranks = owners(8, momentum, whole=True)
    assert any(not rank.shards.pieces for rank in ranks)
    for rank in ranks:
        rank.shards.assign_gradients(used, finite=False)
        assert nan_somewhere(rank.optimizer)
        rank.shards.clear_gradients()
        rank.shards.assign_gradients(used, finite=True)
        for bucket in rank.buckets:
            bucket.own_grads.zero_()
        assert not nan_somewhere(rank.optimizer)
        assert any(each.grad is not None for each in parameters_of(rank.optimizer))


@pytest.mark.parametrize("finite", [True, False])
def test_a_step_never_sees_the_gradient_that_stands_in_for_none(finite: bool) -> None:
    ranks = owners(8, momentum, whole=True)
    for rank in (each for each in ranks if not each.shards.pieces):
        before = [each.detach().clone() for each in parameters_of(rank.optimizer)]
        rank.shards.assign_gradients([True] * 5, finite=finite)
        rank.shards.begin_step()
        rank.optimizer.step()
        rank.shards.assign_gradients([True] * 5, finite=finite)  # as a closure within the step does
        assert all(each.grad is None for each in parameters_of(rank.optimizer))
        rank.shards.end_step()
        assert rank.optimizer.state_dict()["state"] == {}
        assert all(map(torch.equal, before, parameters_of(rank.optimizer)))


def test_cleared_gradients_are_gone() -> None:
    for owner in owners(8, momentum, whole=True):
        owner.shards.assign_gradients([True] * 5, finite=True)
        owner.shards.clear_gradients()
        assert all(each.grad is None for each in parameters_of(owner.optimizer))


def test_pieces_are_settled_until_the_optimizer_changes_them_and_again_after_the_step() -> None:
    (owner,) = owners(1, momentum)
    shards = owner.shards
    shards.assign_gradients([True] * 5, finite=True)
    seen = [shards.settled]
    shards.begin_step()
    seen.append(shards.settled)  # a closure runs first
    owner.optimizer.step()
    seen.append(shards.settled)
    shards.end_step()
    assert [*seen, shards.settled] == [True, True, False, True]
