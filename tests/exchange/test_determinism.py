"""Exact all-reduce gives the same bits on every rank, every time, whatever the network does to the order of arrival."""

from dataclasses import replace

import pytest
import torch
from conftest import OPTIONS, STORM, local_world, processes, simulated

from reference import ENGINE_DTYPES, reduced, same_bits, values
from stormtorch import Options, faults
from stormtorch.collectives import Group, Op, all_reduce, reduce, reduce_scatter
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork, SimulatedTransport
from stormtorch.udp.udp import UdpTransport

pytestmark = pytest.mark.pure

N = 5
# Sent directly to every rank, as the collective chooses, and in two stages.
SIZES = (1_001, 30_011, 300_017)


def all_sums(transport: Transport) -> list[torch.Tensor]:
    group = Group(transport)
    results = []
    for size in SIZES:
        for dtype in ENGINE_DTYPES:
            for op in (Op.SUM, Op.AVG):
                results.append(values(group.rank, size, dtype))
                all_reduce(group, results[-1], op).wait()
    return results


def rank_order_sums(n: int = N) -> list[torch.Tensor]:
    return [
        reduced([values(rank, size, dtype) for rank in range(n)], op)
        for size in SIZES
        for dtype in ENGINE_DTYPES
        for op in (Op.SUM, Op.AVG)
    ]


def assert_all_equal(by_rank: list[list[torch.Tensor]], wanted: list[torch.Tensor]) -> None:
    for results in by_rank:
        for result, reference in zip(results, wanted, strict=True):
            assert same_bits(result, reference)


def test_the_values_tell_one_order_of_summation_from_another() -> None:
    for size in SIZES:
        for dtype in ENGINE_DTYPES:
            contributions = [values(rank, size, dtype) for rank in range(N)]
            for other in (contributions[::-1], contributions[1:] + contributions[:1]):
                assert not same_bits(reduced(contributions, Op.SUM), reduced(other, Op.SUM))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8))
def test_no_seed_of_loss_and_reordering_changes_a_bit(seed: int) -> None:
    knobs = {**STORM, "reorder": 0.3, "jitter_ms": 0.2 * seed}
    assert_all_equal(simulated(N, all_sums, seed=seed, **knobs), rank_order_sums())


@pytest.mark.thorough
def test_neither_datagram_size_nor_seal_changes_a_bit() -> None:
    for options in (
        Options(datagram_bytes=256),
        Options(datagram_bytes=8_972),
        Options(datagram_bytes=65_507),
        Options(datagram_bytes=1472, key=b"sixteen bytes or more"),
    ):
        assert_all_equal(simulated(N, all_sums, options=options, loss=0.1), rank_order_sums())


def test_a_run_of_the_simulator_depends_on_its_seed_alone() -> None:
    def work(transport: SimulatedTransport) -> tuple[list[float], list[int], dict[str, object]]:
        group = Group(transport)
        arrivals = [all_reduce(group, values(group.rank, 30_000)).wait()[0] for _ in range(5)]
        return [each.elapsed_s for each in arrivals], [each.repaired for each in arrivals], transport.health()

    first, again, other = (SimulatedNetwork(4, seed=seed, **STORM).run(work) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", range(4))
def test_repetitions_over_udp_give_the_same_bits(seed: int) -> None:
    with faults(seed=seed, **STORM):
        results = local_world(N, all_sums, options=replace(OPTIONS, datagram_bytes=1472))
    assert_all_equal(results, rank_order_sums())


def test_processes_give_the_same_bits() -> None:
    assert_all_equal(processes(2, in_process), rank_order_sums(2))


def in_process(transport: UdpTransport) -> list[torch.Tensor]:
    with faults(seed=transport.rank, **STORM):
        return all_sums(transport)


def test_all_reduce_reduce_and_reduce_scatter_agree_to_the_bit() -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        group = Group(transport)
        mine = values(group.rank, N * 4_000)
        by_all_reduce, by_reduce = mine.clone(), mine.clone()
        all_reduce(group, by_all_reduce).wait()
        reduce(group, by_reduce, 2).wait()
        part = torch.empty(4_000)
        reduce_scatter(group, part, list(mine.chunk(N))).wait()
        return [by_all_reduce, by_reduce, part]

    results = simulated(N, work, **STORM)
    wanted = reduced([values(rank, N * 4_000) for rank in range(N)], Op.SUM)
    assert same_bits(results[2][1], wanted)
    for rank, (by_all_reduce, _, part) in enumerate(results):
        assert same_bits(by_all_reduce, wanted)
        assert same_bits(part, wanted.chunk(N)[rank])
