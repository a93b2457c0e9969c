"""Timed rounds: the backends take turns, so that whatever else the machine does meets all of them alike."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType

import torch

from stormtorch.bench.backends import Backend, Copies, Gloo, Storm, TooSlow, gloo_group, open_backend
from stormtorch.bench.pattern import Pattern
from stormtorch.bench.ranks import Member
from stormtorch.bench.samples import Log, Sample
from stormtorch.faults import faults
from stormtorch.transport import Arrival

BARRIER = "gloo, on connections of its own, before and after each timed call"
TIMES = "wall time of the slowest rank, from leaving the barrier to the end of its call"
# A lossless machine now and then drops a datagram; a backend that always does is broken.
_CHECKS = 3
# The check is the first call on cold connections and meets no loss: it may take so many times what patience allows.
_CHECK_PATIENCE = 5


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What the ranks do."""

    backends: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    iters: int
    warmup: int
    faults: float = 0.0
    """Fraction of the storm backends' datagrams lost by fault injection."""
    seed: int = 0
    dtype: str = "float32"
    datagram_bytes: int | None = None
    ideal: bool = False
    """Also measure `Copies`."""
    patience_s: float | None = None
    """A call over TCP is given up after so long, and a backend that has used as much sits out the other rounds."""
    lab: bool = False
    """The parent makes the loss; rank 0 gives it a `Cue` when."""


class Cue(StrEnum):
    """What rank 0 asks of its parent, in this order; all ranks wait until it is done."""

    LOSE = "lose"
    """All results were checked: let loss begin."""
    COUNT = "count"
    """Timed rounds begin: count packets from here. Once for each size."""
    READ = "read"
    """They have ended: read the counters."""


class Stage:
    """A rank's backends and the barrier between their turns. Use it in a `with` statement."""

    def __init__(
        self,
        member: Member,
        backends: Sequence[str],
        *,
        datagram_bytes: int | None = None,
        ideal: bool = False,
        patience_s: float | None = None,
    ) -> None:
        self.member = member
        self.control = gloo_group(member, "control", interface=member.control_interface)
        self.backends: list[Backend] = [open_backend(name, member, datagram_bytes, patience_s) for name in backends]
        self.given_up: set[str] = set()
        """Backends that can make no further call."""
        self._patience_s = patience_s
        self.storms = [backend for backend in self.backends if isinstance(backend, Storm)]
        if ideal:
            self.backends.append(Copies(member.world))

    def __enter__(self) -> "Stage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            return  # a goodbye would make the peers fail first, and their errors would hide this one
        self.barrier()
        for backend in self.backends:
            backend.close()
            # Where loss is real, the last words of one may need their time; the next one begins after them.
            self.barrier()

    def barrier(self) -> None:
        """Waits for all ranks, by a backend-neutral way."""
        self.control.barrier().wait()

    def everywhere(self, condition: bool) -> bool:
        """Whether the condition holds on all ranks."""
        vote = torch.tensor([not condition], dtype=torch.int32)
        self.control.allreduce([vote]).wait()
        return int(vote) == 0

    def set_patience(self, patience_s: float | None) -> None:
        """From now on."""
        self._patience_s = patience_s
        for backend in self.backends:
            if isinstance(backend, Gloo):
                backend.limit_s = patience_s

    def willing(self, backend: Backend, spent_s: float) -> bool:
        """Whether a backend that has already used `spent_s` goes on, the same on all ranks."""
        if backend.name in self.given_up:
            return False
        return self._patience_s is None or self.everywhere(spent_s < self._patience_s)

    def timed(self, backend: Backend, tensor: torch.Tensor, round_index: int) -> tuple[Sample, Sequence[Arrival]]:
        """One call between two barriers. One that is given up ends on all ranks, and its backend with it."""
        self.barrier()
        cpu_s = time.process_time()
        begin = time.perf_counter()
        arrivals: Sequence[Arrival] = ()
        ended = True
        try:
            arrivals = backend.all_reduce(tensor)
        except TooSlow:
            ended = False
        seconds = time.perf_counter() - begin
        # A rank that is done may still have to serve others: its CPU time counts until all are.
        ended = self.everywhere(ended)
        cpu_s = time.process_time() - cpu_s
        if not ended:
            self.given_up.add(backend.name)
            backend.close()
        arrived = sum(arrival.arrived for arrival in arrivals) / len(arrivals) if arrivals else 1.0
        repaired = sum(arrival.repaired for arrival in arrivals)
        size = tensor.numel() * tensor.element_size()
        return Sample(backend.name, size, round_index, seconds, cpu_s, arrived, repaired, not ended), arrivals


def in_turn(backends: Sequence[Backend], round_index: int) -> Iterator[Backend]:
    """The backends in the order of a round: each round begins with another one."""
    for position in range(len(backends)):
        yield backends[(round_index + position) % len(backends)]


def run_rounds(member: Member, schedule: Schedule) -> Log:
    """Checks, warms up and times all backends at all sizes; one rank's part of it."""
    log = Log([])
    with Stage(
        member,
        schedule.backends,
        datagram_bytes=schedule.datagram_bytes,
        ideal=schedule.ideal,
        patience_s=schedule.patience_s and schedule.patience_s * _CHECK_PATIENCE,
    ) as stage:
        log = Log(
            [],
            chunk_bytes=stage.storms[0].transport.chunk_bytes if stage.storms else None,
            tcp={backend.name: backend.tcp for backend in stage.backends if isinstance(backend, Gloo)},
        )
        for size in schedule.sizes_bytes:
            _check_without_loss(stage, schedule, Pattern(size, schedule.dtype, member), log)
        stage.set_patience(schedule.patience_s)
        _give(stage, schedule, Cue.LOSE)
        # Without loss there is no fault injection at all, as it looks at every datagram.
        with faults(loss=schedule.faults, seed=schedule.seed) if schedule.faults else contextlib.nullcontext():
            for size in schedule.sizes_bytes:
                _run_size(stage, schedule, Pattern(size, schedule.dtype, member), log)
    return log


def _give(stage: Stage, schedule: Schedule, cue: Cue) -> None:
    if schedule.lab:
        stage.barrier()
        if stage.member.rank == 0:
            stage.member.ask(cue)
        stage.barrier()


def _check_without_loss(stage: Stage, schedule: Schedule, pattern: Pattern, log: Log) -> None:
    work = torch.empty_like(pattern.own)
    for backend in stage.backends:
        if isinstance(backend, Copies) or backend.name in stage.given_up:
            continue
        for _ in range(_CHECKS):
            sample, arrivals = stage.timed(backend, work.copy_(pattern.own), 0)
            if sample.gave_up:
                log.samples.append(sample)  # there will be no other
                work = torch.empty_like(work)  # that call may still write to the old one
                break
            if stage.everywhere(all(arrival.arrived == 1.0 for arrival in arrivals)):
                pattern.check(backend.name, work)
                break
        else:
            # Where a line has a rate, its queue may overflow while a backend finds out about it.
            if not schedule.lab:
                raise RuntimeError(f"{backend.name} lost chunks {_CHECKS} times in a row although no loss was injected")
            pattern.check_range(backend.name, work)


def _run_size(stage: Stage, schedule: Schedule, pattern: Pattern, log: Log) -> None:
    work = torch.empty_like(pattern.own)
    spent_s: defaultdict[str, float] = defaultdict(float)
    for round_index in range(schedule.warmup):
        for backend in in_turn(stage.backends, round_index):
            if not stage.willing(backend, spent_s[backend.name]):
                continue
            sample, _ = stage.timed(backend, work.copy_(pattern.own), round_index)
            spent_s[backend.name] += sample.seconds
            if sample.gave_up:
                log.samples.append(sample)  # there will be no other
                work = torch.empty_like(work)  # that call may still write to the old one
            elif backend.exact:
                pattern.check(backend.name, work)
            elif not isinstance(backend, Copies):
                pattern.check_range(backend.name, work)
    before = {storm.name: storm.counters() for storm in stage.storms}
    spent_s.clear()
    _give(stage, schedule, Cue.COUNT)
    for round_index in range(schedule.iters):
        for backend in in_turn(stage.backends, round_index):
            if not stage.willing(backend, spent_s[backend.name]):
                continue
            sample, _ = stage.timed(backend, work.copy_(pattern.own), round_index)
            spent_s[backend.name] += sample.seconds
            log.samples.append(sample)
            if sample.gave_up:
                work = torch.empty_like(work)
        if stage.member.rank == 0:
            stage.member.tell((pattern.bytes, round_index + 1))
    _give(stage, schedule, Cue.READ)
    for storm in stage.storms:
        log.counters[storm.name, pattern.bytes] = storm.counters() - before[storm.name]
