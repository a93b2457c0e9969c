"""The page that shows a survey: who gets the same bits, who is refused and why."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from survey_cases import CASES

FINE = ("same bits", "rounding", "refused", "documented", "not tried")
PACKAGES = {
    "torch": ("torch", "torch.optim"),
    "timm": ("timm", "timm"),
    "pytorch_optimizer": ("pytorch-optimizer", "pytorch_optimizer"),
}

# Of libraries with so many optimizers, those that work are counted.
_LONG = ("timm", "pytorch_optimizer")

_BEGIN = """# Optimizers and training loops, tried one by one
Written by `make survey`. It runs each optimizer, and each idiom of a training loop, on ranks under
`BoundedDrift(reliability=EXACT)`, and compares them with one process that averages the same gradients. Five cases: two
ranks; three ranks; one of three is killed; a third joins two; one of three goes, and returns as a new process.
Each has eight steps or more, on a CPU, with different data on each rank. `papers/benchmarks/survey.json` has every
result and more of each error; [prepare](prepare.md#what-works) has the rules behind them.

- **same bits**: all parameters are equal to the last bit.
- **rounding**: they differ by less than 2e-5 of the distance trained, as norms and sums are added in another order.
- **refused**: an error says why, at `prepare` or where the program does it. Most of these optimizers work under
  `GradientAveraging(reliability=EXACT)`, where every rank has the whole optimizer.
- **documented**: the result is another one, and a warning says so.
- **WRONG**, **hangs**, **fails**: open faults, where nothing is said or not in time.
- **not tried**: it does not run in one process either, or it draws random numbers.

"""

# What a sentence says beside the reason: its subject, how it was found, and what to do instead.
_SUBJECT = re.compile(r"^(?:rank \d+: |does not run by itself: |\w+(?= (?:looks|keeps|computes|evaluates) ))")
_DETAIL = re.compile(
    r": in a trial .*|, but under this policy.*|\. (?:Prepare it|Each rank's|They are averaged|optimizer\.).*"
)
_NAMED = re.compile(r"(?<=keeps )'.*?', of the class \w+,|(?<=computes )'\w+', (?=a setting)(a setting of its groups),")


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


def _section(names: dict[str, dict[str, Any]], *, all_named: bool) -> list[str]:
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, found in names.items():
        rows[_all(found), _reason(_words(found))].append(name)
    lines = ["| which | result | what is said |", "|---|---|---|"]
    for (verdict, words), which in sorted(rows.items(), key=lambda row: -len(row[1])):
        named = ", ".join(which) if all_named or verdict != "same bits" else f"the other {len(which)}"
        lines.append(f"| {_text(named)} | {verdict} | {_text(words)} |")
    return lines


def _reason(words: str) -> str:
    """Returns the reason alone, so that those of many subjects are one."""
    words = _SUBJECT.sub("", " ".join(words.split())).strip()
    words = _NAMED.sub(lambda found: found[1] or "an object", _DETAIL.sub("", words))
    return words if len(words) < 260 else words[:260].rpartition(" ")[0] + " ..."


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
                [
                    f"## {title}",
                    f"{len(names)}: {summary.replace('other', 'mixed')}.",
                    "",
                    *_section(names, all_named=library not in _LONG),
                    "",
                    "",
                ]
            )
        )
    return "".join(parts).rstrip() + "\n"
