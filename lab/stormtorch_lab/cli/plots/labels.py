"""Labels at the ends of lines, instead of a legend, spaced so that they never overlap."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Height of a line of text, and least space between two labels, as fractions of the axis.
_LINE, _SPACE = 0.055, 0.02


def label_ends(axis: "Axes", *, fontsize: float = 8.5) -> None:
    """Writes each line's label at its right end, in its colour; the limits of the axis must be final."""
    right = axis.get_xlim()[1]
    ends: list[tuple[float, Any]] = []
    for line in axis.get_lines():
        label = str(line.get_label())
        x, y = (list(map(float, values)) for values in (line.get_xdata(), line.get_ydata()))  # type: ignore[arg-type]  # arrays
        inside = [at for at in range(len(x)) if x[at] <= right and math.isfinite(y[at])]
        if label.startswith("_") or not inside:
            continue
        _, at = axis.transAxes.inverted().transform(axis.transData.transform((x[inside[-1]], y[inside[-1]])))
        ends.append((min(max(float(at), 0.0), 1.0), line))
    ends.sort(key=lambda end: end[0])
    positions = [at for at, _ in ends]
    heights = [_LINE * (1 + str(line.get_label()).count("\n")) + _SPACE for _, line in ends]
    for _ in range(100):
        for index in range(1, len(positions)):
            lacking = (heights[index] + heights[index - 1]) / 2 - (positions[index] - positions[index - 1])
            if lacking > 0:
                positions[index] += lacking / 2
                positions[index - 1] -= lacking / 2
    for label_y, (_, line) in zip(positions, ends, strict=True):
        axis.annotate(
            str(line.get_label()),
            (1.02, label_y),
            xycoords="axes fraction",
            color=line.get_color(),
            fontsize=fontsize,
            va="center",
            annotation_clip=False,
        )
