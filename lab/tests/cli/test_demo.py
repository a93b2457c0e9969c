"""The demo: progress, results, and no processes left."""

import json
import os
import signal
import subprocess
import time
import webbrowser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import ENVIRONMENT, STORMTORCH, call, ranks_left
from stormtorch_lab.bench.convergence import ConvergenceSettings, Curve, Point
from stormtorch_lab.cli import demo
from stormtorch_lab.cli.race import Race
from stormtorch_lab.cli.terminal.chart import ChartLine, draw_lines
from stormtorch_lab.netns.fixtures import lab_or_skip

SETTINGS = ConvergenceSettings(ranks=2, seconds=4.0, batch=2, context=10, backends=("storm-drift", "gloo"))


def point(backend: str, clock_s: float, steps: int, loss: float, *, gave_up: bool = False) -> Point:
    return Point(backend=backend, clock_s=clock_s, steps=steps, loss=loss, gave_up=gave_up)


def race_of(*points: Point) -> Race:
    race = Race(SETTINGS, "The race")
    for each in points:
        race.watch(each)
    return race


def picture_of(race: Race, width: int, *, braille: bool = True) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(race.picture(width, braille))
    return capture.get()


@pytest.mark.pure
def test_a_race_says_who_is_ahead_at_the_same_second() -> None:
    start = [point("storm-drift", 0.0, 0, 5.0), point("gloo", 0.0, 0, 5.0)]
    race = race_of(*start)
    assert race.ahead() == ""
    race.watch(point("storm-drift", 4.0, 8, 1.0))
    race.watch(point("gloo", 2.0, 2, 4.0))
    # After 2 s, stormtorch was half of the way from 5 to 1.
    assert race.ahead() == "stormtorch is ahead: loss 3.00 against 4.00 after 2 s each"
    assert race.tokens_per_s("storm-drift") == pytest.approx(8 * 2 * 2 * 10 / 4.0)
    other = race_of(*start, point("storm-drift", 2.0, 1, 4.5), point("gloo", 2.0, 2, 4.0))
    assert other.ahead().startswith("DDP on gloo is ahead")
    level = race_of(*start, point("storm-drift", 2.0, 1, 4.0), point("gloo", 2.0, 2, 4.0))
    assert "level" in level.ahead()


@pytest.mark.pure
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("braille", [True, False])
def test_the_picture_fits_and_names_both_lines(width: int, braille: bool) -> None:
    race = race_of(
        point("storm-drift", 0.0, 0, 5.0),
        point("gloo", 0.0, 0, 5.0),
        point("storm-drift", 4.0, 8, 1.0),
        point("gloo", 2.0, 2, 4.0),
    )
    text = picture_of(race, width, braille=braille)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "stormtorch" in text
    assert "DDP on gloo" in text
    assert braille or text.isascii()


@pytest.mark.pure
def test_a_falling_line_begins_at_the_top_left_and_ends_at_the_bottom_right() -> None:
    line = ChartLine("s", "", [(0.0, 5.0), (10.0, 1.0)])
    text = draw_lines([line], width=40, height=6, x_most=10, x_label="s", y_label="", braille=False)
    rows = [row.partition("|")[2] for row in text.plain.splitlines() if "|" in row]
    assert rows[0].startswith("s")
    assert rows[-1].rstrip().endswith("s")
    assert rows[0].index("s") < rows[3].index("s") < rows[-1].index("s")


@pytest.mark.pure
def test_a_curve_made_of_points_knows_who_was_given_up() -> None:
    points = [point("gloo", 0.0, 0, 5.0), point("gloo", 1.0, 1, 4.0)]
    curve = Curve.of(points, params=1)
    assert (curve.steps, curve.losses, curve.gave_up) == ([0, 1], [5.0, 4.0], False)
    late = Curve.of([*points, point("gloo", 1.0, 1, 4.0, gave_up=True)], params=1)
    assert (late.steps, late.gave_up) == ([0, 1], True)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("environment", "wanted", "terminal", "opens"),
    [
        ({"DISPLAY": ":0"}, None, True, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, None, True, True),
        ({}, None, True, False),
        ({"DISPLAY": ":0"}, None, False, False),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "1"}, None, True, False),
        ({"DISPLAY": ":0", "CI": "1"}, None, True, False),
        ({"DISPLAY": ":0"}, False, True, False),
        ({}, True, False, True),
    ],
)
def test_the_page_is_opened_only_where_somebody_sees_it(
    environment: dict[str, str],
    wanted: bool | None,
    terminal: bool,
    opens: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "SSH_TTY", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    opened: list[str] = []

    class Browser:
        def open(self, address: str) -> None:
            opened.append(address)

    monkeypatch.setattr(webbrowser, "get", Browser)
    page = tmp_path / "page.html"
    page.write_text("")
    demo._open(page, wanted, Console(force_terminal=terminal))
    assert opened == ([page.as_uri()] if opens else [])


@pytest.mark.pure
def test_a_page_that_nobody_placed_finds_a_folder_that_takes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo._writable(demo._PAGE) == demo._PAGE
    (tmp_path / demo._PAGE).mkdir()
    moved = demo._writable(demo._PAGE)
    assert moved.parent.is_dir()
    assert moved.parent != tmp_path
    moved.parent.rmdir()


def run_demo(folder: Path, *options: str) -> tuple[str, dict[str, Any], str]:
    page, figures = folder / "demo.html", folder / "demo.json"
    code, text = call("demo", "--ranks", "2", "--page", str(page), "--json", str(figures), *options)
    assert code == 0, text
    assert ranks_left() == []
    return text, json.loads(figures.read_text()), page.read_text()


@pytest.mark.thorough
def test_without_a_lab_the_demo_says_so_and_ends_with_verdict_and_page(tmp_path: Path) -> None:
    text, data, page = run_demo(tmp_path, "--no-lab", "--seconds", "1")
    assert "No lab here (--no-lab was given)" in text
    assert "DDP on gloo runs on a perfect loopback" in text
    assert "verdict" in text
    assert (tmp_path / "demo.html").as_uri() in text
    storm, gloo = data["race"]["results"]
    assert (storm["backend"], gloo["backend"]) == ("storm-drift", "gloo")
    assert storm["losses"][0] == gloo["losses"][0]
    assert 0.85 < storm["arrived"] < 0.95
    assert gloo["arrived"] == 1.0
    assert [each["policy"] for each in data["accuracy"]["results"]] == ["lossless", "plain", "lead"]
    assert "This machine allows no lab" in page


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(300)
def test_in_a_lab_all_contenders_meet_the_same_loss(tmp_path: Path) -> None:
    lab_or_skip()
    text, data, page = run_demo(tmp_path, "--seconds", "2", "--delay", "0ms", "--loss", "0.05")
    assert "Lab of 2 hosts" in text
    conditions, results = data["race"]["conditions"], data["race"]["results"]
    assert conditions["loss_measured"] == pytest.approx(0.05, abs=0.02)
    assert results[0]["backend"] == "storm-drift"
    assert {each["backend"] for each in results[1:]} <= {"gloo-bbr", "gloo-cubic"}
    assert len({each["losses"][0] for each in results}) == 1
    assert "At 5 % loss" in page


@pytest.mark.slow
def test_an_interrupted_demo_ends_its_ranks_and_keeps_what_there_is(tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    command = [*STORMTORCH, "demo", "--no-lab", "--ranks", "2", "--seconds", "60", "--page", str(page)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    said = ""
    # The first line of a race with two evaluations comes after ten seconds or more.
    for line in process.stdout:
        said += line
        if "loss of stormtorch" in line and "(0 steps)" not in line:
            break
    process.send_signal(signal.SIGINT)
    said += process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert "stormtorch" in page.read_text()
    for _ in range(50):
        if not ranks_left(process.pid):
            break
        time.sleep(0.1)
    assert ranks_left(process.pid) == []
    assert not os.path.exists(f"/proc/{process.pid}")
