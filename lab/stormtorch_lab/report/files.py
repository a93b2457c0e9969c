"""Reads result files of commands: finds the command that wrote a file, and its page."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from stormtorch_lab.report.chaos import chaos_page
from stormtorch_lab.report.demo import demo_page
from stormtorch_lab.report.exchanges import allreduce_page, ddp_page, latency_page, sweep_page
from stormtorch_lab.report.parts import Page
from stormtorch_lab.report.race import race_page
from stormtorch_lab.report.trainings import training_page

Files: TypeAlias = Sequence[tuple[str, dict[str, Any]]]
# Larger files were not written by a command.
_MOST_BYTES = 256 << 20


class UnknownFile(ValueError):
    """A file that no command of stormtorch wrote; the message names the file and the expected contents."""


PAGES: dict[str, Callable[[Files], Page]] = {
    "demo": demo_page,
    "bench convergence": race_page,
    "bench allreduce": allreduce_page,
    "bench ddp": ddp_page,
    "bench latency": latency_page,
    "bench sweep": sweep_page,
    "train": training_page,
    "simulate": training_page,
    "chaos": chaos_page,
}
"""Pages by the command that wrote their file."""


def read_file(path: Path) -> dict[str, Any]:
    """Reads a JSON file.

    Raises:
        UnknownFile: It cannot be read, or holds something else.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UnknownFile(f"{path} is larger than {_MOST_BYTES >> 20} MiB: no command writes so much")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnknownFile(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        hint = " It looks like JSON lines: `stormtorch ledger` reads those." if path.suffix == ".jsonl" else ""
        raise UnknownFile(f"{path} is not JSON that a command wrote with --json ({error}).{hint}") from error
    if not isinstance(data, dict):
        raise UnknownFile(f"{path} holds no results: write a file with --json of {_commands()}")
    return data


def kind_of(path: Path, data: dict[str, Any]) -> str:
    """Finds the command that wrote the data, by fields that only that command writes.

    Raises:
        UnknownFile: No command wrote it.
    """
    if data.get("kind") == "demo" and isinstance(data.get("race"), dict):
        return "demo"
    if "timeline" in data and "checks" in data:
        return "chaos"
    if "points" in data:
        return "bench sweep"
    results = data.get("results")
    first = results[0] if isinstance(results, list) and results and isinstance(results[0], dict) else {}
    if "policy" in first and "settings" in data:
        return "simulate" if "workers" in first else "train"
    if "losses" in first:
        return "bench convergence"
    if "bytes" in first:
        return "bench latency"
    if "adds_s" in first:
        return "bench ddp"
    if "median_s" in first and "mb" in first:
        return "bench allreduce"
    raise UnknownFile(f"{path} holds no results of a known kind: write a file with --json of {_commands()}")


def _inside(path: Path) -> list[Path]:
    """Returns the files of a folder, or the file itself."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        if any(path.glob("*.jsonl")):
            raise UnknownFile(
                f"{path} holds records of a job, not results: `stormtorch watch {path} --export job.html` draws them"
            )
        raise UnknownFile(f"{path} is a folder without *.json: write a file into it with --json of {_commands()}")
    return found


def page_of(paths: Sequence[Path]) -> tuple[Page, str]:
    """Makes the page of one file, or of several of one kind; returns it with the kind.

    Raises:
        UnknownFile: A file is unknown, or files are of different kinds.
    """
    paths = [inside for path in paths for inside in _inside(path)]
    files = [(path.stem, read_file(path)) for path in paths]
    kinds = [kind_of(path, data) for path, (_, data) in zip(paths, files, strict=True)]
    if len(set(kinds)) > 1:
        found = ", ".join(f"{path} is of `{kind}`" for path, kind in zip(paths, kinds, strict=True))
        raise UnknownFile(f"only files of one command can be compared: {found}")
    try:
        return PAGES[kinds[0]](files), kinds[0]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
        names = ", ".join(str(path) for path in paths)
        raise UnknownFile(f"{names} lacks something that `{kinds[0]}` writes: {error!r}") from error


def _commands() -> str:
    return ", ".join(f"`stormtorch {name}`" for name in PAGES)
