"""What all commands share: how errors look and which exit code they get, lists of values, files to be written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console


@contextlib.contextmanager
def friendly_errors() -> Iterator[None]:
    """Exit code 2 and the option for a bad value, 1 and one message for a rank or a lab that failed, 130 for Ctrl-C."""
    try:
        # Here, so that --help answers without them.
        from stormtorch.bench.failed import RankFailed
        from stormtorch.lab.access import LabError
        from stormtorch.lab.conditions import BadCondition

        try:
            yield
        except BadCondition as error:  # and BadSetting, which is one
            raise typer.BadParameter(error.problem, param_hint=f"--{error.name.replace('_', '-')}") from error
        except RankFailed as error:
            _show(str(error), error.details)
            raise typer.Exit(1) from error
        except LabError as error:
            _show(str(error))
            raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted: all ranks are ended", err=True)
        raise typer.Exit(130) from error


def _show(message: str, details: str = "") -> None:
    console = Console(stderr=True)
    if details:
        console.print(details, style="dim", markup=False, highlight=False, end="")
    console.print(message, style="bold red", markup=False, highlight=False)


def names(text: str) -> tuple[str, ...]:
    """Of what is separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Of what is separated by commas; a `BadSetting` that names the option otherwise."""
    from stormtorch.bench.settings import BadSetting

    try:
        return tuple(float(number) for number in names(text))
    except ValueError as error:
        raise BadSetting(option, f"must be numbers separated by commas, got {text!r}") from error


def check_file(option: str, path: Path | None) -> None:
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
