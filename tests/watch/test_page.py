"""The page in a real browser: display, keyboard, screen reader, and hostile records."""

import importlib
import importlib.util
import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import ENVIRONMENT, STORMTORCH
from records import make_records
from stormtorch.telemetry.records import Record, line_of

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="needs playwright: pip install 'stormtorch[browser]'"
    ),
]
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Run:
    """A folder, the server that shows it, and a page that looks at it."""

    def __init__(self, folder: Path, browser: Any) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [*STORMTORCH, "watch", str(folder), "--web", "--port", "0"],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self.context = browser.new_context()
        self.errors: list[str] = []

    def open(self, *, width: int = 1280, dark: bool = False) -> Any:
        page = self.context.new_page()
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.goto(self.address)
        page.wait_for_selector("#sentence:not(:has-text('Reading records'))")  # the policy forbids to wait by a script
        return page

    def close(self) -> None:
        self.context.close()
        self._process.terminate()
        self._process.wait(20)
        assert self.errors == []


@pytest.fixture
def run(tmp_path: Path, browser: Any) -> Iterator[Run]:
    found = Run(tmp_path, browser)
    yield found
    found.close()


def write(folder: Path, records: dict[int, list[Record]], now: float) -> None:
    """Writes records to the folder of a run, dated as if the last of them arrived now."""
    last = max(record["time"] for mine in records.values() for record in mine)
    for rank, mine in records.items():
        lines = [line_of({**record, "time": record["time"] + now - last}) + "\n" for record in mine]
        (folder / f"rank-{rank}-0-{rank}.jsonl").write_text("".join(lines))


def now(page: Any) -> float:
    return float(page.evaluate("Date.now() / 1000"))


def test_the_page_shows_a_job_that_begins_goes_bad_and_is_hostile(run: Run) -> None:
    page = run.open()
    assert page.inner_text("#sentence") == "No rank has reported yet."
    write(run.folder, make_records(4, loss=lambda s, r: 0.3 if (s, r) == (2, 1) else 0.001, train_loss=2.0), now(page))
    page.wait_for_selector("#verdict[data-level='bad']")
    assert page.inner_text("#sentence") == "The link 2 -> 1 loses 30 %, the others 0.1 %."
    assert page.get_attribute("#verdict", "aria-live") == "polite"
    assert page.inner_text("#worst tbody tr:first-child td:first-child") == "2 → 1"
    assert page.locator(".matrix td.blamed").all_inner_texts() == ["30"]
    assert page.locator(".split").count() == 4
    page.wait_for_selector('figure[data-chart="Time of a step"] canvas')
    assert page.locator('figure[data-chart="Loss of the training"] canvas').count() == 1
    # A hostile record is text, and nothing else.
    with (run.folder / "rank-0-0-0.jsonl").open("a") as file:
        file.write(line_of({"kind": "event", "time": now(page), "step": 3, "text": HOSTILE}) + "\n")
        file.write('{"kind": "steps", "time"')
    page.wait_for_selector("#notes li:has-text('<script>')")
    assert "owned" not in page.title()
    assert page.locator("#notes script, #notes img").count() == 0


def test_the_matrix_is_read_with_the_keyboard_and_names_the_link(run: Run) -> None:
    page = run.open()
    write(run.folder, make_records(4, loss=lambda s, r: (10 * s + r) / 1000), now(page))
    page.wait_for_selector(".matrix")
    page.focus(".matrix td[tabindex='0']")
    page.keyboard.press("ArrowDown")
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused == page.inner_text("#detail")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#detail").startswith("rank ")
    assert page.evaluate("document.activeElement.tagName") == "TD"
    # The choice of a measure is a group of radio buttons: one stop of the tab key, arrows choose.
    page.focus("#measures [aria-checked='true']")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#measures [aria-checked='true']") == "Round trip"
    assert page.get_attribute(".matrix", "aria-label") == "Round trip of each link in ms; rows receive, columns send"
    assert page.locator("#measures button[tabindex='0']").count() == 1


def test_a_screen_reader_finds_names_for_everything(run: Run) -> None:
    write(run.folder, make_records(4), 1.7e9 + random.random())
    page = run.open()
    page.wait_for_selector("figure canvas")
    tree = page.locator("body").aria_snapshot()
    for part in ("status", "main", "grid", "radiogroup", 'heading "Links"', 'heading "Timeline"', "Rank 0: computes"):
        assert part in tree, part
    visible = "[...document.querySelectorAll('button:not([hidden]), [role=img], table.matrix')]"
    assert page.evaluate(f"{visible}.filter((each) => !each.textContent && !each.ariaLabel).length") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_one_column_without_scrolling_sideways(run: Run, dark: bool) -> None:
    page = run.open(width=390, dark=dark)
    write(run.folder, make_records(8, host=lambda rank: "a-host-with-a-rather-long-name." * 3 + str(rank)), now(page))
    page.wait_for_selector("figure canvas")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (colour == "rgb(15, 20, 25)") == dark


@pytest.mark.parametrize("width", [500, 1300])
def test_names_of_hosts_with_a_domain_are_not_cut(run: Run, width: int) -> None:
    page = run.open(width=width)
    write(run.folder, make_records(8, host=lambda rank: f"worker-{rank}.example.org"), now(page))
    page.wait_for_selector("figure canvas")
    cut = """[...document.querySelectorAll(".matrix th, .matrix .corner, .split .name")]
        .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.textContent)"""
    assert page.evaluate(cut) == []


def test_sixty_four_ranks_have_a_matrix_and_lists_that_open(run: Run) -> None:
    loss = {(2, 5): 0.3}
    write(
        run.folder,
        make_records(64, seconds=4, host=lambda rank: f"node-{rank // 8}", loss=lambda s, r: loss.get((s, r), 0.001)),
        1.7e9,
    )
    page = run.open()
    page.wait_for_selector(".matrix.dense")
    assert page.locator(".matrix td:not(.corner)").count() == 64 * 64
    assert page.inner_text("#worst tbody tr:first-child td:first-child") == "2 → 5"
    assert page.locator("#ranks tbody tr").count() == 12
    page.click("#ranks-more")
    assert page.locator("#ranks tbody tr").count() == 64


def test_a_page_of_somebody_else_learns_nothing(run: Run, browser: Any) -> None:
    run.open()
    # The cookie is there, and the other page is on the same machine: only its origin differs.
    page = run.context.new_page()
    page.goto("data:text/html,<p>evil</p>")
    data = run.address.split("?")[0] + "data"
    said = page.evaluate("url => fetch(url, {credentials: 'include'}).then(a => a.text(), e => 'refused ' + e)", data)
    assert said.startswith("refused")
    frame = run.context.new_page()
    frame.set_content(f'<iframe src="{run.address.split("?")[0]}"></iframe>')
    frame.wait_for_timeout(500)
    assert not any("stormtorch" in (each.title() or "") for each in frame.frames[1:])


def test_a_report_is_the_same_page_without_a_server(tmp_path: Path, browser: Any) -> None:
    records = make_records(4, loss=lambda s, r: 0.3 if (s, r) == (2, 1) else 0.001)
    records[0].append({"kind": "event", "time": records[0][-1]["time"], "step": 1, "text": "</script>" + HOSTILE})
    for mine in records.values():
        mine.append({"kind": "end", "time": mine[-1]["time"], "step": 80, "why": "done"})
    write(tmp_path, records, 1.7e9)
    subprocess.run(
        [*STORMTORCH, "watch", str(tmp_path), "--export", str(tmp_path / "run.html")], env=ENVIRONMENT, check=True
    )
    page = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "run.html").as_uri())
    page.wait_for_selector("figure canvas")
    assert page.inner_text("#sentence") == "The link 2 -> 1 loses 30 %, the others 0.1 %."
    assert "finished" in page.inner_text("#live-text")
    assert "owned" not in page.title()
    assert said == []
    assert len([each for each in asked if not each.startswith("data:")]) == 1, "it loads nothing but itself"
    assert json.loads(page.locator("#data").text_content())["state"] == "done"
    page.close()
