"""The command line. It checks what was typed, shows progress and tables; the work is done elsewhere."""

import contextlib
import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(bench, name="bench", help="Measure stormtorch beside gloo, in the same run.")

# Declared here, so that --help answers without importing torch; a test compares them with the real ones.
_BACKENDS = "storm,storm-lossy,gloo"


class Dtype(StrEnum):
    """What can be summed."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Hosts = Annotated[int, typer.Option(help="Ranks, each a process of this machine: 2 to 64.")]
Warmup = Annotated[int, typer.Option(help="Rounds before the timed ones; their results are checked.")]
Backends = Annotated[str, typer.Option(help="Which to compare, separated by commas.")]
Json = Annotated[Path | None, typer.Option(help="Write conditions and results to this file.", dir_okay=False)]
Timeout = Annotated[float, typer.Option(help="Give up after so many seconds in all.")]


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

      stormtorch bench latency                         small ones, and what idling costs

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
    with _friendly_errors():
        from stormtorch.bench.display import progress_bar
        from stormtorch.demo import DemoSettings, run_demo, show_demo

        settings = DemoSettings(hosts=hosts, mb=mb, rounds=rounds, loss=loss, seed=seed)
        with progress_bar(settings.rounds, f"starting {hosts} processes") as advance:
            report = run_demo(settings, advance)
        show_demo(report, Console())


@bench.command()
def allreduce(
    hosts: Hosts = 2,
    mb: Annotated[str, typer.Option(help="Sizes of the tensor in MB (10^6 bytes), separated by commas.")] = "25",
    iters: Annotated[int, typer.Option(help="Timed rounds per size.")] = 20,
    warmup: Warmup = 3,
    backends: Backends = _BACKENDS,
    loss: Annotated[
        float, typer.Option(help="Fraction of the storm backends' datagrams to lose: 0 to 0.9. gloo cannot feel it.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the loss: the same seed loses the same datagrams.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the tensor.")] = Dtype.float32,
    datagram_bytes: Annotated[
        int | None,
        typer.Option(help="Payload of a datagram, 256 to 65507: 1472 is Ethernet's. Default: what loopback can take."),
    ] = None,
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the times into this .png, .svg or .pdf; needs matplotlib.", dir_okay=False)
    ] = None,
    timeout_s: Timeout = 600.0,
) -> None:
    """Time the all-reduce of large tensors between processes of this machine.

    The backends take turns within every round.
    A time is that of the slowest rank; "x gloo" and "x ideal" are ratios of medians.
    Ideal is what this machine needs just to copy as many bytes in and out.

    [bold]Examples[/bold]

      stormtorch bench allreduce --hosts 4 --mb 25,100 --json out.json

      stormtorch bench allreduce --loss 0.01 --datagram-bytes 1472 --plot out.png

      stormtorch bench allreduce --backends storm,gloo --iters 100
    """
    with _friendly_errors():
        from stormtorch.bench.allreduce import AllReduceSettings, allreduce_table, run_allreduce
        from stormtorch.bench.plot import check_plot, plot_allreduce

        settings = AllReduceSettings(
            hosts=hosts,
            mb=_numbers("mb", mb),
            iters=iters,
            warmup=warmup,
            backends=_names(backends),
            loss=loss,
            seed=seed,
            dtype=dtype.value,
            datagram_bytes=datagram_bytes,
            timeout_s=timeout_s,
        )
        _check_file("json", json)
        if plot is not None:
            check_plot(plot)
            _check_file("plot", plot)
        from stormtorch.bench.display import progress_bar

        with progress_bar(iters * len(settings.mb), f"starting {hosts} processes") as advance:
            report = run_allreduce(settings, advance)
        Console().print(allreduce_table(report))
        if json is not None:
            report.write(json)
        if plot is not None:
            plot_allreduce(report, plot)


@bench.command()
def latency(
    hosts: Hosts = 2,
    iters: Annotated[int, typer.Option(help="Timed rounds per size.")] = 200,
    warmup: Warmup = 20,
    backends: Backends = _BACKENDS,
    idle_s: Annotated[float, typer.Option(help="Seconds to watch an idle transport.")] = 3.0,
    json: Json = None,
    timeout_s: Timeout = 600.0,
) -> None:
    """Time the all-reduce of small tensors, 1 KB to 1 MB.

    Also an exchange of empty messages, and the CPU use of a connected transport that idles.

    [bold]Examples[/bold]

      stormtorch bench latency

      stormtorch bench latency --hosts 4 --iters 1000 --json latency.json
    """
    with _friendly_errors():
        from stormtorch.bench.display import progress_bar
        from stormtorch.bench.latency import SIZES_BYTES, LatencySettings, latency_table, run_latency

        settings = LatencySettings(
            hosts=hosts, iters=iters, warmup=warmup, backends=_names(backends), idle_s=idle_s, timeout_s=timeout_s
        )
        _check_file("json", json)
        with progress_bar(iters * len(SIZES_BYTES), f"starting {hosts} processes") as advance:
            report = run_latency(settings, advance)
        Console().print(latency_table(report))
        if json is not None:
            report.write(json)


@contextlib.contextmanager
def _friendly_errors() -> Iterator[None]:
    """Exit code 2 and the option for a bad value, 1 and one message for a rank that failed, 130 for Ctrl-C."""
    try:
        from stormtorch.bench.ranks import RankFailed
        from stormtorch.bench.settings import BadSetting

        try:
            yield
        except BadSetting as error:
            raise typer.BadParameter(error.problem, param_hint=f"--{error.name.replace('_', '-')}") from error
        except RankFailed as error:
            console = Console(stderr=True)
            console.print(error.details, style="dim", markup=False, highlight=False, end="")
            console.print(str(error), style="bold red", markup=False, highlight=False)
            raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted: all ranks are ended", err=True)
        raise typer.Exit(130) from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(option: str, text: str) -> tuple[float, ...]:
    from stormtorch.bench.settings import BadSetting

    try:
        return tuple(float(number) for number in _names(text))
    except ValueError as error:
        raise BadSetting(option, f"must be numbers separated by commas, got {text!r}") from error


def _check_file(option: str, path: Path | None) -> None:
    """A file that cannot be written is noticed before minutes of measuring, not after."""
    from stormtorch.bench.settings import BadSetting

    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadSetting(option, f"cannot make {path.parent}: {error.strerror}") from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadSetting(option, f"cannot write {path}: permission denied")


if __name__ == "__main__":
    main()
