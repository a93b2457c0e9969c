"""Layout of help texts: prose fills the terminal, and examples can be copied at any width."""

import inspect
import re
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

LAB_COMMANDS = ("bench", "chaos", "demo", "lab", "report", "simulate", "theory", "train")
"""Commands of the package stormtorch-lab."""
# Columns of the terminal that rich does not leave for text.
_FRAME = 2
# Width that rich assumes without a terminal, and the narrowest one for which an example is wrapped.
_NO_TERMINAL, _NARROWEST = 80, 40
_WORD = r"(?:'[^']*'|\"[^\"]*\"|\S+)"
# Never wrapped: the program after a --, an option with its value, a word.
_PART = re.compile(rf"-- .+|--?[a-z][\w-]*(?: (?!-){_WORD})?|{_WORD}")
Function = TypeVar("Function", bound=Callable[..., Any])
_EXAMPLE = re.compile(r"^  (\S.*?)(?:\s{3,}(\S.*))?$")


def lay_out(text: str, width: int) -> str:
    """Fills paragraphs and lists the examples, each with its comment behind a #.

    Args:
        text: A docstring: an example begins with two spaces; its comment follows after three or more.
        width: Columns of the terminal.
    """
    parts: list[str] = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("  ") for line in lines):
            # Examples belong to the heading before them.
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
        # Escape before joining: escaping doubles a final backslash.
        found.append(" \\\n".join(map(escape, _broken(command, width))) + end)
    return "\n".join(found)


def _broken(command: str, width: int) -> list[str]:
    """Wraps a command before an option or a word, with line continuations of the shell."""
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
    """Mixin of a command or group: lays out its help when it is shown."""

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
        """Finds a command; fails with a hint if it belongs to the lab and that is not installed."""
        if ctx.parent is None and args[0] in LAB_COMMANDS and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"{args[0]} is a command of the lab: pip install stormtorch-lab")
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """An application whose commands have such help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, rich_markup_mode="rich", no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        """Returns a decorator that makes a function a command."""
        return super().command(name, cls=Command, **settings)
