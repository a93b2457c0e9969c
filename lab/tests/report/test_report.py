"""Pages of results: contents, no network requests, and escaping of hostile text."""

import copy
import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from commands import call
from stormtorch_lab.report.files import PAGES, UnknownFile, kind_of, page_of, read_file
from stormtorch_lab.report.page import page_html
from stormtorch_lab.report.parts import Fact, LineChart, Mark, Page, Section, Series, Table
from stormtorch_lab.report.race import learners_of, race_verdict

pytestmark = pytest.mark.pure

KEPT = Path(__file__).parents[3] / "papers" / "benchmarks"
FILES = {
    "bench allreduce": "lab-400mbit-loss10.json",
    "bench ddp": "lab-ddp-400mbit-loss10.json",
    "bench latency": "latency-2-hosts.json",
    "bench convergence": "lab-convergence-400mbit-loss10.json",
    "bench sweep": "lab-sweep.json",
    "train": "train-lm-loss10.json",
}
EVIL = "</script><img src=x onerror=alert(1)>\"'&"


def simulated() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((KEPT / FILES["train"]).read_text())
    del data["settings"]["ranks"]
    data["settings"]["workers"] = 8
    for result in data["results"]:
        result |= {"workers": 8, "drift_curve": [[1, 0.1, 0.1, 0.1], [2, 0.2, 0.1, 0.1]]}
    return data


def chaotic() -> dict[str, Any]:
    fault = {"kind": "kill", "at_s": 1.0, "hosts": [1], "began_s": 1.0, "ended_s": 2.5, "pause_s": 0.5, "return_s": 1.0}
    kind = {"kind": "kill", "count": 1, "stopped": 0, "pause_median_s": 0.5, "pause_worst_s": 0.5}
    return {
        "passed": True,
        "verdict": "passed: 1 faults in 0.1 minutes, 30 steps, all 1 invariants held",
        "settings": {"hosts": 3, "minutes": 0.1, "seed": 1},
        "conditions": {},
        "steps": 30,
        "views": 2,
        "checks": [{"name": "no hang", "holds": True, "problems": []}],
        "kinds": [kind],
        "timeline": [fault],
        "hosts": [{"host": host} for host in range(3)],
        "curve": [[0.0, 1], [3.0, 30]],
    }


def raced() -> dict[str, Any]:
    race = json.loads((KEPT / FILES["bench convergence"]).read_text())
    accuracy = json.loads((KEPT / FILES["train"]).read_text())
    return {"kind": "demo", "note": "Lab of 4 hosts.", "problems": [], "race": race, "accuracy": accuracy}


@pytest.fixture(params=list(PAGES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(kind: str, tmp_path: Path) -> Path:
    if kind in FILES:
        return KEPT / FILES[kind]
    made = tmp_path / "made.json"
    made.write_text(json.dumps({"simulate": simulated, "chaos": chaotic, "demo": raced}[kind]()))
    return made


class Reader(HTMLParser):
    """What a browser would fetch or run, and the elements of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.asks: list[str] = []
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data") and not (value or "").startswith("#"):
                self.asks.append(f"{tag} {name}={value}")
            if name.startswith("on"):
                self.handlers.append(f"{tag} {name}")


def test_every_command_has_a_page_that_says_something_and_asks_nobody(kind: str, path: Path) -> None:
    page, found = page_of([path])
    assert found == kind
    assert len(page.verdict) > 20
    assert page.parts
    html = page_html(page)
    read = Reader(html)
    assert read.asks == read.handlers == []
    assert "default-src 'none'" in html
    assert not re.search(r"@import|url\(", re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL))
    assert read.tags.count("h1") == 1
    figures = [part for part in page.parts if not isinstance(part, Table)]
    assert read.tags.count("table") == len(page.parts)  # a chart is never without its figures
    assert figures


def test_files_of_one_command_become_a_comparison(kind: str, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "another-night.json"
    other.write_bytes(path.read_bytes())
    html = page_html(page_of([path, other])[0])
    assert "another-night" in html


def spoiled(data: Any) -> Any:
    """The same, with markup in every text that is no number, key or name that decides how a file is read."""
    if isinstance(data, dict):
        return {key: value if key in ("kind", "policy") else spoiled(value) for key, value in data.items()}
    if isinstance(data, list):
        return [spoiled(each) for each in data]
    return data + EVIL if isinstance(data, str) else data


def test_hostile_text_in_a_file_stays_text(kind: str, path: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil.json"
    evil.write_text(json.dumps(spoiled(json.loads(path.read_text()))))
    html = page_html(page_of([evil])[0])
    read = Reader(html)
    assert "img" not in read.tags
    assert read.handlers == read.asks == []
    assert read.tags.count("script") == 3
    assert "<img" not in html


def test_names_of_lines_cannot_leave_the_script() -> None:
    series = Series(name=EVIL, colour='red" onload="x', x=[0.0, 1.0], y=[1.0, float("nan")])
    chart = LineChart(title=EVIL, x_label=EVIL, y_label=EVIL, series=[series], marks=[Mark(text=EVIL, x=0.5)])
    page = Page(
        title=EVIL,
        verdict=EVIL,
        tone='x" onload="y',
        facts=[Fact(figure=EVIL, text=EVIL, colour='z" onclick="a')],
        sections=[Section(heading=EVIL, text=EVIL, parts=[chart])],
        conditions=[(EVIL, EVIL)],
    )
    html = page_html(page)
    read = Reader(html)
    assert read.handlers == []
    assert read.tags.count("script") == 3
    (data,) = re.findall(r'id="charts">(.*?)</script>', html, re.DOTALL)
    assert json.loads(data)[0]["series"][0]["name"] == EVIL


CONDITIONS: dict[str, Any] = {
    "requested": {"rate_bits_per_s": 1e8, "round_trip_s": 0.02, "loss": 0.1},
    "patience_s": 12.0,
    "ranks": 2,
    "batch": 1,
    "context": 1,
}


def result(backend: str, losses: list[float], *, each_s: float = 1.0, gave_up: bool = False) -> dict[str, Any]:
    count = len(losses)
    return {
        "backend": backend,
        "clock_s": [each_s * index for index in range(count)],
        "steps": list(range(count)),
        "losses": losses,
        "arrived": 0.9,
        "gave_up": gave_up,
    }


def verdict(*results: dict[str, Any]) -> tuple[str, str]:
    return race_verdict(CONDITIONS, learners_of(results))


def test_the_verdict_names_loss_seconds_and_ratio() -> None:
    text, tone = verdict(
        result("storm-drift", [5.0, 3.0, 2.0, 1.0]), result("gloo-bbr", [5.0, 4.0, 3.5, 3.0], each_s=4.0)
    )
    assert text == (
        "At 10 % loss stormtorch reached a validation loss of 3.00 in 1.0 s; DDP on gloo (TCP-BBR) took 12 s "
        "(12x as long)."
    )
    assert tone == "good"


def test_the_verdict_says_so_if_the_peer_wins() -> None:
    text, tone = verdict(result("storm-drift", [5.0, 4.0, 3.0]), result("gloo-bbr", [5.0, 3.0, 2.0]))
    assert text.startswith("At 10 % loss DDP on gloo (TCP-BBR) reached a validation loss of 3.00 in 1.0 s; stormtorch")
    assert "(2.0x as long)" in text
    assert tone == "bad"


def test_the_verdict_calls_equal_times_equal() -> None:
    curve = [5.0, 4.0, 3.0]
    text, tone = verdict(result("storm-drift", curve), result("gloo-bbr", curve))
    assert "in the same time" in text
    assert tone == "plain"


def test_the_verdict_tells_who_made_no_step() -> None:
    ours, stuck = result("storm-drift", [5.0, 4.0]), result("gloo-cubic", [5.0], gave_up=True)
    assert "(TCP-CUBIC) did not complete one step within 12 s" in verdict(ours, stuck)[0]
    slow = result("gloo-bbr", [5.0, 4.0], each_s=3.0)
    text = verdict(ours, slow, stuck)[0]
    assert "3.0x as long" in text
    assert text.endswith("DDP on gloo (TCP-CUBIC) did not complete one step within 12 s.")


def test_without_a_lab_the_verdict_says_that_tcp_was_spared() -> None:
    from stormtorch_lab.report.demo import demo_verdict

    conditions = {key: value for key, value in CONDITIONS.items() if key != "requested"} | {"faults": 0.1}
    results = [result("storm-drift", [5.0, 4.0], each_s=2.0), result("gloo", [5.0, 4.0])]
    text, tone = demo_verdict({"race": {"conditions": conditions, "results": results}})
    assert "gloo, which lost nothing" in text
    assert "no lab" in text
    assert tone == "plain"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1]", "holds no results"),
        ("{}", "of a known kind"),
        ('{"results": [{"policy": "lead"}], "settings": {}}', "lacks something that `train` writes"),
        ('{"points": 3}', "lacks something that `bench sweep` writes"),
    ],
)
def test_an_unknown_file_is_named_in_one_message(content: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "what.json"
    path.write_text(content)
    with pytest.raises(UnknownFile, match=re.escape(problem)) as caught:
        page_of([path])
    assert "what.json" in str(caught.value)
    code, text = call("report", str(path))
    assert code == 2
    assert "what.json" in text


def test_files_of_two_commands_are_refused(tmp_path: Path) -> None:
    code, text = call("report", str(KEPT / FILES["train"]), str(KEPT / FILES["bench ddp"]), "-o", str(tmp_path / "x"))
    assert code == 2
    assert "only files of one command" in text
    assert not (tmp_path / "x").exists()


def test_a_missing_file_is_named() -> None:
    code, text = call("report", "nowhere.json")
    assert code == 2
    assert "nowhere.json cannot be read" in text


def test_the_command_writes_page_tables_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, tables, pictures = tmp_path / "out.html", tmp_path / "tables", tmp_path / "pictures"
    source = KEPT / FILES["bench convergence"]
    code, text = call("report", str(source), "-o", str(out), "--csv", str(tables), "--png", str(pictures))
    assert code == 0, text
    assert "stormtorch reached a validation loss" in text
    assert out.read_text().startswith("<!doctype html>")
    (name,) = [each for each in tables.iterdir() if "seconds" in each.name]
    with name.open() as file:
        rows = list(csv.reader(file))
    # A backend without a step has no curve.
    kept = [each for each in json.loads(source.read_text())["results"] if len(each["losses"]) > 1]
    assert rows[0][1:] == ["seconds of training", "validation loss, nats per byte"]
    assert len(rows) == 1 + sum(len(each["losses"]) for each in kept)
    assert float(rows[1][2]) == kept[0]["losses"][0]
    drawn = sorted(pictures.iterdir())
    assert len(drawn) == 2
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in drawn)


def test_every_kind_is_told_from_the_others(kind: str, path: Path) -> None:
    data = read_file(path)
    assert kind_of(path, data) == kind
    lacking = copy.deepcopy(data)
    for key in ("results", "points", "timeline", "race"):
        lacking.pop(key, None)
    with pytest.raises(UnknownFile):
        kind_of(path, lacking)
