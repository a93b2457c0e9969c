# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Parity (forward error correction) on the simulated network: what it recovers, what "auto" learns, and leads."""

import functools
from typing import Any, Literal

import pytest
import torch

from stormtorch import LOSSY, BoundedDrift, Options, theory
from stormtorch.telemetry.ledger import LedgerRow
from stormtorch.telemetry.statistics import mean
from training import Rank, Vector, on_ranks

pytestmark = pytest.mark.pure

STEPS = 16


@functools.cache
def trained(
    redundancy: float | Literal["auto"], p: float = 0.4, wire: torch.dtype = torch.int8
) -> list[list[LedgerRow]]:
    """The rows of each rank; a rank's shard has about thirty chunks of int8."""

    def work(rank: Rank) -> list[LedgerRow]:
        for _ in range(STEPS):
            rank.model.numbers.sum().backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        rank.values()
        return list(rank.optimizer.ledger)

    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.01)  # noqa: E731
    policy = BoundedDrift(reliability=LOSSY, wire=wire, redundancy=redundancy, guard=None)
    options: dict[str, Any] = {"options": Options(datagram_bytes=400)}
    return on_ranks(Vector(40_000), make, work, policy=policy, loss=p, **options)


def there(rows: list[list[LedgerRow]], first: int = 0) -> tuple[float, float]:
    """Fractions of gradients and of parameters that arrived or were recovered."""
    later = [row for each in rows for row in each[first:]]
    return (
        mean([fraction for row in later for fraction in row.gradients.values()]),
        mean([fraction for row in later for fraction in row.broadcast.values()]),
    )


def test_parity_brings_back_what_a_bad_network_loses() -> None:
    without, parity = trained(0.0), trained(1.1)
    assert there(without) == pytest.approx((0.6, 0.6), abs=0.04)
    assert min(there(parity)) > 0.9
    assert all(row.parity_bytes == row.recovered == 0 for rows in without for row in rows)
    assert all(row.parity_bytes > 0 and row.recovered > 0 for rows in parity for row in rows[1:])


def test_auto_sends_none_until_it_has_seen_losses_and_then_enough() -> None:
    rows = trained("auto")
    assert all(each[0].parity_bytes == 0 for each in rows)
    assert min(there(rows, first=8)) > 0.9
    # Within the budget: at most 1.2 times the data, plus headers of all datagrams.
    assert all(row.parity_bytes < 0.56 * row.bytes_sent for each in rows for row in each[4:])
    # Leads follow the loss that remains after parity, not the 40 % before it.
    assert 0.0 < max(row.lead for each in rows for row in each) < theory.lead(0.2)


@pytest.mark.thorough
def test_auto_sends_none_where_little_is_lost_or_the_wire_is_wide() -> None:
    for rows in (trained("auto", p=0.02), trained("auto", wire=torch.float32)):
        assert all(row.parity_bytes == 0 for each in rows for row in each)
