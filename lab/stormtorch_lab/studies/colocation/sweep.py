"""Sweep of a training beside a service in virtual time: speed-up of the service over loss of the training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from stormtorch.checks import check, check_between
from stormtorch.telemetry.statistics import mean
from stormtorch_lab.studies.colocation.run import Colocated, Colocation, colocate

ALLOWED = (0.01, 0.05, 0.10, 0.20)
"""Allowed losses of the training."""
RATES = (2000.0, 5000.0, 10000.0)
"""Published request rates, per second of all hosts together."""
SHARES = (0.5, 0.05, 0.0)
"""Shares of a line that the training keeps."""
SLACKS = (2.0, 3.0, 6.0)
"""Deadlines of a stage, in multiples of the time that it takes alone."""

CARRY_RATES = (4000.0, 6000.0, 8000.0, 9000.0, 10000.0, 11000.0, 12000.0, 13000.0)
"""Further request rates, beside `RATES`, for the search of the rate at a fixed mean latency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Settings of the study: what is varied."""

    base: Colocation
    """Settings that all runs share."""
    requests: tuple[float, ...] = RATES
    """Requests per second of all hosts."""
    shares: tuple[float, ...] = SHARES
    """Shares of a line that the training keeps."""
    slacks: tuple[float, ...] = SLACKS
    """Deadlines of a stage, in multiples of the time that it takes alone."""
    more_requests: tuple[float, ...] = ()
    """Further rates, for requests at a mean: with the longest deadline, and the strongest preference or one queue."""
    seeds: int = 3
    """Runs of each case, with their own request arrivals."""

    def __post_init__(self) -> None:
        check_between("seeds", self.seeds, 1, 1000)
        for name in ("requests", "shares", "slacks"):
            check(bool(getattr(self, name)), name, "name at least one", getattr(self, name))
        self.runs()

    def runs(self) -> list[Colocation]:
        """All runs: with one queue for all packets, and with traffic classes."""
        cases: list[tuple[float, float, float | None]] = [
            (rate, slack, share) for rate in self.requests for slack in self.slacks for share in (None, *self.shares)
        ]
        for rate in self.more_requests:
            cases += [(rate, max(self.slacks), share) for share in (None, min(self.shares))]
        return [
            replace(self.base, requests_per_s=rate, slack=slack, low_share=share, seed=self.base.seed + seed)
            for rate, slack, share in dict.fromkeys(cases)
            for seed in range(self.seeds)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCase:
    """Means over the seeds of one case."""

    requests_per_s: float
    low_share: float | None
    slack: float | None
    mean_s: float
    """Mean completion time of the service."""
    loss: float
    """Loss of the training."""
    speedup: float = 1.0
    """Speed-up: mean completion time with one queue for all packets, divided by this one."""
    speedups: tuple[float, ...] = ()
    """Speed-up of each seed's run, against the run of that seed with one queue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The best case within an allowed loss, at a rate of requests."""

    requests_per_s: float
    allowed: float
    best: SweepCase | None
    """The case with the largest speed-up within the allowed loss; None if all lose more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seeds:
    """Results of the study over its seeds."""

    sweep: Sweep
    results: dict[Colocation, Colocated]

    def cases(self) -> list[SweepCase]:
        """Means over seeds, with speed-ups against one queue at the same deadline."""
        groups: dict[tuple[float, float | None, float | None], list[Colocated]] = {}
        for settings, result in self.results.items():
            groups.setdefault((settings.requests_per_s, settings.slack, settings.low_share), []).append(result)
        found = []
        for (rate, slack, share), runs in groups.items():
            equal = [each.mean_s or 0.0 for each in groups.get((rate, slack, None), [])]
            means = [each.mean_s or 0.0 for each in runs]
            if len(equal) != len(means):
                continue  # the study ended before all of them ran
            found.append(
                SweepCase(
                    requests_per_s=rate,
                    low_share=share,
                    slack=slack,
                    mean_s=mean(means),
                    loss=mean([each.loss or 0.0 for each in runs]),
                    speedup=mean(equal) / mean(means),
                    speedups=tuple(one / other for one, other in zip(equal, means, strict=True)),
                )
            )
        return found

    def gains(self) -> list[Gain]:
        """Best case for each allowed loss, by rate of requests."""
        cases = [each for each in self.cases() if each.low_share is not None]
        return [
            Gain(
                requests_per_s=rate,
                allowed=allowed,
                best=max(
                    (each for each in cases if each.requests_per_s == rate and each.loss <= allowed),
                    key=lambda each: each.speedup,
                    default=None,
                ),
            )
            for rate in self.sweep.requests
            for allowed in ALLOWED
        ]

    def carried(self, target_s: float, low_share: float | None, most_loss: float = 1.0) -> float:
        """Requests per second at a mean completion time, by linear interpolation, at the longest deadline.

        Args:
            target_s: The mean completion time.
            low_share: The training's share of a link; None has one queue.
            most_loss: Largest allowed loss of the training.
        """
        slack = max(self.sweep.slacks)
        curve = sorted(
            (each.requests_per_s, each.mean_s, each.loss)
            for each in self.cases()
            if each.low_share == low_share and each.slack == slack
        )
        reached = 0.0
        for (rate, mean_s, loss), (next_rate, next_s, next_loss) in itertools.pairwise(curve):
            if mean_s > target_s or loss > most_loss:
                break
            parts = [1.0]
            if next_s > target_s:
                parts.append((target_s - mean_s) / (next_s - mean_s))
            if next_loss > most_loss:
                parts.append((most_loss - loss) / (next_loss - loss))
            reached = rate + min(parts) * (next_rate - rate)
            if min(parts) < 1.0:
                break
        return reached

    def to_json(self, targets_s: Sequence[float]) -> dict[str, Any]:
        """Plain values, by name."""
        shares = (None, min(self.sweep.shares))
        return {
            "settings": asdict(self.sweep),
            "gains": [asdict(each) for each in self.gains()],
            "carried": [
                {
                    "target_s": target_s,
                    "most_loss": most_loss,
                    "equal": self.carried(target_s, shares[0], most_loss),
                    "preferred": self.carried(target_s, shares[1], most_loss),
                }
                for target_s in targets_s
                for most_loss in (1.0, 0.1)
            ],
            "cases": [asdict(each) for each in self.cases()],
        }

    def write(self, path: Path, targets_s: Sequence[float]) -> None:
        """Writes JSON and creates missing folders."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(targets_s), indent=1) + "\n", encoding="utf-8")


def run_sweep(sweep: Sweep, on_run: Callable[[int], None], *, processes: int = 1) -> Seeds:
    """Makes all runs of a study.

    Args:
        sweep: What to run.
        on_run: Called with the number of finished runs.
        processes: Number of runs in parallel, one process each.
    """
    runs = sweep.runs()
    results: dict[Colocation, Colocated] = {}
    if processes == 1:
        for settings in runs:
            results[settings] = colocate(settings)
            on_run(len(results))
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            for settings, result in zip(runs, pool.map(colocate, runs), strict=True):
                results[settings] = result
                on_run(len(results))
    return Seeds(sweep=sweep, results=results)
