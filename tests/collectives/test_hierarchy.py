"""Collectives of ranks that share machines: the same results, fewer bytes between machines, loss only there."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import STORM, local_world

from reference import ENGINE_DTYPES, reduced, same_bits, values
from stormtorch import EXACT, LOSSY, Reliability
from stormtorch.collectives import (
    Group,
    Op,
    Pending,
    all_gather,
    all_reduce,
    all_reduce_on_grids,
    broadcast,
    hierarchy,
    reduce_scatter,
    reduce_scatter_on_grids,
)
from stormtorch.collectives.all_gather import all_gather as flat_all_gather
from stormtorch.collectives.all_reduce import all_reduce as flat_all_reduce
from stormtorch.collectives.broadcast import broadcast as flat_broadcast
from stormtorch.collectives.pipeline import Pipeline
from stormtorch.collectives.reduce_scatter import reduce_scatter as flat_reduce_scatter
from stormtorch.errors import Closed, PeerFailed, PeerSilent, SizeMismatch, StormError
from stormtorch.exchange.exchange import Plan, Transport
from stormtorch.exchange.options import Options
from stormtorch.exchange.simulated import SimulatedNetwork

LAYOUTS = ["aabb", "abab", "abbcca", "aaabbb", "aabbccdd"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets small tensors take the way of large ones, in several pieces."""
    monkeypatch.setattr(hierarchy, "_SMALLEST_BYTES", 0)
    monkeypatch.setattr(hierarchy, "_PIECE_BYTES_PER_RANK", 1500)
    yield


def run(layout: str, work: Callable[[Transport], Any], **knobs: Any) -> list[Any]:
    return SimulatedNetwork(len(layout), machines=layout, seed=1, **knobs).run(work)


def machines_of(layout: str) -> list[list[int]]:
    return [[rank for rank, name in enumerate(layout) if name == machine] for machine in dict.fromkeys(layout)]


def by_machines(layout: str, contributions: list[torch.Tensor], op: Op) -> torch.Tensor:
    """The reduction inside each machine, then over machines."""
    inside = [reduced([contributions[rank] for rank in ranks], op) for ranks in machines_of(layout)]
    return reduced(inside, op)


@pytest.mark.thorough
@pytest.mark.pure
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_reductions_give_the_same_bits_on_all_ranks_whatever_the_size(layout: str, small: None) -> None:
    chosen, n = random.Random(layout), len(layout)
    cases = [
        (chosen.choice([0, 1, 5, 100, 3000, chosen.randrange(20_000)]), chosen.choice(ENGINE_DTYPES), op)
        for op in (Op.SUM, Op.AVG)
        for _ in range(6)
    ]

    def work(transport: Transport) -> list[list[torch.Tensor]]:
        group, results = Group(transport), []
        for size, dtype, op in cases:
            whole = values(group.rank, size, dtype)
            pending = all_reduce(group, whole, op)
            assert isinstance(pending, Pipeline)
            inputs = [values(group.rank, size // 4 + 3 * peer, dtype, seed=peer + 1) for peer in range(n)]
            output = torch.empty_like(inputs[group.rank])
            scattered = reduce_scatter(group, output, inputs, op)
            scattered.wait()
            pending.wait()
            results.append([whole, output])
        return results

    for rank, results in enumerate(run(layout, work, **STORM)):
        for (size, dtype, op), (whole, output) in zip(cases, results, strict=True):
            expected = by_machines(layout, [values(peer, size, dtype) for peer in range(n)], op)
            assert same_bits(whole, expected), (size, dtype, op, rank)
            parts = [values(peer, size // 4 + 3 * rank, dtype, seed=rank + 1) for peer in range(n)]
            assert same_bits(output, by_machines(layout, parts, op)), (size, dtype, op, rank)


@pytest.mark.thorough
@pytest.mark.pure
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_arrive_whatever_the_layout_and_the_root(layout: str, small: None) -> None:
    n = len(layout)
    cases = [(0, torch.float32), (7, torch.int64), (5000, torch.bfloat16), (20_001, torch.uint8), (9000, torch.float64)]

    def work(transport: Transport) -> list[list[torch.Tensor]]:
        group, results = Group(transport), []
        for index, (size, dtype) in enumerate(cases):
            tensor = values(group.rank, size, dtype)
            outputs = [torch.zeros(size + 3 * peer, dtype=dtype) for peer in range(n)]
            gathering = all_gather(group, outputs, values(group.rank, size + 3 * group.rank, dtype, seed=1))
            casting = broadcast(group, tensor, (index + 1) % n)
            assert isinstance(gathering, Pipeline) and isinstance(casting, Pipeline)
            casting.wait()
            gathering.wait()
            results.append([tensor, *outputs])
        return results

    for results in run(layout, work, **STORM):
        for index, (size, dtype) in enumerate(cases):
            assert same_bits(results[index][0], values((index + 1) % n, size, dtype))
            for peer in range(n):
                assert same_bits(results[index][1 + peer], values(peer, size + 3 * peer, dtype, seed=1))


@pytest.mark.pure
@pytest.mark.parametrize("layout", ["aaab", "aabbc", "abc", "aaaa", "ab"])
def test_uneven_layouts_and_single_ranks_go_the_flat_way(layout: str, small: None) -> None:
    def work(transport: Transport) -> torch.Tensor:
        group = Group(transport)
        tensor = values(group.rank, 3000)
        pending = all_reduce(group, tensor)
        assert group.node_layout is None and not isinstance(pending, Pipeline)
        pending.wait()
        return tensor

    expected = reduced([values(rank, 3000) for rank in range(len(layout))], Op.SUM)
    assert all(same_bits(tensor, expected) for tensor in run(layout, work))


@pytest.mark.pure
def test_groups_with_a_view_small_tensors_and_other_types_go_the_flat_way() -> None:
    def work(transport: Transport) -> None:
        group = Group(transport)
        assert group.node_layout is not None
        assert Group(transport, view=1).node_layout is None
        assert Group(transport, interrupted=lambda: False).node_layout is None
        for tensor, op, layered in (
            (torch.ones(1000), Op.SUM, False),
            (torch.ones(1 << 18), Op.SUM, True),
            (torch.ones(1 << 18), Op.MAX, False),
            (torch.ones(1 << 17, dtype=torch.int64), Op.SUM, False),
        ):
            pending = all_reduce(group, tensor, op)
            pending.wait()
            assert isinstance(pending, Pipeline) == layered
        lossy = all_gather(group, [torch.zeros(1 << 17) for _ in range(4)], torch.ones(1 << 17), reliability=LOSSY)
        lossy.wait()
        assert not isinstance(lossy, Pipeline)

    run("aabb", work)


class Counted:
    """Counts the bytes that a rank sends to ranks of other machines."""

    def __init__(self, transport: Transport) -> None:
        self.bytes = 0
        begin, mine = transport.post, transport.machine_of(transport.rank)

        def post(plan: Plan) -> Any:
            self.bytes += sum(each.bytes for each in plan.sends if transport.machine_of(each.peer) != mine)
            return begin(plan)

        transport.post = post  # type: ignore[method-assign]


@pytest.mark.thorough
@pytest.mark.pure
def test_bytes_between_machines_fall_by_the_ranks_of_a_machine() -> None:
    elements, layout = 600_000, "aabbccdd"
    n, each, machines = len(layout), 2, 4

    def work(transport: Transport) -> list[list[int]]:
        group, counted = Group(transport), Counted(transport)
        whole, part = torch.ones(elements), [torch.ones(elements // n) for _ in range(n)]

        def sent(begin: Callable[..., Pending], *arguments: Any) -> int:
            counted.bytes = 0
            begin(group, *arguments).wait()
            return counted.bytes

        return [
            [sent(all_reduce, whole), sent(flat_all_reduce, whole)],
            [sent(reduce_scatter, part[0], part), sent(flat_reduce_scatter, part[0], part)],
            [sent(all_gather, part, part[group.rank]), sent(flat_all_gather, part, part[group.rank])],
            [sent(broadcast, whole, 3), sent(flat_broadcast, whole, 3)],
        ]

    sent = torch.tensor(run(layout, work)).sum(0).double()
    bytes_ = elements * 4
    expected = [2 * (machines - 1) * bytes_, (machines - 1) * bytes_, (machines - 1) * bytes_, (machines - 1) * bytes_]
    assert torch.allclose(sent[:, 0], torch.tensor(expected, dtype=torch.float64), rtol=0.001)
    assert torch.allclose(sent[:3, 1] / sent[:3, 0], torch.full((3,), each, dtype=torch.float64), rtol=0.001)
    assert sent[3, 1] / sent[3, 0] > 1.6


@pytest.mark.pure
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG])
def test_lossy_reductions_are_means_over_the_machines_that_arrived(op: Op, small: None) -> None:
    layout, elements = "aabbcc", 30_000
    n = len(layout)

    def work(transport: Transport) -> dict[str, Any]:
        group = Group(transport)
        mine = float(1 << transport.rank)
        whole = torch.full((elements,), mine)
        arrivals = all_reduce(group, whole, op, reliability=LOSSY, share=EXACT).wait()
        output = torch.empty(elements // n)
        scattered = reduce_scatter(group, output, [torch.full((elements // n,), mine)] * n, op, reliability=LOSSY)
        (arrival,) = scattered.wait()
        return {
            "whole": whole,
            "output": output,
            "counts": arrival.counts(),
            "links": arrival.links(),
            "arrived": [each.fraction(stage=0) for each in arrivals],
            "per_chunk": transport.chunk_bytes // 4,
        }

    results = run(layout, work, loss=0.2)
    sums = [3.0, 12.0, 48.0]  # of the machines
    scale = n if op is Op.SUM else 1
    for rank, result in enumerate(results):
        assert same_bits(result["whole"], results[0]["whole"])  # the share is exact
        assert 0.6 < sum(result["arrived"]) / len(result["arrived"]) < 0.95
        assert set(result["links"]) == {peer for peer in range(n) if peer % 2 == rank % 2 and peer != rank}
        own = sums[rank // 2]
        others = [total for total in sums if total != own]
        for chunk, count in enumerate(result["counts"].tolist()):
            got = float(result["output"][chunk * result["per_chunk"]]) / scale
            assert count in (2, 4, 6)
            possible = {2: [own], 4: [own + other for other in others], 6: [sum(sums)]}[count]
            assert any(abs(got - each / count) < 1e-3 for each in possible)
    assert {2, 4, 6} >= {int(each) for each in results[0]["counts"]} != {6}


@pytest.mark.pure
def test_nothing_is_lost_inside_a_machine(small: None) -> None:
    def work(transport: Transport) -> torch.Tensor:
        tensor = torch.full((30_000,), float(transport.rank))
        all_reduce(Group(transport), tensor, Op.AVG, reliability=LOSSY).wait()
        return tensor

    results = run("aabb", work, loss=0.3)
    assert same_bits(results[0], results[1]) and same_bits(results[2], results[3])
    # Each machine's own mean takes the place of what was lost on the way.
    assert {*results[0].unique().tolist()} <= {0.5, 1.5} and {*results[2].unique().tolist()} <= {2.5, 1.5}
    assert len(results[0].unique()) == 2


@pytest.mark.pure
def test_eight_bits_travel_between_machines_only(small: None) -> None:
    elements = 24_000

    def work(transport: Transport) -> tuple[torch.Tensor, torch.Tensor, int]:
        group, counted = Group(transport), Counted(transport)
        whole = torch.linspace(0, 1, elements) * (1 + transport.rank)
        all_reduce_on_grids(group, whole, wire=torch.int8, reliability=EXACT).wait()
        sent = counted.bytes
        parts = list((torch.linspace(0, 1, elements) * (1 + transport.rank)).chunk(4))
        output = torch.empty_like(parts[0])
        reduce_scatter_on_grids(group, output, parts, wire=torch.int8, reliability=EXACT).wait()
        return whole, output, sent

    results = run("aabb", work)
    expected = torch.linspace(0, 1, elements) * 2.5
    for rank, (whole, output, sent) in enumerate(results):
        assert same_bits(whole, results[0][0])
        assert torch.allclose(whole, expected, atol=0.03)
        assert torch.allclose(output, expected.chunk(4)[rank], atol=0.02)
        assert sent < 1.1 * elements / 2  # a slice to the other machine and back: a quarter of float32


@pytest.mark.pure
def test_a_deadline_is_that_of_the_call_not_of_a_piece(small: None) -> None:
    def work(transport: Transport) -> int:
        tensor = torch.ones(50_000)
        late = Reliability(budget=1.0, deadline_s=0.5)
        return len(all_reduce(Group(transport), tensor, Op.AVG, reliability=late, share=EXACT).wait())

    assert run("aabb", work, loss=0.1) == [1] * 4


@pytest.mark.pure
def test_collectives_under_way_at_once_do_not_meet_whatever_the_order_of_waits(small: None) -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        group = Group(transport)
        tensors = [values(group.rank, 9000, seed=seed) for seed in range(5)]
        pendings = [all_reduce(group, tensor) for tensor in tensors]
        order = list(range(5))
        random.Random(7).shuffle(order)
        while not all(pending.done() for pending in pendings):
            for at in order:
                try:
                    pendings[at].wait(1e-4)
                except TimeoutError:
                    continue
        return tensors

    for tensors in run("abab", work, **STORM):
        for seed, tensor in enumerate(tensors):
            expected = by_machines("abab", [values(rank, 9000, seed=seed) for rank in range(4)], Op.SUM)
            assert same_bits(tensor, expected)


@pytest.mark.pure
def test_a_death_is_named_on_every_rank_also_by_those_that_never_talk_to_the_dead(small: None) -> None:
    network = SimulatedNetwork(8, machines="aabbccdd", seed=1, options=Options(silence_s=2.0, datagram_bytes=1472))

    def work(transport: Transport) -> StormError | None:
        group = Group(transport)
        all_reduce(group, torch.ones(100_000)).wait()
        if transport.rank == 5:
            network.set_unreachable(5, True)
            return None
        try:
            all_reduce(group, torch.ones(100_000)).wait()
        except StormError as error:
            return error
        raise AssertionError("the call must fail")

    errors = network.run(work)
    assert network.now_s < 10
    for rank, error in enumerate(errors):
        if rank == 5:
            continue
        assert error is not None and error.culprit == 5, (rank, error)
        assert isinstance(error, PeerSilent | PeerFailed) and "nothing was received from rank 5" in str(error)


@pytest.mark.pure
def test_a_wrong_size_is_told_to_every_rank(small: None) -> None:
    def work(transport: Transport) -> StormError:
        try:
            all_reduce(Group(transport), torch.ones(60_000 if transport.rank != 3 else 59_000)).wait()
        except StormError as error:
            return error
        raise AssertionError("the call must fail")

    errors = run("aabbcc", work)
    assert any(isinstance(error, SizeMismatch) for error in errors)
    for error in errors:
        assert isinstance(error, SizeMismatch | PeerFailed) and error.culprit in (2, 3), error
        assert isinstance(error, SizeMismatch) or "another number of bytes" in str(error)


@pytest.mark.pure
def test_a_collective_that_is_given_up_fails_on_all_ranks_and_the_next_one_works(small: None) -> None:
    def work(transport: Transport) -> tuple[type, torch.Tensor]:
        group = Group(transport)
        pending = all_reduce(group, torch.ones(60_000))
        if transport.rank == 2:
            pending.cancel()
        try:
            pending.wait()
        except StormError as error:
            ended = type(error)
        tensor = values(group.rank, 9000)
        all_reduce(group, tensor).wait()
        return ended, tensor

    expected = by_machines("aabbcc", [values(rank, 9000) for rank in range(6)], Op.SUM)
    for rank, (ended, tensor) in enumerate(run("aabbcc", work)):
        assert ended is (Closed if rank == 2 else PeerFailed)
        assert same_bits(tensor, expected)


def test_hierarchy_over_udp_gives_the_same_bits_as_in_the_simulator(small: None) -> None:
    layout = "abab"
    met = threading.Barrier(len(layout))

    def work(transport: Any) -> list[torch.Tensor]:
        # All ranks of this test run on one machine: pretend that they do not.
        transport.machine_of = lambda rank: layout[rank]
        met.wait(20)
        group = Group(transport)
        tensors = [values(group.rank, size) for size in (1000, 40_000, 300_001)]
        pendings = [all_reduce(group, tensor, Op.AVG) for tensor in tensors]
        for pending in reversed(pendings):
            assert isinstance(pending, Pipeline)
            pending.wait()
        return tensors

    for results in local_world(len(layout), work):
        for size, tensor in zip((1000, 40_000, 300_001), results, strict=True):
            assert same_bits(tensor, by_machines(layout, [values(rank, size) for rank in range(4)], Op.AVG))
