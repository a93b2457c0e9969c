"""Tables on narrow terminals: no truncated cell; columns that do not fit side by side follow below."""

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import stormtorch_lab.cli.app
from shown_tables import LEAVE_OUT, SHOWN, Show
from stormtorch.cli.terminal import screen
from stormtorch.cli.terminal.screen import hanging_indent, new_table, progress_bar

pytestmark = pytest.mark.pure

CLI = (Path(screen.__file__).parents[1], Path(stormtorch_lab.cli.app.__file__).parent)
SHOWS = sorted(set(SHOWN.values()), key=lambda each: each.__name__)


def makers() -> set[str]:
    """Functions that make a table, be it one of rich's own."""
    found = set()
    for folder, path in ((each, path) for each in CLI for path in each.rglob("*.py")):
        place = ".".join(path.relative_to(folder).with_suffix("").parts)
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                called = {ast.unparse(each.func) for each in ast.walk(function) if isinstance(each, ast.Call)}
                if called & {"new_table", "Table", "rich.table.Table"}:
                    found.add(f"{place}.{function.name}")
    return found


def shown(show: Show, width: int, *, terminal: bool = True) -> str:
    console = Console(width=width, color_system=None, force_terminal=terminal)
    with console.capture() as capture:
        show(console)
    return capture.get()


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\S*[\w%]\S*", re.sub(r"[─│╭╮╰╯⠀-⣿]", " ", text)))


def test_every_function_that_makes_a_table_is_shown_here() -> None:
    assert makers() == set(SHOWN)


@pytest.mark.thorough
@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("make", SHOWS, ids=lambda each: each.__name__.strip("_"))
def test_no_cell_is_cut(make: Callable[[], Show], width: int) -> None:
    show = make()
    text = shown(show, width)
    assert "…" not in text
    if make not in LEAVE_OUT:
        assert words(shown(show, 1000)) - words(text) == Counter()


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(data=st.data(), width=st.integers(20, 120), keys=st.integers(1, 2), lines=st.booleans())
def test_no_table_is_wider_than_the_terminal_or_loses_a_character(
    data: st.DataObject, width: int, keys: int, lines: bool
) -> None:
    cell = st.text("abc123 .%", max_size=40).map(lambda text: " ".join(text.split()))
    row = st.lists(cell, min_size=keys + 1, max_size=keys + 1 + data.draw(st.integers(0, 8)))
    headings = data.draw(row)
    rows = data.draw(st.lists(st.tuples(*[cell] * len(headings)), max_size=4))
    table = new_table("", keys=keys, lines=lines)
    for heading in headings:
        table.add_column(
            heading, no_wrap=data.draw(st.booleans()), justify=data.draw(st.sampled_from(["left", "right"]))
        )
    for each in rows:
        table.add_row(*each)
    text = shown(lambda console: console.print(table), width)
    assert max(map(len, text.splitlines()), default=0) <= width
    given_characters = Counter("".join(each for line in [headings, *rows] for each in line).replace(" ", ""))
    assert given_characters - Counter(text) == Counter()


def test_what_gives_way_first() -> None:
    table = new_table("title", "caption")
    table.add_column("key", no_wrap=True)
    table.add_column("two words", justify="right", no_wrap=True)
    table.add_column("prose")
    table.add_row("first", "123", "a sentence of some length")

    def lines(width: int) -> list[str]:
        return [
            line.strip() for line in shown(lambda console: console.print(table), width).splitlines() if "─" not in line
        ]

    assert lines(60) == ["title", "key    two words  prose", "first        123  a sentence of some length", "caption"]
    assert lines(36)[1:4] == ["key    two words  prose", "first        123  a sentence of", "some length"]
    assert lines(32)[1:4] == ["two", "key   words prose", "first   123 a sentence of some"]
    assert lines(26)[1:5] == ["key   two words", "first       123", "key   prose", "first a sentence of some"]


def test_prose_hangs_behind_its_head_and_is_one_line_where_there_is_no_terminal() -> None:
    def show(console: Console) -> None:
        hanging_indent("1. ", "a sentence that is longer than the line", console)

    assert [line.rstrip() for line in shown(show, 24).splitlines()] == [
        "1. a sentence that is",
        "   longer than the line",
    ]
    assert shown(show, 24, terminal=False) == "1. a sentence that is longer than the line\n"


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_progress_tells_its_numbers_at_every_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=width, color_system=None, force_terminal=True)
    monkeypatch.setattr(screen, "Console", lambda **_: console)
    with console.capture() as capture, progress_bar(60, "starting 4 processes", unit="rounds") as advance:
        advance("25 MB, round 12: storm-lossy-bf16 beside gloo-cubic", 12)
    text = capture.get()
    assert "12/60 rounds 0:00:00 left -:--:--" in text and "…" not in text
