"""How long a training stands still after one of its processes is killed, or stopped: the time to the next step.

    python tests/helpers/pause_after_kill.py --kills 20            # SIGKILL, over loopback, default settings
    python tests/helpers/pause_after_kill.py --kills 20 --lab      # on hosts of a network lab
    python tests/helpers/pause_after_kill.py --kills 4 --stop      # SIGSTOP: the socket stays, so it takes the silence
    python tests/helpers/pause_after_kill.py --kills 4 --cut       # its host is cut off: likewise

Ranks train until three are left, one killed after the other; then another job begins.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not marked as exported

import warm_scripts
from stormtorch import BoundedDrift, Options, connect, prepare
from stormtorch.collectives import Group
from stormtorch_lab.netns import Lab

LEFT = 3
"""Fewer could not tell whether they are the majority."""
STEP_S = 0.005
Process = subprocess.Popen[bytes] | warm_scripts.Script


def train(rank: int, world: int, folder: Path, interface: str, children: int) -> None:
    """Makes steps until it is killed, or the folder has a file "over", and writes when each was made in which view."""
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), world)
    transport = connect(store, rank, world, Options(interface=interface, timeout_s=120.0))
    model = nn.Linear(64, 64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    prepare(model, optimizer, policy=BoundedDrift(), group=Group(transport))
    (folder / f"port-{rank}").write_text(str(transport.endpoint.ports[0]))
    for _ in range(children):
        begin_child(folder, rank)
    with open(folder / f"steps-{rank}", "w", buffering=1) as steps:
        while not (folder / "over").exists():
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.write(f"{time.monotonic()} {optimizer.session.view.number}\n")
            time.sleep(STEP_S)
    os._exit(0)


def begin_child(folder: Path, rank: int) -> None:
    """Forks a process that outlives this one, as a worker of a DataLoader does for a while."""
    child = os.fork()
    if child == 0:
        while not (folder / "over").exists() and folder.exists():
            time.sleep(0.1)
        os._exit(0)
    (folder / f"child-{rank}").write_text(str(child))


@dataclass
class Job:
    """Processes that train, by rank, and how to send one a signal."""

    folder: Path
    processes: dict[int, Process]
    send: Callable[[Any, int], None] = lambda process, number: process.send_signal(number)

    def _lines(self, rank: int) -> list[list[str]]:
        path = self.folder / f"steps-{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self, rank: int) -> list[float]:
        """When a rank made its steps."""
        return [float(words[0]) for words in self._lines(rank)]

    def view(self, rank: int) -> int:
        """The view of a rank's last step."""
        return int(self._lines(rank)[-1][1])

    def port(self, rank: int) -> int:
        return int((self.folder / f"port-{rank}").read_text())

    def cookie(self) -> int:
        """Cookie of all datagrams of the job."""
        return int(FileStore(str(self.folder / "store"), len(self.processes)).get("storm/cookie"), 16) & 0xFFFFFFFF

    def wait_for(self, ready: Callable[[], bool], within_s: float = 120.0) -> None:
        deadline = time.monotonic() + within_s
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened within {within_s:g} s")
            for rank, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"rank {rank} has ended")
            time.sleep(0.02)

    def strike(self, rank: int, number: int, most_s: float = 60.0) -> float:
        """Sends a signal to a rank and returns after what time the slowest of the others made its next steps."""
        victim = self.processes.pop(rank)
        at = time.monotonic()
        self.send(victim, number)
        # A step that was nearly made may still end.
        settled = at + 0.25
        self.wait_for(lambda: all(self.steps(each)[-1] > settled for each in self.processes), most_s)
        if number == signal.SIGKILL:
            victim.wait()
        return max(min(step for step in self.steps(each) if step > settled) for each in self.processes) - at


@contextlib.contextmanager
def job(world: int, lab: Lab | None = None, *, children: int = 0) -> Iterator[Job]:
    """A job whose ranks have all made some steps, and forked so many children each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes: dict[int, Process] = {}
        for rank in range(world):
            words = [str(Path(__file__).resolve()), "--rank", str(rank), "--world", str(world)]
            words += ["--folder", name, "--children", str(children)]
            if lab is None:
                processes[rank] = warm_scripts.start([*words, "--interface", "lo"])
            else:
                processes[rank] = lab.start(rank, [sys.executable, *words, "--interface", lab.address(rank)])
        running = Job(folder, processes) if lab is None else Job(folder, processes, lab.signal)
        everyone = dict(processes)
        try:
            running.wait_for(lambda: all(len(running.steps(rank)) >= 20 for rank in range(world)))
            yield running
        finally:
            (folder / "over").touch()  # for the children
            for process in everyone.values():
                running.send(process, signal.SIGKILL)
            for process in everyone.values():
                process.wait()


def measure(kills: int, world: int, number: int, on_lab: bool, cut: bool = False) -> list[float]:
    """Returns one pause for each kill, or for each host that is cut off."""
    drawn = random.Random(1)
    pauses: list[float] = []
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(world)) if on_lab or cut else None
        while len(pauses) < kills:
            if lab is not None and cut:
                lab.set(cut=frozenset())
            with job(world, lab) as running:
                while len(pauses) < kills and len(running.processes) > LEFT:
                    time.sleep(drawn.uniform(0.5, 1.5))
                    rank = drawn.choice(sorted(running.processes))
                    if lab is not None and cut:
                        running.send = _cutter(lab, lab.conditions.cut | {rank})
                    pauses.append(running.strike(rank, number))
                    print(f"rank {rank}, {len(running.processes)} left: {pauses[-1]:.2f} s", flush=True)
    return pauses


def _cutter(lab: Lab, hosts: frozenset[int]) -> Callable[[Any, int], None]:
    """Returns what cuts hosts off in place of stopping a process; at the end of a job it kills, as always."""

    def send(process: Any, number: int) -> None:
        if number == signal.SIGKILL:
            lab.signal(process, number)
        else:
            lab.set(cut=hosts)

    return send


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--world", type=int, default=6)
    parser.add_argument("--lab", action="store_true")
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--cut", action="store_true")
    for name in ("--folder", "--interface"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--children", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        train(given.rank, given.world, Path(given.folder), given.interface, given.children)
        return
    number = signal.SIGSTOP if given.stop or given.cut else signal.SIGKILL
    pauses = measure(given.kills, given.world, number, given.lab, given.cut)
    print(f"{len(pauses)} kills: median {statistics.median(pauses):.2f} s, worst {max(pauses):.2f} s")


if __name__ == "__main__":
    main()
