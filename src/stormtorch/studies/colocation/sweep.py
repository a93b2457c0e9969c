"""What a service gains from a training that waits for it, against what the training loses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stormtorch.checks import check
from stormtorch.studies.colocation.run import Colocated, Colocation, colocate

ALLOWED = (0.01, 0.05, 0.10, 0.20)
"""Losses of the training that are allowed."""
RATES = (2000.0, 5000.0, 10000.0)
"""Requests per second of all hosts together."""
SHARES = (0.5, 0.2, 0.05, 0.0)
"""Shares of a line that the training keeps."""
SLACKS = (2.0, 3.0, 4.5, 6.0)
"""Deadlines of a stage, in multiples of the time that it takes alone."""
TARGETS_S = (0.002, 0.005, 0.010)
"""Mean completion times at which requests are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A run with classes, and the same run with one queue for all packets."""

    settings: Colocation
    """Settings with classes."""
    preferred: Colocated
    """The run with classes."""
    equal: Colocated
    """The run without."""

    @property
    def speedup(self) -> float:
        """Mean completion time without classes over that with them."""
        assert self.preferred.mean_s is not None and self.equal.mean_s is not None
        return self.equal.mean_s / self.preferred.mean_s

    @property
    def loss(self) -> float:
        """Loss of the training with classes."""
        return self.preferred.loss or 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values, by name."""
        return {
            "requests_per_s": self.settings.requests_per_s,
            "low_share": self.settings.low_share,
            "slack": self.settings.slack,
            "speedup": self.speedup,
            "loss": self.loss,
            "equal_loss": self.equal.loss,
            "preferred": self.preferred.to_json(),
            "equal": self.equal.to_json(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """Most requests per second whose mean completion time stays within a target."""

    target_s: float
    """The target."""
    equal: float
    """With one queue for all packets."""
    preferred: float
    """With classes."""
    equal_loss: float
    """Loss of the training at that rate without classes."""
    preferred_loss: float
    """Loss of the training at that rate with classes."""


class Runs:
    """Runs by their settings, each made once.

    Args:
        told: Called with the settings and result of each new run.
    """

    def __init__(self, told: Callable[[Colocation, Colocated], None] | None = None) -> None:
        self._told = told
        self._known: dict[Colocation, Colocated] = {}

    def __call__(self, settings: Colocation) -> Colocated:
        """Result of a run."""
        if settings not in self._known:
            self._known[settings] = colocate(settings)
            if self._told is not None:
                self._told(settings, self._known[settings])
        return self._known[settings]


def compare(
    base: Colocation,
    *,
    rates: Iterable[float] = RATES,
    shares: Sequence[float] = SHARES,
    slacks: Sequence[float] = SLACKS,
    runs: Runs | None = None,
) -> list[Pair]:
    """Runs with and without classes, for each rate of requests, share of the training and deadline."""
    runs = runs or Runs()
    pairs = []
    for requests_per_s in rates:
        for slack in slacks:
            equal = replace(base, requests_per_s=requests_per_s, slack=slack, low_share=None)
            for share in shares:
                settings = replace(equal, low_share=share)
                pairs.append(Pair(settings=settings, preferred=runs(settings), equal=runs(equal)))
    return pairs


def best_within(pairs: Iterable[Pair], allowed: float) -> Pair | None:
    """The pair with the largest speed-up whose training loses no more than is allowed; None if all lose more."""
    return max((pair for pair in pairs if pair.loss <= allowed), key=lambda pair: pair.speedup, default=None)


def most_requests(
    base: Colocation, target_s: float, *, most_loss: float = 1.0, step: float = 250.0, top: float, runs: Runs
) -> float:
    """Most requests per second with a mean completion time within a target, by bisection.

    Args:
        base: Settings apart from the rate of requests.
        target_s: The mean completion time.
        most_loss: Largest loss of the training.
        step: Distance of the rates that are tried.
        top: Rate that is surely too high.
        runs: Runs that were made before.
    """
    check(target_s > 0.0, "target_s", "be above 0", target_s)
    low, high = 0, int(top // step)  # low holds, high does not
    while high - low > 1:
        middle = (low + high) // 2
        result = runs(replace(base, requests_per_s=middle * step))
        within = result.mean_s is not None and result.mean_s <= target_s
        if within and (result.loss or 0.0) <= most_loss:
            low = middle
        else:
            high = middle
    return low * step


def carry(
    base: Colocation,
    *,
    targets_s: Sequence[float] = TARGETS_S,
    low_share: float = 0.0,
    most_loss: float = 1.0,
    step: float = 250.0,
    runs: Runs | None = None,
) -> list[Carried]:
    """Requests per second that the service carries at fixed mean completion times, with and without classes."""
    runs = runs or Runs()
    top = base.hosts * float(base.rate) / 8 / base.response_bytes
    both = replace(base, low_share=None), replace(base, low_share=low_share)
    all_carried = []
    for target_s in targets_s:
        equal, preferred = (
            most_requests(each, target_s, most_loss=most_loss, step=step, top=top, runs=runs) for each in both
        )
        losses = [
            runs(replace(each, requests_per_s=rate)).loss or 0.0 if rate else 0.0
            for each, rate in zip(both, (equal, preferred), strict=True)
        ]
        all_carried.append(
            Carried(
                target_s=target_s,
                equal=equal,
                preferred=preferred,
                equal_loss=losses[0],
                preferred_loss=losses[1],
            )
        )
    return all_carried


@dataclass(frozen=True, kw_only=True, slots=True)
class ColocationStudy:
    """Results of the whole study."""

    base: Colocation
    """Settings that all runs share."""
    pairs: list[Pair]
    """Runs with and without classes."""
    carried: list[Carried] = field(default_factory=list)
    """Requests at fixed completion times, whatever the training loses."""
    carried_within: list[Carried] = field(default_factory=list)
    """Requests at fixed completion times at which the training loses a tenth at most."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, by name."""
        rates = sorted({pair.settings.requests_per_s for pair in self.pairs})
        best = []
        for rate in rates:
            for allowed in ALLOWED:
                found = best_within((pair for pair in self.pairs if pair.settings.requests_per_s == rate), allowed)
                best.append(
                    {
                        "requests_per_s": rate,
                        "allowed": allowed,
                        "speedup": found and found.speedup,
                        "loss": found and found.loss,
                        "equal_loss": found and found.equal.loss,
                        "low_share": found and found.settings.low_share,
                        "slack": found and found.settings.slack,
                    }
                )
        return {
            "settings": asdict(self.base),
            "best": best,
            "carried": [asdict(each) for each in self.carried],
            "carried_within": [asdict(each) for each in self.carried_within],
            "pairs": [pair.to_json() for pair in self.pairs],
        }

    def write(self, path: Path) -> None:
        """Writes the results as JSON."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
