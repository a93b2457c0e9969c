"""Timed rounds: the backends take turns, so that whatever else the machine does meets all of them alike."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from stormtorch.bench.backends import Backend, Copies, Storm, gloo_group, open_backend
from stormtorch.bench.pattern import Pattern
from stormtorch.bench.ranks import Member
from stormtorch.bench.samples import Log, Sample
from stormtorch.faults import faults
from stormtorch.transport import Arrival

BARRIER = "gloo, on connections of its own, before and after each timed call"
TIMES = "wall time of the slowest rank, from leaving the barrier to the end of its call"
# A lossless machine now and then drops a datagram; a backend that always does is broken.
_CHECKS = 3


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What the ranks do."""

    backends: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    iters: int
    warmup: int
    loss: float = 0.0
    seed: int = 0
    dtype: str = "float32"
    datagram_bytes: int | None = None
    ideal: bool = False
    """Also measure `Copies`."""


class Stage:
    """A rank's backends and the barrier between their turns. Use it in a `with` statement."""

    def __init__(
        self,
        member: Member,
        backends: Sequence[str],
        *,
        datagram_bytes: int | None = None,
        ideal: bool = False,
    ) -> None:
        self.member = member
        self.control = gloo_group(member, "control")
        self.backends: list[Backend] = [open_backend(name, member, datagram_bytes) for name in backends]
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
        self.barrier()

    def barrier(self) -> None:
        """Waits for all ranks, by a backend-neutral way."""
        self.control.barrier().wait()

    def everywhere(self, condition: bool) -> bool:
        """Whether the condition holds on all ranks."""
        vote = torch.tensor([not condition], dtype=torch.int32)
        self.control.allreduce([vote]).wait()
        return int(vote) == 0

    def timed(self, backend: Backend, tensor: torch.Tensor, round_index: int) -> tuple[Sample, Sequence[Arrival]]:
        """One call between two barriers."""
        self.barrier()
        cpu_s = time.process_time()
        begin = time.perf_counter()
        arrivals = backend.all_reduce(tensor)
        seconds = time.perf_counter() - begin
        # A rank that is done may still have to serve others: its CPU time counts until all are.
        self.barrier()
        cpu_s = time.process_time() - cpu_s
        arrived = sum(arrival.arrived for arrival in arrivals) / len(arrivals) if arrivals else 1.0
        repaired = sum(arrival.repaired for arrival in arrivals)
        size = tensor.numel() * tensor.element_size()
        return Sample(backend.name, size, round_index, seconds, cpu_s, arrived, repaired), arrivals


def in_turn(backends: Sequence[Backend], round_index: int) -> Iterator[Backend]:
    """The backends in the order of a round: each round begins with another one."""
    for position in range(len(backends)):
        yield backends[(round_index + position) % len(backends)]


def run_rounds(member: Member, schedule: Schedule) -> Log:
    """Checks, warms up and times all backends at all sizes; one rank's part of it."""
    log = Log([])
    with Stage(member, schedule.backends, datagram_bytes=schedule.datagram_bytes, ideal=schedule.ideal) as stage:
        if stage.storms:
            log = Log([], chunk_bytes=stage.storms[0].transport.chunk_bytes)
        for size in schedule.sizes_bytes:
            pattern = Pattern(size, schedule.dtype, member)
            work = torch.empty_like(pattern.own)
            _check_without_loss(stage, pattern, work)
            # Without loss there is no fault injection at all, as it looks at every datagram.
            with faults(loss=schedule.loss, seed=schedule.seed) if schedule.loss else contextlib.nullcontext():
                _run_size(stage, schedule, pattern, work, log)
    return log


def _check_without_loss(stage: Stage, pattern: Pattern, work: torch.Tensor) -> None:
    for backend in stage.backends:
        if isinstance(backend, Copies):
            continue
        for _ in range(_CHECKS):
            work.copy_(pattern.own)
            stage.barrier()
            arrivals = backend.all_reduce(work)
            if stage.everywhere(all(arrival.arrived == 1.0 for arrival in arrivals)):
                break
        else:
            raise RuntimeError(f"{backend.name} lost chunks {_CHECKS} times in a row although no loss was injected")
        pattern.check(backend.name, work)


def _run_size(stage: Stage, schedule: Schedule, pattern: Pattern, work: torch.Tensor, log: Log) -> None:
    for round_index in range(schedule.warmup):
        for backend in in_turn(stage.backends, round_index):
            work.copy_(pattern.own)
            stage.timed(backend, work, round_index)
            if backend.exact:
                pattern.check(backend.name, work)
            elif not isinstance(backend, Copies):
                pattern.check_range(backend.name, work)
    before = {storm.name: storm.counters() for storm in stage.storms}
    for round_index in range(schedule.iters):
        for backend in in_turn(stage.backends, round_index):
            work.copy_(pattern.own)
            log.samples.append(stage.timed(backend, work, round_index)[0])
        if stage.member.rank == 0:
            stage.member.tell((pattern.bytes, round_index + 1))
    for storm in stage.storms:
        log.counters[storm.name, pattern.bytes] = storm.counters() - before[storm.name]
