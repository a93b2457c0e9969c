"""Loss scale of `torch.amp.GradScaler`, agreed per round, so that only gradients of the same scale are averaged.

A rank that joins, or was excluded, rescales its gradients to the other ranks' scale before it sends them, and its
scaler adopts their scale and growth counter. If its gradients are left out, its program may be at a step with a scaler
while the other ranks are at one without, or the reverse: it gets the averaged gradients in the scale that it expects.
If scales still differ, as when a program has set one of them, all ranks skip the step and continue with the smallest.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from stormtorch.runtime.memory.bucket import Bucket

_MOST = float(torch.finfo(torch.float32).max)
# Growth counters travel as float32, which represents all integers up to this.
MOST_GROWTH = 1 << 24


class Scale(NamedTuple):
    """The scale of a rank's gradients, as ranks report it."""

    scale: float = -1.0
    """0 if no scaler scaled the loss; negative if unknown because there was no backward."""
    growth: float = 0.0
    """Steps since the scale last grew or shrank."""


UNKNOWN = Scale()


class _Scaled(NamedTuple):
    """A running backward of a loss that a scaler has scaled."""

    task: int
    scaler: weakref.ref[torch.amp.GradScaler]
    scale: torch.Tensor


# By thread: ranks that are threads of one process run separate backwards.
_running: dict[int, _Scaled] = {}


def watch_scalers() -> None:
    """Patches `GradScaler` to record which scaler scaled the loss of a backward: torch does not report it."""
    plain = torch.amp.GradScaler.scale
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = plain(self, outputs)
        if self.is_enabled() and not torch.compiler.is_compiling():
            now = self._get_scale_async()
            if now is not None:
                _watch_backward(weakref.ref(self), now.detach().clone(), scaled)
        return scaled

    plain_unscale = torch.amp.GradScaler.unscale_

    @functools.wraps(plain_unscale)
    def unscale_(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        session = vars(optimizer).get("session")
        if session is not None:
            session.settle_gradients()  # it changes the optimizer's gradients; the program may have changed the model's
        plain_unscale(self, optimizer)

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]


def _watch_backward(scaler: weakref.ref[torch.amp.GradScaler], scale: torch.Tensor, scaled: Any) -> None:
    def began(_gradient: torch.Tensor) -> None:
        thread, task = threading.get_ident(), torch._C._current_graph_task_id()
        _running[thread] = _Scaled(task, scaler, scale)
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_ended, thread))

    for each in scaled if isinstance(scaled, list | tuple) else [scaled]:
        if isinstance(each, list | tuple):
            _watch_backward(scaler, scale, each)
        elif isinstance(each, torch.Tensor) and each.requires_grad:
            each.register_hook(began)  # type: ignore[no-untyped-call]  # torch's


def _ended(thread: int) -> None:
    _running.pop(thread, None)


def _current() -> _Scaled | None:
    task = torch._C._current_graph_task_id()
    for each in _running.values():
        if each.task == task:
            return each
    return _running.get(threading.get_ident())  # a backward within a backward, as with checkpointing


class LossScale:
    """The scale of one session's gradients, on one rank."""

    def __init__(self) -> None:
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self._used_scale: torch.Tensor | None = None
        """Scale with which the gradients of this backward were computed; None if there are none."""
        self._bare = False
        """Whether this backward's loss was scaled by no scaler."""
        self._incoming_scale: Scale | None = None
        """Scale of the other ranks that this rank's scaler has not adopted yet."""
        self._wanted: float | None = None
        """Scale to which this rank rescales its gradients before it sends them; None leaves them as they are."""
        self._at: dict[int, float] = {}
        """Scale of each rescaled bucket's gradients."""
        self._left_out = False
        self.shown = 1.0
        """Factor on the averaged gradients that this rank's program expects."""

    # --- views --------------------------------------------------------------------------------------------------------

    def reported(self) -> str:
        """Returns the scale that this rank reports to joining ranks; empty if it has none."""
        state = self._state()
        return "" if state is None else f"{state.scale!r} {state.growth!r}"

    def joined(self, reported: str) -> None:
        """Takes the other ranks' scale, because this rank has just joined or was excluded."""
        try:
            scale, growth = map(float, reported.split())
        except ValueError:
            return
        if 0.0 < scale <= _MOST and 0.0 <= growth <= MOST_GROWTH:
            self._incoming_scale = Scale(scale, growth)

    # --- a backward and its round -------------------------------------------------------------------------------------

    def begins(self) -> None:
        """Called at the first gradient of a backward."""
        found = _current()
        self._bare = found is None
        self._at.clear()
        if found is not None:
            if found.scale is not self._used_scale:
                self._wanted = None
            self._scaler, self._used_scale = found.scaler, found.scale

    def left_out(self) -> None:
        """Called when this rank's gradients become zeros, which fit every scale."""
        self._left_out = True

    def fit(self, bucket: Bucket) -> None:
        """Rescales a bucket's gradients to the other ranks' scale, before they are sent."""
        if self._incoming_scale is not None or self._wanted is not None:
            self._fit(bucket)

    @torch.no_grad()
    def _fit(self, bucket: Bucket) -> None:
        if self._incoming_scale is not None and self._used_scale is not None and not self._bare:
            self._wanted = self._incoming_scale.scale
            self._adopt(self._incoming_scale)
        if self._wanted is None or self._used_scale is None:
            return
        before = self._at.get(bucket.index)
        before = float(self._used_scale) if before is None else before
        if before != self._wanted:
            bucket.grads.mul_(self._wanted / before)
        self._at[bucket.index] = self._wanted

    def report(self, buckets: Iterable[Bucket]) -> Scale:
        """Returns the scale that this rank reports for its gradients."""
        state = self._state()
        if self._left_out:
            return UNKNOWN
        if self._bare:
            # Zeros fit every scale: ranks without data send them.
            return Scale(0.0) if any(bool(bucket.grads.any()) for bucket in buckets) else UNKNOWN
        if state is None or self._incoming_scale is not None:
            return UNKNOWN if self._incoming_scale is None else self._incoming_scale
        if self._used_scale is None:
            return state
        return Scale(float(self._used_scale) if self._wanted is None else self._wanted, state.growth)

    def agree(self, scales: Mapping[int, Scale]) -> str:
        """Agrees on one scale for all ranks.

        Args:
            scales: Reported scale of each rank, by rank label.

        Returns:
            Why the gradients of this round must not be used; empty if they may be.

        Raises:
            ValueError: Some ranks scale their loss and others do not.
        """
        left_out, bare_here = self._left_out, self._bare or self._used_scale is None
        self._used_scale = self._wanted = None
        self._left_out = self._bare = False
        self.shown = 1.0
        known = {rank: each for rank, each in scales.items() if each.scale > 0.0}
        bare = [rank for rank, each in scales.items() if each.scale == 0.0]
        if not known:
            if left_out and not bare_here and (own := self._state()) is not None:
                self.shown = own.scale
            return ""
        if bare:
            raise ValueError(
                f"rank {min(bare)} has scaled its loss by no GradScaler, and rank {min(known)} by "
                f"{known[min(known)].scale:g}: their gradients have no mean; use a GradScaler on all ranks, or on none"
            )
        agreed = min(known.values())
        if left_out and bare_here:
            self.shown = 1.0 / agreed.scale
        differ = len({each.scale for each in known.values()}) > 1
        if differ:
            agreed = Scale(agreed.scale, 0.0)
        state = self._state()
        if state is None:
            self._incoming_scale = agreed
        elif state != agreed:
            self._adopt(agreed)
        if not differ:
            return ""
        which = ", ".join(f"{each.scale:g} on rank {rank}" for rank, each in sorted(known.items()))
        return f"this step is skipped: its gradients have different loss scales: {which}; all go on from the least"

    def _state(self) -> Scale | None:
        scaler = self._scaler() if self._scaler is not None else None
        state = {} if scaler is None else scaler.state_dict()
        if not state or not 0.0 < state["scale"] <= _MOST or not math.isfinite(state["scale"]):
            return None
        return Scale(float(state["scale"]), float(min(state["_growth_tracker"], MOST_GROWTH)))

    def _adopt(self, agreed: Scale) -> None:
        self._incoming_scale = None
        scaler = self._scaler() if self._scaler is not None else None
        if scaler is not None and scaler.is_enabled():
            state = scaler.state_dict()
            scaler.load_state_dict(state | {"scale": agreed.scale, "_growth_tracker": int(agreed.growth)})
