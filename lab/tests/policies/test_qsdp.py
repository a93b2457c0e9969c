"""QSDP: the lossless algorithm where nothing is rounded, and near it in few bits, on ranks and on virtual workers."""

from typing import Any

import pytest
import torch

from simulating import simulated
from stormtorch import EXACT, LOSSY, BoundedDrift
from stormtorch_lab import QSDP
from training import Rank, adamw, assert_close, assert_same, on_ranks, perceptron, plain, regression, trained, values

pytestmark = pytest.mark.pure

STEPS = 8
LOSSLESS = BoundedDrift(reliability=EXACT, lead=0.0)


@pytest.mark.parametrize("lost", [0.0, 0.2])
def test_without_rounding_it_is_the_lossless_algorithm_bit_for_bit_on_ranks(lost: float) -> None:
    found, expected = (
        trained(perceptron(), adamw, STEPS, policy=policy, loss=lost) for policy in (QSDP(bits=32), LOSSLESS)
    )
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert_close(found[0], plain(perceptron(), adamw, STEPS))


def test_without_rounding_it_is_the_lossless_algorithm_bit_for_bit_on_virtual_workers() -> None:
    found, expected = (
        simulated(perceptron(), adamw, STEPS, policy=policy, network=0.2, seed=1)
        for policy in (QSDP(bits=32), LOSSLESS)
    )
    assert_same(found, expected)


@pytest.mark.parametrize(("bits", "off"), [(8, 0.01), (4, 0.15)])
def test_copies_are_off_by_the_rounding_alone_and_owners_by_nothing(bits: Any, off: float) -> None:
    def work(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rank.train(STEPS)
        return values(rank.model), rank.values()

    found = on_ranks(perceptron(inside=100), adamw, work, policy=QSDP(bits=bits), loss=0.1)
    for mine, owned in found:
        assert_same(owned, found[0][1])
        apart = max(float((one - other).abs().max()) for one, other in zip(mine, owned, strict=True))
        span = max(float(each.abs().max()) for each in owned)
        assert 0.0 < apart < off * span


@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits_learn_about_as_much_on_virtual_workers(bits: Any) -> None:
    model = perceptron(inside=100)

    def judged(found: list[torch.Tensor]) -> float:
        held_out = torch.randn(256, 8, generator=torch.Generator().manual_seed(99))
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), found, strict=True):
                parameter.copy_(value)
            return regression(model, held_out).item()

    untrained = judged(values(perceptron(inside=100)))
    lossless = judged(plain(perceptron(inside=100), adamw, 40))
    few = judged(simulated(perceptron(inside=100), adamw, 40, policy=QSDP(bits=bits), network=0.1, seed=1))
    assert lossless < 0.6 * untrained
    assert few == pytest.approx(lossless, rel=0.05)


def test_its_settings_are_checked_and_bits_choose_the_wire() -> None:
    assert [QSDP(bits=bits).wire for bits in (32, 8)] == [torch.float32, torch.int8]
    assert QSDP().up == QSDP().down == EXACT and QSDP(reliability=LOSSY).down == LOSSY
    with pytest.raises(ValueError, match="bits must be 32, 8 or 4"):
        QSDP(bits=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="wire"):
        QSDP(wire=torch.int8)  # type: ignore[call-arg]
