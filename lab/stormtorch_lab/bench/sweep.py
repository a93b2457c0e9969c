"""All-reduce against gloo at every combination of rate, round trip, loss and length of bursts, each in a lab.

report = SweepReport.begin(settings)
for point in run_sweep(settings):
    report.points.append(point)
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stormtorch.checks import BadCondition, BadSetting, check_between
from stormtorch.telemetry.json_files import write_json
from stormtorch.telemetry.progress import Advance, ignore_progress
from stormtorch.telemetry.text import condition_text
from stormtorch_lab.bench.allreduce import LINE_IDEAL, AllReduceSettings, run_allreduce_in
from stormtorch_lab.bench.backends import LAB_DEFAULT, congestion_controls
from stormtorch_lab.bench.results import AllReduceResult, ideal_bytes
from stormtorch_lab.jobs.control import BARRIER, TIMES
from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.jobs.launch import open_lab
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.netns.access import LabError, LabUnavailable
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.netns.lab import Lab


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """Settings of the benchmark: all combinations of rates, delays, losses and burst lengths."""

    ranks: int = 4
    rates: tuple[str, ...] = ("100mbit", "400mbit", "1gbit")
    delays: tuple[str, ...] = ("0ms", "20ms")
    """One-way delays: a round trip takes twice as long."""
    losses: tuple[float, ...] = (0.0, 0.01, 0.1)
    bursts: tuple[float | str, ...] = (1.0,)
    """Mean lengths of a run of losses, in packets or as a time such as "5ms"; 1 is independent loss."""
    queue: str | int = 512 << 10
    """Bytes of the queue at each end of an access link."""
    mb: float | None = None
    """Size of the tensor in 10^6 bytes; None follows `ideal_s`."""
    ideal_s: float = 0.6
    """Ideal time in seconds, from which the size of the tensor follows at each rate."""
    iters: int = 5
    warmup: int = 1
    backends: tuple[str, ...] = LAB_DEFAULT
    seed: int = 0
    """Random seed of the loss."""
    patience_s: float = 30.0
    """Wait limit for a backend at a point, in seconds."""
    timeout_s: float = 600.0
    """Seconds after which a point times out."""

    def __post_init__(self) -> None:
        check_between("ranks", self.ranks, 2, 64)
        check_between("ideal_s", self.ideal_s, 1e-3, 1e3)
        for name in ("rates", "delays", "losses", "bursts"):
            if not getattr(self, name):
                raise BadSetting(name, "must name at least one")
        self.points()

    def points(self) -> list[AllReduceSettings]:
        """The settings of every point; points that share a lab are adjacent."""
        return [
            self._point(rate, delay, loss, burst)
            for rate in self.rates
            for delay in self.delays
            for loss in self.losses
            for burst in (self.bursts if loss else (1.0,))  # without loss, bursts make no difference
        ]

    def _point(self, rate: str, delay: str, loss: float, burst: float | str) -> AllReduceSettings:
        try:
            network = Conditions(
                rate=rate,
                delay=delay,
                loss=loss,
                burst=burst,
                queue=self.queue,
                seed=self.seed,
            )
        except BadCondition as error:
            several = {"rate": "rates", "delay": "delays", "loss": "losses", "burst": "bursts"}
            raise BadCondition(several.get(error.name, error.name), error.problem) from error
        assert network.rate_bits is not None
        mb = self.mb
        if mb is None:
            mb = round(ideal_bytes(self.ranks, self.ideal_s, network.rate_bits) / 1e6, 3)
        return AllReduceSettings(
            ranks=self.ranks,
            mb=(mb,),
            iters=self.iters,
            warmup=self.warmup,
            backends=self.backends,
            network=network,
            patience_s=self.patience_s,
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """Result of one combination."""

    requested: dict[str, Any]
    """Requested conditions of the network."""
    mb: float
    measured: dict[str, Any] | None = None
    """Counters of the network."""
    network: str | None = None
    """Kind of the lab."""
    processors_withheld: float | None = None
    """Fraction of processor time that the hypervisor withheld (steal)."""
    results: list[AllReduceResult] = field(default_factory=list)
    error: str | None = None
    """Error, if there are no results."""


@dataclass(frozen=True)
class SweepReport:
    """Results with the conditions of their measurement; points are added one by one."""

    conditions: dict[str, Any]
    points: list[SweepPoint] = field(default_factory=list)

    @classmethod
    def begin(cls, settings: SweepSettings) -> "SweepReport":
        """Makes a report without any point."""
        asked = asdict(settings) | {"times": TIMES, "barrier": BARRIER, "ideal": LINE_IDEAL}
        return cls({**asked, "points_asked": len(settings.points())} | surroundings())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"conditions": self.conditions, "points": [asdict(point) for point in self.points]}

    def write(self, path: Path) -> None:
        """Writes JSON and creates missing folders."""
        write_json(path, self.to_json())


def run_sweep(settings: SweepSettings, advance: Advance = ignore_progress) -> Iterator[SweepPoint]:
    """Measures point by point. A point that fails is recorded and does not end the others.

    Raises:
        stormtorch_lab.netns.LabUnavailable: This machine cannot make such a lab.
    """
    lab: Lab | None = None
    with contextlib.ExitStack() as labs:
        for index, point in enumerate(settings.points()):
            assert point.network is not None
            requested = point.network.to_json()
            what = condition_text(requested)
            advance(what, index * settings.iters)
            try:
                if lab is None or not _fits(lab.conditions, point.network):
                    labs.close()
                    tcp = congestion_controls(settings.backends)
                    lab = labs.enter_context(open_lab(settings.ranks, point.network, tcp))
                report = run_allreduce_in(lab, point, _behind(advance, what, index * settings.iters))
            except LabUnavailable:
                raise
            except (RankFailed, LabError) as error:
                lab = None  # the next point gets a new one
                yield SweepPoint(requested=requested, mb=point.mb[0], error=str(error))
            else:
                yield SweepPoint(
                    requested=requested,
                    measured=report.conditions["measured"],
                    network=report.conditions["network"],
                    processors_withheld=report.conditions["processors_withheld"],
                    mb=point.mb[0],
                    results=report.results,
                )


def _fits(running: Conditions, wanted: Conditions) -> bool:
    """Whether two points can share a lab: they may differ in loss, and in bursts of the same unit."""
    return running.timed == wanted.timed and running.changed(loss=0.0) == wanted.changed(loss=0.0)


def _behind(advance: Advance, what: str, done: int) -> Advance:
    return lambda _what, rounds: advance(what, done + rounds)
