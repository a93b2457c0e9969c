"""Norms of gradients whose shards lie on different ranks.

After backward, a rank has the averaged gradient of its own shard only. A parameter's `grad` is then a `Gradient`: a
tensor like any other, except that `torch.linalg.vector_norm` of it, which `torch.nn.utils.clip_grad_norm_` calls, is
the norm of the averaged gradient over all ranks. So all ranks must compute it, as all must call `clip_grad_norm_`.
An operation that changes a `Gradient` in place, as clipping does, also changes the optimizer's gradient, which is in
other memory.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.errors import StormError
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.layout import Piece
from stormtorch.runtime.personal import is_personal
from stormtorch.transport.waiting import doing

# In-place operations that do not change values.
_HARMLESS = ("requires_grad_", "detach_")


class Gradient(torch.Tensor):
    """A parameter's gradient on this rank: averaged only where the rank owns it, but with the norm of the whole."""

    home: weakref.ref[Norms]
    parameter: int

    @property
    def norms(self) -> Norms:
        """Computes the norm. Held weakly, as the garbage collector does not see that a parameter holds its gradient."""
        norms = self.home()
        assert norms is not None, "the optimizer of this model is gone"
        return norms

    def plain(self) -> torch.Tensor:
        """Returns the same values as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.linalg.vector_norm and isinstance(args[0], Gradient):
            order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0))
            if len(args) < 3 and not set(kwargs) - {"ord"}:
                return args[0].norms.of(args[0].parameter, order)
        if func is torch._foreach_norm:
            order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0))
            return tuple(torch.linalg.vector_norm(each, order) for each in args[0])
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if name.endswith("_") and not name.endswith("__") and name not in _HARMLESS:
                for each in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                    if isinstance(each, Gradient):
                        each.norms.change_own(each, func, args, kwargs)
            return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Clip:
    """One call of `clip_grad_norm_`."""

    parameters: frozenset[int]
    max_norm: float
    norm_type: float

    def factor(self, total: torch.Tensor) -> torch.Tensor:
        """Returns what gradients of this norm are multiplied by."""
        return (self.max_norm / (total + 1e-6)).clamp(max=1.0)


class Norms:
    """The norms of all parameters' gradients, computed in one exchange of all ranks.

    Args:
        group: Ranks that take part.
        buckets: Buckets that hold the gradients.
        parameters: Number of parameters.
        complete: Called first; returns when gradients are averaged.
    """

    def __init__(
        self,
        group: Group,
        buckets: Sequence[Bucket],
        parameters: int,
        complete: Callable[[], None],
    ) -> None:
        self.group = group
        self._buckets = buckets
        self._parameters = parameters
        self._complete = complete
        self._norms: list[torch.Tensor] = []
        self._order = math.nan
        self._served: set[int] = set()
        self._by_parameter: dict[int, list[tuple[Bucket, Piece]]] = {}
        self.refusal: str | None = None
        """Why norms cannot be computed but by `clip_grad_norm_`, if they cannot."""
        self.idle = False
        """Whether the program's gradients are of no step, so that it gets the norms of the last exchange."""
        self.clips: list[Clip] = []
        """What `clip_grad_norm_` has done since this was last emptied; only kept where there is a `refusal`."""
        self.written: Callable[[], None] = lambda: None
        """Called when `clip_grad_norm_` has changed averaged gradients."""
        self._latest: dict[float, torch.Tensor] = {}
        self.clipping = False
        self.writable: Callable[[Bucket], None] = lambda _bucket: None
        """Called before a bucket's averaged gradients change, as they may be on their way to a standby."""
        self.lacking: Callable[[Sequence[int]], None] = lambda _ranks: None
        """Called with the ranks of the transport that were gone before they had told their part of a norm."""

    def gradient(self, bucket: Bucket, place: int) -> Gradient:
        """Returns a parameter's gradient as a tensor that asks this object for its norm."""
        gradient = bucket.grad_views[place].as_subclass(Gradient)
        gradient.home, gradient.parameter = weakref.ref(self), bucket.layout.slots[place].parameter
        return gradient

    def of(self, parameter: int, order: float) -> torch.Tensor:
        """Returns the norm of one gradient. An exchange computes all norms; asking for one twice makes another."""
        if order != self._order or parameter in self._served:
            self._norms, self._order = list(self._ask(order).unbind()), order
            self._served.clear()
        self._served.add(parameter)
        return self._norms[parameter]

    def forget(self) -> None:
        """Drops computed norms, as gradients have changed."""
        self._order = math.nan

    def scale_own(self, parameters: set[int], factor: torch.Tensor) -> None:
        """Multiplies this rank's pieces of some parameters' gradients by a factor."""
        self.forget()
        if not self.idle:
            self._scale(parameters, factor)

    def _scale(self, parameters: Iterable[int], factor: torch.Tensor) -> None:
        for parameter in parameters:
            for bucket, piece in self._pieces().get(parameter, ()):
                self.writable(bucket)
                bucket.within_own(piece, bucket.own_grads).mul_(factor)
        self.written()

    def clip(self, clip: Clip) -> None:
        """Repeats what `clip_grad_norm_` did in an earlier step, for the gradients of this one."""
        norms_P = self._exchange(clip.norm_type)
        total = torch.linalg.vector_norm(norms_P[sorted(clip.parameters)], clip.norm_type)
        self._scale(clip.parameters, clip.factor(total))

    def change_own(
        self, gradient: Gradient, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Repeats an in-place operation on a gradient, alone or in a list, for the optimizer's copy of it."""
        self.forget()
        if self.idle:
            return
        several = isinstance(args[0], list | tuple)
        place = next((at for at, each in enumerate(args[0]) if each is gradient), 0) if several else 0
        for bucket, piece in self._pieces().get(gradient.parameter, ()):

            def part(value: Any, piece: Piece = piece) -> Any:
                if several and isinstance(value, list | tuple):
                    return [part(value[place])]
                if not isinstance(value, torch.Tensor) or value.shape != gradient.shape:
                    return value
                return value.reshape(-1)[piece.offset : piece.offset + piece.count]

            self.writable(bucket)
            own = bucket.within_own(piece, bucket.own_grads)
            rest = {name: part(value) for name, value in kwargs.items()}
            func([own] if several else own, *(part(value) for value in args[1:]), **rest)

    def _pieces(self) -> dict[int, list[tuple[Bucket, Piece]]]:
        """Returns this rank's pieces of each parameter."""
        if not self._by_parameter:
            for bucket in self._buckets:
                for piece in bucket.pieces():
                    self._by_parameter.setdefault(piece.parameter, []).append((bucket, piece))
        return self._by_parameter

    def begin_view(self, group: Group) -> None:
        """Goes on with other ranks, after shards were cut anew."""
        self.group = group
        self._by_parameter.clear()
        self.forget()

    @torch.no_grad()
    def _ask(self, order: float) -> torch.Tensor:
        if self.refusal is not None and not self.clipping:
            raise StormError(self.refusal)
        self._complete()
        if self.idle:
            return self._latest.get(order, torch.zeros(self._parameters, device=self._buckets[0].device))
        return self._exchange(order)

    @torch.no_grad()
    def _exchange(self, order: float) -> torch.Tensor:
        group, finite = self.group, math.isfinite(order)
        device = self._buckets[0].device
        own_P = torch.zeros(self._parameters, device=device)
        for bucket in self._buckets:
            for piece in bucket.pieces():
                norm = torch.linalg.vector_norm(bucket.within_own(piece, bucket.own_grads), order)
                own_P[piece.parameter] = norm**order if finite else norm
        all_NP = [torch.zeros(self._parameters, device="cpu") for _ in range(group.size)]
        all_NP[group.rank].copy_(own_P)
        with doing("clip_grad_norm_()"):
            arrivals = collectives.all_gather(group, all_NP, all_NP[group.rank]).wait()
        links = [each for arrival in arrivals for each in arrival.links().items()]
        if gone := [rank for rank, (chunks, arrived) in links if arrived < chunks]:
            self.lacking(gone)
        together = torch.stack(all_NP).to(device)
        norms_P = together.sum(0) ** (1.0 / order) if finite else together.amax(0)
        if self.refusal is not None:
            self._latest[order] = norms_P
        return norms_P


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clips the gradients of a prepared model by their norm over all ranks' shards, the same on every rank.

    `torch.nn.utils.clip_grad_norm_` gives the same result; this function touches only what the rank owns. Every rank
    must call it. It leaves gradients of anything but a prepared model under an owner policy, as `BoundedDrift`, to
    torch's.

    Personal parameters are clipped apart, by the norm of this rank's own gradients of them: ranks that scaled what they
    share by different factors would pull it in different directions. Torch's function does not know of that.

    Args:
        parameters: Parameters whose gradients to clip.
        max_norm: Norm to which larger gradients are scaled down.
        norm_type: Order of the norm: 2 is the length, `math.inf` the largest element.
        error_if_nonfinite: Whether to raise an error if the norm is not finite.
        foreach: Passed on to torch.

    Returns:
        The norm before clipping; that of the shared parameters, unless all are personal.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    personal = [each for each in given if is_personal(each)]
    if personal and len(personal) < len(given):
        rest = [each for each in given if not is_personal(each)]
        total = clip_grad_norm_(rest, max_norm, norm_type, error_if_nonfinite, foreach)
        torch.nn.utils.clip_grad_norm_(personal, max_norm, norm_type, error_if_nonfinite, foreach)
        return total
    gradients = [each.grad for each in given if isinstance(each.grad, Gradient)]
    if not gradients or len(gradients) < sum(each.grad is not None for each in given):
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    # A model with several optimizers has gradients of several kinds.
    kinds = {id(each.norms): each.norms for each in gradients}.values()
    for norms in kinds:
        norms.clipping = len(kinds) == 1
    try:
        total = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    finally:
        for norms in kinds:
            norms.clipping = False
    for norms in kinds:
        parameters_of = frozenset(each.parameter for each in gradients if each.norms is norms)
        clip = Clip(parameters_of, float(max_norm), float(norm_type))
        if norms.refusal is not None:
            norms.clips.append(clip)
        norms.scale_own(set(parameters_of), clip.factor(total))
    return total
