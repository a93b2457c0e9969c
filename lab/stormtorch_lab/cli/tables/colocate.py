"""Table of `bench colocate`: a web service beside a training."""

from typing import TYPE_CHECKING

from rich.table import Table

from stormtorch.cli.terminal.screen import new_table
from stormtorch.telemetry.text import loss_text, rate_text, ratio_text, time_text

if TYPE_CHECKING:
    from stormtorch_lab.bench.services.colocate_results import ColocateReport


def colocate_table(report: "ColocateReport") -> Table:
    """One row per training, preference and rate of requests."""
    settings = report.conditions["settings"]
    line = rate_text(settings["network"]["rate_bits_per_s"])
    table = new_table(f"a web service beside a training, {settings['ranks']} hosts at {line}", _caption(report), keys=3)
    table.add_column("training", no_wrap=True)
    headings = ("share", "per s", "mean\nms", "p99\nms", "fail-\ned", "speed-\nup", "loss", "step\ns", "valid.\nratio")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows():
        table.add_row(
            row.train,
            "-" if row.train == "none" else row.prefer,
            f"{row.requests:g}",
            "-" if row.mean_s is None else f"{1e3 * row.mean_s:.1f}",
            "-" if row.p99_s is None else f"{1e3 * row.p99_s:.0f}",
            str(row.failed),
            "-" if row.speedup is None else ratio_text(row.speedup),
            "-" if row.loss is None else loss_text(row.loss),
            "-" if row.step_s is None else f"{row.step_s:.2f}",
            "-" if row.validation_ratio is None else f"{row.validation_ratio:.3f}",
        )
    return table


def _caption(report: "ColocateReport") -> str:
    settings = report.conditions["settings"]
    parts = ["Latency from when a request was due. speed-up: against the same training at equal priority."]
    for train, (step_s, deadline_s, loss) in report.alone().items():
        if step_s is None:
            continue
        text = f"{train} alone: a step {time_text(step_s)}"
        if loss is not None:
            which = "that it learned" if deadline_s is None else f"of {time_text(deadline_s)} for each stage"
            text += f", and {loss_text(loss)} lost with deadlines {which}"
        parts.append(f"{text}.")
    at_s = settings["at_latency_s"]
    carried = [
        f"{each.train}{'' if each.train == 'none' else ' equal' if each.low_share is None else f' {each.low_share:g}'} "
        f"{f'{each.bound} ' if each.bound else ''}{each.per_s:.0f}"
        for each in report.carried(at_s)
    ]
    parts.append(f"Requests/s at a mean of {time_text(at_s)}: {', '.join(carried)}.")
    services = [run.service for run in report.runs if run.service is not None]
    late_s, worst_s = max(each.late_mean_s for each in services), max(each.late_p99_s for each in services)
    nice = report.conditions.get("nice", {})
    parts.append(
        f"Clients sent late by up to {time_text(late_s)} on average, p99 {time_text(worst_s)}; niceness of the service "
        f"{nice.get('service', 0)}, of the training {nice.get('training', 0)}."
    )
    return " ".join(parts)
