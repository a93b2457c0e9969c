"""A long run through a storm: every one of a thousand all-reduces is the lossless result, bit for bit."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import OPTIONS, STORM, local_world

from reference import ENGINE_DTYPES, reduced, same_bits, values
from stormtorch import faults
from stormtorch.collectives import Group, Op, all_reduce
from stormtorch.udp.udp import UdpTransport

N, COUNT, IN_FLIGHT = 4, 1_000, 4


def plan() -> list[tuple[int, torch.dtype, Op]]:
    """Sizes of all magnitudes, most of them small, as gradients come in buckets and metrics in scalars."""
    chosen = random.Random(2025)
    return [
        (int(10 ** chosen.uniform(0.0, 5.4)), chosen.choice(ENGINE_DTYPES), chosen.choice([Op.SUM, Op.AVG]))
        for _ in range(COUNT)
    ]


@pytest.mark.slow
def test_a_thousand_all_reduces_through_a_storm_equal_the_lossless_results_bit_for_bit() -> None:
    cases = plan()

    def work(transport: UdpTransport) -> tuple[list[torch.Tensor], dict[str, Any]]:
        group = Group(transport)
        tensors = [values(group.rank, size, dtype) for size, dtype, _ in cases]
        pending = []
        for tensor, (_, _, op) in zip(tensors, cases, strict=True):
            # As in training: a few are under way while the next is begun.
            pending.append(all_reduce(group, tensor, op))
            if len(pending) == IN_FLIGHT:
                pending.pop(0).wait()
        for each in pending:
            each.wait()
        return tensors, transport.health()

    with faults(seed=2025, **STORM):
        results = local_world(N, work, options=replace(OPTIONS, datagram_bytes=1472), within_s=110.0)
    for index, (size, dtype, op) in enumerate(cases):
        wanted = reduced([values(rank, size, dtype) for rank in range(N)], op)
        for tensors, _ in results:
            assert same_bits(tensors[index], wanted), (index, size, dtype, op)
    for _, health in results:
        seen = health["faults"]["seen"]
        assert seen > 50_000, "it was a long run"
        for what, chance in (("lost", 0.20), ("duplicated", 0.04), ("reordered", 0.04), ("corrupted", 0.008)):
            assert abs(health["faults"][what] / seen - chance) < 0.01, "and the storm was what it was meant to be"
