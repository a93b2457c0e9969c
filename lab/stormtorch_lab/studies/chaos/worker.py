"""The training script of one host in a chaos run: may be killed, paused, cut off, and restarted by its command.

python -m stormtorch_lab.studies.chaos.worker --host 2 --hosts 5 --folder logs --policy lead

A small language model learns bytes of Python's source, and a second model trains beside it. The loop counts the first
model's steps, which all ranks share, so a process that joins later does the same as the others at each step. The file
`stop.json` in the folder announces the last step; every process writes a log, see logs.py. With STORM_KEY, ranks use
that key.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # public, but not marked as exported

from stormtorch.collectives import Group
from stormtorch.collectives.joining import join
from stormtorch.errors import StormError
from stormtorch.exchange.keys import VARIABLE as KEY_VARIABLE
from stormtorch.exchange.options import Options
from stormtorch.joining.rendezvous import connect
from stormtorch.runtime.prepare import exact, prepare
from stormtorch_lab.netns.links.kernel_network import DEVICE, address
from stormtorch_lab.policies.presets import make_policy
from stormtorch_lab.studies.chaos.logs import log_path
from stormtorch_lab.studies.chaos.program import Program, second_model
from stormtorch_lab.tasks.data.corpus import open_corpus
from stormtorch_lab.tasks.language import Text

STOP = "stop.json"
"""File that announces the last step: {"decay_at": step, "stop_at": step}."""
PORT = 29600
"""Port of every rank, UDP and TCP, on its own host."""
STORE_HOST, STORE_PORT = 0, 29500
"""Host and port of the store for the rendezvous."""
_WARMUP_STEPS = 50
# Time to reach the store before a restarted process sends its join request to other ranks instead.
_STORE_S = 10.0
# Time for the join request to other ranks, longer than any fault lasts.
_JOIN_S = 120.0


def main() -> None:
    """Trains until the announced last step, or until SIGTERM, on which this rank leaves."""
    arguments = _arguments()
    torch.set_num_threads(1)
    number = next(each for each in range(1000) if not log_path(arguments.folder, arguments.host, each).exists())
    log = Log(log_path(arguments.folder, arguments.host, number))
    try:
        _train(arguments, log, again=number > 0)
    except SystemExit:  # after SIGTERM, when this rank's shards have moved to others
        log.write(left=True)
        raise
    except Exception as error:
        log.write(error=f"{type(error).__name__}: {error}")
        raise


class Log(logging.Handler):
    """The log: lines of JSON, each written immediately, with the warnings of all libraries."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._file = path.open("x", encoding="utf-8", buffering=1)
        logging.getLogger().addHandler(self)
        logging.captureWarnings(True)

    def write(self, **what: Any) -> None:
        """Writes one line."""
        self._file.write(json.dumps({"t": round(time.monotonic(), 4)} | what) + "\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a warning."""
        self.write(warning=record.getMessage()[:500])


def _train(arguments: argparse.Namespace, log: Log, *, again: bool) -> None:
    task = Text(
        open_corpus(None), width=32, layers=1, batch=8, lr=arguments.lr, context=32, held_out=256, own_generators=True
    )
    model = task.model(arguments.seed)
    optimizer = task.optimizer(model.parameters())
    group = connect_or_join(arguments, again=again)
    policy = make_policy(arguments.policy)
    model, optimizer = prepare(model, optimizer, policy=policy, group=group)
    second, its_optimizer = prepare(*second_model(arguments.seed), policy=make_policy(arguments.policy), group=group)
    models, optimizers = (model, second), (optimizer, its_optimizer)
    sessions: list[Any] = [each.session for each in optimizers]  # type: ignore[attr-defined]  # set by prepare
    session = sessions[0]
    rank = group.transport.rank
    log.write(begin=session.steps, host=arguments.host, rank=rank, pid=os.getpid())
    program, stop = Program(models, optimizers, policy, again=again), Stop(arguments.folder / STOP)
    while session.steps < stop.at():
        begin = time.monotonic()
        step = session.steps
        for parameters in optimizer.param_groups:
            parameters["lr"] = stop.rate(step, arguments.lr)
        batch = task.batch(arguments.seed, step, rank, arguments.hosts)
        loss = program.step(step, step + 1 == stop.at(), functools.partial(task.loss, batch=batch))
        log.write(step=session.steps, loss=round(loss, 4), **view_of(session))
        if session.steps % arguments.digest_every == 0:
            _compare(models, session, log)
        if not stop.decays(session.steps):
            time.sleep(max(begin + arguments.pace_s - time.monotonic(), 0.0))
    shards = prints_of(sessions)  # before `exact`, which copies from owners to standbys
    with exact(model), exact(second):
        digest, (val_loss, _) = digest_of(*models), task.evaluate(model)
        log.write(end=session.steps, val_loss=val_loss, digest=digest, scale=program.scale(), shards=shards)
    group.transport.close()


def _compare(models: Sequence[nn.Module], session: Any, log: Log) -> None:
    """Writes the digest of the exact parameters, or the error of reading them, to detect silent differences."""
    try:
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(exact(model))
            log.write(step=session.steps, digest=digest_of(*models))
    except StormError as error:
        log.write(step=session.steps, refused=str(error)[:500])


def digest_of(*models: nn.Module) -> str:
    """Digest of the bits of all parameters."""
    found = hashlib.blake2b(digest_size=8)
    for model in models:
        for parameter in model.parameters():
            found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def prints_of(sessions: Sequence[Any]) -> dict[int, list[int]]:
    """Fingerprints of this rank's own and standby shards, by owner; of all models one after the other."""
    found: dict[int, list[int]] = {}
    for session in sessions:
        for owner, prints in session.shard_prints().items():
            found.setdefault(owner, []).extend(prints)
    return found


class Stop:
    """The end of the training, announced in a file: step at which the learning rate begins to fall, and last step.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decay_at: int | None = None
        self._stop_at = 0

    def at(self) -> float:
        """Last step; infinite until it is announced."""
        if self._decay_at is None:
            with contextlib.suppress(FileNotFoundError):
                announced = json.loads(self._path.read_text(encoding="utf-8"))
                self._decay_at, self._stop_at = announced["decay_at"], announced["stop_at"]
        return float("inf") if self._decay_at is None else self._stop_at

    def decays(self, step: int) -> bool:
        """Whether the learning rate falls at this step, where steps need no minimum time."""
        return self._decay_at is not None and step >= self._decay_at

    def rate(self, step: int, highest: float) -> float:
        """Learning rate; depends only on the step, so that it is equal on all ranks."""
        rate = highest * min((step + 1) / _WARMUP_STEPS, 1.0)
        if self._decay_at is not None and step > self._decay_at:
            rate *= max((self._stop_at - step) / (self._stop_at - self._decay_at), 0.0)
        return rate


# --- what the runtime offers ----------------------------------------------------------------------------------------


def connect_or_join(arguments: argparse.Namespace, *, again: bool) -> Group:
    """Joins the training, at the first start and at restarts: by a rendezvous in the store if no training runs yet,
    or by a join request. Additional hosts, and hosts that cannot reach the store, send it to any live rank.
    """
    key = os.environ.get(KEY_VARIABLE)
    options = Options(interface=DEVICE, silence_s=arguments.silence_s, port=PORT, key=key.encode() if key else None)
    if arguments.host >= arguments.hosts:
        return _join(arguments, options)
    try:
        store = TCPStore(address(STORE_HOST), STORE_PORT, is_master=False, timeout=timedelta(seconds=_STORE_S))
    except (RuntimeError, TimeoutError):
        if not again:
            raise
        return _join(arguments, options)
    try:
        return Group(connect(store, arguments.host, arguments.hosts, replace(options, rejoin="auto")))
    except DistError:  # the store became unreachable during the read
        if not again:
            raise
        return _join(arguments, options)


def _join(arguments: argparse.Namespace, options: Options) -> Group:
    """Sends the join request to one rank after the other until one replies: some may be dead or unreachable."""
    others = ",".join(f"{address(host)}:{PORT}" for host in range(arguments.hosts) if host != arguments.host)
    deadline = time.monotonic() + _JOIN_S
    while True:
        try:
            return join(others, options)
        except StormError as error:
            if time.monotonic() > deadline:
                raise
            logging.getLogger(__name__).warning("not admitted yet: %s", error)
        time.sleep(0.5)


def view_of(session: Any) -> dict[str, Any]:
    """The view in which the last step was made."""
    view = session.view
    return {"view": view.number, "members": sorted(view.members), "since": view.step}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains on one host of a lab.")
    parser.add_argument("--host", type=int, required=True)
    parser.add_argument("--hosts", type=int, required=True, help="number of hosts at the start")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the logs and of stop.json")
    parser.add_argument("--policy", default="lead")
    parser.add_argument("--seed", type=int, default=0, help="random seed of weights and batches")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--silence-s", type=float, default=2.0)
    parser.add_argument("--pace-s", type=float, default=0.0, help="shortest time of a step")
    parser.add_argument("--digest-every", type=int, default=20, help="steps between two digests")
    return parser.parse_args()


if __name__ == "__main__":
    main()
