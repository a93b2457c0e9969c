"""Settings and results of `bench manners`: figures with their bounds."""

from dataclasses import dataclass
from typing import Any

from stormtorch.checks import check_between, check_subset
from stormtorch_lab.netns import Conditions, Lab
from stormtorch_lab.netns.access import available_tcp

FAIRNESS_CHECKS = ("all-to-all", "incast", "tcp", "low", "latency", "alone", "pause", "step")
"""Names of the checks."""


@dataclass(frozen=True, kw_only=True)
class FairnessSettings:
    """Settings: the checks and the network."""

    only: tuple[str, ...] = FAIRNESS_CHECKS
    rate: str = "200mbit"
    """Rate of each host's access link."""
    queue: str = "256kb"
    """Bytes of the queue at each end of an access link."""
    delay: str = "0ms"
    ranks: int = 4
    """Ranks for all-to-all and incast; step has twice as many."""
    tcp: tuple[str, ...] = ("cubic", "bbr")
    """Congestion controls of the bulk flow."""
    timeout_s: float = 300.0
    """Seconds after which a check times out."""

    def __post_init__(self) -> None:
        check_subset("only", self.only, FAIRNESS_CHECKS)
        check_between("ranks", self.ranks, 3, 16)
        check_between("timeout_s", self.timeout_s, 30, 1e6)
        check_subset("tcp", self.tcp, available_tcp())
        Conditions(rate=self.rate, queue=self.queue, delay=self.delay)


@dataclass(frozen=True, kw_only=True)
class FairnessResult:
    """Result of a check: a figure and its bound."""

    name: str
    what: str
    figure: float
    bound: float
    at_most: bool
    """Whether the bound is an upper one; it is a lower one otherwise."""
    requested: dict[str, Any]
    measured: dict[str, Any]
    details: dict[str, Any]

    @property
    def good(self) -> bool:
        """Whether the bound holds."""
        return self.figure <= self.bound if self.at_most else self.figure >= self.bound


def lab_of(settings: FairnessSettings, hosts: int) -> Lab:
    """Makes a lab of some hosts."""
    return Lab(hosts, Conditions(rate=settings.rate, queue=settings.queue, delay=settings.delay), management=True)
