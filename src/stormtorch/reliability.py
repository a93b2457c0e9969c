"""How much of an exchange may be missing, and for how long it may run."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """How much of an exchange may be missing, and for how long it may run."""

    budget: float = 0.0
    """Fraction of each message that may be missing at the end: 0 is exact, 1 never sends anything again."""
    deadline_s: float | None = None
    """Each stage of an exchange ends after so long with whatever has arrived; None waits until the budget is met."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget <= 1.0:
            raise ValueError(f"budget must lie in [0, 1], got {self.budget}")
        if self.deadline_s is not None and not self.deadline_s > 0.0:
            raise ValueError(f"deadline_s must be above 0 or None, got {self.deadline_s}")

    @property
    def exact(self) -> bool:
        """Whether nothing may be missing."""
        return self.budget == 0.0 and self.deadline_s is None


EXACT = Reliability()
"""Everything arrives, or an error is raised."""

LOSSY = Reliability(budget=1.0)
"""Nothing is sent twice; what was lost stays lost."""

REPAIRED = Reliability(budget=1e-9)
"""Everything arrives, but a peer that falls silent is done without instead of raising an error."""
