"""Launch of a process group's collectives, in order, and its shutdown: what all torch.distributed calls share."""
# mypy: disable-error-code="override, assignment, attr-defined"

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from stormtorch.backend import within_step
from stormtorch.backend.any_source import AnySourceReceives
from stormtorch.backend.flight_recorder import FlightRecorder
from stormtorch.backend.identity import Identity
from stormtorch.backend.tensors import Staged
from stormtorch.backend.work import StormWork
from stormtorch.collectives import Group, Op
from stormtorch.errors import Closed
from stormtorch.staging.launch_queue import Begin, LaunchQueue

Tensors = Sequence[torch.Tensor]

_OPS = {
    dist.ReduceOp.SUM: Op.SUM,
    dist.ReduceOp.AVG: Op.AVG,
    dist.ReduceOp.PRODUCT: Op.PROD,
    dist.ReduceOp.MIN: Op.MIN,
    dist.ReduceOp.MAX: Op.MAX,
    dist.ReduceOp.BAND: Op.BAND,
    dist.ReduceOp.BOR: Op.BOR,
    dist.ReduceOp.BXOR: Op.BXOR,
    dist.ReduceOp.PREMUL_SUM: Op.SUM,
}


def reduce_operation(requested: Any) -> Op:
    """Translates a reduce operation of torch into one of ours."""
    for theirs, ours in _OPS.items():
        if requested == theirs:
            return ours
    raise RuntimeError(
        f"storm: the reduce operation {requested} is not supported; use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR "
        "or PREMUL_SUM"
    )


def factor_of(opts: Any) -> Any:
    """Returns the factor of PREMUL_SUM, which FSDP uses; None for other operations."""
    requested: Any = getattr(opts, "reduceOp", opts)
    return requested.__getstate__()[1] if opts is not None and requested == dist.ReduceOp.PREMUL_SUM else None


@torch.no_grad()
def multiplied(tensors: Tensors, opts: Any) -> Tensors:
    """Returns the tensors times the factor of PREMUL_SUM, in new memory; the tensors themselves without a factor."""
    factor = factor_of(opts)
    return tensors if factor is None else [each * factor for each in tensors]


@torch.no_grad()
def multiply(tensors: Tensors, opts: Any) -> None:
    """Multiplies tensors by the factor of PREMUL_SUM in place."""
    factor = factor_of(opts)
    if factor is not None:
        for each in tensors:
            each.mul_(factor)


class _CoalescedWork:
    """One of several collectives that were started together."""

    exchanges = 1

    def __init__(self, work: StormWork) -> None:
        self._work = work

    @property
    def ended(self) -> bool:
        return self._work.ended

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._work.wait(None if timeout_s is None else timedelta(seconds=timeout_s))


class Launching(Identity):
    """Part of a process group that starts collectives in order and shuts the group down."""

    def __init__(
        self,
        group: Group,
        store: Store,
        timeout: timedelta,
        timeout_limit_s: float,
        enter: Callable[[], None],
        leave: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        super().__init__(group, store, timeout, timeout_limit_s)
        self.flight_recorder = FlightRecorder(group)
        self._leave, self._close = leave, close
        self._coalesced: list[StormWork] | None = None
        self._receives = AnySourceReceives(group)
        self._order = LaunchQueue()
        self._open = True
        enter()

    # --- shutting down ----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Releases the job's transport; the last group to do so sends a goodbye and closes the socket."""
        if self._open:
            self._open = False
            self._leave()

    def abort(self) -> None:
        """Ends all operations in all groups of the job: blocked calls raise `Closed`."""
        self._open = False
        self._close()
        if self.inherited:
            return
        self._order.abort(Closed(f"rank {self.group.rank}: the group was aborted before this operation had begun."))

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that joined the job, and so is not in the job."""
        return bool(getattr(self.group.transport, "inherited", False))

    def check_owner(self, what: str) -> None:
        """Raises an error within the step of a prepared optimizer, and `Closed` in a forked process.

        Call it before taking a lock, which a thread of the parent may hold.
        """
        within_step.check(what)
        if self.inherited:
            self.group.transport.check_owner(what)

    # --- several collectives at once --------------------------------------------------------------------------------

    def _start_coalescing(self, _device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: torch.device) -> StormWork:
        works, self._coalesced = self._coalesced or [], None
        results = [tensor for work in works for tensor in work.result()]
        staged = Staged("coalesced")
        for work in works:
            staged.include(work.staged)
        return StormWork("coalesced", [_CoalescedWork(work) for work in works], results, staged)

    # --- starting a collective --------------------------------------------------------------------------------------

    def begin_work(
        self,
        what: str,
        begin: Begin,
        results: Tensors,
        staged: Staged,
        source: Callable[[], int | None] | None = None,
        inputs: Tensors | None = None,
        finish: Callable[[], None] | None = None,
        value: Sequence[Tensors] | None = None,
        peer: int | None = None,
    ) -> StormWork:
        """Starts an operation after all earlier ones, and records it.

        Args:
            what: The operation's name, for errors, the flight record and the profiler.
            begin: Starts the exchanges.
            results: The tensors that hold the results.
            staged: Contiguous copies of the tensors on the CPU, and the copies to make at the end.
            source: Returns the sender, for a receive.
            inputs: The tensors whose shapes the profiler shows; None takes `results`.
            finish: Called at the end, after the results are copied.
            value: Content of the work's future, if that is not the list of results.
            peer: The other rank, for a send or a receive.
        """
        self.check_owner(what)
        self._sequence += 1
        record = self.flight_recorder.begin(what, self._sequence, results, inputs, peer)
        if torch.autograd._profiler_enabled():
            shown = results if inputs is None else inputs
            with torch._C._profiler._RecordFunctionFast(f"storm::{what}", list(shown)):
                begun = self._order.begin(begin, staged.events())
        else:
            begun = self._order.begin(begin, staged.events())
        work = StormWork(what, begun, results, staged, finish, record, source, value)
        work.drive_in_background()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _timeout(self, opts: Any, timeout: Any) -> float:
        requested = timeout if timeout is not None else getattr(opts, "timeout", None)
        if isinstance(requested, timedelta) and requested > timedelta(0):
            return min(requested.total_seconds(), self._timeout_limit_s)
        return self._timeout_s

    def _reducing(self, opts: Any, timeout: Any) -> tuple[Op, float]:
        requested = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        return reduce_operation(requested), self._timeout(opts, timeout)
