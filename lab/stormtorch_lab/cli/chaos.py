"""The command `stormtorch chaos`: options, progress, tables and the verdict."""

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from stormtorch.checks import BadSetting
from stormtorch.cli.console import check_outputs, friendly_errors, handle_termination_signals, names, save
from stormtorch.cli.terminal.completion import complete_choice, complete_choice_list
from stormtorch.cli.terminal.options import Json, Plot
from stormtorch_lab.cli.terminal.choices import FAULTS, POLICIES, spaced
from stormtorch_lab.cli.terminal.options import Delay, Loss, Rate


def chaos(
    hosts: Annotated[int, typer.Option(help="Virtual hosts that train, one process on each: 3 to 32.")] = 5,
    minutes: Annotated[
        float, typer.Option(help="Minutes in which faults are injected; the run without faults takes further time.")
    ] = 3.0,
    seed: Annotated[
        int, typer.Option(help="Random seed of the schedule, the packet loss, the weights and the batches.")
    ] = 1,
    loss: Loss = 0.1,
    rate: Rate = None,
    delay: Delay = None,
    faults: Annotated[
        str,
        typer.Option(
            help="Kinds of faults to inject, separated by commas.",
            show_default="all kinds",
            autocompletion=complete_choice_list(FAULTS),
        ),
    ] = FAULTS,
    spares: Annotated[int, typer.Option(help="Additional hosts that join and leave.")] = 1,
    policy: Annotated[
        str,
        typer.Option(
            help=f"Policy of the training: {spaced(POLICIES)}; or a class in a file, as my.py:MyPolicy.",
            autocompletion=complete_choice(POLICIES),
        ),
    ] = "lead",
    silence_s: Annotated[float, typer.Option(help="Seconds of silence after which the ranks exclude a peer.")] = 2.0,
    pace_s: Annotated[
        float, typer.Option(help="Shortest time of a step in seconds: processes share this machine's cores.")
    ] = 0.1,
    patience_s: Annotated[
        float,
        typer.Option(
            help="Seconds after a fault within which training must continue and the affected hosts must be back."
        ),
    ] = 30.0,
    baseline: Annotated[
        bool, typer.Option(help="Train again for as many steps without faults, and compare the validation loss.")
    ] = True,
    json: Json = None,
    plot: Plot = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Keep the logs of all processes in this new folder; by default, only a failed run keeps its logs.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Train on hosts that crash, hang, leave and join, over links that fail, and check invariants.

    A lab of virtual hosts trains a small language model. A schedule drawn from the seed kills and pauses processes;
    cuts off hosts, links or the whole network; partitions it; drops half of the packets, or all large ones; and lets
    hosts join and leave. Kinds: kill, pause, cut, link, outage, partition, storm, mtu, join, leave.
    The tables show how long training paused, when affected hosts took part again, and which invariants held.
    The exit status is 0 if all held and 1 if not.

    [bold]Examples[/bold]

      stormtorch chaos
      stormtorch chaos --hosts 5 --minutes 3 --seed 1 --loss 0.1 --json chaos.json --plot chaos.png
      stormtorch chaos --minutes 30 --faults kill,pause,cut --keep logs
      stormtorch chaos --hosts 3 --minutes 1 --rate 100mbit --delay 5ms --no-baseline
    """
    with friendly_errors(), handle_termination_signals():
        from rich.console import Console

        from stormtorch.cli.terminal.screen import progress_bar
        from stormtorch_lab.cli.networks import lab_network
        from stormtorch_lab.cli.tables.chaos import show_chaos
        from stormtorch_lab.studies.chaos import run
        from stormtorch_lab.studies.chaos.settings import ChaosSettings

        network = lab_network(seed, loss=loss, rate=rate, delay=delay)
        assert network is not None  # a loss is always given
        settings = ChaosSettings(
            hosts=hosts,
            spares=spares,
            minutes=minutes,
            seed=seed,
            kinds=names(faults),
            network=network,
            policy=policy,
            silence_s=silence_s,
            pace_s=pace_s,
            patience_s=patience_s,
            baseline=baseline,
        )
        check_outputs(json, plot)
        folder = _folder(keep)
        with contextlib.ExitStack() as stack:
            if keep is None:
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            with progress_bar(round(60 * minutes), f"making {hosts} hosts", unit="s") as advance:
                report = run.run_chaos(settings, folder, advance)
            if keep is None and not report.passed:
                stack.pop_all()  # the logs may show why
            try:
                save(report.write, json)  # first, so that a later failure cannot lose the figures
            finally:
                show_chaos(report, Console(), kept=folder if keep is not None or not report.passed else None)
            if plot is not None:
                from stormtorch_lab.cli.plots.chaos import plot_chaos

                save(lambda path: plot_chaos(report, path), plot)
    raise typer.Exit(0 if report.passed else 1)


def _folder(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="stormtorch-chaos-"))
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadSetting("keep", f"cannot be {keep}: {error.strerror}") from error
    if any(keep.iterdir()):
        raise BadSetting("keep", f"must be a new or empty folder, and {keep} holds files")
    return keep
