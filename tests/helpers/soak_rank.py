"""A rank that runs a random program of collectives, by several threads, and waits for them in another order."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import soak_program as program
from soak_program import Call
from stormtorch import collectives as storm
from stormtorch.collectives import Group, Op
from stormtorch.collectives.pipeline import Pipeline
from stormtorch.exchange.exchange import Transport

Begun = tuple[Call, Any, list[torch.Tensor]]
INCOMPLETE = -1
"""In place of a checksum: the call may lose something, and has."""
ABSENT = -2
"""In place of a checksum: this rank took no part."""

_WITH_BUFFERS = ("all_gather", "all_to_all", "gather")
_WITH_PARTS = ("reduce_scatter", "all_to_all", "scatter")
_TORCH_OPS = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.AVG: dist.ReduceOp.AVG,
    Op.PROD: dist.ReduceOp.PRODUCT,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.BAND: dist.ReduceOp.BAND,
    Op.BOR: dist.ReduceOp.BOR,
    Op.BXOR: dist.ReduceOp.BXOR,
}


class Runner:
    """Runs calls on one rank.

    Args:
        transport: Carries them.
        ranks: The ranks of the transport that take part; a program's ranks are positions in this list.
        name: Begins the names of all groups.
        backend: Groups of torch.distributed by members; None calls the functions of stormtorch in their place.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: list[int],
        name: str = "soak",
        backend: dict[tuple[int, ...], Any] | None = None,
    ) -> None:
        self.transport = transport
        self.ranks = ranks
        self.rank = ranks.index(transport.rank)
        self._name = name
        self._backend = backend
        self._groups: dict[tuple[int, tuple[int, ...]], Group] = {}
        self._threads = ThreadPoolExecutor(program.LANES - 1)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def run(self, calls: list[Call], keep: Callable[[Call, int], None]) -> None:
        """Runs the calls of a round, and hands a checksum of each to `keep`."""
        mine = [call for call in calls if self.rank in call.members]
        lanes = [[call for call in mine if call.lane == lane] for lane in range(program.LANES)]
        others = [self._threads.submit(self._run_lane, lane, keep) for lane in lanes[1:] if lane]
        errors: list[BaseException] = []
        try:
            self._run_lane(lanes[0], keep)
        except Exception as error:
            errors.append(error)
        errors += [found for each in others if (found := each.exception()) is not None]
        if errors:
            raise ExceptionGroup("a round failed", [error for error in errors if isinstance(error, Exception)])

    def _run_lane(self, calls: list[Call], keep: Callable[[Call, int], None]) -> None:
        begun: list[Begun] = []
        left = list(calls)
        try:
            while left:
                call = left.pop(0)
                each = self._begin(call)
                if call.waits_at_once:
                    keep(call, _end(each))
                else:
                    begun.append(each)
            # A call of several exchanges begins the next one in `wait`: all ranks wait for these in the same order.
            several = [each for each in begun if _has_several(each)]
            single = [each for each in begun if not _has_several(each)]
            random.Random(f"{self.rank} {calls[0].index if calls else 0}").shuffle(single)
            while several or single:
                each = (several or single).pop(0)
                begun.remove(each)
                keep(each[0], _end(each))
        except Exception:
            self._abort(begun, left)
            raise

    def _abort(self, begun: list[Begun], left: list[Call]) -> None:
        """Cancels what was begun, and begins and cancels the rest, so that no other rank waits for this one."""
        for each in (*begun, *(each for call in left if (each := self._try(call)) is not None)):
            if isinstance(each[1], storm.Pending):
                each[1].cancel()

    def _try(self, call: Call) -> Begun | None:
        try:
            return self._begin(call)
        except Exception:
            return None

    def _begin(self, call: Call) -> Begun:
        if call.by_backend and self._backend is not None:
            return self._begin_by_backend(call)
        return self._begin_by_group(call)

    def _group(self, call: Call) -> Group:
        key = call.lane, call.members
        if key not in self._groups:
            members = [self.ranks[each] for each in call.members]
            self._groups[key] = Group(self.transport, members, name=f"{self._name} {call.lane}")
        return self._groups[key]

    def _begin_by_group(self, call: Call) -> Begun:
        group, n = self._group(call), len(call.members)
        me, root = call.members.index(self.rank), call.root
        lossy: dict[str, Any] = {"reliability": call.reliability}
        own = program.values(self.rank, call)
        buffers = [torch.zeros_like(own) for _ in range(n)] if call.kind in _WITH_BUFFERS else []
        parts = [program.values(self.rank, call, part) for part in range(n)] if call.kind in _WITH_PARTS else []
        match call.kind:
            case "all_reduce":
                return call, storm.all_reduce(group, own, call.op, **lossy), [own]
            case "int8" | "int4":
                wire = getattr(torch, call.kind)
                return call, storm.all_reduce_on_grids(group, own, call.op, wire=wire, **lossy), [own]
            case "reduce_scatter":
                return call, storm.reduce_scatter(group, own, parts, call.op, **lossy), [own]
            case "all_gather":
                return call, storm.all_gather(group, buffers, own, **lossy), buffers
            case "all_to_all":
                return call, storm.all_to_all(group, buffers, parts, **lossy), buffers
            case "broadcast":
                return call, storm.broadcast(group, own, root, **lossy), [own]
            case "reduce":
                return call, storm.reduce(group, own, root, call.op, **lossy), [own]
            case "gather":
                into = buffers if me == root else None
                return call, storm.gather(group, own, into, root, **lossy), into or []
            case "scatter":
                return call, storm.scatter(group, own, parts if me == root else None, root, **lossy), [own]
            case "pair" if me == root:
                return call, storm.send(group, own, call.target, tag=call.tag, **lossy), []
            case "pair" if me == call.target:
                return call, storm.receive(group, own, root, tag=call.tag, **lossy), [own]
            case "pair":
                return call, None, []
            case _:
                return call, storm.barrier(group), []

    def _begin_by_backend(self, call: Call) -> Begun:
        assert self._backend is not None
        group, n, op = self._backend[call.members], len(call.members), _TORCH_OPS[call.op]
        me, root = call.members.index(self.rank), call.members[call.root]
        own = program.values(self.rank, call)
        buffers = [torch.zeros_like(own) for _ in range(n)] if call.kind in _WITH_BUFFERS else []
        parts = [program.values(self.rank, call, part) for part in range(n)] if call.kind in _WITH_PARTS else []
        options: dict[str, Any] = {"group": group, "async_op": True}
        match call.kind:
            case "all_reduce":
                return call, dist.all_reduce(own, op, **options), [own]
            case "reduce_scatter":
                return call, dist.reduce_scatter(own, parts, op, **options), [own]
            case "all_gather":
                return call, dist.all_gather(buffers, own, **options), buffers
            case "all_to_all":
                return call, dist.all_to_all(buffers, parts, **options), buffers
            case "broadcast":
                return call, dist.broadcast(own, root, **options), [own]
            case "reduce":
                return call, dist.reduce(own, root, op, **options), [own]
            case "gather":
                into = buffers if me == call.root else None
                return call, dist.gather(own, into, root, **options), into or []
            case "scatter":
                return call, dist.scatter(own, parts if me == call.root else None, root, **options), [own]
            case "pair" if me == call.root:
                return call, dist.isend(own, call.members[call.target], group=group, tag=call.tag), []
            case "pair" if me == call.target:
                return call, dist.irecv(own, root, group=group, tag=call.tag), [own]
            case "pair":
                return call, None, []
            case _:
                return call, dist.barrier(**options), []


def _has_several(begun: Begun) -> bool:
    pending = begun[1]
    if isinstance(pending, storm.Pending) and not isinstance(pending, Pipeline):
        return pending.exchanges > 1
    return pending is not None  # the exchanges of torch.distributed's work cannot be seen


def _end(begun: Begun) -> int:
    call, pending, results = begun
    if pending is None:
        return ABSENT
    if isinstance(pending, dist.Work):
        pending.wait(timedelta(seconds=120.0))
    else:
        arrivals = pending.wait()
        if not all(each.arrived == 1.0 for each in arrivals):
            assert not call.reliability.exact, f"{call} has lost something"
            return INCOMPLETE
    return program.checksum(results)
