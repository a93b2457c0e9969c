"""`stormtorch chaos`: checks what was typed, shows progress, tables and the verdict; others do the work."""

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
        float, typer.Option(help="Time in which faults strike; the undisturbed run comes on top.")
    ] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of the schedule, of the loss, of weights and of batches.")] = 1,
    loss: Loss = 0.1,
    rate: Rate = None,
    delay: Delay = None,
    faults: Annotated[
        str,
        typer.Option(
            help="Kinds of faults to draw from, separated by commas.",
            show_default="all kinds",
            autocompletion=complete_choice_list(FAULTS),
        ),
    ] = FAULTS,
    spares: Annotated[int, typer.Option(help="Further hosts, which join and leave.")] = 1,
    policy: Annotated[
        str,
        typer.Option(
            help=f"Policy of the training: {spaced(POLICIES)}; or a class in a file, as my.py:MyPolicy.",
            autocompletion=complete_choice(POLICIES),
        ),
    ] = "lead",
    silence_s: Annotated[float, typer.Option(help="Silence after which ranks go on without a peer.")] = 2.0,
    pace_s: Annotated[float, typer.Option(help="Shortest time of a step: processes share this machine's cores.")] = 0.1,
    patience_s: Annotated[
        float, typer.Option(help="Time within which training must go on after a fault, and struck hosts return.")
    ] = 30.0,
    baseline: Annotated[
        bool, typer.Option(help="Train once more for as many steps without faults, and compare the loss.")
    ] = True,
    json: Json = None,
    plot: Plot = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Keep the logs of all processes in this new folder; without it, only a run that failed leaves some.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Train on hosts that crash, hang, leave and join, over links that fail, and check what must always hold.

    A lab of virtual hosts trains a small language model. A schedule that depends on the seed alone kills and pauses
    processes; cuts hosts, links and all of the network; parts it; lets half of the packets vanish, or all large ones;
    lets hosts join and leave. Kinds: kill, pause, cut, link, outage, partition, storm, mtu, join, leave.
    The tables show how long training paused and when struck hosts took part again, and which invariants held.
    The exit code is 0 if all held and 1 if not.

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
                stack.pop_all()  # they may tell why
            try:
                save(report.write, json)  # first: whatever befalls the rest, the figures are kept
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
