"""Live chart of the demo's race: loss over seconds, tokens per second, and the leader; piped, a line every 10 s."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stormtorch.cli.terminal.screen import new_table, periodic_lines
from stormtorch_lab.cli.terminal.chart import ChartLine, draw_lines
from stormtorch_lab.report.text import called

if TYPE_CHECKING:
    from stormtorch_lab.bench.convergence import ConvergenceSettings, Point

_STYLES = {"storm-drift": "bright_blue", "gloo-bbr": "bright_red", "gloo-cubic": "magenta", "gloo": "bright_red"}
_ROWS = 13


class Race:
    """Evaluations so far, as a chart or as a line of text."""

    def __init__(self, settings: ConvergenceSettings, where: str) -> None:
        self.settings = settings
        self.points: dict[str, list[Point]] = {}
        self.doing = f"starting {settings.ranks} processes: torch takes some seconds"
        self._where = where
        self._begun_s = time.monotonic()

    def watch(self, point: Point) -> None:
        """Keeps an evaluation."""
        self.points.setdefault(point.backend, []).append(point)
        self.doing = ""

    def tokens_per_s(self, backend: str) -> float | None:
        """Tokens of all ranks per second of training; None before the first step."""
        last = self.points[backend][-1]
        made = last.steps * self.settings.batch * self.settings.context * self.settings.ranks
        return made / last.clock_s if last.clock_s else None

    def ahead(self) -> str:
        """Describes which training is ahead at the last second that two of them have reached."""
        curves = {name: points for name, points in self.points.items() if points[-1].steps}
        if len(curves) < 2:
            return ""
        second = min(points[-1].clock_s for points in curves.values())
        losses = {name: _loss_at(points, second) for name, points in curves.items()}
        (first, best), (then, other), *_ = sorted(losses.items(), key=lambda each: each[1])
        if other - best < 0.005:
            return f"{called(first)} and {called(then)} are level after {second:.0f} s"
        return f"{called(first)} is ahead: loss {best:.2f} against {other:.2f} after {second:.0f} s each"

    def line(self) -> str:
        """One line of text, for pipes."""
        passed = f"{time.monotonic() - self._begun_s:.0f} s"
        if not self.points:
            return f"{passed}: {self.doing}"
        words = [
            f"{called(name)} {points[-1].loss:.2f} after {points[-1].clock_s:.0f} s ({points[-1].steps} steps)"
            for name, points in self.points.items()
        ]
        return "; ".join(filter(None, [f"{passed}: loss of " + ", ".join(words), self.ahead(), self.doing]))

    def __rich_console__(self, console: Console, _options: object) -> Iterator[RenderableType]:
        yield self.picture(console.width, console.encoding.lower().startswith("utf"))

    def picture(self, width: int, braille: bool = True) -> RenderableType:
        """The whole chart, for a terminal of that width."""
        parts: list[RenderableType] = [Text(self._where, style="bold")]
        lines = [
            ChartLine(called(name), _STYLES.get(name, "green"), [(point.clock_s, point.loss) for point in points])
            for name, points in self.points.items()
        ]
        if lines:
            most = max(self.settings.seconds, *(line.points[-1][0] for line in lines))
            parts.append(
                draw_lines(
                    lines,
                    width=min(width, 110),
                    height=_ROWS,
                    x_most=round(most),
                    x_label="seconds of training",
                    y_label="validation loss (lower is better)",
                    braille=braille,
                )
            )
            parts.append(self._table())
            parts.append(Text(self.ahead(), style="bold"))
        if self.doing:
            parts.append(Text(f"{self.doing} ({time.monotonic() - self._begun_s:.0f} s)", style="dim"))
        return Group(*parts)

    def _table(self) -> Table:
        table = new_table("", lines=False)
        for heading in ("", "tokens/s", "steps", "seconds", "loss"):
            table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
        for name, points in self.points.items():
            last, speed = points[-1], self.tokens_per_s(name)
            shown = "aborted" if last.gave_up else "-" if speed is None else f"{speed:,.0f}"
            style = _STYLES.get(name, "green")
            table.add_row(
                Text(called(name), style=f"bold {style}"),
                shown,
                str(last.steps),
                f"{last.clock_s:.1f}",
                f"{last.loss:.2f}",
            )
        return table


@contextlib.contextmanager
def shown(race: Race, console: Console) -> Iterator[None]:
    """Shows a race while it runs: live in a terminal, else as a line every ten seconds."""
    if console.is_terminal:
        # Few refreshes: drawing takes processor time from the trainings.
        with Live(race, console=console, refresh_per_second=2, transient=False):
            yield
    else:
        with periodic_lines(race.line, console):
            yield
        console.print(race.line(), highlight=False, soft_wrap=True)


def _loss_at(points: list[Point], second: float) -> float:
    for before, after in itertools.pairwise(points):
        if after.clock_s >= second:
            share = (second - before.clock_s) / (after.clock_s - before.clock_s or 1.0)
            return before.loss + share * (after.loss - before.loss)
    return points[-1].loss
