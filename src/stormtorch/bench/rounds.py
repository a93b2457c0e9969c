"""Timed rounds: the backends take turns, so that whatever else the machine does meets all of them alike."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import torch

from stormtorch.bench.backends import DTYPES, Backend, Copies, Counters, Storm, gloo_group, open_backend
from stormtorch.bench.ranks import Member
from stormtorch.faults import faults
from stormtorch.transport import Arrival

BARRIER = "gloo, on connections of its own, before and after each timed call"
TIMES = "wall time of the slowest rank, from leaving the barrier to the end of its call"
# A lossless machine now and then drops a datagram; a backend that always does is broken.
_CHECKS = 3


class Sample(NamedTuple):
    """One call, on one rank or, merged, on all."""

    backend: str
    bytes: int
    round: int
    seconds: float
    cpu_s: float
    """CPU time of the process, engine threads included, until all ranks were done."""
    arrived: float
    """Fraction of the chunks that arrived."""
    repaired: int
    """Chunks sent again."""


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


@dataclass(frozen=True)
class Log:
    """What one rank, or all of them together, saw."""

    samples: list[Sample]
    """In the order of the calls."""
    counters: dict[tuple[str, int], Counters] = field(default_factory=dict)
    """Of each storm backend and size, over its timed rounds."""
    chunk_bytes: int | None = None


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


def _check_without_loss(stage: Stage, pattern: "Pattern", work: torch.Tensor) -> None:
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


def _run_size(stage: Stage, schedule: Schedule, pattern: "Pattern", work: torch.Tensor, log: Log) -> None:
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


class Pattern:
    """Contributions whose sum is known: small integers, exact in every dtype and in every order up to 64 ranks."""

    def __init__(self, size_bytes: int, dtype: str, member: Member) -> None:
        period = torch.arange(3).add(member.rank % 3).to(DTYPES[dtype])
        elements = max(size_bytes // period.element_size(), 1)
        self.own = period.repeat(math.ceil(elements / 3))[:elements]
        self.bytes = elements * period.element_size()
        self._member = member

    def _lowest(self) -> torch.Tensor:
        """The sum, had all ranks the contribution of rank 0."""
        return (self.own - self._member.rank % 3) * self._member.world

    def check(self, backend: str, result: torch.Tensor) -> None:
        """Raises RuntimeError unless the result is the sum of all ranks' contributions."""
        expected = self._lowest() + sum(rank % 3 for rank in range(self._member.world))
        wrong = int((result != expected).sum())
        if wrong:
            raise RuntimeError(f"{backend} gave a wrong sum in {wrong} of {result.numel()} elements")

    def check_range(self, backend: str, result: torch.Tensor) -> None:
        """Raises RuntimeError unless the result lies where a mean of some contributions, times the ranks, can lie."""
        world = self._member.world
        lowest = self._lowest()
        # Means of half precision are rounded.
        slack = world * torch.finfo(result.dtype).eps * 4
        wrong = int(((result < lowest - slack) | (result > lowest + 2 * world + slack)).sum())
        if wrong:
            raise RuntimeError(f"{backend} gave no mean of contributions in {wrong} of {result.numel()} elements")


def merge(logs: Sequence[Log]) -> Log:
    """The log of the whole job: the slowest rank's time, the sum of CPU time and repairs, the mean of what arrived."""
    samples: list[Sample] = []
    for calls in zip(*(log.samples for log in logs), strict=True):
        first = calls[0]
        if any(call[:3] != first[:3] for call in calls):
            raise RuntimeError(f"ranks disagree on the order of calls: {sorted({call[:3] for call in calls})}")
        samples.append(
            first._replace(
                seconds=max(call.seconds for call in calls),
                cpu_s=sum(call.cpu_s for call in calls),
                arrived=sum(call.arrived for call in calls) / len(calls),
                repaired=sum(call.repaired for call in calls),
            )
        )
    counters = {key: sum((log.counters[key] for log in logs), Counters()) for key in logs[0].counters}
    return Log(samples, counters, logs[0].chunk_bytes)


def median(times_s: Sequence[float]) -> float:
    """The middle one, or the mean of the two in the middle."""
    ordered = sorted(times_s)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def percentile(times_s: Sequence[float], percent: float) -> float:
    """The smallest time that `percent` of all do not exceed; of few times, a high one is simply the worst."""
    ordered = sorted(times_s)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]
