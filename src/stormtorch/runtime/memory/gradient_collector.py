"""Gradient hooks that fill buckets during backward: a bucket's exchange starts as soon as the bucket is full."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from stormtorch.exchange.waiting import BACKWARD, in_call
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.gradient_norms import GradientNorms
from stormtorch.runtime.memory.visible_gradients import VisibleGradients


class GradientCollector:
    """Collects gradients into buckets.

    Every backward that exchanges gradients starts each bucket exactly once, so that all ranks make the same exchanges,
    even if some of them do not use a parameter.

    Args:
        buckets: Buckets to fill.
        start: Called with a bucket whose local gradients are complete.
        finish: Called at the end of backward, when all buckets were started; returns when all are reduced.
        norms: Computes norms of gradients over all ranks; None where each rank has all of the averaged gradients.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        start: Callable[[Bucket], None],
        finish: Callable[[], None],
        norms: GradientNorms | None = None,
    ) -> None:
        self._allowed = True
        self.wanted: Callable[[], bool] = lambda: True
        """Returns whether the user wants backward to exchange anything."""
        self.reduced = False
        """Whether the current gradients were exchanged."""
        self.began: Callable[[], None] = lambda: None
        """Called at the first gradient of a backward that exchanges gradients."""
        self.end: Callable[[], None] = self.complete
        """Called at the end of a backward that has produced gradients."""
        self._buckets = buckets
        self._start = start
        self._finish = finish
        self._sharded = norms is not None
        self._running = False
        self._task = -1
        """Number of the backward that will call `_end` at its end."""
        self._awaited: list[set[int]] = [set() for _ in buckets]
        self._started = [False for _ in buckets]
        self._carried: dict[int, torch.Tensor] = {}
        self._used: list[list[bool]] = [[False] * len(bucket.parameters) for bucket in buckets]
        self._views: list[list[torch.Tensor]] = []
        self._numbers: list[list[int]] = [[] for _ in buckets]
        """Torch's id of the hook that collects a parameter's gradient."""
        for bucket in buckets:
            views = [each.data for each in bucket.grad_views]  # no views to torch, so that detach_() works
            if norms is not None:
                views = [norms.gradient(bucket, position) for position in range(len(views))]
            self._views.append(views)
            for position, parameter in enumerate(bucket.parameters):
                before, after = self._hooks(bucket.index, position)
                parameter.register_hook(before)  # type: ignore[no-untyped-call]  # torch's, and the next one
                handle = parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
                self._numbers[bucket.index].append(handle.id)

        self.visible_gradients = VisibleGradients(buckets, self._views)
        """The averaged gradients that the program sees, where this rank has only those of its shard."""
        if norms is not None:
            norms.settle, norms.refresh, norms.averaged = (
                self.settle,
                self.visible_gradients.refresh,
                lambda: self.reduced,
            )
            self.visible_gradients.on_replaced = norms.warn_replaced

    @property
    def syncing(self) -> bool:
        """Whether a backward exchanges its gradients at its end."""
        return self._allowed and self.wanted()

    # --- backward ---------------------------------------------------------------------------------------------------

    def _hooks(
        self, index: int, position: int
    ) -> tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]:
        # Python's garbage collector does not see that parameters hold their hooks, so hooks must not hold parameters.
        found = weakref.ref(self)

        def before(_gradient: torch.Tensor) -> None:
            gradients = found()
            if gradients is None:
                return
            gradients._move_hook_last(index, position)
            if gradients.reduced or gradients._running:
                gradients._expect(gradients._buckets[index])

        def after(parameter: torch.Tensor) -> None:
            gradients = found()
            if gradients is not None:
                gradients._on_gradient(gradients._buckets[index], position, parameter)

        return before, after

    def _move_hook_last(self, index: int, position: int) -> None:
        """Moves the collecting hook behind all hooks of the program, including those that were registered later."""
        hooks = self._buckets[index].parameters[position]._post_accumulate_grad_hooks
        number = self._numbers[index][position]
        if hooks and number in hooks and next(reversed(hooks)) != number:
            hooks[number] = hooks.pop(number)

    def _expect(self, bucket: Bucket) -> None:
        if self._running and self._started[bucket.index]:
            # A second gradient in one backward, as when two recomputed parts share a parameter. Gradients in flight
            # must not change, so that exchange completes first and the rest follows in another.
            self.complete()
        if self.reduced:
            # For all buckets at once: the first parameter may have had no gradient before, but later ones may have.
            self._set_aside()

    def _on_gradient(self, bucket: Bucket, position: int, parameter: torch.Tensor) -> None:
        if parameter.dtype != bucket.dtype:
            bucket.reattach_parameters()
        if not self.syncing:
            if parameter.grad is not self._views[bucket.index][position]:
                self._store_gradient(bucket, position, parameter)
            return
        if not self._running:
            self._begin()
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        awaited = self._awaited[bucket.index]
        awaited.discard(position)
        if not awaited and not self._started[bucket.index]:
            self._launch(bucket)

    def _store_gradient(self, bucket: Bucket, position: int, parameter: torch.Tensor) -> None:
        given, view = parameter.grad, self._views[bucket.index][position]
        assert given is not None
        bucket.reattach_gradient(position, view, keep=False)
        with torch.no_grad():  # backward(create_graph=True) enables gradients
            bucket.grad_views[position].copy_(given.to_dense() if given.is_sparse else given)
        parameter.grad = view

    def _begin(self) -> None:
        self._running = True
        self.reduced = False
        for bucket in self._buckets:
            self._awaited[bucket.index] = set(range(len(bucket.parameters)))
            self._started[bucket.index] = False
        self.began()

    def _end(self) -> None:
        # In a nested backward, as with activation checkpointing, the outer one may still bring the missing gradients.
        within = torch._C._current_autograd_node() is not None
        if self._running and not within:
            self.end()
        elif self._running and all(self._started):
            self.complete()

    def complete(self) -> None:
        """Starts the remaining buckets and completes the exchange of gradients, unless that is done."""
        if self.reduced:
            return
        if not self._running:
            # This rank has no gradient, but the other ranks wait for its part.
            for bucket in self._buckets:
                self._started[bucket.index] = False
        for bucket in self._buckets:
            if not self._started[bucket.index]:
                self._launch(bucket)
        self._running = False
        with in_call(BACKWARD):
            self._finish()
        for index, carried in self._carried.items():
            self._buckets[index].own_grads.add_(carried)
        self._carried.clear()
        if self._sharded:
            self.visible_gradients.show()
        self.reduced = True

    def _launch(self, bucket: Bucket) -> None:
        self._started[bucket.index] = True
        bucket.reattach_parameters()
        self._used[bucket.index] = bucket.collect(self._views[bucket.index])
        self._start(bucket)

    def _set_aside(self) -> None:
        """Saves averaged gradients before backward adds to them, so that only new gradients are exchanged."""
        self.reduced = False
        if not self._sharded:
            return  # every rank has the whole mean, and exchanging it again does not change it
        self.visible_gradients.settle(replace=True)
        for bucket in self._buckets:
            if all(parameter.grad is None for parameter in bucket.parameters):
                continue
            carried = bucket.step_grads.clone()
            for position, parameter in enumerate(bucket.parameters):
                if parameter.grad is None:
                    for piece in bucket.pieces():
                        if piece.parameter == bucket.layout.slots[position].parameter:
                            bucket.within_own(piece, carried).zero_()
            earlier = self._carried.get(bucket.index)
            self._carried[bucket.index] = carried if earlier is None else carried.add_(earlier)
            bucket.grads.zero_()

    # --- for the user -----------------------------------------------------------------------------------------------

    def settle(self, *, replace: bool = True) -> bool:
        """Applies the program's changes to averaged gradients. Returns whether there were any."""
        return self.reduced and self.visible_gradients.settle(replace=replace)

    def present(self, before: Sequence[bool]) -> list[bool]:
        """Returns whether each parameter has a gradient now.

        Args:
            before: Whether each had one when backward had ended.
        """
        found = list(before)
        for bucket in self._buckets:
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                found[slot.parameter] = parameter.grad is not None
        return found

    def used(self) -> dict[int, bool]:
        """Whether each parameter, by number, has a gradient on this rank."""
        return {
            slot.parameter: used
            for bucket in self._buckets
            for slot, used in zip(bucket.layout.slots, self._used[bucket.index], strict=True)
        }

    def started(self, bucket: Bucket) -> bool:
        """Whether this backward has begun the exchange of a bucket."""
        return self._running and self._started[bucket.index]

    def received(self, bucket: Bucket) -> bool:
        """Whether this backward has produced a gradient for one of a bucket's parameters."""
        return self._running and len(self._awaited[bucket.index]) < len(bucket.parameters)

    def repartition(self) -> bool:
        """Drops averaged gradients of earlier backwards after a repartition. Returns whether there were any."""
        carried = bool(self._carried)
        self._carried.clear()
        return carried

    def show(self, used: Sequence[bool]) -> None:
        """Sets a gradient on every parameter that any rank has used, as in a single process."""
        for bucket in self._buckets:
            for position, slot in enumerate(bucket.layout.slots):
                if used[slot.parameter] and bucket.parameters[position].grad is None:
                    bucket.parameters[position].grad = self._views[bucket.index][position]

    def clear(self, set_to_none: bool) -> None:
        """Clears all gradients."""
        if self._running:
            # Backward has failed with some buckets in flight. Complete the exchange, as the other ranks do, so that the
            # next backward's gradients do not count as the rest of this one.
            self.complete()
        self.reduced = False
        self._carried.clear()
        for bucket in self._buckets:
            if not set_to_none:
                bucket.grads.zero_()
            for parameter in bucket.parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enters a context in which ranks only accumulate gradients; the first backward after it exchanges the sum."""
        before, self._allowed = self._allowed, False
        try:
            yield
        finally:
            self._allowed = before
