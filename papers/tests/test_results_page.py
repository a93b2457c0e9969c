"""The page of results and the paper say what is kept: in tables to the letter, in sentences to their last digit."""

import functools
import importlib
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
# A figure with its error, or one with a sign: differences, which is what the sentences are about.
_FIGURE = re.compile(r"(?<![\w.,])([+-]?\d+(?:\.\d+)?) ± (\d+(?:\.\d+)?)|(?<![\w.,±-])([+-]\d+(?:\.\d+)?)(?![\w.])")
# What others published, and what we wanted, by section; no result of ours.
_NOT_OURS = {
    "What a loss rate costs": {"+0.8", "+0.3", "+1.2"},
    "A larger model": {"+0.8"},
    "Fine-tuning": {"+0.2"},
    "RPS: averaging models": {"+0.02", "+0.01"},
    "3. The lead": {"+0.11", "-0.14"},  # by formula
    "5. Results": {"+0.8", "+0.2", "+0.3", "+1.2"},
}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "papers" / "experiments"))
    before = set(sys.modules)
    yield importlib.import_module("page")
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == ROOT / "papers" / "experiments":
            del sys.modules[name]


@pytest.mark.thorough
@pytest.mark.parametrize("at, least", [(0, 15), (1, 7)], ids=["results", "paper"])
def test_tables_are_those_of_the_results(page: Any, at: int, least: int) -> None:
    text = page.PAGES[at].read_text()
    assert text.count("<!-- table of ") >= least
    assert page.with_tables(text) == text, "run `make results`"
    other = re.sub(r"\| \+\d\.\d\d ± 0\.\d\d %", "| +9.99 ± 0.01 %", text, count=1)
    assert other != text
    assert page.with_tables(other) == text


def test_a_row_must_fit_its_heading(page: Any) -> None:
    with pytest.raises(ValueError, match="other columns than its heading"):
        page.with_tables("<!-- table of gradients -->\n| a | b | c |\n|---|---|---|\n")


@pytest.mark.thorough
def test_figures_in_sentences_are_those_of_the_results(page: Any) -> None:
    assert unknown_figures(page.PAGES[1].read_text()) == []
    text = page.PAGES[0].read_text()
    assert unknown_figures(text) == []
    # It can fail.
    wrong = text.replace("-9.0 ± 0.3 %", "-9.3 ± 0.3 %").replace("leaves +6.1 ± 0.9 %", "leaves +6.1 ± 0.2 %")
    assert unknown_figures(wrong) == ["The lead, studied: -9.3 ± 0.3", "The lead, studied: +6.1 ± 0.2"]


def test_trainings_in_several_tables_have_the_same_bits() -> None:
    by_settings: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for name in ("perplexity", "pareto", "redundancy"):
        for run in _runs(name).values():
            by_settings[settings_of(run)].append(run)
    shared = [runs for runs in by_settings.values() if len(runs) > 1]
    assert len(shared) == 31, "as papers/results.md says"
    for runs in shared:
        assert len({run["commit"] for run in runs}) == len({run["date"] for run in runs}) == len(runs)
        for name in ("val_loss", "curve", "drift_curve", "lag"):
            assert all(run["result"][name] == runs[0]["result"][name] for run in runs), runs[0]["settings"]


def settings_of(run: dict[str, Any]) -> str:
    """What decides the bits of a deterministic run; settings that came later are there by their default, None."""
    settings: dict[str, Any] = run["settings"]
    return json.dumps({name: each for name, each in settings.items() if each is not None}, sort_keys=True)


def test_every_run_says_what_it_takes_to_repeat_it() -> None:
    lacking: Counter[str] = Counter()
    for path in sorted((ROOT / "papers" / "experiments" / "results").glob("*.json")):
        kept = json.loads(path.read_text())
        # Experiments without seeds of their own tell the conditions of all that they did.
        runs = kept.get("runs") or dict(enumerate(kept.get("machines", [kept.get("conditions")])))
        lacking[path.stem] = sum(not _is_repeatable(run) for run in runs.values())
    assert not +lacking
    run = {"commit": "3a7880d7f492", "date": "2026-11-18", "versions": {"torch": "2.13.0"}, "machine": {"cores": 2}}
    assert _is_repeatable(run)
    assert not _is_repeatable(run | {"commit": "3a7880d7f492+changes"})
    assert not _is_repeatable(run | {"settings": {"device": "cuda", "deterministic": False}})
    assert _is_repeatable(run | {"settings": {"device": "cuda", "deterministic": True}})


def _is_repeatable(run: dict[str, Any]) -> bool:
    settings = run.get("settings", {})
    known = all(run.get(name) for name in ("commit", "date", "versions", "machine")) and "+" not in run["commit"]
    return known and (settings.get("device") != "cuda" or settings.get("deterministic") is True)


def unknown_figures(text: str) -> list[str]:
    """Figures outside of tables that no result of their section gives, each with its section."""
    unknown = []
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        names = set(re.findall(r"results/(\w+)\.png|<!-- table of (\w+)", body))
        named = re.findall(r"<!-- figures of ([\w, ]+) -->", body)
        names = {name for pair in names for name in pair if name} | {
            name for each in named for name in each.split(", ")
        }
        sentences = " ".join(line for line in body.split("\n") if not line.startswith("|"))
        for found in _FIGURE.finditer(sentences):
            mean, error, alone = found.groups()
            # Only what is said to be one is looked for among differences: there are very many.
            points = " points" in sentences[found.end() : found.end() + 30]
            known = [pair for name in names for pair in (_differences(name) if points else _known(name))]
            if (alone or mean) not in _NOT_OURS.get(title, ()) and not _is_one_of(mean or alone, error, known):
                unknown.append(f"{title}: {found.group(0)}")
    return unknown


def _is_one_of(mean: str, error: str | None, known: list[tuple[float, float]]) -> bool:
    """Whether some result rounds to it; signs may be given in words."""
    return any(
        _rounds_to(abs(average), mean.lstrip("+-")) and (error is None or _rounds_to(deviation, error))
        for average, deviation in known
    )


def _rounds_to(value: float, text: str) -> bool:
    return abs(value - float(text)) <= 0.5000001 * 10.0 ** -len(text.partition(".")[2])


@functools.cache
def _known(name: str) -> list[tuple[float, float]]:
    """Means and standard errors that an experiment can tell: each kind of run over lossless ones, and its own loss."""
    over_seeds = importlib.import_module("over_seeds")
    runs = _runs(name)
    own = [[run["val_loss"] for run in over_seeds.seeds(runs, kind)] for kind in _kinds(runs)]
    return _summaries([*_compared(name).values(), *(values for values in own if None not in values)])


@functools.cache
def _differences(name: str) -> list[tuple[float, float]]:
    """Means and standard errors of the difference between each two kinds of runs, seed by seed."""
    over = list(_compared(name).values())
    pairs = [(one, other) for one in over for other in over if len(one) == len(other) > 1]
    return _summaries([[a - b for a, b in zip(one, other, strict=True)] for one, other in pairs])


def _compared(name: str) -> dict[tuple[str, str], list[float]]:
    """Per cent above each lossless kind, or that of its own family and that of all; and of plain above the lead."""
    over_seeds = importlib.import_module("over_seeds")
    runs = _runs(name)
    kinds = _kinds(runs)
    bases = [kind for kind in kinds if "lossless" in kind or "exact" in kind]
    common = getattr(importlib.import_module(name), "BASE", None)
    found = {}
    for kind in kinds:
        own = f"{kind.partition('/')[0]}/lossless"
        for base in {own, common or own} if own in bases and own != kind else bases:
            more = over_seeds.above(runs, kind, base)
            if more and base != kind:
                found[kind, base] = more
        led = kind.replace("plain", "lead")
        if led != kind and led in kinds:
            found[kind, led] = over_seeds.above(runs, kind, led)
    return found


def _runs(name: str) -> dict[str, Any]:
    kept = json.loads((ROOT / "papers" / "experiments" / "results" / f"{name}.json").read_text())
    runs: dict[str, Any] = kept.get("runs", {})
    return runs


def _kinds(runs: dict[str, Any]) -> list[str]:
    return sorted({key.rpartition("/")[0] for key in runs})


def _summaries(values: list[list[float]]) -> list[tuple[float, float]]:
    over_seeds = importlib.import_module("over_seeds")
    finite = (each for each in values if each and all(map(math.isfinite, each)))
    return [(over_seeds.mean(each), over_seeds.standard_error(each)) for each in finite]
