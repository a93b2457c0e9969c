"""Commands as a user types them, and what they leave behind."""

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from stormtorch.cli import app as cli

STORMTORCH = (sys.executable, "-m", "stormtorch.cli")
# Wide and without colour, so that messages are not broken into pieces.
ENVIRONMENT = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(cli.app, arguments)
    return result.exit_code, result.output


def ranks_left(parent: int | None = None) -> list[int]:
    """Process ids of the spawned children of a process, of this one by default."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if above == (parent or os.getpid()) and b"spawn_main" in command:
                found.append(int(entry.name))
    return found


def text_of(table: Table) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
