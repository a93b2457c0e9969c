"""Findings: what the doctor says about one thing, how bad that is, and what to do about it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """Weight of a finding."""

    OK = "ok"
    NOTE = "worth knowing"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """One thing that was looked at."""

    subject: str
    """Thing that was looked at, in a word or two; findings about a network name their kind: "loss", "path MTU"."""
    level: Level
    text: str
    """Sentence that says what was found."""
    remedy: str = ""
    """Command, setting or step that helps; empty if nothing needs to be done."""
    ranks: tuple[int, ...] = ()
    """Ranks at fault: one for a host; sender and receiver for one direction of a link, the lower rank first if both
    directions are meant; none if it is nobody in particular."""

    def to_json(self) -> dict[str, Any]:
        """Finding as plain data."""
        return {**asdict(self), "level": self.level.value, "ranks": list(self.ranks)}


def worst(diagnoses: Iterable[Diagnosis]) -> Level:
    """Highest level of some findings."""
    order = list(Level)
    return max((each.level for each in diagnoses), key=order.index, default=Level.OK)
