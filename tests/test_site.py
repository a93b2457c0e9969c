"""The docs site: it builds without a warning, needs nothing from elsewhere, and leaves no page, name or error out."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import stormtorch
from stormtorch import errors

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="mkdocs is not installed: make docs installs it",
)


def test_the_first_page_and_the_readme_show_the_same_example_and_levels() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for part in (r"```python\n.*?```\n", r"\| level \| you write.*?\n\n"):
        found = re.search(part, readme, re.S)
        assert found is not None and found[0] in index
    assert "## Install" in index.partition("```python")[0]


def test_every_error_has_a_section_that_says_what_to_do() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    names = [
        name for name, each in vars(errors).items() if isinstance(each, type) and each.__module__ == errors.__name__
    ]
    assert len(names) > 8
    assert sorted(set(names) - set(sections)) == []
    for name in sorted(set(names) - {"StormError", "Interrupted"}):
        assert "**It means**" in sections[name]
        assert "**What to do**" in sections[name] or "| do |" in sections[name]
        assert f"(#{name.lower()})" in page, f"no symptom leads to {name}"


def test_what_is_wider_than_a_phone_scrolls_in_its_own_box_and_no_word_of_code_in_a_table_is_broken() -> None:
    styles = (DOCS / "site" / "extra.css").read_text(encoding="utf-8")
    for wide in (r"\.md-typeset pre > code", r"\.md-typeset__scrollwrap", r"\.md-typeset \.drawing"):
        assert re.search(wide + r" \{[^}]*overflow-x: auto", styles)
    assert re.search(r"td code \{[^}]*overflow-wrap: break-word", styles)
    assert re.search(r"td:first-child code \{[^}]*white-space: nowrap", styles)


@pytest.mark.parametrize("path", sorted((DOCS / "drawings").glob("*.svg")), ids=lambda path: path.name)
def test_drawings_have_a_title_and_the_colours_of_the_page(path: Path) -> None:
    drawing = ElementTree.parse(path).getroot()
    assert drawing.find("{http://www.w3.org/2000/svg}title") is not None
    text = path.read_text(encoding="utf-8")
    colours = set(re.findall(r"var\((--\w+)\)", text))
    styles = (DOCS / "site" / "extra.css").read_text(encoding="utf-8")
    assert colours
    for colour in colours:
        assert styles.count(f"{colour}: ") == 2, f"{colour} must have a value in light and in dark mode"
    used = sum(f"drawings/{path.name}" in page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert used, f"no page shows {path.name}"


def test_the_navigation_names_each_page_once() -> None:
    source = ast.parse((DOCS / "site" / "hooks.py").read_text(encoding="utf-8"))
    (navigation,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "NAVIGATION"
        if node.value is not None
    )
    pages = [page for listed in navigation.values() for page in listed.values()]
    assert len(pages) == len(set(pages))
    for page in ("index.md", "concepts.md", "guarantees.md", "choosing.md", "operating.md", "security.md"):
        assert page in pages
        assert (DOCS / page).is_file()


@pytest.mark.slow
@needs_mkdocs
def test_the_site_builds_strictly_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr

    site = tmp_path / "site"
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(https?:[^\"> ]*)", page.read_text("utf-8")
        )
        assert loaded == [], f"{page.name} loads {loaded}"
    api = (site / "api.html").read_text(encoding="utf-8")
    missing = [
        name for name in stormtorch.__all__ if not name.startswith("__") and f'id="stormtorch.{name}"' not in api
    ]
    assert [name for name in missing if name != "StormError"] == []
    assert 'id="stormtorch.errors.PeerSilent"' in api
    assert "<svg" in (site / "concepts.html").read_text(encoding="utf-8")
    assert "--max-lag" in (site / "commands.html").read_text(encoding="utf-8")
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert any("PeerSilent" in entry["title"] for entry in found)
