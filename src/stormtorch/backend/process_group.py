# mypy: disable-error-code="override, assignment, attr-defined"
# torch declares overloads that it calls by position, in two generations of names.
"""The process group "storm": torch.distributed's calls, turned into collectives.

Names and arguments are torch's, old and new, as it calls them from Python and from C++. Everything here is exact.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from stormtorch import collectives
from stormtorch.backend.anybody import Receives, Taking
from stormtorch.backend.flight import Flight
from stormtorch.backend.identity import Identity
from stormtorch.backend.order import Order
from stormtorch.backend.sparse import sum_sparse
from stormtorch.backend.tensors import Staged, one, pieces, split
from stormtorch.backend.work import StormWork
from stormtorch.collectives import Group, Op, Pending
from stormtorch.errors import Closed, ExchangeTimeout, StormError

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
}
_MONITOR_TAG = -7
_POLL_S = 0.002


def reduce_operation(asked: Any) -> Op:
    """Ours for torch's."""
    for theirs, ours in _OPS.items():
        if asked == theirs:
            return ours
    raise RuntimeError(f"storm: the reduce operation {asked} is not supported; use SUM, AVG, PRODUCT, MIN, MAX or bits")


def _root(opts: Any) -> int:
    """Of a call with a root: torch gives the rank itself, or options that hold it."""
    return opts if isinstance(opts, int) else int(opts.rootRank)


class StormProcessGroup(Identity):
    """Made by torch.distributed; use it through `dist.all_reduce` and the like."""

    def __init__(
        self,
        group: Group,
        store: Store,
        timeout: timedelta,
        enter: Callable[[], None],
        leave: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        super().__init__(group, store, timeout)
        self.flight = Flight(group)
        self._leave, self._close = leave, close
        self._together: list[StormWork] | None = None
        self._receives = Receives(group)
        self._order = Order()
        self._open = True
        enter()

    # --- its end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leaves; the last group of a job also closes the socket, after telling the peers."""
        if self._open:
            self._open = False
            self._leave()

    def abort(self) -> None:
        """Ends whatever runs, in all groups of the job: calls that wait raise `Closed`."""
        self._open = False
        self._close()

    # --- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> StormWork:
        """Every rank ends with the reduction of all."""
        op, timeout_s = self._reducing(opts, timeout)
        tensor = one(tensors, "all_reduce")
        if tensor.layout is torch.sparse_coo and op is Op.SUM:
            self._order.flush()
            sum_sparse(self.group, tensor, timeout_s)
            return self.begin_work("all_reduce", list, [tensor], Staged("all_reduce"))
        staged = Staged("all_reduce")
        dense = staged.update(tensor)
        return self.begin_work(
            "all_reduce",
            lambda: [collectives.all_reduce(self.group, dense, op, timeout_s=timeout_s)],
            [tensor],
            staged,
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> StormWork:
        """Several all-reduces at once."""
        op, timeout_s = self._reducing(opts, None)
        staged = Staged("all_reduce")
        dense = [staged.update(each) for each in tensors]
        return self.begin_work(
            "all_reduce",
            lambda: [collectives.all_reduce(self.group, each, op, timeout_s=timeout_s) for each in dense],
            tensors,
            staged,
        )

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> StormWork:
        """The root ends with the reduction of all."""
        root = _root(opts)
        operation, timeout_s = self._reducing(op if isinstance(opts, int) else opts, timeout)
        tensor = one(tensors, "reduce")
        staged = Staged("reduce")
        dense = staged.update(tensor) if root == self.group.rank else staged.read(tensor)
        return self.begin_work(
            "reduce",
            lambda: [collectives.reduce(self.group, dense, root, operation, timeout_s=timeout_s)],
            [tensor],
            staged,
        )

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> StormWork:
        """Every rank ends with the root's tensor."""
        root = _root(opts)
        timeout_s = self._timeout(opts, timeout)
        tensor = one(tensors, "broadcast")
        staged = Staged("broadcast")
        dense = staged.read(tensor) if root == self.group.rank else staged.write(tensor)
        return self.begin_work(
            "broadcast",
            lambda: [collectives.broadcast(self.group, dense, root, timeout_s=timeout_s)],
            [tensor],
            staged,
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> StormWork:
        """Every rank ends with every rank's tensor."""
        tensor = one(inputs, "all_gather")
        lists = outputs if isinstance(outputs[0], torch.Tensor) else one_list(outputs, "all_gather")
        return self._gather_all([lists], [tensor], lists, self._timeout(opts, timeout))

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> StormWork:
        """Several all-gathers at once: `outputs[rank][index]`."""
        lists = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        return self._gather_all(lists, inputs, [each for row in outputs for each in row], self._timeout(opts, None))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> StormWork:
        """The same into one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> StormWork:
        """Several of them at once."""
        staged = Staged("all_gather")
        lists = [pieces(staged.write(each), self.group.size, "all_gather") for each in outputs]
        return self._gather_all(lists, inputs, outputs, self._timeout(opts, None), staged)

    def _gather_all(
        self,
        lists: Sequence[Tensors],
        inputs: Tensors,
        results: Tensors,
        timeout_s: float,
        staged: Staged | None = None,
    ) -> StormWork:
        staged = staged or Staged("all_gather")
        dense = [
            (staged.read(given), [staged.write(each) for each in outs])
            for given, outs in zip(inputs, lists, strict=True)
        ]
        return self.begin_work(
            "all_gather",
            lambda: [collectives.all_gather(self.group, outs, given, timeout_s=timeout_s) for given, outs in dense],
            results,
            staged,
            inputs=inputs,
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> StormWork:
        """Each rank ends with the reduction of its part."""
        op, timeout_s = self._reducing(opts, timeout)
        parts = inputs if isinstance(inputs[0], torch.Tensor) else one_list(inputs, "reduce_scatter")
        output = one(outputs, "reduce_scatter")
        return self._reduce_scatter_all([output], [parts], op, timeout_s, parts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> StormWork:
        """The same from one tensor."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> StormWork:
        """Several of them at once."""
        op, timeout_s = self._reducing(opts, None)
        staged = Staged("reduce_scatter")
        parts = [pieces(staged.read(each), self.group.size, "reduce_scatter") for each in inputs]
        return self._reduce_scatter_all(outputs, parts, op, timeout_s, inputs, staged)

    def _reduce_scatter_all(
        self,
        outputs: Tensors,
        inputs: Sequence[Tensors],
        op: Op,
        timeout_s: float,
        shown: Tensors,
        staged: Staged | None = None,
    ) -> StormWork:
        staged = staged or Staged("reduce_scatter")
        dense = [
            (staged.write(output).view(-1), [staged.read(each).view(-1) for each in parts])
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        return self.begin_work(
            "reduce_scatter",
            lambda: [
                collectives.reduce_scatter(
                    self.group, out.view(-1), [each.view(-1) for each in parts], op, timeout_s=timeout_s
                )
                for out, parts in dense
            ],
            outputs,
            staged,
            inputs=shown,
        )

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> StormWork:
        """The root ends with every rank's tensor."""
        root = _root(opts)
        timeout_s = self._timeout(opts, timeout)
        staged = Staged("gather")
        given = staged.read(one(inputs, "gather"))
        results: Tensors = []
        outs = None
        if root == self.group.rank:
            results = outputs if isinstance(outputs[0], torch.Tensor) else one_list(outputs, "gather")
            outs = [staged.write(each) for each in results]
        return self.begin_work(
            "gather",
            lambda: [collectives.gather(self.group, given, outs, root, timeout_s=timeout_s)],
            results,
            staged,
            inputs=[given],
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> StormWork:
        """Each rank ends with its tensor of the root's."""
        root = _root(opts)
        timeout_s = self._timeout(opts, timeout)
        staged = Staged("scatter")
        output = one(outputs, "scatter")
        out = staged.write(output)
        given = None
        if root == self.group.rank:
            lists = inputs if isinstance(inputs[0], torch.Tensor) else one_list(inputs, "scatter")
            given = [staged.read(each) for each in lists]
        return self.begin_work(
            "scatter",
            lambda: [collectives.scatter(self.group, out, given, root, timeout_s=timeout_s)],
            [output],
            staged,
            inputs=given or [],
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None) -> StormWork:
        """Every rank gives every rank its own tensor."""
        staged = Staged("all_to_all")
        outs, given = [staged.write(each) for each in outputs], [staged.read(each) for each in inputs]
        return self._exchange_all(outputs, outs, given, staged, self._timeout(opts, timeout), inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> StormWork:
        """The same with parts of one tensor."""
        staged = Staged("all_to_all")
        size = self.group.size
        outs = split(staged.write(output), output_splits, size, "all_to_all")
        given = split(staged.read(tensor), input_splits, size, "all_to_all")
        return self._exchange_all([output], outs, given, staged, self._timeout(opts, timeout), [tensor])

    alltoall_base = all_to_all_single

    def _exchange_all(
        self, results: Tensors, outs: Tensors, given: Tensors, staged: Staged, timeout_s: float, shown: Tensors
    ) -> StormWork:
        return self.begin_work(
            "all_to_all",
            lambda: [collectives.all_to_all(self.group, outs, given, timeout_s=timeout_s)],
            results,
            staged,
            inputs=shown,
        )

    # --- one to one -------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, target: int, tag: int) -> StormWork:
        """To one rank, which receives it."""
        staged = Staged("send")
        tensor = one(tensors, "send")
        given = staged.read(tensor)
        return self.begin_work(
            "send",
            lambda: [collectives.send(self.group, given, target, tag=tag, timeout_s=self._timeout_s)],
            [tensor],
            staged,
        )

    def recv(self, tensors: Any, source: int, tag: int) -> StormWork:
        """From one rank."""
        tensor = one(tensors, "recv")
        staged = Staged("recv")
        out = staged.write(tensor)
        return self.begin_work(
            "recv",
            lambda: [self._receives.start(out, source, tag, self._timeout_s)],
            [tensor],
            staged,
            source=lambda: source,
        )

    def recv_anysource(self, tensors: Any, tag: int) -> StormWork:
        """From whoever sends first."""
        tensor = one(tensors, "recv")
        staged = Staged("recv")
        out = staged.write(tensor)
        taking: list[Taking] = []

        def begin() -> list[Taking]:
            taking.append(self._receives.from_anybody(out, tag, self._timeout_s))
            return taking

        return self.begin_work("recv", begin, [tensor], staged, source=lambda: taking[0].source)

    # --- barriers ---------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> StormWork:
        """Nobody goes on before all have come."""
        timeout_s = self._timeout(opts, timeout)
        return self.begin_work(
            "barrier", lambda: [collectives.barrier(self.group, timeout_s=timeout_s)], [], Staged("barrier")
        )

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come.

        Args:
            timeout: How long to wait for them, seconds where it is a number; None is the group's.
            wait_all_ranks: Name all that are missing, not only the first.
        """
        asked = self._timeout_s if timeout is None else timeout
        seconds = asked.total_seconds() if isinstance(asked, timedelta) else float(asked)
        if self.group.rank == 0 and seconds <= 0:
            raise ExchangeTimeout("[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms.")
        self._order.flush()
        token = torch.zeros(1, dtype=torch.uint8)
        if self.group.rank != 0:
            try:
                for start in (collectives.send, collectives.receive):
                    start(self.group, token, 0, tag=_MONITOR_TAG, timeout_s=seconds).wait()
            except StormError as error:
                raise type(error)(
                    f"[Rank {self.group.rank}]: Rank {self.group.rank} successfully reached monitoredBarrier, but "
                    f"received errors while waiting for send/recv from rank 0: {error}"
                ) from error
            return
        waiting = {
            peer: collectives.receive(self.group, token.clone(), peer, tag=_MONITOR_TAG, timeout_s=seconds + 1.0)
            for peer in range(1, self.group.size)
        }
        give_up_at = time.monotonic() + seconds
        while waiting and time.monotonic() < give_up_at:
            for peer in [peer for peer, pending in waiting.items() if pending.done()]:
                try:
                    waiting[peer].wait()
                except Closed:
                    raise
                except StormError:
                    give_up_at = 0.0
                else:
                    del waiting[peer]
            time.sleep(_POLL_S)
        if waiting:
            missing = sorted(waiting) if wait_all_ranks else [min(waiting)]
            names = ", ".join(map(str, missing))
            raise ExchangeTimeout(
                f"[Rank 0]: Rank{'s' if len(missing) > 1 else ''} {names} failed to pass monitoredBarrier in "
                f"{1000 * seconds:.0f} ms"
            )
        going = [
            collectives.send(self.group, token, peer, tag=_MONITOR_TAG, timeout_s=seconds)
            for peer in range(1, self.group.size)
        ]
        for each in going:
            each.wait()

    # --- several at once --------------------------------------------------------------------------------------------

    def _start_coalescing(self, _device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, _device: torch.device) -> StormWork:
        works, self._together = self._together or [], None

        def wait_for_all() -> None:
            for work in works:
                work.wait()

        results = [tensor for work in works for tensor in work.result()]
        staged = Staged("coalesced")
        for work in works:
            staged.include(work.staged)
        return StormWork("coalesced", [], results, staged, wait_for_all)

    # --- how all of them begin --------------------------------------------------------------------------------------

    def begin_work(
        self,
        what: str,
        begin: Callable[[], Sequence[Pending | Taking]],
        results: Tensors,
        staged: Staged,
        source: Callable[[], int | None] | None = None,
        inputs: Tensors | None = None,
        finish: Callable[[], None] | None = None,
    ) -> StormWork:
        """Begins an operation after those that were asked for before, and notes it.

        Args:
            what: Its name, for errors, the flight record and the profiler.
            begin: Starts the exchanges.
            results: The tensors that hold the results, which are the inputs too unless `inputs` are given.
            staged: Their stand-ins, and what remains to be copied at the end.
            source: Of a receive, tells whose it is.
            inputs: What the profiler shows the shapes of.
            finish: What else remains to be done at the end.
        """
        self._sequence += 1
        record = self.flight.begin(what, self._sequence, results)
        if torch.autograd._profiler_enabled():
            shown = results if inputs is None else inputs
            with torch._C._profiler._RecordFunctionFast(f"storm::{what}", list(shown)):
                begun = self._order.begin(begin, staged.moments())
        else:
            begun = self._order.begin(begin, staged.moments())
        work = StormWork(what, begun, results, staged, finish, record, source)
        work.go_on()
        if self._together is not None:
            self._together.append(work)
        return work

    def _timeout(self, opts: Any, timeout: Any) -> float:
        asked = timeout if timeout is not None else getattr(opts, "timeout", None)
        if isinstance(asked, timedelta) and asked > timedelta(0):
            return asked.total_seconds()
        return self._timeout_s

    def _reducing(self, opts: Any, timeout: Any) -> tuple[Op, float]:
        asked = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        return reduce_operation(asked), self._timeout(opts, timeout)


def one_list(lists: Sequence[Tensors], what: str) -> Tensors:
    """The only list of lists of tensors."""
    if len(lists) != 1:
        raise ValueError(f"storm: {what} takes one list of tensors, got {len(lists)}")
    return lists[0]


def _keep_from_compiler(cls: type) -> None:
    """torch.compile must call these, not look into them."""
    for name, value in list(vars(cls).items()):
        if callable(value) and not name.startswith("__"):
            setattr(cls, name, torch._disable_dynamo(value))


_keep_from_compiler(Identity)
_keep_from_compiler(StormProcessGroup)
