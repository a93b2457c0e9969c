"""Any mixture of collectives over any network ends; what is exact is exact, and what may lose keeps its budget.

Scenarios are drawn from seeds, so a failure names its seed: `pytest tests/exchange/test_scenarios.py -k 123`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from reference import ENGINE_DTYPES, reduced, same_bits, values
from stormtorch import EXACT, LOSSY, Options, Reliability
from stormtorch.collectives import (
    Group,
    Op,
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    receive,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from stormtorch.exchange.exchange import ExchangeResult, Transport
from stormtorch.exchange.simulated import SimulatedNetwork

SCENARIOS, PER_TEST = 400, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One collective, and what only it knows."""

    what: str
    index: int
    elements: int
    dtype: torch.dtype
    root: int
    first: Reliability
    share: Reliability

    def values(self, rank: int, target: int = 0) -> torch.Tensor:
        return values(rank, self.elements, self.dtype, seed=100 * self.index + target)

    def blank(self) -> torch.Tensor:
        return torch.zeros(self.elements, dtype=self.dtype)

    def begin(self, group: Group) -> tuple[list[Pending], list[torch.Tensor]]:
        """What is under way, and the tensors that will hold its result."""
        me, n, mine = group.rank, group.size, self.values(group.rank)
        parts = [self.values(me, target) for target in range(n)]
        blanks = [self.blank() for _ in range(n)]
        lossy: dict[str, Any] = {"reliability": self.first}
        match self.what:
            case "all_reduce":
                return [all_reduce(group, mine, Op.AVG, share=self.share, **lossy)], [mine]
            case "reduce":
                return [reduce(group, mine, self.root, **lossy)], [mine]
            case "broadcast":
                return [broadcast(group, mine, self.root, **lossy)], [mine]
            case "reduce_scatter":
                return [reduce_scatter(group, blanks[0], parts, **lossy)], blanks[:1]
            case "all_gather":
                return [all_gather(group, blanks, mine, **lossy)], blanks
            case "all_to_all":
                return [all_to_all(group, blanks, parts, **lossy)], blanks
            case "gather":
                outputs = blanks if me == self.root else None
                return [gather(group, mine, outputs, self.root, **lossy)], outputs or []
            case "scatter":
                inputs = parts if me == self.root else None
                return [scatter(group, blanks[0], inputs, self.root, **lossy)], blanks[:1]
            case "ring":
                sent = send(group, mine, (me + 1) % n, tag=self.index, **lossy)
                return [sent, receive(group, blanks[0], (me - 1) % n, tag=self.index, **lossy)], blanks[:1]
        return [barrier(group)], []

    def expected(self, rank: int, n: int) -> list[torch.Tensor]:
        """The result where nothing may be lost."""
        given = [self.values(peer) for peer in range(n)]
        to_me = [self.values(peer, rank) for peer in range(n)]
        results: dict[str, Callable[[], list[torch.Tensor]]] = {
            "all_reduce": lambda: [reduced(given, Op.AVG)],
            "reduce": lambda: [reduced(given, Op.SUM) if rank == self.root else given[rank]],
            "broadcast": lambda: [given[self.root]],
            "reduce_scatter": lambda: [reduced(to_me, Op.SUM)],
            "all_gather": lambda: given,
            "all_to_all": lambda: to_me,
            "gather": lambda: given if rank == self.root else [],
            "scatter": lambda: [to_me[self.root]],
            "ring": lambda: [given[(rank - 1) % n]],
            "barrier": lambda: [],
        }
        return results[self.what]()

    def check(self, rank: int, n: int, results: list[torch.Tensor], arrivals: list[ExchangeResult]) -> None:
        if self.what == "barrier" or (self.first.exact and (self.what != "all_reduce" or self.share.exact)):
            for result, wanted in zip(results, self.expected(rank, n), strict=True):
                assert same_bits(result, wanted), f"{self} at rank {rank}"
            return
        for arrival in arrivals:
            for message in arrival._outcome.arrivals:
                limit = self.first
                if message.second_stage and self.what in ("all_reduce", "reduce"):
                    limit = self.share if self.what == "all_reduce" else EXACT
                missing = message.chunks - message.arrived
                assert limit.deadline_s is not None or missing <= limit.budget * message.chunks, (
                    f"{self} at rank {rank}"
                )


def draw(seed: int) -> tuple[SimulatedNetwork, list[Call], int]:
    """A network, what is called on it, and how many calls are under way at once."""
    dice = random.Random(seed)
    n = dice.choice([2, 2, 3, 4, 6])
    options: dict[str, Any] = {"datagram_bytes": dice.choice([256, 512, 1472, 9_000])}
    for knob, sizes in {
        "eager_bytes": [4096],
        "pool_bytes": [4096, 20_000],
        "receive_buffer_bytes": [4096, 100_000],
    }.items():
        if dice.random() < 0.3:
            options[knob] = dice.choice(sizes)
    rate = dice.choice([None, None, "20mbit", "200mbit"])
    if rate is not None:
        options["rate"] = dice.choice(["auto", "unlimited", "15mbit"])
    if dice.random() < 0.2:
        options["key"] = b"sixteen bytes and more"
    network = SimulatedNetwork(
        n,
        loss=dice.choice([0.0, 0.05, 0.2]),
        duplicate=dice.choice([0.0, 0.1]),
        reorder=dice.choice([0.0, 0.05, 0.3]),
        corrupt=dice.choice([0.0, 0.02]),
        jitter_ms=dice.choice([0.0, 0.0, 0.5, 5.0]),
        delay_s=dice.choice([1e-6, 50e-6, 5e-3, 40e-3]),
        rate=rate,
        seed=seed,
        options=Options(timeout_s=120.0, **options),
    )
    kinds = ["all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all", "gather", "scatter"]
    reliabilities = [EXACT, EXACT, LOSSY, Reliability(budget=0.05), Reliability(budget=0.3)]
    reliabilities += [
        Reliability(budget=budget, deadline_s=after_s) for budget in (0.0, 1.0) for after_s in (0.001, 0.2)
    ]
    calls = [
        Call(
            what=dice.choice([*kinds, "ring", "barrier"]),
            index=index,
            elements=int(10 ** dice.uniform(0.0, 4.5)),
            dtype=dice.choice(ENGINE_DTYPES),
            root=dice.randrange(n),
            first=dice.choice(reliabilities),
            share=dice.choice(reliabilities),
        )
        for index in range(dice.randint(1, 8))
    ]
    return network, calls, dice.choice([1, 3, 20])


def run(seed: int) -> None:
    network, calls, width = draw(seed)

    def work(transport: Transport) -> list[tuple[list[torch.Tensor], list[ExchangeResult]]]:
        group = Group(transport)
        under_way: list[Pending] = []
        begun = []
        for call in calls:
            begun.append(call.begin(group))
            under_way += begun[-1][0]
            while len(under_way) >= width:
                under_way.pop(0).wait()
        return [(results, [arrival for each in pending for arrival in each.wait()]) for pending, results in begun]

    for rank, outcomes in enumerate(network.run(work)):
        for call, (results, arrivals) in zip(calls, outcomes, strict=True):
            call.check(rank, network.world, results, arrivals)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, SCENARIOS, PER_TEST))
def test_whatever_is_called_over_whatever_network_ends_as_it_should(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        try:
            run(seed)
        except BaseException as error:
            error.add_note(f"scenario {seed}")
            raise
