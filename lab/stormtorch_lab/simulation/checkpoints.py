"""Checkpoints of simulations, saved regularly and at Ctrl-C: another process resumes from them bit-identically."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from numbers import Number
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stormtorch.network.loss import LinkModel, LossModel, PerLink, SlowBackward, Stragglers, in_time
from stormtorch_lab.simulation.outcome import Simulated
from stormtorch_lab.simulation.processes import Processes
from stormtorch_lab.simulation.workers import Workers

_log = logging.getLogger("stormtorch")


class Checkpoint:
    """The checkpoint file of one simulation, or of one process's part of it.

    Within its context, Ctrl-C waits for the end of the step, as a simulation cannot resume in the middle of one. A
    second Ctrl-C does not wait, and leaves the last checkpoint as it is. A full disk also leaves it: the
    simulation warns, goes on, and tries again when the next checkpoint is due.

    Args:
        path: The file. Each of several processes appends its rank to the name.
        every_s: Seconds between two checkpoints.
        identity: Properties of the simulation that must match those of a checkpoint to resume.
        processes: The processes that simulate together.
    """

    def __init__(self, path: Path, every_s: float, identity: dict[str, object], processes: Processes) -> None:
        self._path = path if processes.world == 1 else path.with_name(f"{path.name}.{processes.rank}")
        self._every_s = every_s
        self._identity = identity | {"processes": processes.world}
        self._processes = processes
        self._saved_at = time.monotonic()
        self._interrupted = False
        self._handler: Any = None

    def __enter__(self) -> Checkpoint:
        # Only the main thread receives signals.
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        # torchrun forwards a Ctrl-C that its processes already received, so a second one is no request to stop now.
        if self._interrupted and not self._processes.on:
            raise KeyboardInterrupt
        self._interrupted = True

    def interrupt(self) -> None:
        """Requests the same as Ctrl-C: the next `tick` saves the state and ends the simulation."""
        self._interrupted = True

    def resume(self, training: Workers, found: Simulated) -> int:
        """Loads the file, if it exists. Returns the number of steps that are done.

        Raises:
            ValueError: The file cannot be read, or belongs to another simulation.
        """
        done = self._load(training, found) if self._path.exists() else 0
        least, most = -self._processes.all_reduce_max(-done), self._processes.all_reduce_max(done)
        if least != most:
            raise ValueError(
                f"checkpoint {self._path} is after {done} steps, those of other processes after {least} to {most}; "
                "remove them to start over"
            )
        return done

    def tick(self, training: Workers, found: Simulated, *, last: bool) -> None:
        """Saves the state if it is time to; called after every step. All processes save after the same step.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed since the last call; the state is saved.
        """
        due = time.monotonic() - self._saved_at >= self._every_s and not last
        wanted = self._processes.all_reduce_max(2 if self._interrupted else int(due))
        if wanted:
            self._save(training, found)
            self._saved_at = time.monotonic()
        if wanted == 2:
            raise KeyboardInterrupt

    def remove(self) -> None:
        """Deletes the file, at the end of the simulation."""
        self._path.unlink(missing_ok=True)

    def _save(self, training: Workers, found: Simulated) -> None:
        state: dict[str, Any] = {
            "identity": self._identity,
            "training": training.state_dict(),
            "found": vars(found) | {"ledger": None},
            "random": _random(),
        }
        state = pytree.tree_map(_plain, state)
        state["found"]["ledger"] = found.ledger.state_dict()
        beside, problem = _beside(self._path), None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write(state, beside)
        except OSError as error:
            problem = error
        # States of different steps are useless: all processes replace theirs, or none.
        if not self._processes.all_reduce_max(int(problem is not None)):
            os.replace(beside, self._path)
            return
        beside.unlink(missing_ok=True)
        if problem is not None:
            kept = "the previous one is kept" if self._path.exists() else "there is none yet"
            _log.warning("cannot write checkpoint %s: %s; %s", self._path, problem.strerror or problem, kept)

    def _load(self, training: Workers, found: Simulated) -> int:
        path = self._path
        try:
            # Only tensors and plain data are loaded, so that a file from somewhere else cannot run code.
            state = torch.load(path, map_location="cpu", weights_only=True)
            known = dict(state["identity"])
        except Exception as error:
            raise ValueError(f"checkpoint {path} cannot be read, remove it to start over: {error}") from error
        for name, value in self._identity.items():
            if known.get(name) != value:
                raise ValueError(
                    f"checkpoint {path} belongs to another simulation: its {name} is {known.get(name)!r}, "
                    f"not {value!r}; remove it to start over"
                )
        training.load_state_dict(state["training"])
        _restore_random(state["random"])
        found.ledger.load_state_dict(state["found"].pop("ledger"))
        vars(found).update(state["found"])
        return len(found.curve)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a second file to write, which then replaces the first: if writing stops midway, the first one remains."""
    beside = _beside(path)
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())  # some file systems report a full disk only here
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    os.replace(beside, path)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _write(state: dict[str, Any], path: Path) -> None:
    """Writes a file and syncs it to disk.

    Raises:
        OSError: The file cannot be written. torch reports a full disk as an unexpected position instead.
    """
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    """Converts NumPy numbers, such as a learning rate or a loss, to plain data that `torch.load` accepts."""
    return value.item() if isinstance(value, Number) and hasattr(value, "item") else value


def _random() -> list[torch.Tensor]:
    """Returns the states of torch's random generators, which dropout and the like draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def _restore_random(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


def digest(network: LossModel) -> str:
    """Returns a short text that identifies a network, even with many links."""
    reached = in_time(network)
    found = hashlib.sha256()
    if isinstance(network, Stragglers):
        found.update(f"late {network.chance} {network.delivered} ".encode())
        if network.backwards:
            found.update(b"backwards ")
    if isinstance(network, SlowBackward):
        found.update(f"slow {network.part_s} {network.parts} ".encode())
    if isinstance(reached, PerLink):
        # A million links share a few models, whose traces may be long.
        numbers: dict[LinkModel, int] = {}
        for link, model in sorted(reached.links.items(), key=lambda item: item[0]):
            found.update(f"{link} {numbers.setdefault(model, len(numbers))} ".encode())
        found.update(repr([reached.default, *numbers]).encode())
    else:
        found.update(repr(reached).encode())
    return found.hexdigest()[:16]
