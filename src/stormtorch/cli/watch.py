"""`stormtorch watch`: what the network costs a job, which link is bad, which rank is waited for."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stormtorch.checks import check_between
from stormtorch.cli.console import check_file, friendly_errors, save

if TYPE_CHECKING:
    from stormtorch.watch.watcher import Watcher
    from stormtorch.watch.web.access_guard import AccessGuard

_WEB, _FILES = "The web page", "Files"
_PORT = 8420
_EVERY_S = 1.0
# One line every ten seconds shows that the job is alive, and does not fill a log.
_LINE_EVERY_S = 10.0
_OVER = ("done", "left", "failed", "gone")
_EXTRA = "pip install 'stormtorch[watch]'"


def watch(
    job: Annotated[
        str | None,
        typer.Argument(
            help="Folder of the job's records, or HOST:PORT of any of its ranks.",
            envvar="STORM_RECORD",
            metavar="DIR|HOST:PORT",
            show_envvar=True,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve a web page.", rich_help_panel=_WEB)] = False,
    port: Annotated[
        int | None,
        typer.Option(
            help=f"Port of the page: 0 to 65535; {_PORT}, or a free one if that is taken.",
            rich_help_panel=_WEB,
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0 makes the page reachable from other machines.", rich_help_panel=_WEB
        ),
    ] = "127.0.0.1",
    export: Annotated[
        list[Path] | None,
        typer.Option(
            help="Write a report to this .html, or a picture to this .png, .svg or .pdf, and exit.",
            dir_okay=False,
            rich_help_panel=_FILES,
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write the time series to this file and exit.", dir_okay=False, rich_help_panel=_FILES),
    ] = None,
) -> None:
    """Watch a job: cost of the network, bad links, slow ranks.

    It begins with a verdict: one sentence that names the cause and a remedy.
    Watch a job that was started with STORM_RECORD=DIR by its folder, while it runs or afterwards.
    Watch any other running job by the address of one of its ranks.
    The page is served to this machine only, and its address contains an access token.
    To watch from another machine, use `ssh -L 8420:127.0.0.1:8420 HOST`.

    [bold]Examples[/bold]

      STORM_RECORD=run torchrun --nproc-per-node 4 train.py    a job that records
      stormtorch watch run                             in this terminal; q quits
      stormtorch watch host2:29500                     a live job, by any of its ranks
      stormtorch watch run --web                       as a web page
      stormtorch watch run --once                      print the state once
      stormtorch watch run --export run.html           a report in one file
    """
    with friendly_errors():
        files = list(export or [])
        _check(port, files, csv)
        with _ending_quietly(), contextlib.closing(_watcher(job)) as watcher:
            _read_first(watcher)
            if files or csv is not None:
                _write(watcher, files, csv)
            elif web:
                _serve(watcher, host, port)
            elif once:
                _print_once(watcher)
            elif sys.stdout.isatty():
                _follow_on_screen(watcher)
            else:
                _follow_by_lines(watcher)


@contextlib.contextmanager
def _ending_quietly() -> Iterator[None]:
    """Ctrl-C ends the watch, not the job, and prints no message."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def _read_first(watcher: "Watcher") -> None:
    """Reads for the first time: an unreachable rank or a refused key is an error now, not later."""
    from stormtorch.errors import StormError

    try:
        watcher.read()
    except (StormError, OSError) as error:
        typer.secho(str(error), err=True, fg="red", bold=True)
        raise typer.Exit(1) from error


def _check(port: int | None, files: list[Path], csv: Path | None) -> None:
    if port is not None:
        check_between("port", port, 0, 65535)
    for path in files:
        if path.suffix.lower() != ".html":
            from stormtorch.checks import blaming
            from stormtorch.cli.plots import check_plot

            with blaming("export"):
                check_plot(path)
        check_file("export", path)
    check_file("csv", csv)


def _watcher(job: str | None) -> "Watcher":
    from stormtorch.watch.sources import source_of
    from stormtorch.watch.watcher import Watcher

    if not job:
        raise typer.BadParameter(
            "none given: name the folder of STORM_RECORD, or HOST:PORT of a rank", param_hint="JOB"
        )
    try:
        return Watcher(source_of(job))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="JOB") from error


def _write(watcher: "Watcher", files: list[Path], csv: Path | None) -> None:
    from stormtorch.watch.columns import as_csv
    from stormtorch.watch.web.pages import report

    data = watcher.snapshot()
    if data["state"] == "empty":
        raise typer.BadParameter(f"{watcher.source.name} holds no records yet", param_hint="JOB")
    for path in files:
        if path.suffix.lower() == ".html":
            save(lambda each: _put(each, report(data)), path)
        else:
            from stormtorch.cli.plots.watch import plot_watch

            save(lambda each: plot_watch(data, each), path)
        typer.echo(f"wrote {path}")
    if csv is not None:
        save(lambda each: _put(each, as_csv(data)), csv)
        typer.echo(f"wrote {csv}")


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


# --- in a terminal ---------------------------------------------------------------------------------------------------


def _print_once(watcher: "Watcher") -> None:
    from rich.console import Console

    from stormtorch.cli.tables.watch import screen

    data = watcher.snapshot()
    Console().print(screen(data))
    if data["state"] == "empty":
        raise typer.Exit(1)


def _follow_by_lines(watcher: "Watcher") -> None:
    """Prints a line every ten seconds until the job is over."""
    from stormtorch.cli.tables.watch import line

    while True:
        data = watcher.snapshot()
        typer.echo(line(data))
        if data["state"] in _OVER:
            return
        until = time.monotonic() + _LINE_EVERY_S
        while time.monotonic() < until:
            time.sleep(_EVERY_S)
            _read(watcher)


def _read(watcher: "Watcher") -> None:
    """Reads new records. A rank that fails to answer, or answers garbage, must not end the watch."""
    with contextlib.suppress(OSError, RuntimeError):
        watcher.read()


def _follow_on_screen(watcher: "Watcher") -> None:
    from rich.console import Console
    from rich.live import Live

    from stormtorch.cli.tables.watch import screen

    console = Console()
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            _read(watcher)
            live.update(screen(watcher.snapshot(), keys=True), refresh=True)
            if pressed(_EVERY_S) in ("q", "Q", "\x04"):
                break
    # Leaving the alternate screen erases it: print the last state again.
    console.print(screen(watcher.snapshot()))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits for a key, for a limited time; the terminal does not echo keys meanwhile."""
    import termios
    import tty

    if not sys.stdin.isatty():

        def nothing(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield nothing
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> str:
        if select.select([terminal], [], [], seconds)[0]:
            return os.read(terminal, 1).decode(errors="replace") or "q"  # a closed terminal reads as end of file
        return ""

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


# --- as a web page ---------------------------------------------------------------------------------------------------


def _serve(watcher: "Watcher", host: str, port: int | None) -> None:
    try:
        from stormtorch.watch.web.server import listen, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise typer.BadParameter(f"needs a web server: {_EXTRA}", param_hint="--web") from error
    from stormtorch.watch.web.access_guard import AccessGuard, is_loopback

    try:
        try:
            listener = listen(host, _PORT if port is None else port)
        except OSError:
            if port is not None:
                raise
            listener = listen(host, 0)
    except OSError as error:
        where = f"{host}:{_PORT if port is None else port}"
        raise typer.BadParameter(f"cannot listen at {where}: {error.strerror or error}", param_hint="--port") from error
    guard = AccessGuard(host, listener.getsockname()[1])
    typer.echo(_address(guard, host, listener.getsockname()[1]))
    if not is_loopback(host):
        typer.echo("anyone with the token who can reach this address sees the page; HTTP is not encrypted", err=True)
    typer.echo("Ctrl-C stops the server", err=True)
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        serve(watcher, guard, listener)


def _address(guard: "AccessGuard", host: str, port: int) -> str:
    import socket

    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/?token={guard.token}"
