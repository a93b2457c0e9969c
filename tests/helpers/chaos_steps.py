"""A process for chaos that trains nothing: its steps follow the clock, so that only what is done to it can stop it.

It needs Python alone, takes the options of the real one, and writes the same logs. With `--stubborn`, SIGTERM does
nothing; with `--fragile STEP`, its first process on host 1 fails at that step.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

options = argparse.ArgumentParser()
for name in ("host", "hosts", "seed", "digest-every"):
    options.add_argument(f"--{name}", type=int)
for name in ("silence-s", "pace-s"):
    options.add_argument(f"--{name}", type=float)
options.add_argument("--folder", type=Path)
options.add_argument("--policy")
options.add_argument("--stubborn", action="store_true")
options.add_argument("--fragile", type=int)
given = options.parse_args()

number = next(each for each in range(1000) if not (given.folder / f"h{given.host}.{each}.jsonl").exists())
log = (given.folder / f"h{given.host}.{number}.jsonl").open("x", buffering=1)
stop_signals: list[int] = []
signal.signal(signal.SIGTERM, lambda received, _frame: stop_signals.append(received))


def write(**what: Any) -> None:
    log.write(json.dumps({"t": time.monotonic()} | what) + "\n")


def begun() -> float:
    """The time at which the first process of the run began: all count their steps from it."""
    path = given.folder / "begun"
    try:
        with path.open("x") as file:
            file.write(repr(time.monotonic()))
    except FileExistsError:
        time.sleep(0.05)
    return float(path.read_text())


def now(start: float) -> int:
    return int((time.monotonic() - start) / 0.05)


start = begun()
stop = given.folder / "stop.json"
last = float("inf")
step = now(start)
write(begin=step, host=given.host, rank=given.host)
while step < last:
    time.sleep(0.01)
    if stop.exists():
        last = json.loads(stop.read_text())["stop_at"]
    if min(now(start), last) <= step:
        continue
    step = int(min(now(start), last))
    write(step=step, view=1, members=list(range(given.hosts + 1)), since=0, loss=2.0)
    if step % given.digest_every == 0:
        write(step=step, digest=f"d{step}")
    if stop_signals and not given.stubborn:
        write(left=step)
        sys.exit()
    if given.fragile and given.host == 1 and number == 0 and step >= given.fragile:
        write(error="RuntimeError: it was fragile")
        sys.exit(3)
write(end=step, val_loss=2.0, digest=f"d{step}")
