"""Progress without a terminal, and shell completion."""

import io
import time

import pytest
from rich.console import Console

from stormtorch.cli.terminal import screen
from stormtorch.cli.terminal.completion import complete_choice, complete_choice_list
from stormtorch_lab.cli.lab import _silence_broken
from stormtorch_lab.cli.terminal import choices
from stormtorch_lab.netns.running import OutputLine


def test_work_that_is_piped_says_where_it_is_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "EVERY_S", 0.02)
    with screen.progress_bar(10, "starting", unit="steps") as advance:
        time.sleep(0.1)
        advance("half of it", 5)
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("starting: 0 of 10 steps after 0 s")
    assert any(line.startswith("half of it: 5 of 10 steps after 0 s, about 0 s left") for line in lines)
    count = len(lines)
    time.sleep(0.06)
    assert capsys.readouterr().err == "" and count > 3


def test_short_work_that_is_piped_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with screen.progress_bar(10, "starting") as advance:
        advance("done", 10)
    assert capsys.readouterr().err == ""


def test_a_line_of_progress_may_hold_brackets() -> None:
    console = Console(file=io.StringIO(), width=80)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen, "EVERY_S", 0.01)
        with screen.periodic_lines(lambda: "[bold]as it is[/bold]", console):
            time.sleep(0.05)
    assert "[bold]as it is[/bold]" in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


@pytest.mark.pure
def test_the_shell_offers_values_also_within_a_list() -> None:
    one, several = complete_choice(choices.MODELS), complete_choice_list(choices.POLICIES)
    assert one("res") == ["resnet20", "resnet110"]
    assert one("x") == []
    assert several("l") == ["lossless", "lead", "light-dp"]
    assert several("lossless,l") == ["lossless,lead", "lossless,light-dp"]
    assert several("lossless,lead,p") == ["lossless,lead,plain", "lossless,lead,partel", "lossless,lead,private-drift"]
    assert several("") == choices.POLICIES.split(",")
    assert complete_choice_list("a,b", "b,c")("") == ["a", "b", "c"]


@pytest.mark.thorough
@pytest.mark.alone
def test_a_silent_command_in_a_lab_is_said_to_run_and_a_talking_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "EVERY_S", 0.1)
    console = Console(file=io.StringIO(), width=80)
    heard: list[str] = []
    with _silence_broken(console, lambda line: heard.append(line.text)) as write:
        for _ in range(12):
            write(OutputLine(0, 0, False, "busy"))
            time.sleep(0.025)
        busy = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
        time.sleep(0.35)
    assert heard == ["busy"] * 12
    assert busy == ""
    assert "still running after 0 s, silent for 0 s" in console.file.getvalue()  # type: ignore[attr-defined]
