"""Theory of redundancy: blocks as in the engine, residual loss against sampled losses, parity that a wire allows."""

import random

import pytest

from stormtorch import theory

pytestmark = pytest.mark.pure


def drawn(p: float, data: int, redundancy: float, burst: float, messages: int) -> float:
    """Fraction of chunks that stays lost where losses are drawn, chunk after chunk as they are sent."""
    rng, bad, lost = random.Random(1), False, 0
    enter, leave = (p, 1.0 - p) if burst == 1.0 else (p / (burst * (1.0 - p)), 1.0 / burst)
    for _ in range(messages):
        for blocks in theory.stretches_of(data):
            n, m = len(blocks), theory.block_parity(redundancy, blocks[0])
            arrived, missing = [0] * n, [0] * n
            for place in range(sum(blocks) + n * m):
                bad = rng.random() >= leave if bad else rng.random() < enter
                is_data = place < sum(blocks)
                block = (place if is_data else place - sum(blocks)) % n
                arrived[block] += not bad
                missing[block] += bad and is_data
            lost += sum(gone for gone, there, k in zip(missing, arrived, blocks, strict=True) if there < k)
    return lost / (data * messages)


@pytest.mark.parametrize("burst", [1.0, 4.0])
@pytest.mark.parametrize(
    ("p", "data", "redundancy"), [(0.4, 7, 8 / 7), (0.4, 40, 0.6), (0.2, 300, 0.26), (0.1, 1, 1.0), (0.3, 5, 0.0)]
)
def test_what_stays_lost_is_what_drawn_losses_leave(p: float, data: int, redundancy: float, burst: float) -> None:
    expected = theory.residual_loss(p, data, redundancy, burst)
    found = drawn(p, data, redundancy, burst, messages=150_000 // (data + 10))
    assert found == pytest.approx(expected, rel=0.15, abs=0.004)
    assert expected == pytest.approx(p) if redundancy == 0.0 else expected < p


@pytest.mark.parametrize("data", [1, 2, 127, 128, 129, 512, 513, 5000])
def test_messages_are_cut_as_in_the_engine(data: int) -> None:
    stretches = theory.stretches_of(data)
    assert sum(map(sum, stretches)) == data
    assert len(stretches) == -(-data // 512)
    for blocks in stretches:
        assert len(blocks) <= 4
        assert 128 >= blocks[0] >= blocks[-1] >= blocks[0] - 1
        for redundancy in (0.1, 1.2, 4.0):
            assert blocks[0] + theory.block_parity(redundancy, blocks[0]) <= 255


def test_a_number_that_a_division_left_above_a_whole_one_is_no_further_chunk() -> None:
    for k in range(1, 129):
        assert all(theory.block_parity(m / k, k) == m for m in range(min(2 * k, 255 - k)))


@pytest.mark.parametrize("data", [1, 7, 100, 1000])
def test_a_narrow_wire_pays_for_parity_within_its_share(data: int) -> None:
    assert theory.most_redundancy(data, 1.0) == 0.0
    most = theory.most_redundancy(data, 3.97)
    bytes_sent = (data + theory.parity_of(most, data)) / (3.97 * data)
    assert 0.55 - 1 / (3.97 * min(data, 100)) < bytes_sent <= 0.55 or most * 128 >= 120  # a block has 255 chunks


def test_the_least_redundancy_leaves_what_it_should_and_one_chunk_less_does_not() -> None:
    for p, data in ((0.1, 30), (0.3, 30), (0.4, 128), (0.25, 700)):
        least, k = theory.least_redundancy(p, data, 3.0), theory.stretches_of(data)[0][0]
        assert theory.residual_loss(p, data, least) <= 0.05 < theory.residual_loss(p, data, least - 1 / k)
    assert theory.least_redundancy(0.05, 30, 3.0) == 0.0
    assert theory.least_redundancy(0.4, 7, 0.5) == 0.5  # not even that suffices
    with pytest.raises(ValueError, match="redundancy must"):
        theory.residual_loss(0.1, 7, -1.0)
