"""Registers the lab's commands with the command `stormtorch`."""

from stormtorch.cli.terminal.help_layout import App
from stormtorch_lab.cli import lab, train
from stormtorch_lab.cli.benches import exchanges
from stormtorch_lab.cli.chaos import chaos
from stormtorch_lab.cli.demo import demo
from stormtorch_lab.cli.report import report
from stormtorch_lab.cli.simulate import simulate
from stormtorch_lab.cli.theory import theory

_STUDY = "Measure and study"


def add(app: App) -> None:
    """Adds the lab's commands to the application."""
    app.command(rich_help_panel="Use")(demo)
    app.add_typer(
        lab.app,
        name="lab",
        help="Virtual hosts on a real network with packet loss, rate limits and delay.",
        rich_help_panel=_STUDY,
    )
    app.add_typer(
        exchanges.app, name="bench", help="Benchmark stormtorch against gloo in the same run.", rich_help_panel=_STUDY
    )
    app.add_typer(
        train.app,
        name="train",
        help="Train real models over lossy networks and compare policies.",
        rich_help_panel=_STUDY,
    )
    for command in (simulate, theory, chaos, report):
        app.command(rich_help_panel=_STUDY)(command)
