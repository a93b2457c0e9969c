"""Partial reliability of exchanges: how much may be missing, how long an exchange may take, and its priority."""

from dataclasses import dataclass
from typing import Literal

Priority = Literal["normal", "low"]
"""Priorities of traffic: low-priority traffic is marked as such and yields to all other traffic."""

MOST_REDUNDANCY = 4.0
"""Most parity chunks for each data chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """Fraction of an exchange that may be missing, and the longest time that it may take."""

    budget: float = 0.0
    """Fraction of each message that may be missing at the end: 0 is exact, 1 never retransmits."""
    deadline_s: float | None = None
    """Time after which each stage of an exchange ends with what has arrived; None waits until the budget is met."""

    redundancy: float | Literal["auto"] = "auto"
    """Forward error correction: parity chunks per data chunk, from which receivers recover losses without a round trip.
    0 sends none, 0.2 sends one parity chunk for every five data chunks. "auto" sends the amount that pays according to
    a model of the link, and none with a budget of 1, because then no rank waits for what is lost. Paths whose MTU has
    fallen below the job's datagrams get none: see `parity_bytes` in the ledger, and set `datagram_bytes` in Options for
    such paths."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget <= 1.0:
            raise ValueError(f"budget must lie in [0, 1], got {self.budget}")
        if self.deadline_s is not None and not self.deadline_s > 0.0:
            raise ValueError(f"deadline_s must be above 0 or None, got {self.deadline_s}")
        given: object = self.redundancy  # callers without types pass anything
        if given != "auto" and not (isinstance(given, int | float) and 0.0 <= given <= MOST_REDUNDANCY):
            raise ValueError(f'redundancy must lie in [0, {MOST_REDUNDANCY:g}] or be "auto", got {given!r}')

    @property
    def exact(self) -> bool:
        """Whether nothing may be missing."""
        return self.budget == 0.0 and self.deadline_s is None


EXACT = Reliability()
"""Everything arrives, or an error is raised."""

LOSSY = Reliability(budget=1.0)
"""No retransmission: lost data stay lost."""

REPAIRED = Reliability(budget=1e-9)
"""Everything arrives, but a peer that falls silent is left out instead of raising an error."""
