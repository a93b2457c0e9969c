"""Pairwise masks: equal at both ends, cancelling in the sum, with the predicted noise if uploads are missing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stormtorch_lab.privacy.masks import (
    new_key,
    normals,
    pairwise_mask,
    pretended_secret,
    public_part,
    residue_variance,
    shared_secret,
)

pytestmark = pytest.mark.pure

SECRET = bytes(range(32))


def secrets_of(index: int, ranks: int) -> dict[int, bytes]:
    return {other: pretended_secret(1, index, other) for other in range(ranks) if other != index}


def test_both_ends_of_a_pair_have_the_same_secret_and_nobody_else_has() -> None:
    alice, bob, eve = new_key(), new_key(), new_key()
    ours = shared_secret(alice, public_part(bob))
    assert ours == shared_secret(bob, public_part(alice))
    assert len({ours, shared_secret(alice, public_part(eve)), shared_secret(eve, public_part(bob))}) == 3


@pytest.mark.parametrize("bad", [b"", bytes(31), bytes(33), bytes(32), bytes([1] + [0] * 31)], ids=len)
def test_what_is_no_public_key_is_refused(bad: bytes) -> None:
    with pytest.raises(ValueError):
        shared_secret(new_key(), bad)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 3))
def test_a_mask_does_not_depend_on_how_messages_are_cut(first: int, count: int, round_: int) -> None:
    whole = normals(SECRET, round_, 0, 400)
    assert torch.equal(normals(SECRET, round_, first, count), whole[first : first + count])


def test_rounds_secrets_and_places_far_away_have_masks_of_their_own() -> None:
    one = normals(SECRET, 0, 0, 1000)
    for other in (
        normals(SECRET, 1, 0, 1000),
        normals(bytes(32), 0, 0, 1000),
        normals(SECRET, 0, 1 << 33, 1000),
        normals(SECRET, 1 << 40, 0, 1000),
    ):
        assert abs(float(torch.dot(one, other))) / 1000 < 5.0 / math.sqrt(1000)


def test_masks_are_standard_normal() -> None:
    drawn = normals(SECRET, 3, 5, 200_000).double()
    assert float(drawn.mean()) == pytest.approx(0.0, abs=5.0 / math.sqrt(200_000))
    assert float(drawn.var()) == pytest.approx(1.0, abs=0.02)
    for bound in (0.5, 1.0, 2.0, 3.0):
        inside = math.erf(bound / math.sqrt(2.0))
        spread = math.sqrt(inside * (1.0 - inside) / 200_000)
        assert float((drawn.abs() < bound).double().mean()) == pytest.approx(inside, abs=5.0 * spread)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_masks_of_all_ranks_cancel_out(ranks: int) -> None:
    masks = [pairwise_mask(index, secrets_of(index, ranks), 4, 30, 500, 10.0) for index in range(ranks)]
    assert float(torch.stack(masks).sum(0).abs().max()) < 1e-4
    assert float(masks[0].std()) == pytest.approx(10.0 * math.sqrt(ranks - 1), rel=0.15)


@pytest.mark.parametrize("missing", [0, 1, 2, 4])
def test_what_is_missing_leaves_the_variance_that_theory_says(missing: int) -> None:
    ranks, count, noise, mask = 6, 40_000, 0.3, 0.7
    arrived = ranks - missing
    random = torch.Generator().manual_seed(missing)
    total = torch.zeros(count)
    for index in range(arrived):
        total += torch.randn(count, generator=random) * noise
        total += pairwise_mask(index, secrets_of(index, ranks), missing, 0, count, mask)
    expected = residue_variance(arrived, missing, noise, mask)
    assert float(total.double().var()) == pytest.approx(expected, rel=6.0 * math.sqrt(2.0 / count))
