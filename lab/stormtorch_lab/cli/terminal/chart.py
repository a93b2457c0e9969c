"""Line charts in a terminal: braille cells of two by four dots, or letters in terminals without braille."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True)
class ChartLine:
    """A line of the chart, labelled at its end."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


def draw_lines(
    lines: Sequence[ChartLine],
    *,
    width: int,
    height: int,
    x_most: float,
    x_label: str,
    y_label: str,
    braille: bool = True,
) -> Text:
    """Draws lines into a text of `height` rows and an axis below; the horizontal axis runs from 0 to `x_most`."""
    values = [y for line in lines for _, y in line.points]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    high, low = high + 0.03 * (high - low or 1.0), low - 0.05 * (high - low or 1.0)
    names = max((len(line.name) for line in lines), default=0) + 2
    axis = 6
    columns = max(width - axis - names - 1, 8)
    across, down = (2, 4) if braille else (1, 1)
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    labels: dict[int, tuple[str, str]] = {}
    for line in lines:
        dots = [
            (
                min(int(x / (x_most or 1.0) * (columns * across - 1)), columns * across - 1),
                round((high - y) / (high - low) * (height * down - 1)),
            )
            for x, y in line.points
        ]
        for column, row in _joined(dots):
            mask, _ = cells.get((row // down, column // across), (0, ""))
            cells[row // down, column // across] = (
                mask | _DOTS[row % down][column % across] if braille else 1,
                line.style,
            )
            if not braille:
                cells[row, column] = ord(line.name[:1] or "*"), line.style
        if dots:
            labels[_free(dots[-1][1] // down, labels, height)] = (line.name, line.style)
    text = Text()
    text.append(f"{y_label}\n", style="dim")
    for row in range(height):
        number = high - (row + 0.5) / height * (high - low)
        text.append(f"{number:5.2f} " if row % 3 == 0 else " " * axis, style="dim")
        text.append("│" if braille else "|", style="dim")
        for column in range(columns):
            mask, style = cells.get((row, column), (0, ""))
            text.append(" " if not mask else chr(0x2800 + mask) if braille else chr(mask), style=style)
        if row in labels:
            name, style = labels[row]
            text.append(f" {name}", style=f"bold {style}")
        text.append("\n")
    text.append(" " * axis + ("└" + "─" * columns if braille else "+" + "-" * columns) + "\n", style="dim")
    end = f"{x_most:g} {x_label}"
    text.append(" " * axis + " 0" + end.rjust(columns - 1), style="dim")
    return text


def _free(row: int, taken: dict[int, tuple[str, str]], height: int) -> int:
    """Finds the nearest row without a label."""
    return min((each for each in range(height) if each not in taken), key=lambda each: abs(each - row), default=row)


def _joined(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """All dots between consecutive points."""
    found = list(dots[:1])
    for (x0, y0), (x1, y1) in itertools.pairwise(dots):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        found += [
            (round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)) for step in range(1, steps + 1)
        ]
    return found
