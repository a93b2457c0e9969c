"""The command line. It checks what was typed, shows progress and tables; the work is done elsewhere."""

from typing import Annotated

import typer
from rich.console import Console

from stormtorch.bench import commands as bench
from stormtorch.console import friendly_errors
from stormtorch.lab import commands as lab

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
app.add_typer(bench.app, name="bench", help="Measure stormtorch beside gloo, in the same run.")
app.add_typer(lab.app, name="lab", help="Virtual hosts whose network really loses, limits and delays packets.")

Hosts = Annotated[int, typer.Option(help="Ranks, each a process of this machine: 2 to 64.")]


def main() -> None:
    """Runs the command line."""
    app(prog_name="stormtorch")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"stormtorch {version('stormtorch')}")
        raise typer.Exit


@app.callback()
def stormtorch(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Distributed PyTorch training over networks that drop packets.

    [bold]Examples[/bold]

      stormtorch demo                                  see it work, in less than a minute

      stormtorch bench allreduce --hosts 4 --mb 25     large tensors, beside gloo

      stormtorch bench allreduce --loss 0.1            the same under real loss, in a lab

      stormtorch bench latency                         small ones, and what idling costs

      stormtorch bench ddp                             training steps, beside gloo

      stormtorch lab run --loss 0.1 -- python train.py    hosts with a bad network between them

    `stormtorch COMMAND --help` tells more about each.
    """


@app.command()
def demo(
    rounds: Annotated[int, typer.Option(help="Rounds; fewer if they would take more than half a minute.")] = 20,
    hosts: Hosts = 4,
    mb: Annotated[float, typer.Option(help="Size of the tensor in MB.")] = 25.0,
    loss: Annotated[float, typer.Option(help="Fraction of the datagrams to lose: 0 to 0.9.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the loss and of the tensors.")] = 0,
) -> None:
    """All-reduce on this machine while a tenth of the datagrams is lost.

    Exactly, lossily, and with gloo beside it.
    gloo runs without loss, as that cannot be injected below TCP without root.
    The demo itself needs no root, no network and no other machine.

    [bold]Examples[/bold]

      stormtorch demo

      stormtorch demo --loss 0.3 --rounds 5
    """
    with friendly_errors():
        from stormtorch.bench.display import progress_bar
        from stormtorch.demo import DemoSettings, run_demo, show_demo

        settings = DemoSettings(hosts=hosts, mb=mb, rounds=rounds, loss=loss, seed=seed)
        with progress_bar(settings.rounds, f"starting {hosts} processes") as advance:
            report = run_demo(settings, advance)
        show_demo(report, Console())


if __name__ == "__main__":
    main()
