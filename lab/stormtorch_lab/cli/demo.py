"""The command `stormtorch demo`: two trainings race over a lossy link; accuracy under loss; a verdict and a page."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stormtorch.checks import BadSetting, check_between
from stormtorch.cli.console import check_file, friendly_errors, handle_termination_signals, save
from stormtorch.cli.terminal.completion import complete_choice

if TYPE_CHECKING:
    from rich.console import Console

    from stormtorch_lab.bench.convergence import ConvergenceReport, ConvergenceSettings, Point
    from stormtorch_lab.cli.race import Race

_PAGE = Path("stormtorch-demo.html")
# TCP-CUBIC stalls under loss: its first step is aborted after so many seconds.
_WAIT_LIMIT_S = 12.0
_IN_TURNS = (
    "stormtorch and DDP on gloo alternate about every second on the same cores and the same links: the one with less "
    "training time goes next."
)


@dataclass
class _Found:
    """Results so far; written however the demo ends."""

    race: ConvergenceReport
    note: str
    accuracy: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        found = {"kind": "demo", "note": self.note, "problems": self.problems, "race": self.race.to_json()}
        return found | {"accuracy": self.accuracy}


def demo(
    seconds: Annotated[float, typer.Option(help="Seconds of training for each contender: 1 to 120.")] = 20.0,
    loss: Annotated[float, typer.Option(help="Fraction of all packets to drop, TCP's included: 0 to 0.5.")] = 0.1,
    rate: Annotated[
        str,
        typer.Option(
            help="Rate of each host's access link: 20mbit, 100mbit, 1gbit.",
            autocompletion=complete_choice("20mbit,100mbit,400mbit,1gbit"),
        ),
    ] = "100mbit",
    delay: Annotated[str, typer.Option(help="One-way delay between hosts: 20ms is a round trip of 40 ms.")] = "20ms",
    ranks: Annotated[int, typer.Option(help="Hosts that train together, on these cores: 2 to 8.")] = 2,
    lab: Annotated[
        bool, typer.Option(help="Use a lab if this machine can make one; --no-lab always runs on loopback.")
    ] = True,
    page: Annotated[Path, typer.Option(help="Write the report to this HTML file.", dir_okay=False)] = _PAGE,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures to this file, for `stormtorch report`.", dir_okay=False)
    ] = None,
    open_page: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open the report.", show_default="if there is a screen")
    ] = None,
) -> None:
    """See in two minutes what stormtorch is for: a race against DDP on gloo under loss.

    Virtual hosts train a small language model over links of 100 Mbit/s with a round trip of 40 ms that lose a tenth of
    all packets, stormtorch's and TCP's alike. A chart shows the loss of both trainings over the seconds.
    Then the same steps are trained with and without loss: what does loss cost accuracy?
    It ends with a verdict and one HTML page. It takes less than three minutes on two cores.
    Root is not needed where the kernel allows user namespaces. Where no lab can be made, the demo reports it and runs
    on loopback: TCP then has a perfect network, and only stormtorch loses datagrams.

    [bold]Examples[/bold]

      stormtorch demo
      stormtorch demo --loss 0.01 --rate 400mbit --delay 0ms
      stormtorch demo --seconds 40 --page race.html --json race.json
      stormtorch demo --no-lab
    """
    interrupted = False
    with friendly_errors(), handle_termination_signals():
        _check(seconds, loss, rate, ranks)
        page = _writable(page)
        check_file("json", json)
        from rich.console import Console

        console = Console(highlight=False)
        settings, note = _settings(seconds, loss, rate, delay, ranks, lab)
        found = _begin(settings, note)
        console.print(note, soft_wrap=not console.is_terminal)
        try:
            _race(settings, found, console)
            _accuracy(settings, found, loss, console)
        except KeyboardInterrupt:
            interrupted = True
            console.print("interrupted: all ranks have ended; these are the results so far", style="bold")
        finally:
            _conclude(found, console, page, json)
        if not interrupted:
            _open(page, open_page, console)
    if interrupted:
        raise typer.Exit(130)


def _check(seconds: float, loss: float, rate: str, ranks: int) -> None:
    check_between("seconds", seconds, 1.0, 120.0)
    check_between("loss", loss, 0.0, 0.5)
    check_between("ranks", ranks, 2, 8)
    if rate == "unlimited":
        raise BadSetting("rate", "must be a rate such as 100mbit: the race needs a limited rate")


def _writable(page: Path) -> Path:
    """Moves the page to a temporary folder if no path was chosen and this folder is not writable."""
    try:
        check_file("page", page)
    except BadSetting:
        if page != _PAGE:
            raise
        return Path(tempfile.mkdtemp(prefix="stormtorch-")) / page
    return page


def _settings(
    seconds: float, loss: float, rate: str, delay: str, ranks: int, lab: bool
) -> tuple[ConvergenceSettings, str]:
    """Chooses the backends that this machine can run; returns them with a sentence on what is compared."""
    from stormtorch.telemetry.text import network_text
    from stormtorch_lab.bench.convergence import ConvergenceSettings
    from stormtorch_lab.netns.access import LabUnavailable, available_tcp
    from stormtorch_lab.netns.conditions import Conditions
    from stormtorch_lab.netns.lab import try_lab
    from stormtorch_lab.report.text import percent

    network = Conditions(rate=rate, loss=loss, delay=delay)
    common: dict[str, Any] = {
        "ranks": ranks,
        "seconds": seconds,
        "every_s": max(seconds / 20, 0.2),
        "layers": 2,
        "width": 128,
        "lr": 2e-3,
        "wires": ("float32",),
        "turns": True,
        "patience_s": min(_WAIT_LIMIT_S, max(seconds, 3.0)),
        # Processes may take a minute to start on a busy machine, and evaluations stop the clock.
        "timeout_s": 150 + 10 * seconds,
    }
    reason = "--no-lab was given"
    try:
        if lab:
            access = try_lab(ranks, network).name
            peers = ("gloo-bbr", "gloo-cubic") if "bbr" in available_tcp() else ("gloo-cubic",)
            settings = ConvergenceSettings(backends=("storm-drift", *peers), network=network, **common)
            line = f"{network_text(network.to_json())}, {percent(loss)} loss"
            with_bbr = (
                "DDP on gloo runs with TCP-BBR, the best of this kernel under loss; then with CUBIC, Linux's default, "
                "alone. "
                if len(peers) > 1
                else "This kernel has no TCP-BBR: DDP on gloo runs with CUBIC, Linux's default, after stormtorch. "
            )
            how = with_bbr + (_IN_TURNS if len(peers) > 1 else "")
            return settings, f"Lab of {ranks} hosts by {access}: {line}, TCP's packets included. {how.strip()}"
    except LabUnavailable as error:
        reason = str(error).partition(" Without a lab,")[0].rstrip(".")
    settings = ConvergenceSettings(backends=("storm-drift", "gloo"), faults=loss, **common)
    note = (
        f"No lab here ({reason}). Without a lab, TCP cannot be made to lose packets: DDP on gloo runs on a perfect "
        f"loopback, and fault injection drops {percent(loss)} of stormtorch's datagrams, without a rate limit. "
        f"The race shows what that costs stormtorch, not what loss does to TCP; a lab shows both. {_IN_TURNS}"
    )
    return settings, note


def _begin(settings: ConvergenceSettings, note: str) -> _Found:
    from stormtorch_lab.bench.convergence import ConvergenceReport

    report = ConvergenceReport.begin(settings)
    if "gloo-bbr" in settings.backends:
        order = f"{report.conditions['order']}; gloo-cubic alone afterwards, in its own processes"
        report.conditions["order"] = order
    return _Found(report, note)


def _race(settings: ConvergenceSettings, found: _Found, console: Console) -> None:
    """Runs the backends that alternate, then gloo-cubic alone; keeps the results however it ends."""
    from stormtorch_lab.cli.race import Race, shown
    from stormtorch_lab.report.text import called, where_text

    title = f"The race: a language model on {settings.ranks} hosts, {where_text(found.race.conditions)}"
    race = Race(settings, title)
    alone = "gloo-cubic" in settings.backends
    first = tuple(name for name in settings.backends if name != "gloo-cubic" or len(settings.backends) == 1)
    with shown(race, console), _retained(race, found):
        _run(replace(settings, backends=first, turns=len(first) > 1), race, found)
        if alone and not found.problems:
            waits = f"{settings.patience_s:g} s for its first step"
            race.doing = f"now {called('gloo-cubic')}, alone: it has {waits}, after its processes have started"
            _run(replace(settings, backends=("gloo-cubic",), turns=False), race, found)
            race.doing = ""


def _run(settings: ConvergenceSettings, race: Race, found: _Found) -> None:
    from stormtorch_lab.bench.learning import run_convergence
    from stormtorch_lab.jobs.failed import RankFailed

    try:
        for curve in run_convergence(settings, watch=race.watch):
            found.race.curves.append(curve)
            if curve.measured is not None:
                found.race.conditions.setdefault("loss_measured", curve.measured["loss"])
    except RankFailed as error:
        found.problems.append(str(error))


@contextlib.contextmanager
def _retained(race: Race, found: _Found) -> Iterator[None]:
    """Makes curves from the evaluations of backends that ended before they returned one."""
    from stormtorch_lab.bench.convergence import Curve

    try:
        yield
    finally:
        have = {curve.backend for curve in found.race.curves}
        for name, points in race.points.items():
            if name not in have:
                found.race.curves.append(Curve.of(_ended(name, points, found), params=0))


def _ended(name: str, points: list[Point], found: _Found) -> list[Point]:
    """Marks a backend over TCP as aborted if its processes did not end in time."""
    late = bool(found.problems) and name.startswith("gloo")
    return [*points, replace(points[-1], gave_up=True)] if late else points


def _accuracy(settings: ConvergenceSettings, found: _Found, loss: float, console: Console) -> None:
    """Trains the same steps without loss, with it, and with it corrected by the lead."""
    from stormtorch.cli.terminal.screen import progress_bar
    from stormtorch_lab.jobs.failed import RankFailed
    from stormtorch_lab.studies.on_ranks import run_training
    from stormtorch_lab.studies.settings import LmSettings

    if loss == 0.0:
        return
    steps = max(min(round(3 * settings.seconds), 60), 5)
    console.print(f"\nWhat loss costs accuracy: the same {steps} steps three times, on loopback with injected loss.")
    asked = LmSettings(ranks=settings.ranks, steps=steps, loss=loss, policies=("lossless", "plain", "lead"))
    try:
        with progress_bar(3 * steps, f"starting {settings.ranks} processes", unit="steps") as advance:
            found.accuracy = run_training(asked, advance).to_json()
    except RankFailed as error:
        found.problems.append(str(error))


def _conclude(found: _Found, console: Console, page: Path, json: Path | None) -> None:
    """Prints the verdict and writes the page."""
    from rich.panel import Panel
    from rich.text import Text

    from stormtorch.telemetry.json_files import without_nan, write_json
    from stormtorch_lab.report.demo import accuracy_sentence, busy_sentence, demo_page, demo_verdict
    from stormtorch_lab.report.page import page_html
    from stormtorch_lab.report.race import learners_of, same_steps

    data = without_nan(found.to_json())
    for problem in found.problems:
        console.print(problem, style="red", markup=False)
    verdict, tone = demo_verdict(data)
    more = [busy_sentence(data), same_steps(learners_of(data["race"]["results"])), accuracy_sentence(data)]
    text = Text(verdict, style="bold")
    for sentence in filter(None, more):
        text.append(f"\n\n{sentence}", style="not bold")
    colour = {"good": "green", "bad": "red"}.get(tone, "blue")
    console.print(Panel(text, title="verdict", border_style=colour, padding=(1, 2), width=min(console.width, 100)))
    save(lambda path: write_json(path, data), json)
    if data["race"]["results"]:
        save(lambda path: _write(path, page_html(demo_page([(page.stem, data)]))), page)
        console.print(f"report: {page.resolve().as_uri()}", soft_wrap=True)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _open(page: Path, wanted: bool | None, console: Console) -> None:
    """Opens the page on a screen of this machine; not over ssh and not in CI."""
    if wanted is None:
        screen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
        away = any(os.environ.get(name) for name in ("SSH_CONNECTION", "SSH_TTY", "CI"))
        wanted = screen and not away and console.is_terminal
    if not wanted or not page.is_file():
        return
    import webbrowser

    try:
        webbrowser.get().open(page.resolve().as_uri())
    except webbrowser.Error:
        console.print("no browser was found: open the report by hand")
