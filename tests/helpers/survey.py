"""Surveys optimizers and idioms of training loops: on ranks, also during a join or leave, and in one process.

    python tests/helpers/survey.py --write docs/optimizers.md     # or: make survey
    python tests/helpers/survey.py --only lamb "closure"
    python tests/helpers/survey.py --libraries --write docs/optimizers.md         # the page, of what is known

Optimizers of timm and pytorch_optimizer take part where these are installed; otherwise what
papers/benchmarks/survey.json has of them stays. Each subject has a process of its own, as some of them start threads,
and some hang. Every result is written at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import warm_start
from survey_cases import CASES, Subject, alone, judge
from survey_idioms import IDIOMS
from survey_optimizers import libraries, subjects
from survey_page import FINE, PACKAGES, page

_WITHIN_S = 150.0
_RESULTS = Path(__file__).parents[2] / "papers" / "benchmarks" / "survey.json"


def subject_of(library: str, name: str) -> Subject:
    """Returns a subject by name."""
    return IDIOMS[name] if library == "idioms" else subjects(library)[name]


def run(library: str, name: str, cases: list[str], line: Any) -> None:
    """Judges a subject. The target of a process."""
    torch.set_num_threads(1)
    subject = subject_of(library, name)
    why = alone(subject)
    for case in cases:
        line.send((case, *(("not tried", why) if why else judge(subject, case))))
    line.close()


def survey(library: str, name: str, cases: list[str]) -> dict[str, tuple[str, str]]:
    """Judges a subject in another process, and returns verdicts by case."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(False)
    process = context.Process(target=run, args=(library, name, cases, there), daemon=True)
    process.start()
    there.close()
    found: dict[str, tuple[str, str]] = {}
    end = time.monotonic() + _WITHIN_S
    try:
        while len(found) < len(cases) and here.poll(max(end - time.monotonic(), 0.0)):
            case, verdict, about = here.recv()
            found[case] = verdict, about
            if verdict == "refused" and case == cases[0]:
                break  # for the same reason in all other cases
    except EOFError:
        pass
    process.kill()
    process.join(10.0)
    first = found.get(cases[0])
    for case in cases:
        if case not in found:
            found[case] = first if first and first[0] == "refused" else ("hangs", f"for {_WITHIN_S:.0f} s")
    return found


def _lines(known: dict[str, dict[str, tuple[str, str]]], versions: dict[str, str]) -> str:
    """Returns a file with a line for each subject. Where all cases have one verdict, it is said once."""
    lines = [f' "versions": {json.dumps(versions)}']
    for key, found in known.items():
        verdicts = list(found.values())
        one = len(found) == len(CASES) and all(list(each) == list(verdicts[0]) for each in verdicts)
        lines.append(f" {json.dumps(key)}: {json.dumps({'all': verdicts[0]} if one else found)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Runs the survey; the exit code says whether something is silently different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of subjects")
    parser.add_argument("--libraries", nargs="*", default=[*libraries(), "idioms"])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--json", type=Path, default=_RESULTS, help="where results go; those of others stay")
    parser.add_argument("--write", type=Path, help="page to write")
    arguments = parser.parse_args()
    warm_start.PRELOADED += [each for each in libraries() if each == "pytorch_optimizer"]
    warm_start.use()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    versions: dict[str, str] = known.pop("versions", {})
    # Where all cases have one verdict, a file may say it once.
    known = {key: dict.fromkeys(CASES, each["all"]) if "all" in each else each for key, each in known.items()}
    wrong = []
    for library in arguments.libraries:
        for name in IDIOMS if library == "idioms" else subjects(library):
            if arguments.only and name not in arguments.only:
                continue
            key = f"{library}/{name}"
            known[key] = found = survey(library, name, arguments.cases)
            print(key, {case: " ".join(each)[:160] for case, each in found.items()}, flush=True)
            if library in PACKAGES:
                versions[library] = version(PACKAGES[library][0])
            arguments.json.write_text(_lines(known, versions))
            wrong += [key for each in found.values() if each[0] not in FINE]
    if arguments.write:
        arguments.write.write_text(page(known, versions))
    print(f"{len(known)} subjects; neither right nor refused: {sorted(set(wrong))}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
