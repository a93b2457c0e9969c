"""Results as pictures: one module per command, drawn with matplotlib."""

from pathlib import Path

from stormtorch.checks import BadSetting


def check_plot(path: Path) -> None:
    """Raises `BadSetting` where no picture could be made, before anything is measured."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise BadSetting("plot", "needs matplotlib: pip install matplotlib") from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise BadSetting("plot", f"must end with one of {', '.join('.' + kind for kind in sorted(kinds))}, got {path}")
