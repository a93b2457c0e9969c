"""Runs random jobs whose ranks die, return, join, leave and pause, and recomputes each in one process.

    python tests/helpers/recompute.py --jobs 200 --seed 1      # or: make recompute JOBS=200 SEED=1
    python tests/helpers/recompute.py --jobs 1 --seed 17       # one of them again
    python tests/helpers/recompute.py --jobs 0                 # the table of all that build/recompute.json has

Ranks are processes over real sockets. What befalls them follows from the seed; at which instant, also from the clock.
Each writes down what it gives and gets, and `recompute_check` computes everything else from that: at zero loss equal
bit for bit, but where a line of the ledger names what is lost. The last lines count what was compared, by kind of job,
over all portions of a run that `--json` has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import warm_start
from recompute_check import check
from recompute_program import Schedule, draw
from recompute_rank import run
from recompute_recording import MOST_RANKS, SharedProgress
from recompute_recordings import Differs
from recompute_table import JobResult, kind_of, table

_WITHIN_S = 240.0
_AFTER_S = 15.0
"""How long after others a process may end; one that they have left out meanwhile would wait for them for ever."""
_MARGIN = 30
"""Steps from when everything has happened to the end: all ranks must know the last one before they are there."""


class Job:
    """The processes of a job, and what happens to them from outside."""

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.schedule, self.folder = schedule, folder
        self.progress = SharedProgress(folder / "board")
        self.context = multiprocessing.get_context("spawn")
        self.processes: dict[int, Any] = {}
        self.incarnations: dict[int, int] = {}
        self.returns: dict[int, float] = {}
        self.joined: list[Any] = []
        self.began = time.monotonic()

    def start(self, rank: int) -> None:
        """Starts the process of a rank; -1 is one that joins."""
        number = len(self.joined) if rank < 0 else self.incarnations.get(rank, -1) + 1
        process = self.context.Process(target=run, args=(self.schedule, str(self.folder), rank, number), daemon=True)
        process.start()
        if rank < 0:
            self.joined.append(process)
        else:
            self.processes[rank], self.incarnations[rank] = process, number

    def run(self) -> None:
        """Runs the job to its end.

        Raises:
            Differs: It does not end.
        """
        for rank in range(self.schedule.ranks):
            self.start(rank)
        events = self.schedule.events
        resume: dict[int, float] = {}
        ended = 0.0
        while any(each.is_alive() for each in (*self.processes.values(), *self.joined)) or self.returns:
            time.sleep(0.02)
            now = time.monotonic()
            steps = max(self.progress.read(place)[0] for place in range(MOST_RANKS))
            self._bring_back(now)
            happened = self.progress.happened()
            next_ = len(happened)
            if next_ < len(events) and events[next_].kind == "join" and self.progress.reaches(events, next_, steps):
                self.progress.happen(next_, steps)
                self.start(-1)
            self._resume(resume, now)
            ended = ended or (now if any(self.progress.read(place)[1] == 2 for place in range(MOST_RANKS)) else 0.0)
            if ended and now - ended > _AFTER_S:
                return
            if now - self.began > _WITHIN_S:
                raise Differs(self._hung())
            # Where a program never comes to the point of an event, that one and those after it do not happen.
            pause = 10 if next_ == len(events) else 100
            until = max([*(each for each, _ in happened), *(each.step for each in events)], default=0) + pause
            if not self.progress.end and steps >= until and not resume and self._all_in(steps):
                self.progress.report(MOST_RANKS, steps + _MARGIN)

    def _bring_back(self, now: float) -> None:
        for rank, process in list(self.processes.items()):
            if process.is_alive() or rank in self.returns:
                continue
            if process.exitcode == -signal.SIGKILL and self.incarnations[rank] == 0:
                event = next((each for each in self.schedule.events if each.kind == "die" and each.rank == rank), None)
                if event is not None and event.seconds and not self.progress.end:
                    self.returns[rank] = now + event.seconds
        for rank, at in list(self.returns.items()):
            if now >= at:
                self.start(rank)
                del self.returns[rank]

    def _resume(self, resume: dict[int, float], now: float) -> None:
        for rank, process in self.processes.items():
            _, state, seconds = self.progress.read(rank)
            if state == 1 and rank not in resume:
                resume[rank] = now + seconds
            if rank in resume and now >= resume[rank]:
                os.kill(process.pid, signal.SIGCONT)
                if state != 1:
                    del resume[rank]

    def _all_in(self, steps: int) -> bool:
        """Whether all processes that live take part in the latest step."""
        alive = sum(each.is_alive() for each in (*self.processes.values(), *self.joined))
        near = sum(
            steps - self.progress.read(place)[0] <= 2 and self.progress.read(place)[0] > 0
            for place in range(MOST_RANKS)
        )
        return near >= alive and not self.returns

    def _hung(self) -> str:
        states = {place: self.progress.read(place)[0] for place in range(MOST_RANKS) if self.progress.read(place)[0]}
        alive = [rank for rank, each in self.processes.items() if each.is_alive()]
        joined = sum(each.is_alive() for each in self.joined)
        return f"after {_WITHIN_S:.0f} s, ranks {alive} and {joined} that joined have not ended; steps: {states}"

    def kill(self) -> None:
        """Ends whatever is left."""
        for each in (*self.processes.values(), *self.joined):
            if each.is_alive():
                each.kill()
            each.join(10.0)


def recompute(schedule: Schedule, keep: Path | None = None) -> Counter[str]:
    """Runs a job and recomputes it. Returns what was compared and what was named.

    Raises:
        Differs: Something else came out.
    """
    folder = Path(tempfile.mkdtemp(prefix="recompute-"))
    try:
        job = Job(schedule, folder)
        try:
            job.run()
        finally:
            job.kill()
        return check(schedule, folder)
    finally:
        if keep is not None:
            shutil.copytree(folder, keep / str(schedule.seed), dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Runs jobs; the exit code says whether all were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200, help="number of jobs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first job; the next ones follow")
    parser.add_argument(
        "--kinds", nargs="*", default=[], help="one, halves, models, scaler, diloco, lossy; default: all"
    )
    parser.add_argument("--json", type=Path, default=Path("build/recompute.json"), help="where results are added")
    parser.add_argument("--keep", type=Path, help="folder for what ranks have written down")
    arguments = parser.parse_args()
    warm_start.use()
    rows: list[JobResult] = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    wrong: list[int] = []
    begin = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.jobs):
        schedule = draw(seed, arguments.kinds)
        start = time.monotonic()
        found: Counter[str] = Counter()
        try:
            found = recompute(schedule, arguments.keep)
            said = f"right, {found['rounds']} rounds, {found['views']} views"
        except Differs as error:
            wrong.append(seed)
            said = f"WRONG: {error}"
        rows = [each for each in rows if (each["seed"], each["kinds"]) != (seed, arguments.kinds)]
        rows.append({"seed": seed, "kinds": arguments.kinds, "kind": kind_of(schedule), "said": said, "counts": found})
        arguments.json.write_text(json.dumps(rows, indent=None))
        with contextlib.suppress(ValueError):
            print(f"{seed}: {said}, {time.monotonic() - start:.1f} s ({schedule.words()})", flush=True)
    print(f"{arguments.jobs} jobs, {len(wrong)} wrong {wrong}, {time.monotonic() - begin:.0f} s\n", flush=True)
    print(table(rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
