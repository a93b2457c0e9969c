"""Kills ranks that share memory with SIGKILL in the midst of random collectives, and checks the survivors.

    python tests/helpers/soak_kills.py --kills 50

Five rank processes run random collectives. One is paused for a while and goes on; one forks; one is killed at a random
moment. Each of the others must raise an error that names it, within the silence and some slack, and they go on in new
groups without it. After two kills the rest close, and must leave nothing: no thread, descriptor, mapping or name.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

import soak_program as program
from soak_rank import Runner
from stormtorch import EXACT, Options, StormError, connect
from stormtorch.collectives import Op

RANKS, KILLS_PER_JOB = 5, 2
SILENCE_S, PAUSE_S = 2.0, 1.0
SLACK_S = 4.0
"""Time beyond the silence until all survivors must have raised: the machine may be busy."""
START_S = 120.0


def _left() -> dict[str, Any]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": sum("memfd:stormtorch" in line for line in maps),
    }


def _calls(drawn: random.Random, world: int) -> list[program.Call]:
    """Draws a round of calls of all ranks; each lane ends with a barrier, so that no rank gets ahead."""
    calls: list[program.Call] = []
    while len(calls) < 6:
        for call in next(program.rounds(drawn.randrange(1 << 30), 10, world, most_bytes=1 << 20)):
            if len(call.members) == world and call.kind not in ("pair", *program.ON_GRIDS) and call.reliability.exact:
                calls.append(call)
    barrier = {"kind": "barrier", "elements": 0, "waits_at_once": True}
    return calls + [program.Call(**{**vars(calls[0]), **barrier, "lane": lane}) for lane in range(program.LANES)]


def _check_sum(runner: Runner, world: int, round_: int) -> None:
    call = next(
        call
        for calls in program.rounds(round_, 1000, world)
        for call in calls
        if call.kind == "all_reduce" and len(call.members) == world and call.dtype is torch.float32
    )
    call = program.Call(**{**vars(call), "whole": True, "op": Op.SUM, "lane": 0, "by_backend": False})
    call = program.Call(**{**vars(call), "reliability": EXACT, "waits_at_once": True})
    got: list[int] = []
    runner.run([call], lambda _, checksum: got.append(checksum))
    expected = torch.stack([program.values(rank, call) for rank in range(world)]).sum(0)
    assert got == [program.checksum([expected])], f"a wrong sum: {call}"


def _rank(line: Connection, rank: int, store_path: str) -> None:
    torch.set_num_threads(1)
    try:
        _work(line, rank, store_path)
    except BaseException:
        line.send(("failed", traceback.format_exc()))


def _work(line: Connection, rank: int, store_path: str) -> None:
    store = FileStore(store_path, RANKS)
    store.set_timeout(timedelta(seconds=START_S))
    torch.ones(10).sum()
    before = _left()
    options = Options(silence_s=SILENCE_S, timeout_s=60.0, linger_s=0.5)
    transport = connect(store, rank, RANKS, options)
    while len(transport.near()) < RANKS - 1:
        time.sleep(0.001)
    line.send(("ready", transport.cards[rank].nonce))
    alive: list[int] | None = list(range(RANKS))
    phase = 0
    rounds = [0]
    forks = threading.Event()
    while alive is not None:
        runner = Runner(transport, alive, name=f"phase {phase}")
        drawn = random.Random(f"{os.path.basename(store_path)} {phase}")
        try:
            while True:
                if line.poll():
                    asked = line.recv()
                    if asked == "fork":
                        forks.set()
                    elif asked == "rounds":
                        line.send(("rounds", rounds[0]))
                if forks.is_set():
                    forks.clear()
                    child = os.fork()
                    if child == 0:
                        time.sleep(0.05)
                        os._exit(0)
                    threading.Thread(target=os.waitpid, args=(child, 0)).start()
                runner.run(_calls(drawn, len(alive)), lambda _call, _checksum: None)
                _check_sum(runner, len(alive), rounds[0] + 1000 * phase)
                rounds[0] += 1
        except* StormError as group:
            raised = time.monotonic()
            line.send(("raised", raised, [(getattr(error, "culprit", None), str(error)) for error in _flat(group)]))
        runner.close()
        alive, phase, rounds[0] = line.recv(), phase + 1, 0
    transport.close()
    after = _left()
    deadline = time.monotonic() + 3.0
    while after["threads"] > before["threads"] and time.monotonic() < deadline:
        time.sleep(0.01)
        after = _left()
    line.send(("closed", before, after))


def _flat(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    return [
        leaf for each in group.exceptions for leaf in (_flat(each) if isinstance(each, BaseExceptionGroup) else [each])
    ]


class Job:
    """Rank processes, and lines to them."""

    def __init__(self, folder: str, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.lines: dict[int, Connection] = {}
        self.processes: dict[int, Any] = {}
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(there, rank, str(Path(folder) / name)), daemon=True)
            process.start()
            there.close()
            self.lines[rank], self.processes[rank] = here, process

    def receive(self, ranks: list[int], what: str, within_s: float) -> dict[int, tuple[Any, ...]]:
        """Waits for a message of one kind from each of these ranks."""
        found: dict[int, tuple[Any, ...]] = {}
        end = time.monotonic() + within_s
        while len(found) < len(ranks):
            lines: dict[Any, int] = {self.lines[rank]: rank for rank in ranks if rank not in found}
            ready: list[Any] = wait(list(lines), timeout=max(end - time.monotonic(), 0.0))
            missing = sorted(set(ranks) - set(found))
            assert ready, f"within {within_s:.1f} s, ranks {missing} did not say {what!r}: {found}"
            for line in ready:
                message = line.recv()
                assert message[0] == what, f"rank {lines[line]} said {message} instead of {what!r}"
                found[lines[line]] = message
        return found

    def progress(self, ranks: list[int]) -> None:
        """Checks that all ranks go on: each has run two more rounds before long."""
        counts: dict[int, int] = {}
        for _ in range(2):
            end = time.monotonic() + 30.0
            while True:
                for rank in ranks:
                    self.lines[rank].send("rounds")
                now = {rank: message[1] for rank, message in self.receive(ranks, "rounds", 30.0).items()}
                if all(now[rank] > counts.get(rank, 0) for rank in ranks):
                    counts = now
                    break
                assert time.monotonic() < end, f"no rank goes on: {now}"
                time.sleep(0.05)

    def kill(self) -> None:
        """Ends whatever is left."""
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(10.0)


def run_job(seed: int, kills: int) -> list[float]:
    """Runs a job with so many kills, and returns how long each survivor took to raise."""
    drawn = random.Random(seed)
    shm = set(os.listdir("/dev/shm"))
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, f"store{seed}")
        try:
            nonces = {rank: message[1] for rank, message in job.receive(list(range(RANKS)), "ready", START_S).items()}
            alive = list(range(RANKS))
            for kill in range(kills):
                job.progress(alive)
                paused = job.processes[drawn.choice(alive)].pid
                os.kill(paused, signal.SIGSTOP)
                time.sleep(PAUSE_S)
                os.kill(paused, signal.SIGCONT)
                job.lines[drawn.choice(alive)].send("fork")
                job.progress(alive)
                victim = drawn.choice(alive)
                time.sleep(drawn.uniform(0.0, 0.5))
                killed = time.monotonic()
                os.kill(job.processes[victim].pid, signal.SIGKILL)
                alive.remove(victim)
                raised = job.receive(alive, "raised", SILENCE_S + SLACK_S)
                for rank, (_, at, errors) in raised.items():
                    culprits = {culprit for culprit, _ in errors}
                    assert culprits == {victim}, f"rank {rank} blames {culprits} instead of {victim}: {errors}"
                    took.append(at - killed)
                job.processes[victim].join(5.0)
                ending = kill + 1 == kills
                if ending:
                    break
                for rank in alive:
                    job.lines[rank].send(list(alive))
            for rank in alive:
                job.lines[rank].send(None)
            for rank, (_, before, after) in job.receive(alive, "closed", 20.0).items():
                # Fewer threads may be left: some of torch's own end by themselves.
                left = {what: count for what, count in after.items() if count > before[what]}
                assert not left, f"rank {rank} left something: {before} before, {after} after"
            for rank in alive:
                job.processes[rank].join(20.0)
                assert job.processes[rank].exitcode == 0, f"rank {rank} ended with {job.processes[rank].exitcode}"
        finally:
            job.kill()
    names = Path("/proc/net/unix").read_text()
    assert not [nonce for nonce in nonces.values() if nonce in names], "the name of a socket is left"
    assert not [each for each in set(os.listdir("/dev/shm")) - shm if "storm" in each], "a file in /dev/shm is left"
    return took


def main() -> int:
    """Runs jobs until enough ranks were killed; the exit code says whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="number of ranks to kill")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first job")
    asked = parser.parse_args()
    begin, done, seed, wrong = time.monotonic(), 0, asked.seed, 0
    while done < asked.kills:
        kills = min(KILLS_PER_JOB, asked.kills - done)
        took: list[float] = []
        try:
            took = run_job(seed, kills)
        except AssertionError as error:
            wrong += 1
            print(f"job {seed}: {error}", flush=True)
        done, seed = done + kills, seed + 1
        with contextlib.suppress(ValueError):
            print(
                f"{done} killed, {wrong} jobs failed, errors after {min(took):.2f} to {max(took):.2f} s, "
                f"{time.monotonic() - begin:.0f} s",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
