"""Writes the rows of every table of papers/results.md, and of the paper, from the results that are kept.

A table begins with a comment, `<!-- table of NAME -->`, and a heading of two lines; what follows up to the next empty
line are rows of `table` in NAME.py. `<!-- table of NAME, 2 -->` is its second table: empty rows divide them. Sentences
around them are written by hand, and a test compares their figures with the results.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

from grid import RESULTS

PAPERS = Path(__file__).parents[1]
PAGES = (PAPERS / "results.md", PAPERS / "paper.md")
_TABLE = re.compile(r"<!-- table of (\w+)(?:, (\d))? -->\n((?:\|.*\n){2})((?:\|.*\n)*)")


def tables_of(name: str) -> list[list[str]]:
    """Tables of an experiment, each as its rows."""
    kept = json.loads((RESULTS / f"{name}.json").read_text())
    rows: list[str] = importlib.import_module(name).table(kept.get("runs", kept))
    return [part.split("\n") for part in "\n".join(rows).split("\n\n")]


def with_tables(text: str) -> str:
    """The page with the rows that the results give."""

    def filled(found: re.Match[str]) -> str:
        name, number, heading, _ = found.groups()
        rows = tables_of(name)[int(number or 1) - 1]
        columns = heading.partition("\n")[0].count("|")
        for row in rows:
            if row.count("|") != columns:
                raise ValueError(f"{name}: a row has other columns than its heading: {row}")
        comment = found.group(0).partition("\n")[0]
        return f"{comment}\n{heading}" + "".join(f"{row}\n" for row in rows)

    return _TABLE.sub(filled, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
        print(f"{page} has the tables of the results that are kept")
