"""The command `stormtorch`: assembles its subcommands, and those that other packages add."""

from importlib.metadata import entry_points
from typing import Annotated

import typer

from stormtorch.cli.doctor import doctor
from stormtorch.cli.ledger import ledger
from stormtorch.cli.postmortem import postmortem
from stormtorch.cli.terminal.help_layout import App
from stormtorch.cli.watch import watch

app = App(
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
_USE = "Use"
app.command(rich_help_panel=_USE)(doctor)
app.command(rich_help_panel=_USE)(watch)
app.command(rich_help_panel=_USE)(ledger)
app.command(rich_help_panel=_USE)(postmortem)


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

      stormtorch demo                                         what it is for, in two minutes
      stormtorch doctor node0 node1                           test the network between these hosts
      stormtorch lab run --loss 0.1 -- python train.py        your training on a lossy network
      stormtorch watch runs/today --web                       what the network costs a job
      stormtorch simulate --workers 64 --loss 0.1             what loss would cost, before renting machines

    `stormtorch COMMAND --help` explains each of them.
    """


@app.command(rich_help_panel=_USE)
def keygen() -> None:
    """Print a new job key, which seals the datagrams of a job.

    It has 256 random bits, as hexadecimal digits. Every rank of a job needs the same key.

    [bold]Examples[/bold]

      export STORM_KEY=$(stormtorch keygen)            for dist.init_process_group("storm")
      stormtorch.Options(key=text.encode())            in a program, with the printed key as text
    """
    from stormtorch.exchange.keys import new_key

    typer.echo(new_key())


# Other packages, such as stormtorch-lab, add their commands.
for _entry in entry_points(group="stormtorch.commands"):
    _entry.load()(app)

if __name__ == "__main__":
    main()
