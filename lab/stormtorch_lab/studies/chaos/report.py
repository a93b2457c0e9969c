"""Report of a chaos run: faults, recoveries, invariants, and the verdict."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stormtorch.telemetry.json_files import without_nan, write_json
from stormtorch.telemetry.statistics import median
from stormtorch_lab.studies.chaos.faults import KINDS
from stormtorch_lab.studies.chaos.invariants import Check, final_loss
from stormtorch_lab.studies.chaos.logs import History
from stormtorch_lab.studies.chaos.settings import ChaosSettings
from stormtorch_lab.studies.chaos.timeline import Recovery


@dataclass(frozen=True)
class KindResult:
    """Recoveries from all faults of one kind."""

    kind: str
    count: int
    stopped: int
    """Number of faults after which the training never continued."""
    pauses_s: list[float]
    """Longest pause of the training, for each fault after which it continued."""
    returns_s: list[float]
    """Time until the affected hosts made steps again, for faults without another one in between."""

    def to_json(self) -> dict[str, Any]:
        """Plain data: medians and worst values."""
        found: dict[str, Any] = {"kind": self.kind, "count": self.count, "stopped": self.stopped}
        for name, values in (("pause", self.pauses_s), ("return", self.returns_s)):
            found |= {
                f"{name}_median_s": median(values) if values else None,
                f"{name}_worst_s": max(values, default=None),
            }
        return found


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """Result of a run."""

    settings: ChaosSettings
    conditions: dict[str, Any]
    """Machine, versions, commit and date; conditions of the network as requested and as measured."""
    history: History
    start_s: float
    """Time at which the faults began, on the clock of the logs."""
    finish_s: float
    recoveries: list[Recovery]
    planned: int
    """Faults of the schedule; an aborted run injects fewer."""
    checks: list[Check]
    undisturbed: float | None
    """Validation loss of the run without faults."""
    folder: Path
    """Folder of the logs."""

    @property
    def passed(self) -> bool:
        """Whether all invariants held and all faults were injected."""
        return all(check.holds for check in self.checks) and len(self.recoveries) == self.planned

    @property
    def steps(self) -> int:
        """Steps of the training."""
        return self.history.last_step

    @property
    def val_loss(self) -> float | None:
        """Validation loss at the end; None if no rank reached it."""
        return final_loss(self.history)

    @property
    def views(self) -> int:
        """Number of views in which steps were made."""
        return len({(step.view, step.members) for step in self.history.steps})

    @property
    def compared(self) -> int:
        """Steps at which exact parameters of two or more ranks were compared."""
        steps = [step for process_log in self.history.process_logs for step in process_log.digests]
        return sum(steps.count(step) > 1 for step in set(steps))

    @property
    def refused(self) -> int:
        """Number of reads of exact parameters that were refused with an error."""
        return sum(len(process_log.refused) for process_log in self.history.process_logs)

    @property
    def verdict(self) -> str:
        """One sentence."""
        seconds = self.finish_s - self.start_s
        what = f"{len(self.recoveries)} faults in {seconds / 60:.1f} minutes, {self.steps} steps"
        broken = [check.name for check in self.checks if not check.holds]
        if len(self.recoveries) < self.planned:
            broken.append(f"only {len(self.recoveries)} of {self.planned} faults were injected")
        if broken:
            return f"failed: {what}; {len(broken)} of {len(self.checks)} invariants violated ({'; '.join(broken)})"
        loss = ""
        if self.val_loss is not None and self.undisturbed is not None:
            loss = f", validation loss {self.val_loss / self.undisturbed - 1:+.1%} against the run without faults"
        return f"passed: {what}, all {len(self.checks)} invariants held{loss}"

    def of_kind(self, kind: str) -> KindResult:
        """Recoveries from one kind of fault."""
        own = [each for each in self.recoveries if each.struck.fault.kind == kind]
        return KindResult(
            kind,
            len(own),
            sum(each.pause_s is None for each in own),
            [each.pause_s for each in own if each.pause_s is not None],
            [each.return_s for each in own if each.return_s is not None],
        )

    @property
    def kinds(self) -> list[KindResult]:
        """Results of all injected kinds."""
        return [found for kind in KINDS if (found := self.of_kind(kind)).count]

    @property
    def hosts(self) -> list[dict[str, Any]]:
        """Processes of each host, as plain data."""
        found = []
        for host in sorted({process_log.host for process_log in self.history.process_logs}):
            process_logs = self.history.of_host(host)
            found.append(
                {
                    "host": host,
                    "processes": len(process_logs),
                    "steps": sum(len(process_log.steps) for process_log in process_logs),
                    "longest_pause_s": round(max(process_log.longest_pause_s for process_log in process_logs), 3),
                    "warnings": sum(len(process_log.warnings) for process_log in process_logs),
                    "errors": [process_log.error for process_log in process_logs if process_log.error],
                }
            )
        return found

    def curve(self) -> list[tuple[float, int]]:
        """Seconds since the faults began, and the step of the training, about once a second."""
        found: list[tuple[float, int]] = []
        for t, step in self.history.frontier:
            if not found or t - self.start_s - found[-1][0] >= 1.0:
                found.append((round(t - self.start_s, 2), step))
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found: dict[str, Any] = without_nan(
            {
                "passed": self.passed,
                "verdict": self.verdict,
                "settings": self.settings.to_json(),
                "conditions": self.conditions,
                "steps": self.steps,
                "views": self.views,
                "compared": self.compared,
                "refused": self.refused,
                "val_loss": self.val_loss,
                "undisturbed_val_loss": self.undisturbed,
                "checks": [check.to_json() for check in self.checks],
                "kinds": [kind.to_json() for kind in self.kinds],
                "timeline": [each.to_json(self.start_s) for each in self.recoveries],
                "hosts": self.hosts,
                "curve": self.curve(),
            }
        )
        return found

    def write(self, path: Path) -> None:
        """Writes JSON and creates missing folders."""
        write_json(path, self.to_json())
