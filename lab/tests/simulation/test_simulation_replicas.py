"""Replicas of virtual workers: versions and ages give every replica, and each policy keeps its promises."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mask_statistics import CPU
from simulating import Data, outcome
from stormtorch import EXACT, LOSSY, BoundedDrift, GradientAveraging, ModelAveraging, Reliability, theory
from stormtorch.network.loss import Bernoulli, PerLink
from stormtorch.policies import rules
from stormtorch.policies.policy import Policy
from stormtorch.telemetry.ledger import Ledger
from stormtorch.telemetry.statistics import mean
from stormtorch_lab.simulation.arrivals.masks import Masks
from stormtorch_lab.simulation.arrivals.repair import arrived
from stormtorch_lab.simulation.parameters.chunks import Chunks
from stormtorch_lab.simulation.parameters.replicas import MOST_VERSIONS, Replicas
from training import Optimizer, Vector

pytestmark = pytest.mark.pure

PER_CHUNK = 8


# --- versions and ages ------------------------------------------------------------------------------------------------


@given(
    workers=st.integers(1, 6),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    p=st.sampled_from([0.0, 0.3, 0.6, 0.9]),
    max_lag=st.sampled_from([None, 1, 2, 3, 7]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_versions_and_ages_are_the_replicas_that_real_workers_would_hold(
    workers: int, sizes: list[int], p: float, max_lag: int | None, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    chunks = Chunks.of([nn.Parameter(torch.zeros(size)) for size in sizes], workers, PER_CHUNK)
    replicas = Replicas(chunks, 0, workers, CPU)
    replicas.owned.copy_(torch.randn(chunks.count, PER_CHUNK, generator=random))
    replicas.begin()
    own_WC = chunks.owner_C == torch.arange(workers).unsqueeze(1)
    stored_WCE = replicas.owned.expand(workers, -1, -1).clone()
    ages_WC = torch.zeros(workers, chunks.count, dtype=torch.int64)
    found_WCE = torch.empty_like(stored_WCE)
    for _ in range(30):
        lead = float(torch.rand((), generator=random))
        lost_WC = torch.rand(workers, chunks.count, generator=random) < p
        arrived_WC = ~lost_WC | own_WC
        oldest = int(replicas.ages.max())
        replicas.reserve_versions(oldest)
        next_version_CE, before = replicas.next_version(), replicas.owned.clone()
        next_version_CE.copy_(before)
        replicas.owned.add_(torch.randn(chunks.count, PER_CHUNK, generator=random))
        next_version_CE.lerp_(replicas.owned, 1.0 + lead)
        if max_lag is not None:
            arrived_WC |= rules.overdue(replicas.ages, max_lag)
        replicas.broadcast(arrived_WC)
        # The same as real workers do it: each has a replica, and what arrives takes its place.
        sent_CE = replicas.owned + lead * (replicas.owned - before)
        stored_WCE = torch.where(arrived_WC.unsqueeze(-1), sent_CE, stored_WCE)
        stored_WCE = torch.where(own_WC.unsqueeze(-1), replicas.owned, stored_WCE)
        ages_WC = torch.where(arrived_WC, 0, ages_WC + 1)
        replicas.put(0, workers, found_WCE)
        torch.testing.assert_close(found_WCE, stored_WCE, rtol=1e-5, atol=1e-5)
        assert torch.equal(replicas.ages.long(), ages_WC)
        assert max_lag is None or int(ages_WC.max()) <= max_lag
    first = workers // 2
    replicas.put(first, workers, found_WCE[first:])
    torch.testing.assert_close(found_WCE[first:], stored_WCE[first:], rtol=1e-5, atol=1e-5)


def test_a_link_that_loses_everything_is_kept_up_with_all_the_same() -> None:
    replicas = Replicas(Chunks.of([nn.Parameter(torch.zeros(16))], 2, PER_CHUNK), 0, 2, CPU)
    replicas.begin()
    found = torch.empty(2, 2, PER_CHUNK)
    for step in range(1, MOST_VERSIONS + 1):
        replicas.reserve_versions(int(replicas.ages.max()))
        replicas.owned.fill_(step)
        replicas.next_version().fill_(step)
        replicas.broadcast(replicas.own)
        replicas.put(0, 2, found)
        assert found[:, :, 0].tolist() == [[step, 0.0], [0.0, step]]
    assert int(replicas.ages.max()) == MOST_VERSIONS < replicas.versions


@given(elements=st.lists(st.integers(1, 50), min_size=1, max_size=5), workers=st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_a_cut_gives_every_parameter_elements_of_its_own(elements: list[int], workers: int) -> None:
    chunks = Chunks.of([nn.Parameter(torch.zeros(size)) for size in elements], workers, PER_CHUNK)
    vector = chunks.empty(device=CPU)
    for view in chunks.views(vector):
        view += 1.0
    assert float(vector.sum()) == sum(elements) and float(vector.max()) == 1.0
    owned = torch.bincount(chunks.owner_C, minlength=workers)
    assert int(owned.max()) - int(owned.min()) <= 1
    chunk_S, element_S = chunks.choose(500, torch.Generator().manual_seed(0))
    assert bool((vector[chunk_S, element_S] == 1.0).all())  # nothing that is padding
    assert len(set((chunk_S * PER_CHUNK + element_S).tolist())) >= min(sum(elements), 60)


# --- runs of a vector whose gradients are what data says -----------------------------------------------------------


def ones(rank: int, step: int) -> torch.Tensor:
    return torch.ones(1)


def noise(rank: int, step: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(1000 * step + rank))


COUNT = 6000


def inner(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(given)
    return found


def descent(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def ledger_of(policy: Policy, steps: int, data: Any = noise, *, workers: int = 4, **more: Any) -> Ledger:
    done, _ = outcome(Vector(COUNT), descent, steps, objective=inner, data=data, workers=workers, policy=policy, **more)
    return done.ledger


@pytest.mark.parametrize("max_lag", [1, 2, 5])
def test_no_copy_is_ever_older_than_the_bound(max_lag: int) -> None:
    rows = list(ledger_of(BoundedDrift(max_lag=max_lag, guard=None), 40, network=0.6))
    assert max(max(row.lag) for row in rows) == max_lag
    # All of that age are fetched, as they must be asked for before it is known what arrives.
    for before, row in itertools.pairwise(rows):
        assert row.fetched == before.lag.get(max_lag, 0)


@pytest.mark.parametrize("budget", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("up", [True, False])
def test_of_no_message_is_more_missing_than_the_budget(budget: float, up: bool) -> None:
    owner_C = torch.arange(5).repeat_interleave(torch.tensor([7, 20, 0, 40, 13]))
    masks = Masks(Bernoulli(p=0.6), 5, owner_C, seed=1)
    for _ in range(20):
        missing_WC = ~arrived(masks, Reliability(budget=budget), up=up).arrived_WC
        for owner in range(5):
            message_WC = missing_WC[:, owner_C == owner]
            assert int(message_WC.sum(1).max()) <= budget * message_WC.shape[1]
        assert int(missing_WC.sum()) > 0


def test_a_budget_allows_as_many_chunks_as_the_engine_does() -> None:
    masks = Masks(Bernoulli(p=0.9), 2, torch.zeros(75, dtype=torch.long), seed=1)
    missing = [int((~arrived(masks, Reliability(budget=0.84), up=False).arrived_WC)[1].sum()) for _ in range(50)]
    assert max(missing) == 63  # 0.84 x 75, where float32 says 62.99


@pytest.mark.parametrize("policy", [ModelAveraging, GradientAveraging])
def test_averaging_repairs_to_its_budget_too(policy: Any) -> None:
    lost = {}
    for budget in (0.1, 1.0):
        rows = list(ledger_of(policy(reliability=Reliability(budget=budget)), 10, network=0.4))
        lost[budget] = 1.0 - mean([row.arrived for row in rows])
    assert lost[0.1] < 0.1 < 0.35 < lost[1.0] < 0.45  # of what is sent: one's own blocks are not


def test_a_budget_that_no_network_can_meet_is_told() -> None:
    network = PerLink(default=Bernoulli(p=0.0), links={(0, 1): Bernoulli(p=1.0)})
    with pytest.raises(ValueError, match="budget"):
        ledger_of(BoundedDrift(gradients=Reliability(budget=0.1)), 1, network=network)
    assert ledger_of(BoundedDrift(gradients=EXACT, broadcast=LOSSY), 3, network=network)[2].lag[3] > 0


def test_drift_is_of_parameters_and_not_of_padding() -> None:
    """Twenty numbers fill a small part of a chunk: the rest would make every drift look small."""
    same: Data = lambda rank, step: torch.full((20,), -1.0 if rank else 1.0)  # noqa: E731
    done, _ = outcome(Vector(20), descent, 9, objective=inner, data=same, network=0.4, policy=GradientAveraging())
    assert done.ledger[-1].pair_drift == pytest.approx(done.drift, rel=1e-4)
    policy = BoundedDrift(gradients=EXACT, lead=0.0, guard=None)
    done, _ = outcome(Vector(20), descent, 9, objective=inner, data=ones, network=0.6, policy=policy)
    for row in done.ledger:
        assert row.update_variance == 1.0
        assert row.owner_drift == pytest.approx(sum(age**2 * count for age, count in row.lag.items()) / 3)


# --- the guard --------------------------------------------------------------------------------------------------------


def test_where_most_is_lost_the_broadcast_becomes_exact() -> None:
    rows = list(ledger_of(BoundedDrift(), 30, network=0.7))
    before = [row.guarded for row in rows].index(True)
    assert 1 <= before <= 5  # the first chunks are too few to tell
    assert "guard: the broadcast is exact" in rows[before - 1].events
    for row in rows[before:]:
        assert row.guarded and row.lead == 0.0
        assert row.lag.keys() == {0} and row.pair_drift == row.owner_drift == 0.0
    assert not any(row.guarded for row in ledger_of(BoundedDrift(guard=None), 30, network=0.7))
    assert not any(row.guarded for row in ledger_of(BoundedDrift(), 30, network=0.2))


def test_the_guard_stays_while_repaired_gradients_show_no_loss() -> None:
    rows = list(ledger_of(BoundedDrift(gradients=EXACT), 70, network=0.7))
    assert all(row.guarded for row in rows[5:])
    assert rows[-1].loss == pytest.approx(0.7, abs=0.1)  # measured all the while


def test_the_guard_heeds_what_arrives_at_a_worker_and_not_what_one_of_them_sends() -> None:
    """Of one sender, 90 % are lost: 30 % of what a worker receives; the guard stops when the rest arrives."""
    bad = {(0, target): Bernoulli(p=0.9) for target in range(1, 4)}
    network = PerLink(default=Bernoulli(p=0.0), links=bad)
    rows = list(ledger_of(BoundedDrift(guard=0.4), 40, network=network))
    assert not any(row.guarded for row in rows[5:])
    all_of_one = PerLink(default=Bernoulli(p=0.0), links={(source, 1): Bernoulli(p=0.9) for source in (0, 2, 3)})
    assert all(row.guarded for row in list(ledger_of(BoundedDrift(guard=0.4), 60, network=all_of_one))[5:])


def test_workers_that_own_nothing_do_not_make_the_network_look_better() -> None:
    def rows(count: int, workers: int) -> Ledger:
        policy = BoundedDrift(guard=None)
        task: dict[str, Any] = {"objective": inner, "data": ones, "workers": workers, "policy": policy}
        return outcome(Vector(count), descent, 40, network=0.4, **task)[0].ledger

    crowded = rows(720, 16)[-1]  # two or three chunks
    assert len(crowded.broadcast) < 4
    assert crowded.loss == pytest.approx(0.4, abs=0.08)
    assert crowded.lead == pytest.approx(theory.lead(0.4), rel=0.3)


# --- weights, and what is kept ----------------------------------------------------------------------------------------


def test_horvitz_and_thompson_are_right_on_average_where_one_sender_is_bad() -> None:
    """Worker 3 alone has a gradient of 1, and most of what it sends is lost: the mean over all is 1/4."""
    links = {(3, target): Bernoulli(p=0.6) for target in range(3)}
    network = PerLink(default=Bernoulli(p=0.1), links=links)
    only: Data = lambda rank, step: torch.full((1,), -1.0 if rank == 3 else 0.0)  # noqa: E731
    found = {}
    for weights in ("mean", "horvitz-thompson"):
        policy = BoundedDrift(weights=weights, guard=None)
        task: dict[str, Any] = {"objective": inner, "data": only, "network": network, "policy": policy}
        judged = [outcome(Vector(36000), descent, steps, **task)[1] for steps in (20, 60)]
        # What the first three own moved by, in the steps after the first, which do not know the links yet.
        moved = judged[1].get_parameter("numbers").detach() - judged[0].get_parameter("numbers").detach()
        found[weights] = float(moved[:27000].mean()) / 40
    assert found["horvitz-thompson"] == pytest.approx(0.25, rel=0.05)
    assert found["mean"] < 0.6 * 0.25


@pytest.mark.parametrize("weights", ["mean", "horvitz-thompson"])
def test_what_is_lost_does_no_harm_though_it_is_infinite(weights: Any) -> None:
    """No chunk of worker 3 arrives, so only its own shard is affected."""
    dead = PerLink(default=Bernoulli(p=0.0), links={(3, target): Bernoulli(p=1.0) for target in range(3)})
    infinite: Data = lambda rank, step: torch.full((1,), torch.inf if rank == 3 else -1.0)  # noqa: E731
    policy = BoundedDrift(weights=weights, guard=None)
    task: dict[str, Any] = {"objective": inner, "data": infinite, "network": dead, "policy": policy}
    numbers = outcome(Vector(COUNT), descent, 1, **task)[1].get_parameter("numbers")
    assert bool(numbers[: COUNT // 2].isfinite().all())
    assert not bool(numbers.isfinite().all())


@pytest.mark.parametrize("policy", [ModelAveraging(), GradientAveraging()])
def test_where_the_mean_is_lost_a_worker_keeps_its_own(policy: Policy) -> None:
    """Nothing comes back to worker 2, and nothing of it arrives elsewhere: it trains as if it were alone."""
    dead = {pair: Bernoulli(p=1.0) for other in (0, 1, 3) for pair in ((2, other), (other, 2))}
    network = PerLink(default=Bernoulli(p=0.0), links=dead)
    apart: Data = lambda rank, step: torch.full((1,), 10.0 if rank == 2 else -float(rank))  # noqa: E731
    task: dict[str, Any] = {"objective": inner, "data": apart, "policy": policy, "network": network}
    done, _ = outcome(Vector(COUNT), descent, 5, **task)
    rest = 5 * (0 + 1 + 3) / 3
    # Its own quarter it averages as well, over itself alone; there, the others keep what they have.
    quarter = torch.tensor([0.0, 5.0, -50.0, 15.0]).var().item()
    others = torch.tensor([rest, rest, -50.0, rest]).var().item()
    assert done.drift == pytest.approx(2 * (others * 13 + quarter * 4) / 17, rel=0.02)
    assert done.ledger[-1].gradients[2] == done.ledger[-1].broadcast[2] == 0.0
