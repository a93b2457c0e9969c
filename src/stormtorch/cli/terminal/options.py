"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[
    Path | None, typer.Option(help="Write settings, conditions and results to this JSON file.", dir_okay=False)
]
Plot = Annotated[
    Path | None,
    typer.Option(help="Draw the results into this .png, .svg or .pdf; needs matplotlib.", dir_okay=False),
]
