"""Names at the ends of lines, instead of a legend: they make room for each other, and never hide a line."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Least distance of two names, as a fraction of the axis.
_APART = 0.075


def label_ends(axis: "Axes", *, fontsize: float = 8.5) -> None:
    """Writes each line's label at its right end, in its colour; call it once the limits of the axis are final."""
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
    places = [at for at, _ in ends]
    for _ in range(100):
        for index in range(1, len(places)):
            lacking = _APART - (places[index] - places[index - 1])
            if lacking > 0:
                places[index] += lacking / 2
                places[index - 1] -= lacking / 2
    for place, (_, line) in zip(places, ends, strict=True):
        axis.annotate(
            str(line.get_label()),
            (1.02, place),
            xycoords="axes fraction",
            color=line.get_color(),
            fontsize=fontsize,
            va="center",
            annotation_clip=False,
        )
