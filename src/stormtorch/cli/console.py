"""Shared by all commands: error messages and exit codes, lists of values, checks and writing of output files."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console

from stormtorch.checks import BadSetting, CommandFailed


@contextlib.contextmanager
def friendly_errors(**arguments: str) -> Iterator[None]:
    """Turns errors into one message and an exit code: 2 for a bad value, with its option; 1 for a rank or lab that
    failed; 130 for Ctrl-C. `arguments` names the settings that are positional arguments: `hosts="HOST"`.
    """
    try:
        yield
    except BadSetting as error:
        raise typer.BadParameter(
            error.problem, param_hint=arguments.get(error.name, f"--{error.name.replace('_', '-')}")
        ) from error
    except CommandFailed as error:
        _show(str(error), error.details)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted: all ranks were stopped", err=True)
        raise typer.Exit(130) from error


@contextlib.contextmanager
def handle_termination_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP exit through the cleanup handlers, as Ctrl-C does."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(message: str, details: str = "") -> None:
    console = Console(stderr=True)
    if details:
        console.print(details, style="dim", markup=False, highlight=False, end="")
    console.print(message, style="bold red", markup=False, highlight=False)


def names(text: str) -> tuple[str, ...]:
    """Splits a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Splits a comma-separated list of numbers; raises a `BadSetting` that names the option for anything else."""
    try:
        return tuple(float(number) for number in names(text))
    except ValueError as error:
        raise BadSetting(option, f"must be numbers separated by commas, got {text!r}") from error


def check_outputs(json: Path | None, plot: Path | None = None) -> None:
    """Raises `BadSetting` if the results cannot be written, before anything is measured."""
    check_file("json", json)
    if plot is not None:
        from stormtorch.cli.plots import check_plot

        check_plot(plot)
        check_file("plot", plot)


def check_file(option: str, path: Path | None) -> None:
    """Raises `BadSetting` if a file cannot be written, before minutes of work rather than after.

    An existing file is opened and not changed; otherwise a temporary file is made in its folder. Permission bits are
    not enough: root passes every check, even for a folder that accepts no files.
    """
    if path is None:
        return
    try:
        if path.is_file():
            with path.open("ab"):
                pass
        elif path.is_dir():
            raise BadSetting(option, f"cannot write {path}: it is a directory")
        elif path.exists():  # a pipe or a device, which opening may change
            if not os.access(path, os.W_OK):
                raise BadSetting(option, f"cannot write {path}: permission denied")
        elif not path.parent.is_dir():
            raise BadSetting(option, f"there is no folder {path.parent}: create it, or name another file")
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise BadSetting(option, f"cannot write {path}: {error.strerror}") from error


def save(write: Callable[[Path], None], path: Path | None) -> None:
    """Writes a result if a path was given; a full disk is one message and exit code 1.

    The write is atomic: a temporary file beside the path, which then replaces it.
    """
    if path is None:
        return
    # Pipes, links, and files in a folder that accepts no new ones are written in place.
    in_place = path.exists() and (not path.is_file() or path.is_symlink() or not os.access(path.parent, os.W_OK))
    beside = path if in_place else path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(beside)
        if beside != path:
            beside.replace(path)
    except OSError as error:
        _show(f"cannot write {path}: {error.strerror or error}")
        raise typer.Exit(1) from error
    finally:
        if beside != path and beside.is_file():
            beside.unlink()


def save_into(write: Callable[[Path], None], folder: Path | None) -> None:
    """Writes several files into a folder if one was given; errors are those of `save`."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _show(f"cannot make {folder}: {error.strerror or error}")
        raise typer.Exit(1) from error
    save(write, folder)
