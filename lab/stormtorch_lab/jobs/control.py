"""Timed calls of several backends in round-robin order, so that other load on the machine affects all alike."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch

from stormtorch_lab.jobs.counters import Delivery, Sample
from stormtorch_lab.jobs.gloo import gloo_group
from stormtorch_lab.jobs.ranks import Member

BARRIER = "gloo, on its own connections, before and after each timed call"
TIMES = "wall time of the slowest rank, from the end of the barrier to the end of its call"
ORDER = "every round calls every backend once; the first backend rotates from round to round"
# The first calls have cold connections and no loss: their wait limit is so many times longer.
_CHECK_WAIT_FACTOR = 5


class CallTimeout(RuntimeError):
    """Raised when a call timed out; its contender can make no further calls."""


class Contender(Protocol):
    """A backend or replica that is compared with others."""

    name: str
    limit_s: float | None
    """A call over TCP that takes longer raises `CallTimeout`; other calls always end by themselves."""

    def close(self) -> None:
        """Frees everything."""
        ...


C = TypeVar("C", bound=Contender)
Call: TypeAlias = Callable[[], Delivery]
"""The timed function."""


class LabRequest(StrEnum):
    """Requests of rank 0 to its parent, in this order; all ranks wait until each is served."""

    LOSE = "lose"
    """Switch the loss on: all results are checked."""
    COUNT = "count"
    """Reset the packet counters: timed rounds begin. Sent once per size."""
    READ = "read"
    """Read the packet counters: timed rounds have ended."""


class Stage(Generic[C]):
    """The contenders of a rank, and the barrier between their calls. Use it in a `with` statement.

    Args:
        member: This rank.
        contenders: Contenders in the order of the first round; the stage closes them at the end.
        patience_s: Wait limit in seconds: a call over TCP is aborted after it, and a contender that has used it up
            skips the remaining rounds. None waits for ever. The limit is longer until `cue(LOSE)`.
        lab: Whether the parent switches the loss on, on a `LabRequest`.
    """

    def __init__(
        self, member: Member, contenders: Sequence[C], *, patience_s: float | None = None, lab: bool = False
    ) -> None:
        self.member = member
        self.control = gloo_group(member, "control", interface=member.control_interface)
        self.contenders = list(contenders)
        self.timed_out: set[str] = set()
        """Names of contenders whose calls timed out."""
        self._lab = lab
        self._full_wait_limit_s = patience_s
        self._set_wait_limit(patience_s and patience_s * _CHECK_WAIT_FACTOR)

    def __enter__(self) -> "Stage[C]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            return  # goodbyes would fail the peers first, and their errors would hide this one
        self.barrier()
        for contender in self.contenders:
            contender.close()
            # Under real loss, the goodbyes of one contender may take a while; the next closes after them.
            self.barrier()

    def barrier(self) -> None:
        """Barrier of all ranks, by a group that is not measured."""
        self.control.barrier().wait()

    def on_all_ranks(self, condition: bool) -> bool:
        """Whether the condition holds on all ranks."""
        vote = torch.tensor([not condition], dtype=torch.int32)
        self.control.allreduce([vote]).wait()
        return int(vote) == 0

    def cue(self, cue: LabRequest) -> None:
        """Sends a request to the parent, in a lab."""
        if cue is LabRequest.LOSE:
            self._set_wait_limit(self._full_wait_limit_s)
        if self._lab:
            self.barrier()
            if self.member.rank == 0:
                self.member.request(cue)
            self.barrier()

    def _set_wait_limit(self, patience_s: float | None) -> None:
        self._wait_limit_s = patience_s
        for contender in self.contenders:
            contender.limit_s = patience_s

    def within_wait_limit(self, contender: C, spent_s: float) -> bool:
        """Whether a contender that has used `spent_s` goes on; the same result on all ranks."""
        if contender.name in self.timed_out:
            return False
        return self._wait_limit_s is None or self.on_all_ranks(spent_s < self._wait_limit_s)

    def timed(self, contender: C, call: Call, size_bytes: int, round_index: int) -> Sample:
        """Times one call between two barriers. A timed-out call is aborted on all ranks and closes its contender."""
        self.barrier()
        cpu_s = time.process_time()
        begin = time.perf_counter()
        delivery, ended = Delivery(), True
        try:
            delivery = call()
        except CallTimeout:
            ended = False
        seconds = time.perf_counter() - begin
        # A rank that is done may still serve others: its CPU time counts until all ranks are done.
        ended = self.on_all_ranks(ended)
        cpu_s = time.process_time() - cpu_s
        if not ended:
            self.timed_out.add(contender.name)
            contender.close()
        return Sample(contender.name, size_bytes, round_index, seconds, cpu_s, *delivery, not ended)


def round_robin(contenders: Sequence[C], round_index: int) -> Iterator[C]:
    """Yields the contenders in the order of a round; the first one rotates."""
    for position in range(len(contenders)):
        yield contenders[(round_index + position) % len(contenders)]


class RoundRobin(Generic[C]):
    """Rounds in which every contender within its wait limit makes one call.

    Args:
        stage: Stage of the contenders.
        size_bytes: Size of the reduced tensor.
        prepare: Prepares a contender's next call, untimed, and returns it.
    """

    def __init__(self, stage: Stage[C], size_bytes: int, prepare: Callable[[C], Call]) -> None:
        self._stage = stage
        self._size_bytes = size_bytes
        self._prepare = prepare
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    def round(self, round_index: int) -> Iterator[tuple[C, Sample]]:
        """Yields each contender with its sample; the next is called when the generator resumes."""
        for contender in round_robin(self._stage.contenders, round_index):
            if self._stage.within_wait_limit(contender, self._spent_s[contender.name]):
                sample = self._stage.timed(contender, self._prepare(contender), self._size_bytes, round_index)
                self._spent_s[contender.name] += sample.seconds
                yield contender, sample
