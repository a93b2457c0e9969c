"""Gradient norms and clipping over shards of all ranks.

After backward, a rank has the averaged gradient of its own shard only. A parameter's `grad` is then a
`ShardedGradient`, whose `norm()` and `torch.linalg.vector_norm`, which `torch.nn.utils.clip_grad_norm_` calls, give the
norm of the averaged gradient over all ranks. Computing it is a collective: all ranks must do it, as all ranks must call
`clip_grad_norm_`. Other sums and means over elements cover this rank's values only, and a warning says so once. To
detect them, results computed from a `ShardedGradient` are marked as `PartialGradient`.

If the optimizer's gradient is in other memory, an operation that changes a `ShardedGradient` in place, as clipping
does, is repeated there.
"""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.errors import StormError
from stormtorch.exchange.waiting import in_call
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import Piece
from stormtorch.runtime.memory.personal import is_personal

_log = logging.getLogger("stormtorch")
# In-place operations that do not change values.
_HARMLESS = ("requires_grad_", "detach_")
_OPERATORS = frozenset(f"__i{each}__" for each in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow"))
_MIXING = """
    sum nansum mean nanmean std var std_mean var_mean norm linalg_norm linalg_vector_norm linalg_matrix_norm
    _foreach_norm max min amax amin aminmax prod median nanmedian quantile nanquantile kthvalue topk sort argsort
    argmax argmin cumsum logsumexp softmax count_nonzero histc dot vdot inner outer ger matmul __matmul__ __rmatmul__
    mm bmm mv addmm einsum tensordot cosine_similarity normalize dist cdist linalg_svd linalg_qr linalg_eigh svd
    linalg_svdvals trace
"""
_OVER_ELEMENTS = frozenset(_MIXING.split())
"""Operations whose results depend on several elements."""


class PartialGradient(torch.Tensor):
    """A tensor that the program computed from gradients: correct only for the elements that this rank owns."""

    norms_ref: weakref.ref[GradientNorms]
    parameter: int = -1

    @property
    def norms(self) -> GradientNorms:
        """Computes the norm. Held weakly, as the garbage collector does not see that a parameter holds its gradient."""
        norms = self.norms_ref()
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
        if func is torch._foreach_norm:
            order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0))
            return tuple(torch.linalg.vector_norm(each, order) for each in args[0])
        requested = _requested_order(func, args, kwargs)
        if requested is not None and isinstance(args[0], PartialGradient) and args[0].norms.knows(args[0]):
            return args[0].norms.of(args[0].parameter, requested)
        if func is torch.Tensor.detach_ and isinstance(args[0], ShardedGradient):
            return args[0]  # torch detaches no view in place, and it has no graph
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if not _in_place(name):
                result = func(*args, **kwargs)
                return _mark_result(name, result, args, kwargs)
            targets = args[0] if isinstance(args[0], list | tuple) else args[:1]
            if any(isinstance(each, nn.Parameter) for each in targets):
                _mark_result(name, None, args, kwargs)
            parts = [each for each in targets if isinstance(each, PartialGradient)]
            changed = [each for each in parts if each.norms.change_own(each, func, args, kwargs)]
            result = func(*args, **kwargs)
            for each in changed:
                each.norms.show(each)
            return result


class ShardedGradient(PartialGradient):
    """A parameter's gradient: averaged only for the elements that this rank owns, but with the norm over all ranks."""


def _in_place(name: str) -> bool:
    return name in _OPERATORS or (name.endswith("_") and not name.endswith("__") and name not in _HARMLESS)


def _requested_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Returns the order of the requested norm over all elements; None if the call is something else."""
    if func is torch.linalg.vector_norm:
        known, order = "ord", 2.0
    elif func is torch.Tensor.norm or func is torch.norm:
        known, order = "p", 2.0
    elif func is torch.linalg.norm:
        known, order = "ord", None
    else:
        return None
    given = args[1] if len(args) > 1 else kwargs.get(known, order)
    others = (*args[2:], *(each for name, each in kwargs.items() if name not in (known, "input", "self", "A", "x")))
    if any(each is not None and each is not False for each in others):
        return None
    if func is torch.linalg.norm:
        return 2.0 if given is None else None
    return 2.0 if given in ("fro", None) else float(given) if isinstance(given, int | float) else None


def _mark_result(name: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Marks a result of gradients as `PartialGradient`, and warns if the operation mixes elements."""
    part = _first((*args, *kwargs.values()))
    if part is None or torch._C._current_graph_task_id() != -1:
        return result
    norms = part.norms_ref()
    if norms is None or not norms.averaged() or norms.group.size == 1:
        return result
    if name in _OVER_ELEMENTS or result is None:
        norms.warn_mixed(name)
        return result
    if type(result) is torch.Tensor:
        return _marked(result, part)
    if type(result) in (list, tuple):
        return type(result)(_marked(each, part) if type(each) is torch.Tensor else each for each in result)
    return result


def _marked(result: torch.Tensor, part: PartialGradient) -> torch.Tensor:
    if not result.is_floating_point() or not result.dim():
        return result
    same = part.parameter >= 0 and result.numel() == part.numel()
    kind = (
        ShardedGradient
        if same and isinstance(part, ShardedGradient) and result.data_ptr() == part.data_ptr()
        else PartialGradient
    )
    marked = result.as_subclass(kind)
    marked.norms_ref, marked.parameter = part.norms_ref, part.parameter if same else -1
    return marked


def _first(values: Iterable[Any]) -> PartialGradient | None:
    for each in values:
        if isinstance(each, PartialGradient):
            return each
        if isinstance(each, list | tuple):
            found = _first(each)
            if found is not None:
                return found
    return None


@dataclass(frozen=True, slots=True)
class Clip:
    """One call of `clip_grad_norm_`."""

    parameters: frozenset[int]
    max_norm: float
    norm_type: float

    def factor(self, total: torch.Tensor) -> torch.Tensor:
        """Returns the factor for gradients whose norm is `total`."""
        return (self.max_norm / (total + 1e-6)).clamp(max=1.0)


class GradientNorms:
    """Computes the norms of all parameters' gradients in one exchange of all ranks.

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
        """Why only `clip_grad_norm_` may compute norms; None if there is no such limit."""
        self.idle = False
        """Whether the program's gradients belong to no step, so that it gets the norms of the last exchange."""
        self.clips: list[Clip] = []
        """Calls of `clip_grad_norm_` since this was last emptied; only recorded if there is a `refusal`."""
        self.written: Callable[[], None] = lambda: None
        """Called when `clip_grad_norm_` has changed averaged gradients."""
        self._latest: dict[float, torch.Tensor] = {}
        self.clipping = False
        self.writable: Callable[[Bucket], None] = lambda _bucket: None
        """Called before a bucket's averaged gradients change, because they may be in flight to a standby."""
        self.settle: Callable[..., bool] = lambda **_: False
        """Applies the program's changes to its gradients."""
        self.refresh: Callable[[Bucket], None] = lambda _bucket: None
        """Shows the program the changed gradients of the optimizer."""
        self.averaged: Callable[[], bool] = lambda: False
        """Returns whether the program sees averaged gradients."""
        self._members: dict[int, nn.Parameter] = {}
        self._warned: set[str] = set()
        self.on_missing: Callable[[Sequence[int]], None] = lambda _ranks: None
        """Called with the transport ranks whose part of a norm did not arrive because they are gone."""

    def gradient(self, bucket: Bucket, position: int) -> ShardedGradient:
        """Returns a parameter's gradient as a tensor that computes its norm with this object."""
        gradient = bucket.grad_views[position].as_subclass(ShardedGradient)
        gradient.norms_ref, gradient.parameter = weakref.ref(self), bucket.layout.slots[position].parameter
        return gradient

    def of(self, parameter: int, order: float) -> torch.Tensor:
        """Returns the norm of one gradient. One exchange computes all norms; a repeated request starts another."""
        if order != self._order or parameter in self._served:
            self._norms, self._order = list(self._compute(order).unbind()), order
            self._served.clear()
        self._served.add(parameter)
        return self._norms[parameter]

    def forget(self) -> None:
        """Drops computed norms, because gradients have changed."""
        self._order = math.nan

    def knows(self, part: PartialGradient) -> bool:
        """Whether a tensor is a gradient whose norm is taken over all ranks."""
        if torch._C._current_graph_task_id() != -1:
            return False  # called by a hook of the program during backward
        return isinstance(part, ShardedGradient) or (
            part.parameter >= 0 and self._parameter(part.parameter).grad is part
        )

    def _parameter(self, number: int) -> torch.Tensor:
        if not self._members:
            for bucket in self._buckets:
                self._members.update(
                    (slot.parameter, each) for slot, each in zip(bucket.layout.slots, bucket.parameters, strict=True)
                )
        return self._members[number]

    def warn_mixed(self, what: str) -> None:
        """Warns once that the program computes a value that differs between ranks."""
        self._warn_once(
            "mixed",
            f"the program computes {what!r} from gradients between backward and step. They are averaged only where "
            "this rank owns them, so that every rank gets another result: clip by clip_grad_norm_, take norms by "
            "p.grad.norm() or torch.linalg.vector_norm, or prepare with "
            "policy=GradientAveraging(reliability=EXACT), under which every rank has all averaged gradients",
        )

    def warn_replaced(self) -> None:
        """Warns once that the program has set gradients that are not computed from the averaged ones."""
        if self.group.size > 1:
            self._warn_once(
                "set",
                "the program has set p.grad between backward and step to a tensor that is not computed from it: each "
                "rank uses the part of it that it owns, and clip_grad_norm_ of it is by a norm of this rank alone",
            )

    def _warn_once(self, key: str, words: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("rank %d: %s", self.group.rank, words)

    def scale_own(self, parameters: set[int], factor: torch.Tensor) -> None:
        """Multiplies this rank's pieces of the given parameters' gradients by a factor."""
        self.forget()
        if not self.idle:
            self.settle()
            self._scale(parameters, factor)
            for bucket in self._buckets:
                self.refresh(bucket)

    def _scale(self, parameters: Iterable[int], factor: torch.Tensor) -> None:
        for parameter in parameters:
            for bucket, piece in self._pieces().get(parameter, ()):
                self.writable(bucket)
                bucket.within_own(piece, bucket.step_grads).mul_(factor)
        self.written()

    def clip(self, clip: Clip) -> None:
        """Repeats a call of `clip_grad_norm_` from an earlier step on the gradients of this one."""
        norms_P = self._exchange(clip.norm_type)
        total = torch.linalg.vector_norm(norms_P[sorted(clip.parameters)], clip.norm_type)
        self._scale(clip.parameters, clip.factor(total))

    def change_own(
        self, gradient: PartialGradient, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Repeats an in-place operation on a gradient, alone or in a list, on the optimizer's copy in other memory.

        Returns whether it did. If not, the changed gradient is copied to the optimizer later.
        """
        self.forget()
        own_pieces = self._pieces_apart(gradient)
        if self.idle or not self.averaged() or not isinstance(gradient, ShardedGradient) or not own_pieces:
            return False
        self.settle(replace=False)
        several = isinstance(args[0], list | tuple)
        position = next((at for at, each in enumerate(args[0]) if each is gradient), 0) if several else 0
        given = [*args[1:], *kwargs.values()]
        if any(isinstance(each, torch.Tensor) and each.dim() and each.shape != gradient.shape for each in given):
            return False
        for bucket, piece in own_pieces:

            def part(value: Any, piece: Piece = piece) -> Any:
                if several and isinstance(value, list | tuple):
                    return [part(value[position])]
                if not isinstance(value, torch.Tensor) or value.shape != gradient.shape:
                    return value
                return value.reshape(-1)[piece.offset : piece.offset + piece.count]

            self.writable(bucket)
            own = bucket.within_own(piece, bucket.step_grads)
            rest = {name: part(value) for name, value in kwargs.items()}
            func([own] if several else own, *(part(value) for value in args[1:]), **rest)
        return True

    def show(self, gradient: PartialGradient) -> None:
        """Shows the program the optimizer's copy of a gradient, which has more bits, after an operation on it."""
        for bucket, _ in self._pieces_apart(gradient):
            self.refresh(bucket)

    def _pieces_apart(self, gradient: PartialGradient) -> list[tuple[Bucket, Piece]]:
        """Returns this rank's pieces of a parameter, if the optimizer's gradients are in other memory."""
        pieces = self._pieces().get(gradient.parameter, ())
        return [(bucket, piece) for bucket, piece in pieces if bucket.step_grads is bucket.own_grads]

    def _pieces(self) -> dict[int, list[tuple[Bucket, Piece]]]:
        """Returns this rank's pieces of each parameter."""
        if not self._by_parameter:
            for bucket in self._buckets:
                for piece in bucket.pieces():
                    self._by_parameter.setdefault(piece.parameter, []).append((bucket, piece))
        return self._by_parameter

    def begin_view(self, group: Group) -> None:
        """Continues with other ranks, after shards were repartitioned."""
        self.group = group
        self._by_parameter.clear()
        self.forget()

    @torch.no_grad()
    def _compute(self, order: float) -> torch.Tensor:
        if self.refusal is not None and not self.clipping:
            raise StormError(self.refusal)
        self._complete()
        if not self.idle:
            self.settle(replace=False)
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
                norm = torch.linalg.vector_norm(bucket.within_own(piece, bucket.step_grads), order)
                own_P[piece.parameter] = norm**order if finite else norm
        all_NP = [torch.zeros(self._parameters, device="cpu") for _ in range(group.size)]
        all_NP[group.rank].copy_(own_P)
        with in_call("clip_grad_norm_()"):
            arrivals = collectives.all_gather(group, all_NP, all_NP[group.rank]).wait()
        links = [each for arrival in arrivals for each in arrival.links().items()]
        if gone := [rank for rank, (chunks, arrived) in links if arrived < chunks]:
            self.on_missing(gone)
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

    `torch.nn.utils.clip_grad_norm_` gives the same result, but this function only scales this rank's shard. Every rank
    must call it. Outside a prepared model under an owner policy, such as `BoundedDrift`, it calls torch's function.

    Personal parameters are clipped separately, by the norm of this rank's own gradients: otherwise ranks would scale
    the shared gradients by different factors. Torch's function does not make this distinction.

    Args:
        parameters: Parameters whose gradients to clip.
        max_norm: Norm to which larger gradients are scaled down.
        norm_type: Order of the norm: 2 is the length, `math.inf` the largest element.
        error_if_nonfinite: Whether to raise an error if the norm is not finite.
        foreach: Passed on to torch.

    Returns:
        The norm before clipping, of the shared parameters; of the personal ones if all are personal.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    personal = [each for each in given if is_personal(each)]
    if personal and len(personal) < len(given):
        rest = [each for each in given if not is_personal(each)]
        total = clip_grad_norm_(rest, max_norm, norm_type, error_if_nonfinite, foreach)
        torch.nn.utils.clip_grad_norm_(personal, max_norm, norm_type, error_if_nonfinite, foreach)
        return total
    gradients = [each.grad for each in given if isinstance(each.grad, ShardedGradient)]
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
