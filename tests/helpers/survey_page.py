"""The page that shows a survey: who gets the same bits, who is refused and why."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from typing import Any

from survey_cases import CASES

FINE = ("same bits", "rounding", "refused", "documented", "not tried")
PACKAGES = {
    "torch": ("torch", "torch.optim"),
    "timm": ("timm", "timm"),
    "pytorch_optimizer": ("pytorch-optimizer", "pytorch_optimizer"),
}

_BEGIN = """# Optimizers and training loops, tried one by one
Written by `make survey`. It runs each optimizer, and each idiom of a training loop, on ranks under
`BoundedDrift(reliability=EXACT)`, and beside them one process that averages the same gradients. Five cases: two
ranks and three, undisturbed; one of three is killed; a third joins two; one of three goes, and returns as a new
process. Each has eight steps or more, on a CPU, and data of its own on each rank.
[prepare](prepare.md#what-works) says the same in general.

- **same bits**: all parameters are equal to the last bit.
- **rounding**: they differ by less than 2e-5 of the way that training has gone, as norms and sums are added up in
  another order.
- **refused**: an error says why, at `prepare` or where the program does it.
- **documented**: the result is another one, and a warning says so.
- **WRONG**, **hangs**, **fails**: open faults, where nothing is said or not in time.
- **not tried**: it does not run in one process either, as it needs more than parameters and a learning rate, or it
  draws random numbers.

"""


def _all(found: dict[str, Any]) -> str:
    """Returns the verdict in all cases, or the verdicts of all cases that have another one than the first."""
    verdicts = [found[case][0] for case in CASES if case in found]
    first = max(verdicts, key=verdicts.count)
    others = [f"{found[case][0]} where {case}" for case in CASES if case in found and found[case][0] != first]
    return "; ".join([first, *others])


def _words(found: dict[str, Any]) -> str:
    """Returns the sentence that was said, or how far apart parameters are."""
    for verdict in ("WRONG", "fails", "hangs", "refused", "documented", "not tried"):
        for each in found.values():
            if each[0] == verdict and each[1]:
                words: str = each[1].partition(": ")[2] if verdict in ("refused", "fails") else each[1]
                return words
    return ""


def _section(names: dict[str, dict[str, Any]]) -> list[str]:
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, found in names.items():
        rows[_all(found), _sentence(_words(found), name)].append(name)
    lines = ["| which | result | what is said |", "|---|---|---|"]
    for (verdict, words), which in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {_text(', '.join(which))} | {verdict} | {_text(words)} |")
    return lines


def _sentence(words: str, name: str) -> str:
    """Returns a sentence without what only names its subject, so that those of many subjects are one."""
    return textwrap.shorten(words, 220, placeholder=" …")


def _text(words: str) -> str:
    """Returns words so that a page shows them as they are; what stands between backticks is code there, too."""
    parts = words.replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([\[\]_*])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def page(known: dict[str, Any], versions: dict[str, str]) -> str:
    """Returns the page."""
    parts = [_BEGIN]
    libraries = dict.fromkeys(key.partition("/")[0] for key in known)
    for library in libraries:
        names = {key.partition("/")[2]: found for key, found in known.items() if key.startswith(library + "/")}
        title = "Idioms of training loops"
        if library in PACKAGES:
            title = f"{PACKAGES[library][1]} {versions.get(library, '')}".strip()
        counts = {verdict: 0 for verdict in FINE}
        for found in names.values():
            verdict = _all(found)
            counts[verdict if verdict in counts else "other"] = (
                counts.get(verdict if verdict in counts else "other", 0) + 1
            )
        summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        parts.append(
            "\n".join(
                [f"## {title}", f"{len(names)}: {summary.replace('other', 'mixed')}.", "", *_section(names), "", ""]
            )
        )
    return "".join(parts).rstrip() + "\n"
