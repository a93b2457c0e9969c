"""The table of recomputed jobs: how many jobs were equal bit for bit, what was rounded, lost or wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from recompute_program import Schedule


class JobResult(TypedDict):
    """A job, by its seed and the kinds from which it was drawn."""

    seed: int
    kinds: list[str]
    kind: str
    said: str
    counts: dict[str, int]


def kind_of(schedule: Schedule) -> str:
    """Returns the kind of a job in words."""
    program = schedule.program
    if program.loss:
        return f"{program.loss:.0%} loss, nothing sent twice".replace("%", " %")
    for kind, words in (("models", "two models"), ("halves", "two optimizers of a model")):
        if program.sessions == kind:
            return words
    return "GradScaler" if program.scaler else "DiLoCo" if program.diloco else "closure" if program.closure else "plain"


def table(rows: Sequence[JobResult]) -> str:
    """Returns the table, by kind of job and in all."""
    lines = [
        "| jobs | | rounds | views | same bits | rounding | something lost, and said | longest silent wait | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kinds = sorted({row["kind"] for row in rows})
    lines += [_line(kind, [row for row in rows if row["kind"] == kind]) for kind in kinds]
    return "\n".join([*lines, _line("all", rows)])


def _line(title: str, rows: Sequence[JobResult]) -> str:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row["counts"])
    right = [row for row in rows if row["said"].startswith("right")]
    rounded = sum(_any(row, "rounded: ") for row in right)
    lost = sum(_any(row, "named: ") for row in right)
    wait = max((row["counts"].get("wait, ms", 0) for row in rows), default=0) / 1000
    figures = (len(rows), total["rounds"], total["views"], len(right) - rounded, rounded, lost)
    return f"| {title} | " + " | ".join(map(str, figures)) + f" | {wait:.1f} s | {len(rows) - len(right)} |"


def _any(row: JobResult, what: str) -> bool:
    return any(count for name, count in row["counts"].items() if name.startswith(what))
