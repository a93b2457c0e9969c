"""What a simulation tells: how it fares, and what came out."""

from __future__ import annotations

from dataclasses import dataclass, field

from stormtorch.policies.ledger import Ledger


@dataclass(frozen=True)
class Spot:
    """How a simulation fares."""

    step: int
    """Steps done."""
    loss: float
    """Mean of all workers in the last one."""


@dataclass
class Simulated:
    """What came out."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    """Step, counted from 1, and training loss, mean over the workers."""
    validations: list[tuple[int, float, float]] = field(default_factory=list)
    """After how many steps, the loss and the fraction of right answers on what is held out."""
    times_s: list[float] = field(default_factory=list)
    """Of each step."""
    drift: float = 0.0
    """Mean squared difference per parameter between two replicas after the last step."""
    ledger: Ledger = field(default_factory=Ledger)
    """What happened, step by step: links are summed up, {worker: what arrived of it at all owners, or of it as an owner
    at all workers}."""
    how: str = ""
    """Whether workers were computed "batched" or in a "loop"."""
    at_once: int = 0
    """Workers computed at a time."""
    peak_bytes: int | None = None
    """The most memory of the GPU that was in use; None on the CPU."""
