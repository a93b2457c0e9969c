"""The progress of a simulation, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field

from stormtorch.telemetry.ledger import Ledger


@dataclass(frozen=True)
class ProgressPoint:
    """The progress of a simulation."""

    step: int
    """Number of steps done."""
    loss: float
    """Loss in the last step, mean over the workers."""


@dataclass
class Simulated:
    """The results of a simulation."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    """Number of each step, from 1, and its training loss, mean over the workers."""
    validations: list[tuple[int, float, float]] = field(default_factory=list)
    """Number of steps before each evaluation, and its loss and fraction of right answers on held-out data."""
    times_s: list[float] = field(default_factory=list)
    """Seconds that each step took."""
    drift: float = 0.0
    """Mean squared difference per parameter between two replicas after the last step."""
    ledger: Ledger = field(default_factory=Ledger)
    """Record of all steps. Its links are sums over receivers: `gradients` has the fraction of each worker's chunks that
    reached the owners, `broadcast` the fraction of each owner's chunks that reached the workers."""
    how: str = ""
    """Whether workers were computed "batched" or in a "loop"."""
    at_once: int = 0
    """Number of workers computed at a time."""
    peak_bytes: int | None = None
    """Highest use of GPU memory; None on the CPU."""
