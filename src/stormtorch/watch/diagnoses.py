"""A diagnosis of a job: a sentence, its severity, and how it names the culprits."""

from dataclasses import dataclass
from enum import StrEnum

from stormtorch.watch.job import named
from stormtorch.watch.job_snapshot import JobSnapshot


class Level(StrEnum):
    """Severity of a diagnosis."""

    BAD = "bad"
    WARN = "warn"
    GOOD = "good"
    IDLE = "idle"
    """There is nothing to judge yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDiagnosis:
    """One problem of a job, or the statement that all is well."""

    level: Level
    kind: str
    text: str
    """The problem and its culprit, in one sentence without its full stop."""
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    """Affected links, each as (sender, receiver)."""
    weight: float = 0.0
    """Cost as a share of a step or of the bytes: sorts diagnoses of one level."""

    @property
    def sentence(self) -> str:
        """The whole sentence."""
        words = f"{self.text}: {self.remedy}" if self.remedy else self.text
        return words if words.endswith("\N{HORIZONTAL ELLIPSIS}") else f"{words}."


def where(job_snapshot: JobSnapshot, ranks: tuple[int, ...]) -> str:
    """Names ranks by their host if they are all of its ranks, otherwise by their numbers."""
    everyone = job_snapshot.everyone
    hosts = {everyone[rank].host for rank in ranks if rank in everyone}
    if len(hosts) == 1 and (host := next(iter(hosts))):
        whole = tuple(rank for rank, process in everyone.items() if process.host == host)
        if whole == ranks and len(everyone) > len(ranks):
            return f"Host {host} ({named(ranks)})"
        if len(ranks) == 1:
            return f"Rank {ranks[0]} on {host}"
    text = named(ranks)
    return text[0].upper() + text[1:]


def does(who: str, one: str, many: str) -> str:
    """Joins a culprit of `where` and a verb."""
    return f"{who} {many if who.startswith('Ranks') else one}"


def percent(fraction: float) -> str:
    """Formats a fraction: "12 %", "0.4 %"."""
    return f"{100 * fraction:.0f} %" if fraction >= 0.0995 else f"{100 * fraction:.2g} %"
