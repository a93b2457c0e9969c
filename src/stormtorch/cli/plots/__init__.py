"""Plots of results with matplotlib: one module per command."""

from pathlib import Path

from stormtorch.checks import BadSetting


def check_plot(path: Path) -> None:
    """Raises `BadSetting` if the plot cannot be drawn, before anything is measured."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise BadSetting("plot", "needs matplotlib: pip install matplotlib") from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise BadSetting("plot", f"must end with one of {', '.join('.' + kind for kind in sorted(kinds))}, got {path}")
