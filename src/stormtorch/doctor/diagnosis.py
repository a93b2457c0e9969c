"""A diagnosis of the doctor: what was found, how bad it is, and the remedy."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """Severity of a diagnosis."""

    OK = "ok"
    NOTE = "worth knowing"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Result of one check."""

    subject: str
    """What was checked, in a word or two: "cores", or for a network "loss", "path MTU"."""
    level: Level
    text: str
    """What was found, in one sentence."""
    remedy: str = ""
    """Command, setting or step that helps; empty if nothing needs to be done."""
    ranks: tuple[int, ...] = ()
    """Ranks at fault: one for a host; sender and receiver for one direction of a link, the lower rank first for both
    directions; empty if no single rank or link is at fault."""

    def to_json(self) -> dict[str, Any]:
        """Diagnosis as plain data."""
        return {**asdict(self), "level": self.level.value, "ranks": list(self.ranks)}


def worst(diagnoses: Iterable[Diagnosis]) -> Level:
    """Highest level of some diagnoses."""
    order = list(Level)
    return max((each.level for each in diagnoses), key=order.index, default=Level.OK)
