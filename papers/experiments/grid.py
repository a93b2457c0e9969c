"""Runs the simulations of an experiment: each once, kept as soon as it is done, so that any of them can be stopped.

An experiment is a list of runs and a picture of their results:

    if __name__ == "__main__":
        main("lead", __doc__, runs, draw)

`python papers/experiments/lead.py --data DIR` computes what is missing in results/lead.json and draws results/lead.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pool import pool

from stormtorch.cli.terminal.screen import progress_bar
from stormtorch.policies import OwnerPolicy, rules
from stormtorch.policies.policy import Numbers
from stormtorch.telemetry.json_files import without_nan
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.simulation.checkpoints import replacing
from stormtorch_lab.simulation.exchanges import Exchanges
from stormtorch_lab.simulation.setting import Reuse, Setting
from stormtorch_lab.studies.on_workers import simulate_one, task_of
from stormtorch_lab.studies.settings import SimSettings
from stormtorch_lab.tasks.task import Task

RESULTS = Path(__file__).parent / "results"
# What may differ from an earlier run: where and how fast it is computed. Data are described by the task.
_FREE = {"data", "device", "precision", "how", "at_once", "fuse", "deterministic"}
GPU: dict[str, Any] = {"precision": "bfloat16", "deterministic": True}
"""Settings of runs on a GPU: the same seed gives the same bits, which costs no time that we could measure."""
# Points of a curve that are kept.
_POINTS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One simulated training of an experiment."""

    key: str
    """Name of the run in the results."""
    settings: SimSettings
    """Settings with one policy; `first_seed` is the seed."""
    lead_steps: tuple[int, int] | None = None
    """Steps with a lead, from the first to before the second; the others have none. None leaves it to the settings."""
    lookahead: float | None = None
    """Lead in updates, whatever was lost, in place of p/(1-p)."""
    smooth: float | None = None
    """Fraction that a mean of updates keeps of itself at each step; the lead follows it, not the last update alone."""
    carry: bool = False
    """Whether a worker adds what was lost of its gradient to its next one; otherwise it is gone."""
    task: Callable[[SimSettings], Task] = task_of
    """Function that makes what is learned."""

    @property
    def shape(self) -> tuple[object, ...]:
        """Runs of the same shape share what was compiled for one of them."""
        names = (
            "model data workers batch lr context width layers held_out device precision how at_once fuse deterministic"
        )
        return (self.task, *(getattr(self.settings, name) for name in names.split()))


def run_one(run: Run, task: Task | None = None, reuse: Reuse | None = None) -> dict[str, Any]:
    """Simulates a run. Returns settings, result and seconds, as plain data."""
    began = time.monotonic()
    task = task or run.task(run.settings)
    settings = run.settings
    if run.lead_steps is not None:
        settings = _Switched(**vars(settings), lead_steps=run.lead_steps)
    (policy,) = settings.policies
    with _looking_ahead(run.lookahead), _smoothing(run.smooth), _carrying(run.carry, settings.workers):
        result = dataclasses.asdict(simulate_one(settings, task, policy, settings.first_seed, reuse=reuse))
    for name in ("curve", "drift_curve"):
        result[name] = result[name][:: max(len(result[name]) // _POINTS, 1)]
    asked = _asked(run) | {"data": task.to_json()}
    found: dict[str, Any] = without_nan(
        {"settings": asked, "result": result, "seconds": round(time.monotonic() - began, 1), **surroundings()}
    )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Switched(SimSettings):
    """Settings whose lead is on for some steps only."""

    lead_steps: tuple[int, int]

    def policy_of(self, name: str) -> Any:
        first, last = self.lead_steps
        on, off = super().policy_of("lead"), super().policy_of("plain")
        return lambda step: on if first <= step < last else off


def _looking_ahead(updates: float | None) -> AbstractContextManager[object]:
    if updates is None:
        return nullcontext()
    return patch.object(rules, "lead_for", lambda *_given: updates)


def _smoothing(kept: float | None) -> AbstractContextManager[object]:
    if kept is None:
        return nullcontext()
    mean, weight = torch.zeros(()), 0.0

    def publish(_policy: OwnerPolicy, before: torch.Tensor, now: torch.Tensor, ahead: Numbers) -> torch.Tensor:
        nonlocal mean, weight
        mean = kept * mean + (1.0 - kept) * (now - before)
        weight = kept * weight + (1.0 - kept)
        return before.copy_(now + ahead * mean / weight)

    return patch.object(OwnerPolicy, "publish", publish)


@contextmanager
def _carrying(wanted: bool, workers: int) -> Iterator[None]:
    """Has workers learn what of their gradients was lost, and add it to the next ones before these are rounded.

    Owners divide by all workers: as everything arrives in the end, to divide by those who arrived would count it twice.
    """
    if not wanted:
        yield
        return
    draws, rounds = Exchanges.draw, Setting.round_
    arrived_WC = torch.zeros(())
    carried: dict[int, torch.Tensor] = {}

    def draw(self: Exchanges, *given: Any, up: bool, **options: Any) -> torch.Tensor:
        nonlocal arrived_WC
        found = draws(self, *given, up=up, **options)
        arrived_WC = found if up else arrived_WC
        return found

    def round_(self: Setting, values: torch.Tensor, *, step: int, sender: int) -> None:
        if sender < self.workers:  # gradients; owners' values come from behind the last worker
            if sender in carried:
                values += carried[sender]
            lost_WC = ~arrived_WC[sender : sender + len(values)]
            carried[sender] = values * lost_WC.unsqueeze(-1)
        rounds(self, values, step=step, sender=sender)

    def mean_of_all(sums_CE: torch.Tensor, _count_C: torch.Tensor) -> torch.Tensor:
        return sums_CE.div_(workers)

    with (
        patch.object(Exchanges, "draw", draw),
        patch.object(Setting, "round_", round_),
        patch.object(rules, "mean_of_arrived", mean_of_all),
    ):
        yield


# --- keeping ----------------------------------------------------------------------------------------------------------


def load(name: str) -> dict[str, dict[str, Any]]:
    """Reads the runs of an experiment that are there, by key."""
    path = RESULTS / f"{name}.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else {}
    return found


def keep(name: str, runs: dict[str, dict[str, Any]]) -> None:
    """Writes all runs; if this is interrupted, the earlier file stays."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(run)}" for key, run in sorted(runs.items()))
    with replacing(path) as beside:
        beside.write_text(f'{{"runs": {{\n{lines}\n}}}}\n')


def run_all(name: str, runs: Sequence[Run], processes: int, stop_after_s: float) -> dict[str, dict[str, Any]]:
    """Computes what is missing; starts nothing more when the time is over."""
    found = load(name)
    check(name, runs, found)
    data = {each: text for run in found.values() for each, text in _named(run["settings"].get("data"))}
    missing = [run for run in runs if run.key not in found]
    until = time.monotonic() + stop_after_s
    with progress_bar(len(runs), name, unit="runs") as advance:
        done = _in_processes if processes > 1 else _here
        for run, result in done(missing, processes, until):
            _check_data(name, run, result, data)
            found[run.key] = result
            keep(name, found)
            advance(run.key, sum(each.key in found for each in runs))
            print(f"{name} {run.key}: {_brief(result)}", flush=True)
    left = [run.key for run in runs if run.key not in found]
    if left:
        print(f"{name}: {len(left)} runs are left: {', '.join(left[:8])} ...", flush=True)
    return found


def check(name: str, runs: Sequence[Run], found: dict[str, dict[str, Any]]) -> None:
    """Keys must name one run each, and what is there must be what is asked for.

    Raises:
        ValueError: Something else is there, or two runs have one key.
    """
    keys = [run.key for run in runs]
    twice = sorted(key for key in set(keys) if keys.count(key) > 1)
    if twice:
        raise ValueError(f"{name} has several runs with the key {twice[0]}")
    for run in runs:
        asked = _asked(run)
        known = found[run.key]["settings"] if run.key in found else {}
        if known and ("network" in asked) != ("network" in known):
            raise ValueError(
                f"{RESULTS / f'{name}.json'} has {run.key} over another network; take it out to compute it anew"
            )
        for each in sorted((asked.keys() & known.keys()) - _FREE):
            if not _agree(asked[each], known[each]):
                raise ValueError(
                    f"{RESULTS / f'{name}.json'} has {run.key} with other settings: its {each} is {known[each]!r}, not "
                    f"{asked[each]!r}; take it out to compute it anew"
                )


def _agree(asked: Any, known: Any) -> bool:
    """Names that one of them lacks, here or in a policy, were added later: their default is what there was before."""
    if isinstance(asked, dict) and isinstance(known, dict):
        return all(_agree(asked[name], known[name]) for name in asked.keys() & known.keys())
    if isinstance(asked, str) and isinstance(known, str) and asked != known:
        one, other = _parts(asked), _parts(known)
        return bool(one) and one["class"] == other.get("class") and _agree(one, other)
    return bool(asked == known)


def _parts(text: str) -> dict[str, str]:
    """Splits what a dataclass prints of itself: `A(b=1, c=D(e=2))` has the class A, b and c. {} if it is none."""
    name, opened, inner = text.partition("(")
    if not (opened and inner.endswith(")") and name.isidentifier()):
        return {}
    found, depth, began = {"class": name}, 0, 0
    for place, letter in enumerate(inner):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0 or (letter == "," and depth == 0):
            field, _, value = inner[began:place].partition("=")
            found[field.strip()] = value
            began = place + 1
    return found


def _check_data(name: str, run: Run, result: dict[str, Any], known: dict[str, dict[str, Any]]) -> None:
    """Data of one name must be the same in all runs of an experiment.

    Raises:
        ValueError: A kept run had others.
    """
    for each, text in _named(result["settings"]["data"]):
        other = known.setdefault(each, text)
        for what in sorted(text.keys() & other.keys()):
            if text[what] != other[what]:
                raise ValueError(
                    f"{RESULTS / f'{name}.json'} has runs with another {each}: its {what} is {other[what]!r}, that of "
                    f"{run.key} {text[what]!r}; point --data to the same, or take those runs out to compute them anew"
                )


def _named(data: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Data sets in what a task tells of itself, however deep, by name."""
    if isinstance(data, dict):
        if isinstance(data.get("name"), str):
            yield data["name"], data
        for each in data.values():
            yield from _named(each)


def _asked(run: Run) -> dict[str, Any]:
    """Settings of a run as JSON gives them back."""
    more = {"lead_steps": run.lead_steps, "lookahead": run.lookahead, "smooth": run.smooth, "carry": run.carry}
    found: dict[str, Any] = json.loads(json.dumps(run.settings.to_json() | more))
    return found


def _here(runs: Sequence[Run], _processes: int, until: float) -> Iterable[tuple[Run, dict[str, Any]]]:
    for run in runs:
        if time.monotonic() > until:
            return
        yield run, _reusing(run)


# Of the last run's shape in this process: what it learned, and what was compiled for it.
_last: dict[object, tuple[Task, Reuse]] = {}


def _reusing(run: Run) -> dict[str, Any]:
    """Simulates a run, with what the one before left if that has the same shape."""
    if run.shape not in _last:
        _last.clear()
        _free_memory()
        _last[run.shape] = run.task(run.settings), Reuse()
    return run_one(run, *_last[run.shape])


def _free_memory() -> None:
    """Frees the memory of earlier runs: peaks are measured."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _in_processes(runs: Sequence[Run], processes: int, until: float) -> Iterable[tuple[Run, dict[str, Any]]]:
    waiting = list(runs)
    with pool(processes) as computing:
        working: dict[Future[dict[str, Any]], Run] = {}
        while waiting or working:
            while waiting and len(working) < processes and time.monotonic() < until:
                run = waiting.pop(0)
                working[computing.submit(_reusing, run)] = run
            if not working:
                return
            for future in wait(working, return_when=FIRST_COMPLETED).done:
                yield working.pop(future), future.result()


def _brief(run: dict[str, Any]) -> str:
    result = run["result"]
    return f"loss {result['loss']}, held out {result['val_loss']}, {run['seconds']} s"


# --- the command ------------------------------------------------------------------------------------------------------


def main(
    name: str,
    about: str,
    runs: Callable[[argparse.Namespace], Sequence[Run]],
    draw: Callable[[dict[str, dict[str, Any]], Path], None],
) -> None:
    """An experiment's command line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help="folder with wikitext-2, atis, stories.pt and cifar10 (see README.md)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, each with one thread")
    parser.add_argument("--only", default="", help="only runs whose key contains this")
    parser.add_argument("--stop-after-s", type=float, default=math.inf, help="start no run after so many seconds")
    parser.add_argument("--draw", action="store_true", help="compute nothing, draw what is there")
    chosen = parser.parse_args()
    if chosen.draw:
        found = load(name)
    else:
        if chosen.data is None or not chosen.data.is_dir():
            parser.error("--data must name the folder of the data: README.md tells what is in it")
        wanted = [run for run in runs(chosen) if chosen.only in run.key]
        found = run_all(name, wanted, chosen.processes, chosen.stop_after_s)
    if found:
        draw(found, RESULTS / f"{name}.png")
        print(f"{RESULTS / f'{name}.png'} is drawn")
