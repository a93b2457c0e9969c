# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Models with noise and masks: visible to an owner: noise for one rank, the mean for all."""

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import EXACT, RankPolicy, StormError
from stormtorch.checks import BadSetting
from stormtorch.policies.memory import Memory, MemoryStore
from stormtorch_lab import LightDp, simulate
from stormtorch_lab.privacy.masks import residue_variance
from training import assert_close, perceptron, sgd, trained

pytestmark = pytest.mark.pure

RANKS, CHUNKS, EACH = 5, 6, 300


def rank_of(index: int, *, round_: int = 3, ranks: int = RANKS) -> Memory:
    return MemoryStore(CHUNKS * EACH).chunks(0, CHUNKS, EACH).told(index=index, ranks=ranks, round_=round_, offset=1000)


def met(policy: LightDp) -> list[LightDp]:
    """A policy on each of several ranks, in separate processes, after their key exchange."""
    each = [replace(policy) for _ in range(RANKS)]
    told = [one.meet(rank_of(index)) for index, one in enumerate(each)]
    for index, one in enumerate(each):
        one.met(rank_of(index), told)
    return each


@pytest.mark.parametrize("seed", [None, 5], ids=["met", "seed"])
def test_masks_hide_one_model_and_are_gone_from_the_sum_of_all(seed: int | None) -> None:
    policy = LightDp(mask=50.0, key_seed=seed)
    each = met(policy) if seed is None else [policy] * RANKS
    own = torch.ones(CHUNKS, EACH)
    uploads = [one.send(own * index, 0.0, rank_of(index)) for index, one in enumerate(each)]
    for upload in uploads:
        assert float(upload.std()) == pytest.approx(50.0 * math.sqrt(RANKS - 1), rel=0.1)
    assert_close([torch.stack(uploads).mean(0)], [own * (RANKS - 1) / 2], atol=1e-3)
    again = each[0].send(own, 0.0, rank_of(0, round_=4))
    assert abs(float(torch.corrcoef(torch.stack([again.flatten(), uploads[0].flatten()]))[0, 1])) < 0.12


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_the_sum_of_those_that_arrive_has_the_variance_that_theory_says(missing: int) -> None:
    policy = LightDp(noise=0.4, mask=0.9, key_seed=2)
    sums = torch.zeros(CHUNKS, EACH)
    squares = []
    for round_ in range(20):
        sums = sum(
            (policy.send(torch.zeros(CHUNKS, EACH), 0.0, rank_of(i, round_=round_)) for i in range(RANKS - missing)),
            start=torch.zeros(CHUNKS, EACH),
        )
        squares.append(float(sums.square().mean()))
    expected = residue_variance(RANKS - missing, missing, 0.4, 0.9)
    assert sum(squares) / 20 == pytest.approx(expected, rel=6.0 * math.sqrt(2.0 / (20 * CHUNKS * EACH)))


def test_ranks_with_masks_average_as_ranks_without() -> None:
    def found(policy: RankPolicy) -> list[list[torch.Tensor]]:
        return trained(perceptron(inside=300), sgd, 4, policy=policy, world=3)

    masked = found(LightDp(mask=10.0, key_seed=1, reliability=EXACT, every=2))
    for ours, theirs in zip(masked, found(RankPolicy(reliability=EXACT, every=2)), strict=True):
        assert_close(ours, theirs, atol=2e-5)


def test_virtual_workers_with_masks_learn_as_without_where_nothing_is_lost() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch)
        return out.square().mean()

    def curve(network: float, **settings: Any) -> list[float]:
        return [
            value
            for _, value in simulate(
                perceptron(inside=300),
                loss,
                lambda step, first, last: torch.stack(
                    [torch.full((2, 8), math.sin(step + worker)) for worker in range(first, last)]
                ),
                lambda parameters: torch.optim.SGD(parameters, lr=0.05),
                workers=4,
                steps=6,
                network=network,
                policy=LightDp(key_seed=3, every=1, **settings),
            ).curve
        ]

    assert curve(0.0, mask=5.0) == pytest.approx(curve(0.0), abs=1e-3)
    assert max(curve(0.3, mask=5.0)[1:]) > 2.0 * max(curve(0.3)[1:])  # masks whose counterpart is lost stay in the mean


def test_without_meeting_there_are_no_masks_and_an_error_says_so() -> None:
    with pytest.raises(StormError, match=r"rank 1 shares secrets with 0 of 4 other ranks: masks need meet\(\)"):
        LightDp(mask=1.0).send(torch.zeros(CHUNKS, EACH), 0.0, rank_of(1))
    alone = LightDp(mask=1.0).send(torch.zeros(CHUNKS, EACH), 0.0, rank_of(0, ranks=1))
    assert not bool(alone.any())


def test_keys_and_secrets_stay_in_their_process() -> None:
    one = met(LightDp(mask=1.0, noise=1.0))[0]
    one.send(torch.zeros(CHUNKS, EACH), 0.0, rank_of(0))
    copied = pickle.loads(pickle.dumps(one))
    assert copied == one and repr(copied) == repr(one)
    assert set(one.__dict__) - set(copied.__dict__) == {"_keys", "_secrets", "_generator"}
    assert not one._of("keys")


def test_what_is_told_may_be_anything() -> None:
    policy = LightDp(mask=1.0)
    own = policy.meet(rank_of(0))
    with pytest.raises(ValueError, match="a public key has 32 bytes, got 3"):
        policy.met(rank_of(0), [own, b"key", own, own, own])


@pytest.mark.parametrize(
    "name, settings",
    [("noise", {"noise": -1.0}), ("mask", {"mask": -1.0}), ("wire", {"mask": 1.0, "wire": torch.int8})],
)
def test_what_is_no_setting_is_refused_by_name(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match=f"^{name} must"):
        LightDp(**settings)
