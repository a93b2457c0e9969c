# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Hierarchical exchanges where ranks share machines: fewer bytes between machines, loss only there, equal copies."""

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import local_world

from stormtorch import EXACT, LOSSY, BoundedDrift, Options, Reliability, exact, prepare
from stormtorch.collectives import Group, barrier, hierarchy
from stormtorch.collectives.wire import WIRES
from stormtorch.exchange.exchange import Plan, Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.policies.policy import Policy
from training import Rank, Vector, adamw, assert_close, on_ranks, perceptron, plain, trained, values

pytestmark = pytest.mark.pure

SMALL: dict[str, Any] = {"options": Options(datagram_bytes=400)}
STEPS = 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes exchanges hierarchical for small models, too."""
    monkeypatch.setattr(hierarchy, "_SMALLEST_BYTES", 0)
    yield


def by_machines(rank: Rank) -> bool:
    session = rank.optimizer.session
    ways = session._broadcast._hierarchical is not None, session._reduction._islands is not None
    assert ways[0] == ways[1]
    return ways[0]


def copies(rank: Rank) -> list[torch.Tensor]:
    """This rank's parameters, whether stale or not."""
    rank.optimizer.session.wait()
    return values(rank.model)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["aabb", "abab", "aabbcc", "aaabbb", "abcabc"])
@pytest.mark.parametrize("overlap", [False, True])
def test_without_loss_everyone_has_what_one_process_has(layout: str, overlap: bool) -> None:
    policy = BoundedDrift(reliability=EXACT, bucket_mb=5e-4, overlap=overlap)

    def work(rank: Rank) -> list[torch.Tensor]:
        assert by_machines(rank)
        rank.train(STEPS)
        return copies(rank)

    world = len(layout)
    found = on_ranks(perceptron(), adamw, work, world=world, policy=policy, machines=layout)
    expected = plain(perceptron(), adamw, STEPS, world=world)
    for each in found:
        assert_close(each, expected)
        assert equal(each, found[0])


@pytest.mark.thorough
@pytest.mark.parametrize("wire", WIRES)
def test_every_wire_trains_like_the_flat_way(wire: torch.dtype) -> None:
    model = perceptron(inside=100)
    ways = [
        trained(model, adamw, 12, policy=BoundedDrift(wire=wire, hierarchy=way), machines="aabb", **SMALL)[0]
        for way in (True, False)
    ]
    exact = plain(model, adamw, 12)
    apart = [max(float((one - other).abs().max()) for one, other in zip(way, exact, strict=True)) for way in ways]
    # A machine's mean is rounded once, where a flat exchange rounds each rank's gradient.
    assert apart[0] < 1.5 * apart[1] + 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_fewer_bits_go_by_machines(dtype: torch.dtype) -> None:
    def work(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        assert by_machines(rank)
        rank.train(STEPS, data=lambda at, step: torch.full((4, 8), 0.1 * at + 0.01 * step, dtype=dtype))
        return copies(rank), rank.values()

    found = on_ranks(perceptron().to(dtype), adamw, work, policy=BoundedDrift(), machines="aabb")
    assert all(equal(ours, found[0][1]) for _, ours in found)
    assert all(equal(*each) for each in found)
    assert not equal(found[0][0], values(perceptron().to(dtype)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "policy",
    [BoundedDrift(), BoundedDrift(wire=torch.int8), BoundedDrift(max_lag=1)],
    ids=["float32", "int8", "bounded"],
)
def test_ranks_of_a_machine_have_the_same_stale_copies_of_what_others_own(policy: BoundedDrift) -> None:
    def work(rank: Rank) -> list[Any]:
        found = []
        for step in range(12):
            rank.train(range(step, step + 1))
            copies(rank)
            mine = rank.optimizer.session.buckets[0].flat.clone()
            ages = [torch.cat(each) for each in zip(*rank.optimizer.session._broadcast.ages, strict=True)]
            found.append((mine, ages, rank.optimizer.session.buckets[0].layout.spans))
        return found

    layout = "aabb"
    results = on_ranks(perceptron(inside=300), adamw, work, policy=policy, loss=0.2, machines=layout, **SMALL)
    differ = stale = 0
    for step in range(12):
        mine, ages, spans = zip(*(each[step] for each in results), strict=True)
        for rank, mate in ((0, 1), (2, 3)):
            for owner in range(4):
                first, count = spans[0][owner]
                one, other = (mine[each].narrow(0, first, count) for each in (rank, mate))
                # Where everything arrives, a rank has the owner's values.
                assert torch.equal(one, other), (step, rank, owner)
                assert torch.equal(ages[rank][owner], ages[mate][owner])
                inside = layout[owner] == layout[rank]
                assert not (inside and ages[rank][owner].any())
                stale += int(ages[rank][owner].sum())
        differ += not torch.equal(mine[0], mine[2])
    assert differ == 12 and stale > 0


@pytest.mark.thorough
@pytest.mark.parametrize("max_lag", [1, 2])
def test_no_copy_is_older_than_max_lag_on_any_rank(max_lag: int) -> None:
    def work(rank: Rank) -> list[Any]:
        rank.train(30)
        copies(rank)
        return list(rank.optimizer.ledger)

    policy = BoundedDrift(max_lag=max_lag, guard=None)
    found = on_ranks(perceptron(inside=200), adamw, work, policy=policy, loss=0.3, machines="aabb", **SMALL)
    assert max(max(row.lag) for rows in found for row in rows) == max_lag
    for rows in found:
        assert sum(row.fetched for row in rows) > 0


@pytest.mark.thorough
def test_gradients_that_arrived_are_averaged_over_machines_without_bias() -> None:
    """Rank r has a gradient of 2**r everywhere, so a sum shows which ranks contributed."""
    layout, world = "aabbcc", 6

    def work(rank: Rank) -> list[tuple[torch.Tensor, Any]]:
        seen = []
        for _ in range(40):
            (rank.model.numbers.sum() * float(1 << rank.rank)).backward()
            owned = [each.grad for each in rank.optimizer.param_groups[0]["params"] if each.grad is not None]
            seen.append(torch.cat([each.flatten() for each in owned]))
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        copies(rank)
        return list(zip(seen, rank.optimizer.ledger, strict=True))

    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.0)  # noqa: E731
    found = on_ranks(
        Vector(6000), make, work, world=world, policy=BoundedDrift(guard=None), loss=0.3, machines=layout, **SMALL
    )
    sums = {"a": 3.0, "b": 12.0, "c": 48.0}
    per_chunk = SimulatedNetwork(2, **SMALL).chunk_bytes // 4
    whole = 0.0
    for rank, steps in enumerate(found):
        own = layout[rank]
        first, second = (sums[each] for each in "abc" if each != own)
        possible = torch.tensor([sums[own] / 2, (sums[own] + first) / 4, (sums[own] + second) / 4, 63.0 / 6])
        for gradients, row in steps:
            nearest = (gradients.unsqueeze(1) - possible).abs().min(1)
            assert float(nearest.values.max()) < 1e-3
            ranks_C = torch.tensor([2.0, 4.0, 4.0, 6.0])[nearest.indices[::per_chunk]]
            assert row.effective_batch == pytest.approx(float(ranks_C.mean()) / world)
            assert row.variance_inflation == pytest.approx(float((world / ranks_C).mean()))
            # Only the ranks with the same local rank on other machines.
            counterparts = {at for at, name in enumerate(layout) if name != own and at % 2 == rank % 2}
            assert set(row.gradients) == set(row.broadcast) == counterparts
            whole += float((nearest.indices == 3).float().mean()) / (world * 40)
    assert whole == pytest.approx(0.7**2, abs=0.05)


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
@pytest.mark.parametrize("layout", ["aabb", "aaabbb", "aabbccdd"])
def test_bytes_between_machines_fall_by_the_ranks_of_a_machine(layout: str) -> None:
    world, machines = len(layout), len(set(layout))
    model = perceptron(inside=4000)
    size = sum(each.numel() * 4 for each in model.parameters())

    def sent(way: bool) -> float:
        models = [copy.deepcopy(model) for _ in range(world)]

        def body(transport: Transport) -> float:
            model = models[transport.rank]
            policy = BoundedDrift(hierarchy=way, standby=0, drift_samples=0)
            _, optimizer = prepare(model, adamw(model), policy=policy, group=Group(transport))
            rank = Rank(transport.rank, world, model, optimizer)
            rank.train(1)
            counted = Counted(transport)
            rank.train(range(1, 4))
            copies(rank)
            return counted.bytes / 3

        return sum(SimulatedNetwork(world, machines=layout, seed=1).run(body))

    ours, flat = sent(True), sent(False)
    assert ours == pytest.approx(2 * (machines - 1) * size, rel=0.02)
    assert flat / ours == pytest.approx(world / machines, rel=0.02)


class Accepting(BoundedDrift):
    """Has its own rule for what arrives."""

    def accept(self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        return torch.where(arrived, received, own)


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("aaab", BoundedDrift()),
        ("aabbc", BoundedDrift()),
        ("abcd", BoundedDrift()),
        ("aaaa", BoundedDrift()),
        ("aabb", BoundedDrift(hierarchy=False)),
        ("aabb", BoundedDrift(weights="horvitz-thompson")),
        ("aabb", Accepting()),
    ],
    ids=["aaab", "aabbc", "abcd", "aaaa", "off", "weighs", "accepts"],
)
def test_other_layouts_and_policies_that_need_every_link_go_the_flat_way(layout: str, policy: Policy) -> None:
    def work(rank: Rank) -> int:
        assert not by_machines(rank)
        rank.train(2)
        copies(rank)
        return len(rank.optimizer.ledger[-1].gradients)

    world = len(layout)
    found = on_ranks(perceptron(), adamw, work, world=world, policy=policy, machines=layout, loss=0.1)
    assert found == [world - 1] * world


def test_a_small_model_goes_the_flat_way(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(each.numel() * 4 for each in perceptron().parameters())
    for smallest, expected in ((size, True), (2 * size, False)):
        monkeypatch.setattr(hierarchy, "_SMALLEST_BYTES", smallest)
        assert on_ranks(perceptron(), adamw, by_machines, policy=BoundedDrift(), machines="aabb") == [expected] * 4


@pytest.mark.parametrize("alone", range(4))
def test_one_rank_may_use_the_model_while_others_wait_elsewhere(alone: int) -> None:
    """A rank forwards parameters even while its program waits in a barrier."""

    def body(transport: Transport) -> float:
        model = models[transport.rank]
        policy = BoundedDrift(reliability=EXACT, overlap=True, bucket_mb=5e-4)
        _, optimizer = prepare(model, adamw(model), policy=policy, group=Group(transport))
        rank = Rank(transport.rank, 4, model, optimizer)
        group = Group(transport, name="mine")
        for step in range(4):
            rank.train(range(step, step + 1))
            if transport.rank == alone:
                with torch.no_grad():
                    model(torch.ones(1, 8))
            barrier(group).wait()
        return float(copies(rank)[0].sum())

    models = [copy.deepcopy(perceptron()) for _ in range(4)]
    assert len(set(SimulatedNetwork(4, machines="aabb", seed=1).run(body))) == 1


def test_over_udp_ranks_train_by_machines_as_one_process_does() -> None:
    layout = "abab"
    models = [copy.deepcopy(perceptron(inside=400)) for _ in range(4)]
    met = threading.Barrier(4)

    def body(transport: Any) -> list[torch.Tensor]:
        # All ranks of this test run on one machine: pretend that they do not.
        transport.machine_of = lambda rank: layout[rank]
        met.wait(20)
        model = models[transport.rank]
        policy = BoundedDrift(gradients=EXACT, broadcast=LOSSY, overlap=True, bucket_mb=5e-3)
        _, optimizer = prepare(model, adamw(model), policy=policy, group=Group(transport))
        rank = Rank(transport.rank, 4, model, optimizer)
        assert by_machines(rank)
        rank.train(STEPS)
        return rank.values()

    for ours in local_world(4, body):
        assert_close(ours, plain(perceptron(inside=400), adamw, STEPS))


@pytest.mark.thorough
def test_a_rank_that_calls_exact_alone_shares_the_ages_of_its_machine_afterwards() -> None:
    def work(rank: Rank) -> list[Any]:
        found = []
        session = rank.optimizer.session
        for step in range(20):
            rank.train(range(step, step + 1))
            copies(rank)
            found.append([torch.cat(each) for each in zip(*session._broadcast.ages, strict=True)])
            if rank.rank == 1 and step % 3 == 0:
                with exact(rank.model):  # the others take part while they wait in the next step
                    pass
        assert not any(row.guarded for row in rank.optimizer.ledger.rows)
        return found

    policy = BoundedDrift(max_lag=2)
    results = on_ranks(perceptron(inside=300), adamw, work, policy=policy, loss=0.3, machines="aabb", **SMALL)
    assert max(int(each.max()) for step in results[0] for each in step) in (1, 2)
    for one, other in ((0, 1), (2, 3)):
        for mine, theirs in zip(results[one], results[other], strict=True):
            far = [owner for owner in range(4) if owner not in (one, other)]
            assert all(torch.equal(mine[owner], theirs[owner]) for owner in far)


def test_other_default_dtypes_go_by_machines() -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        assert by_machines(rank)
        rank.train(3, data=lambda at, step: torch.full((4, 8), 0.1 * at + 0.01 * step, dtype=torch.float32))
        return rank.values()

    torch.set_default_dtype(torch.float64)
    try:
        found = on_ranks(perceptron().float(), adamw, work, policy=BoundedDrift(), machines="aabb", **SMALL)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(equal(each, found[0]) for each in found)


def test_a_deadline_goes_from_rank_to_rank() -> None:
    policy = BoundedDrift(gradients=Reliability(budget=1.0, deadline_s=5.0))
    assert not any(on_ranks(perceptron(), adamw, by_machines, policy=policy, machines="aabb", **SMALL))
