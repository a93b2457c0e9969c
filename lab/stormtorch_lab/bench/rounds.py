"""Rounds of an all-reduce benchmark on each rank: check, warm up and time all backends at all sizes."""

import contextlib
from dataclasses import dataclass

import torch

from stormtorch.network.faults import faults
from stormtorch.telemetry.text import size_text
from stormtorch_lab.bench.backends import Backend, Copies, Gloo, Storm, open_backends
from stormtorch_lab.bench.pattern import Pattern
from stormtorch_lab.jobs.control import Call, LabRequest, RoundRobin, Stage
from stormtorch_lab.jobs.counters import Counters, Delivery, Log, Sample
from stormtorch_lab.jobs.ranks import Member

# A machine without loss drops a datagram occasionally; a backend that loses one every time is broken.
_CHECKS = 3


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule of the ranks."""

    backends: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    iters: int
    warmup: int
    faults: float = 0.0
    """Fraction of the storm backends' datagrams dropped by fault injection."""
    seed: int = 0
    dtype: str = "float32"
    datagram_bytes: int | None = None
    ideal: bool = False
    """Whether `Copies` is also measured."""
    patience_s: float | None = None
    """Wait limit in seconds, see `Stage`."""
    lab: bool = False
    """Whether the parent switches the loss on, at a `LabRequest` of rank 0."""


def run_rounds(member: Member, schedule: Schedule) -> Log:
    """Runs one rank's part of the schedule."""
    backends = open_backends(schedule.backends, member, schedule.datagram_bytes)
    if schedule.ideal:
        backends.append(Copies(member.world))
    storms = _storms(backends)
    log = Log(
        [],
        chunk_bytes=storms[0].transport.chunk_bytes if storms else None,
        tcp={each.name: each.connections.congestion_control for each in backends if isinstance(each, Gloo)},
    )
    with Stage(member, backends, patience_s=schedule.patience_s, lab=schedule.lab) as stage:
        for size in schedule.sizes_bytes:
            _Rounds(stage, schedule, Pattern(size, schedule.dtype, member), log).check_without_loss()
        stage.cue(LabRequest.LOSE)
        # Without loss, fault injection is off, as it costs time for every datagram.
        with faults(loss=schedule.faults, seed=schedule.seed) if schedule.faults else contextlib.nullcontext():
            for size in schedule.sizes_bytes:
                _Rounds(stage, schedule, Pattern(size, schedule.dtype, member), log).run()
    return log


def _storms(backends: list[Backend]) -> list[Storm]:
    return [backend for backend in backends if isinstance(backend, Storm)]


class _Rounds:
    """Rounds of one size."""

    def __init__(self, stage: Stage[Backend], schedule: Schedule, pattern: Pattern, log: Log) -> None:
        self._stage = stage
        self._schedule = schedule
        self._pattern = pattern
        self._log = log
        self._work = torch.empty_like(pattern.own)

    def _prepare(self, backend: Backend) -> Call:
        work = self._work.copy_(self._pattern.own)
        return lambda: backend.all_reduce(work)

    def _keep(self, sample: Sample) -> None:
        self._log.samples.append(sample)
        if sample.gave_up:
            self._work = torch.empty_like(self._work)  # the aborted call may still write to the old one

    def check_without_loss(self) -> None:
        """Checks that every backend gives the right sum."""
        stage, pattern = self._stage, self._pattern
        for backend in stage.contenders:
            if isinstance(backend, Copies) or backend.name in stage.timed_out:
                continue
            for _ in range(_CHECKS):
                sample = stage.timed(backend, self._prepare(backend), pattern.bytes, 0)
                if sample.gave_up:
                    self._keep(sample)  # there will be no other
                    break
                if stage.on_all_ranks(sample.arrived == Delivery().arrived):
                    pattern.check(backend.name, self._work)
                    break
            else:
                # The queue of a link with a rate may overflow while a backend probes the rate.
                if not self._schedule.lab:
                    raise RuntimeError(
                        f"{backend.name} lost chunks {_CHECKS} times in a row although no loss was injected"
                    )
                pattern.check_range(backend.name, self._work)

    def run(self) -> None:
        """Warms up, and times the rounds."""
        stage, pattern, storms = self._stage, self._pattern, _storms(self._stage.contenders)
        round_robin_calls = RoundRobin(stage, pattern.bytes, self._prepare)
        for round_index in range(self._schedule.warmup):
            for backend, sample in round_robin_calls.round(round_index):
                if sample.gave_up:
                    self._keep(sample)  # there will be no other
                elif backend.exact:
                    pattern.check(backend.name, self._work)
                elif not isinstance(backend, Copies):
                    pattern.check_range(backend.name, self._work)
        before = {storm.name: Counters.of(storm.transport) for storm in storms}
        stage.cue(LabRequest.COUNT)
        round_robin_calls = RoundRobin(stage, pattern.bytes, self._prepare)
        for round_index in range(self._schedule.iters):
            for _, sample in round_robin_calls.round(round_index):
                self._keep(sample)
            if stage.member.rank == 0:
                stage.member.report(size_text(pattern.bytes))
        stage.cue(LabRequest.READ)
        for storm in storms:
            self._log.counters[storm.name, pattern.bytes] = Counters.of(storm.transport) - before[storm.name]
