# mypy: disable-error-code="override, assignment, attr-defined"
# torch declares these methods as overloads under two generations of names, and passes arguments by position.
"""Process group "storm": all-reduce, all-gather and the other collectives, as torch.distributed calls them.

Methods have torch's names and arguments, old and new, as torch calls them from Python and from C++. Everything here is
exact.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from stormtorch import collectives
from stormtorch.backend.compiler import keep_from_compiler
from stormtorch.backend.identity import Identity
from stormtorch.backend.launching import Launching, Tensors, multiplied, multiply
from stormtorch.backend.point_to_point import PointToPoint
from stormtorch.backend.sparse import sum_sparse
from stormtorch.backend.tensors import Staged, one, pieces, split
from stormtorch.backend.work import StormWork
from stormtorch.collectives import Op


def _root(opts: Any) -> int:
    """Returns the root of a call: torch passes the rank itself or options that hold it."""
    return opts if isinstance(opts, int) else int(opts.rootRank)


class StormProcessGroup(PointToPoint):
    """Process group that torch.distributed creates; use it through `dist.all_reduce` and the like."""

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> StormWork:
        """Reduces a tensor over all ranks; every rank gets the result."""
        op, timeout_s = self._reducing(opts, timeout)
        tensor = one(tensors, "all_reduce")
        multiply([tensor], opts)
        if tensor.layout is torch.sparse_coo and op is Op.SUM:
            self.check_owner("all_reduce")
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
        """Starts several all-reduces at once."""
        op, timeout_s = self._reducing(opts, None)
        multiply(tensors, opts)
        staged = Staged("all_reduce")
        dense = [staged.update(each) for each in tensors]
        return self.begin_work(
            "all_reduce",
            lambda: [collectives.all_reduce(self.group, each, op, timeout_s=timeout_s) for each in dense],
            tensors,
            staged,
        )

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> StormWork:
        """Reduces a tensor over all ranks; the root gets the result."""
        root = _root(opts)
        requested = op if isinstance(opts, int) else opts
        operation, timeout_s = self._reducing(requested, timeout)
        tensor = one(tensors, "reduce")
        staged = Staged("reduce")
        if root == self.group.rank:
            multiply([tensor], requested)
            dense = staged.update(tensor)
        else:
            dense = staged.read(multiplied([tensor], requested)[0])
        return self.begin_work(
            "reduce",
            lambda: [collectives.reduce(self.group, dense, root, operation, timeout_s=timeout_s)],
            [tensor],
            staged,
        )

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> StormWork:
        """Copies the root's tensor to every rank."""
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
        """Copies every rank's tensor to every rank."""
        tensor = one(inputs, "all_gather")
        lists = outputs if isinstance(outputs[0], torch.Tensor) else one_list(outputs, "all_gather")
        return self._gather_all([lists], [tensor], lists, self._timeout(opts, timeout))

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> StormWork:
        """Starts several all-gathers at once, into `outputs[rank][index]`."""
        lists = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        results = [each for row in outputs for each in row]
        return self._gather_all(lists, inputs, results, self._timeout(opts, None), value=outputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> StormWork:
        """Gathers every rank's tensor into one tensor on every rank."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> StormWork:
        """Starts several all-gathers into one tensor each."""
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
        value: Sequence[Tensors] | None = None,
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
            value=value,
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> StormWork:
        """Reduces one tensor per rank over all ranks; each rank gets its own result."""
        op, timeout_s = self._reducing(opts, timeout)
        parts = inputs if isinstance(inputs[0], torch.Tensor) else one_list(inputs, "reduce_scatter")
        output = one(outputs, "reduce_scatter")
        return self._reduce_scatter_all([output], [multiplied(parts, opts)], op, timeout_s, parts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> StormWork:
        """Reduces a tensor over all ranks; each rank gets one of its equal parts."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> StormWork:
        """Starts several reduce-scatters of one tensor each."""
        op, timeout_s = self._reducing(opts, None)
        staged = Staged("reduce_scatter")
        given = multiplied(inputs, opts)
        parts = [pieces(staged.read(each), self.group.size, "reduce_scatter") for each in given]
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
        """Copies every rank's tensor to the root."""
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
        """Copies one of the root's tensors to each rank."""
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
        """Sends a different tensor to each rank, and receives one from each."""
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
        """Sends a part of one tensor to each rank, and receives the parts of another."""
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


def storm_group(group: Any, what: str) -> StormProcessGroup:
    """Returns a process group, checked to be of the backend storm.

    Args:
        group: A process group.
        what: The feature that needs it, for the error.

    Raises:
        TypeError: The group is of another backend.
    """
    if isinstance(group, StormProcessGroup):
        return group
    other = dist.get_backend(group) if isinstance(group, dist.ProcessGroup) else type(group).__name__
    raise TypeError(
        f'{what}: this needs a group of the backend "storm", got {other}: use dist.init_process_group("storm")'
    )


def one_list(lists: Sequence[Tensors], what: str) -> Tensors:
    """Returns the only list of tensors, as one process has one device."""
    if len(lists) != 1:
        raise ValueError(f"storm: {what} takes one list of tensors, got {len(lists)}")
    return lists[0]


for part in (Identity, Launching, PointToPoint, StormProcessGroup):
    keep_from_compiler(part)
