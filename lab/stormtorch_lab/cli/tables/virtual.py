"""Table of a training beside a service in virtual time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from stormtorch.cli.terminal.screen import new_table
from stormtorch.telemetry.text import loss_text, rate_text, ratio_text, time_text

if TYPE_CHECKING:
    from stormtorch_lab.studies.colocation.sweep import Seeds


def virtual_table(study: "Seeds", targets_s: Sequence[float]) -> Table:
    """One row per rate of requests and allowed loss."""
    base = study.sweep.base
    line = rate_text(float(base.rate))
    title = f"a service beside a training in virtual time, {base.hosts} hosts at {line}"
    table = new_table(title, _caption(study, targets_s), keys=2)
    headings = ("per s", "allowed\nloss", "loss", "share", "deadline\nx alone", "equal\nms", "mean\nms", "speed-\nup")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for gain in study.gains():
        if before not in (None, gain.requests_per_s):
            table.add_section()
        before, best = gain.requests_per_s, gain.best
        table.add_row(
            f"{gain.requests_per_s:g}",
            loss_text(gain.allowed),
            *(
                ["-"] * 6
                if best is None
                else [
                    loss_text(best.loss),
                    f"{best.low_share:g}",
                    f"{best.slack:g}",
                    f"{1e3 * best.mean_s * best.speedup:.2f}",
                    f"{1e3 * best.mean_s:.2f}",
                    ratio_text(best.speedup),
                ]
            ),
        )
    return table


def _caption(study: "Seeds", targets_s: Sequence[float]) -> str:
    parts = ["The best of all shares and deadlines that lose no more than allowed; equal: one queue, same deadline."]
    if study.sweep.more_requests:
        for target_s in targets_s:
            share = min(study.sweep.shares)
            equal, preferred = study.carried(target_s, None), study.carried(target_s, share)
            within = study.carried(target_s, share, 0.1)
            parts.append(
                f"At a mean of {time_text(target_s)}: {equal:.0f} requests/s equal, {preferred:.0f} preferred "
                f"({within:.0f} with at most 10 % lost)."
            )
    return " ".join(parts)
