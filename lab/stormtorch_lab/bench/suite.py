"""The benchmark suite as data: part, command and approximate time of each measurement."""

from collections.abc import Sequence
from dataclasses import dataclass

from stormtorch.checks import check_subset


@dataclass(frozen=True)
class Measurement:
    """One command of `stormtorch bench`, which writes one file."""

    part: str
    file: str
    """Name of its result file, without the ending."""
    words: str
    """Arguments of `stormtorch bench`."""
    about_s: int
    """Approximate seconds on two cores."""
    lab: bool = False
    """Whether this part of the suite runs on hosts of a lab."""

    @property
    def at_most_s(self) -> int:
        """Time limit in seconds; generous, as machines may be much slower."""
        return 60 + 5 * self.about_s


_LOSSY = "--patience-s 20 --iters 10"

SUITE = (
    Measurement("allreduce", "allreduce-2-hosts", "allreduce --ranks 2 --mb 25,100", 12),
    Measurement("allreduce", "allreduce-4-hosts", "allreduce --ranks 4 --mb 25,100", 25),
    Measurement("latency", "latency-2-hosts", "latency --ranks 2", 17),
    Measurement("latency", "latency-4-hosts", "latency --ranks 4", 28),
    Measurement("ddp", "ddp-2-hosts", "ddp --ranks 2", 45),
    Measurement("ddp", "ddp-4-hosts", "ddp --ranks 4", 80),
    Measurement(
        "cable",
        "cable-1500",
        "allreduce --cable 1500 --mb 25,100 --backends storm,storm-lossy,gloo,gloo-cubic",
        27,
        True,
    ),
    Measurement(
        "cable",
        "cable-9000",
        "allreduce --cable 9000 --mb 25,100 --backends storm,storm-lossy,gloo,gloo-cubic",
        27,
        True,
    ),
    Measurement("lab", "lab-1gbit", f"allreduce --ranks 4 --rate 1gbit --mb 25 {_LOSSY}", 35, True),
    Measurement("lab", "lab-1gbit-loss1", f"allreduce --ranks 4 --rate 1gbit --mb 25 --loss 0.01 {_LOSSY}", 65, True),
    Measurement("lab", "lab-1gbit-loss10", f"allreduce --ranks 4 --rate 1gbit --mb 25 --loss 0.1 {_LOSSY}", 80, True),
    Measurement(
        "hierarchy",
        "lab-hierarchy-400mbit",
        "allreduce --ranks 8 --ranks-per-host 2 --rate 400mbit --iters 15 --backends storm,storm-flat,gloo-bbr "
        "--patience-s 90",
        110,
        True,
    ),
    Measurement("mpi", "mpi-2-hosts", "allreduce --ranks 2 --mb 25,100 --backends storm,gloo,mpi", 12),
    Measurement("mpi", "mpi-4-hosts", "allreduce --ranks 4 --mb 25,100 --backends storm,gloo,mpi", 25),
    Measurement("mpi", "mpi-latency-2-hosts", "latency --ranks 2 --backends storm,gloo,mpi", 17),
    Measurement("mpi", "mpi-latency-4-hosts", "latency --ranks 4 --backends storm,gloo,mpi", 30),
)
"""Measurements in order of execution."""

PARTS = tuple(dict.fromkeys(measurement.part for measurement in SUITE))
"""Parts that can be chosen."""


def chosen(parts: Sequence[str]) -> list[Measurement]:
    """Measurements of these parts, in the order of the suite.

    Raises:
        BadSetting: A part is unknown, or none is named.
    """
    check_subset("only", parts, PARTS)
    return [measurement for measurement in SUITE if measurement.part in parts]
