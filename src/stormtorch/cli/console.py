"""Console of all commands: how errors look and which exit code they get, lists of values, files to be written."""

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
    """Exits with 2 and the option for a bad value, with 1 and one message for a rank or a lab that failed, and with
    130 for Ctrl-C. `arguments` are settings that are no options, as the usage writes them: `hosts="HOST"`.
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
        typer.echo("interrupted: all ranks are ended", err=True)
        raise typer.Exit(130) from error


@contextlib.contextmanager
def handle_termination_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a lab as tidily as Ctrl-C does."""

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
    """Raises a `BadSetting` for results that could not be written, before anything is measured."""
    check_file("json", json)
    if plot is not None:
        from stormtorch.cli.plots import check_plot

        check_plot(plot)
        check_file("plot", plot)


def check_file(option: str, path: Path | None) -> None:
    """Raises a `BadSetting` for a file that cannot be written, before minutes of work and not after them.

    A file that exists is opened and left as it is; otherwise its folder must exist and take one. Asking for permissions
    alone would not do: root has them all, also for a folder that takes no files.
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
            raise BadSetting(option, f"there is no folder {path.parent}: make it first, or name another file")
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise BadSetting(option, f"cannot write {path}: {error.strerror}") from error


def save(write: Callable[[Path], None], path: Path | None) -> None:
    """Writes a result where a file was asked for; a disk that has become full is one message and exit code 1.

    The file is whole or as it was before: it is written beside its place first.
    """
    if path is None:
        return
    # Pipes, links and files in a folder that takes no others are written in place.
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
    """Writes several files into a folder if one was asked for; errors are those of `save`."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _show(f"cannot make {folder}: {error.strerror or error}")
        raise typer.Exit(1) from error
    save(write, folder)
