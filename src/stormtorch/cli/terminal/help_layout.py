"""Help of commands: prose that fills the terminal, and examples that can be copied out of it at any width."""

import inspect
import re
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

LAB_COMMANDS = ("bench", "chaos", "demo", "lab", "report", "simulate", "theory", "train")
"""Commands of the distribution stormtorch-lab."""
# What rich leaves of the terminal for text.
_FRAME = 2
# Most that rich uses where it finds no terminal, and least that an example is broken for.
_NO_TERMINAL, _NARROWEST = 80, 40
_WORD = r"(?:'[^']*'|\"[^\"]*\"|\S+)"
# What is not broken: the program behind a --, an option with its value, a word.
_PART = re.compile(rf"-- .+|--?[a-z][\w-]*(?: (?!-){_WORD})?|{_WORD}")
Function = TypeVar("Function", bound=Callable[..., Any])
_EXAMPLE = re.compile(r"^  (\S.*?)(?:\s{3,}(\S.*))?$")


def lay_out(text: str, width: int) -> str:
    """Fills paragraphs, and puts examples one under the other: each whole, and what it is for behind a #.

    Args:
        text: A docstring: lines of an example begin with two spaces; what it is for stands behind three or more.
        width: Columns of the terminal.
    """
    parts: list[str] = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("  ") for line in lines):
            # Examples follow each other, and the line that says what they are.
            parts[-1] += f"\n{_examples(lines, max(width - _FRAME, _NARROWEST))}"
        else:
            parts.append(" ".join(line.strip() for line in lines))
    return "\n\n".join(parts)


def _examples(lines: list[str], width: int) -> str:
    pairs = [_EXAMPLE.findall(line)[0] for line in lines]
    column = max(len(command) for command, about in pairs if about) if any(about for _, about in pairs) else 0
    beside = all(not about or column + len(about) + 6 <= width for _, about in pairs)
    found = []
    for command, about in pairs:
        note = f"[dim]# {escape(about)}[/dim]" if about else ""
        if note and not beside:
            found.append(f"  {note}")
        end = f"{' ' * (column - len(command) + 2)}{note}" if note and beside else ""
        # Not before it is escaped: that doubles what ends a text.
        found.append(" \\\n".join(map(escape, _broken(command, width))) + end)
    return "\n".join(found)


def _broken(command: str, width: int) -> list[str]:
    """Breaks a command before an option or a word, as a shell goes on reading it."""
    lines, line = [], "  "
    for part in re.findall(
        r"-- .+|(?:--?[a-z][\w-]*(?: (?!-)(?:'[^']*'|\"[^\"]*\"|\S+))?)|'[^']*'|\"[^\"]*\"|\S+", command
    ):
        if len(line) + len(part) + 2 > width and line.strip():
            lines.append(line.rstrip())
            line = "      "
        line += f"{part} "
    return [*lines, line.rstrip()]


class _LaidOut:
    """Part of a command or group whose help is laid out when it is shown."""

    help: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help."""
        given = self.help
        columns = shutil.get_terminal_size((_NO_TERMINAL, 24)).columns
        try:
            self.help = given and lay_out(inspect.cleandoc(given), columns)
            super().format_help(ctx, formatter)  # type: ignore[misc]  # that of a command or a group
        finally:
            self.help = given


class Command(_LaidOut, TyperCommand):
    """A command whose help is laid out."""


class Group(_LaidOut, TyperGroup):
    """Commands whose help is laid out."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds a command; says so where it is one of the lab, which is not installed."""
        if ctx.parent is None and args[0] in LAB_COMMANDS and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"{args[0]} is a command of the lab: pip install stormtorch-lab")
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """An application with such commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, rich_markup_mode="rich", no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        """Returns a decorator that makes a function a command."""
        return super().command(name, cls=Command, **settings)
