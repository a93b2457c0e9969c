"""Help at every width: no truncated or badly wrapped line, and examples can be pasted."""

import inspect
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from stormtorch.cli.app import app
from stormtorch.cli.terminal.help_layout import lay_out

pytestmark = pytest.mark.pure


def commands(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    command = get_command(app) if command is None else command
    yield words, command
    for name, inside in getattr(command, "commands", {}).items():
        yield from commands(inside, (*words, name))


ALL = list(commands())


def shown(words: tuple[str, ...], width: int) -> str:
    environment = {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"}
    done = CliRunner(env=environment).invoke(app, [*words, "--help"])
    assert done.exit_code == 0
    return done.output


def examples(text: str) -> list[str]:
    """The examples of a help text, as a shell reads them after pasting."""
    behind = text.partition("Examples")[2].partition("\n \n")[0] if "Examples" in text else ""
    block = []
    for line in behind.split("\n")[1:]:
        if not line.strip():
            break
        block.append(line[1:].rstrip())
    joined = re.sub(r"\\\n\s*", "", "\n".join(block))
    return [line.partition("  # ")[0].strip() for line in joined.split("\n") if line.strip() and line[2] != "#"]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("words", [words for words, _ in ALL], ids=lambda words: " ".join(words) or "stormtorch")
def test_help_fits_and_its_examples_are_whole(words: tuple[str, ...], width: int) -> None:
    text = shown(words, width)
    assert max(map(len, text.splitlines())) <= width
    given = [line for line in inspect.cleandoc(dict(ALL)[words].help or "").splitlines() if line.startswith("  ")]
    wanted = [re.split(r"\s{3,}", line.strip())[0] for line in given]
    assert [shlex.split(each) for each in examples(text)] == [shlex.split(each) for each in wanted]


def test_prose_fills_the_line_and_examples_say_what_they_are_for() -> None:
    text = "First\nline.\n\nMore\nprose.\n\nExamples\n\n  run --one 1 --two 2 -- do it     all of it\n  run"
    assert lay_out(text, 80) == (
        "First line.\n\nMore prose.\n\nExamples\n  run --one 1 --two 2 -- do it  [dim]# all of it[/dim]\n  run"
    )
    assert lay_out(text, 30) == (
        "First line.\n\nMore prose.\n\nExamples\n  [dim]# all of it[/dim]\n  run --one 1 --two 2 -- do it\n  run"
    )
    assert lay_out("A.\n\n  run --option with --many words and more of them, really", 44) == (
        "A.\n  run --option with --many words and \\\n      more of them, really"
    )


def test_the_first_page_fits_on_a_screen_and_has_two_groups() -> None:
    text = shown((), 100)
    assert len(text.splitlines()) <= 48
    assert "─ Use ─" in text and "─ Measure and study ─" in text
