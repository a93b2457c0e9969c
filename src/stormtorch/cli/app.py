"""The command `stormtorch` and its parts. They check what was typed, show progress and tables; others do the work."""

from typing import Annotated

import typer

from stormtorch.cli import bench, lab, train
from stormtorch.cli.chaos import chaos
from stormtorch.cli.demo import demo
from stormtorch.cli.doctor import doctor
from stormtorch.cli.ledger import ledger
from stormtorch.cli.postmortem import postmortem
from stormtorch.cli.report import report
from stormtorch.cli.simulate import simulate
from stormtorch.cli.theory import theory
from stormtorch.cli.watch import watch

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
app.command()(demo)
app.add_typer(train.app, name="train", help="Train real models over networks that lose, policies side by side.")
app.command()(simulate)
app.add_typer(bench.app, name="bench", help="Measure stormtorch beside gloo, in the same run.")
app.command()(theory)
app.add_typer(lab.app, name="lab", help="Virtual hosts whose network really loses, limits and delays packets.")
app.command()(chaos)
app.command()(watch)
app.command()(ledger)
app.command()(postmortem)
app.command()(doctor)
app.command()(report)


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

      stormtorch demo                                  what it is for

      stormtorch train lm --loss 0.1 --seeds 3         a language model under loss

      stormtorch train image                           ResNet-20, the same

      stormtorch simulate --workers 64 --loss 0.1      many workers, one process

      stormtorch theory --ranks 64 --loss 0.1          what to expect of it

      stormtorch bench allreduce --ranks 4 --mb 25     beside gloo

      stormtorch bench allreduce --loss 0.1            the same under real loss

      stormtorch bench latency                         small tensors, idling

      stormtorch bench ddp                             training steps

      stormtorch lab run --loss 0.1 -- python train.py a bad network

      stormtorch chaos --hosts 5 --minutes 3           hosts and links that fail

      stormtorch watch run --web                       what the network costs

      stormtorch ledger runs/today                     what arrived, what waited

      stormtorch postmortem /tmp                       who diverged first

      stormtorch doctor                                is this machine fit?

      stormtorch report out.json -o out.html           a page of results

      stormtorch keygen                                seals a job's datagrams

    `stormtorch COMMAND --help` explains each of them.
    """


@app.command()
def keygen() -> None:
    """Print a new job key, which seals the datagrams of a job.

    It has 256 random bits, as hexadecimal digits. Every rank of a job must have the same one.

    [bold]Examples[/bold]

      export STORM_KEY=$(stormtorch keygen)            for dist.init_process_group("storm")

      stormtorch.Options(key=text.encode())            in a program, where text is what was printed
    """
    from stormtorch.transport.keys import new_key

    typer.echo(new_key())


if __name__ == "__main__":
    main()
