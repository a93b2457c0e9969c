"""First starts with `rejoin="auto"`, by a store that answers slowly: how many form one job, and how fast.

    python tests/helpers/first_starts.py --starts 50 --ranks 32 --delay-ms 20

Ranks are threads with sockets of their own. Each answer of the store takes a random time before and after what it says
is read: so it may no longer be so when a rank hears of it. Ranks look back as often as in the tests.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but its types do not

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import OPTIONS

from stormtorch import Options, connect
from stormtorch.joining import restarting
from stormtorch.udp.udp import UdpTransport

AUTO = replace(OPTIONS, rejoin="auto", timeout_s=20.0)


class SlowStore:
    """A store with delayed replies, which may be stale on arrival."""

    def __init__(self, store: Any, delay: Callable[[str, str], None]) -> None:
        self._store, self._delay = store, delay

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("add", "check", "get", "set"):
            return found

        def slow(first: Any, *more: Any) -> Any:
            self._delay(name, first if isinstance(first, str) else "")
            said = found(first, *more)
            self._delay(name, first if isinstance(first, str) else "")
            return said

        return slow


class Start:
    """Ranks as threads that all start a job by the same store."""

    def __init__(self, store: Any, world: int) -> None:
        self.transports: dict[int, UdpTransport] = {}
        self.errors: dict[int, BaseException] = {}
        self._store, self._world, self._threads = store, world, list[threading.Thread]()

    def rank(self, rank: int, delay: Callable[[str, str], None], options: Options) -> None:
        def body() -> None:
            try:
                self.transports[rank] = connect(SlowStore(self._store, delay), rank, self._world, options)  # type: ignore[arg-type]
            except BaseException as error:
                self.errors[rank] = error

        self._threads.append(threading.Thread(target=body))
        self._threads[-1].start()

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close(0.0)

    def check_one_job(self, within_s: float = 60.0) -> None:
        """All have come, as the first processes of their ranks, to one job."""
        for thread in self._threads:
            thread.join(within_s)
        assert not self.errors, self.errors
        assert sorted(self.transports) == list(range(self._world))
        for transport in self.transports.values():
            assert [transport.incarnation(rank) for rank in range(self._world)] == [0] * self._world
        assert len({transport.prefix for transport in self.transports.values()}) == 1


def slow_start(store: Any, world: int, seed: int, delay_s: float, timeout_s: float) -> Start:
    """Starts ranks, all at once, by a store each of whose answers takes a random time, on average twice `delay_s`."""
    start = Start(store, world)
    for rank in range(world):
        draw = random.Random(seed * world + rank)
        start.rank(
            rank, lambda *_, draw=draw: time.sleep(draw.expovariate(1.0 / delay_s)), replace(AUTO, timeout_s=timeout_s)
        )
    return start


def main() -> int:
    """Starts jobs one after the other; the exit code says whether all of them came as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=50, help="number of jobs")
    parser.add_argument("--ranks", type=int, default=32, help="ranks of each")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="mean time before, and again after, each answer")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first job; the next ones follow")
    arguments = parser.parse_args()
    restarting._LOOK_EVERY_S = 0.2
    took: list[float] = []
    wrong: list[int] = []
    for seed in range(arguments.seed, arguments.seed + arguments.starts):
        store = HashStore()
        store.set_timeout(timedelta(seconds=120))
        began = time.monotonic()
        start = slow_start(store, arguments.ranks, seed, arguments.delay_ms / 1e3, 120.0)
        try:
            start.check_one_job(150.0)
            took.append(time.monotonic() - began)
            print(f"{seed}: one job after {took[-1]:.1f} s", flush=True)
        except AssertionError as error:
            wrong.append(seed)
            print(f"{seed}: WRONG: {str(error)[:300]}", flush=True)
        finally:
            start.close()
    took.sort()
    times = f"; seconds: median {took[len(took) // 2]:.1f}, worst {took[-1]:.1f}" if took else ""
    print(f"{arguments.starts} first starts of {arguments.ranks} ranks, {len(wrong)} wrong {wrong}{times}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
