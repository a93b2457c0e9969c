"""Averaged gradients as the program sees them after backward: what it does to them reaches the optimizer.

Where a bucket is float32, the program sees the very memory that the optimizer uses. Elsewhere the optimizer has values
of more bits, which keep them where the program has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stormtorch.runtime.memory.bucket import Bucket


class VisibleGradients:
    """What the program sees of the averaged gradients, in `grad` of its parameters.

    Args:
        buckets: Buckets that hold the gradients.
        views: What parameters get as their gradients, by bucket.
    """

    def __init__(self, buckets: Sequence[Bucket], views: Sequence[Sequence[torch.Tensor]]) -> None:
        self._buckets = buckets
        self._views = views
        self._before: dict[int, tuple[torch.Tensor, int]] = {}
        """What was shown last, and the version of what it shows, for buckets whose optimizer has other memory."""
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when the program has set a gradient that it has not computed from the present one."""

    def show(self) -> None:
        """Shows the program the averaged gradients of this rank's shard, where it sees gradients."""
        for bucket in self._buckets:
            bucket.show_own_gradients()
            self._note(bucket)

    @torch.no_grad()
    def refresh(self, bucket: Bucket) -> None:
        """Shows what the optimizer has, where that has changed and is in other memory."""
        if bucket.index in self._before:
            bucket.show_own_gradients()
            self._note(bucket)

    def _note(self, bucket: Bucket) -> None:
        if bucket.step_grads is bucket.own_grads:
            self._before[bucket.index] = _bits(bucket).clone(), bucket.own_grads._version

    def settle(self, *, replace: bool) -> bool:
        """Takes what the program has made of its gradients since. Returns whether it has changed any by itself.

        Args:
            replace: Whether parameters get their places in the buckets back as gradients.

        Raises:
            RuntimeError: It has changed gradients in two places, and nobody knows which comes first.
        """
        changed = False
        for bucket, views in zip(self._buckets, self._views, strict=True):
            for position, (parameter, view) in enumerate(zip(bucket.parameters, views, strict=True)):
                given = parameter.grad
                if given is None:
                    continue
                changed |= bucket.reattach_gradient(position, view, keep=given is view)
                if given is not view:
                    changed = True
                    if type(given) is torch.Tensor:
                        self.on_replaced()
                    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                        bucket.grad_views[position].copy_(given.to_dense() if given.is_sparse else given)
                    if replace:
                        parameter.grad = view
            changed |= self._merge(bucket)
        return changed

    def _merge(self, bucket: Bucket) -> bool:
        """Gives the optimizer what the program has changed, where it has other memory. Returns whether that is so."""
        return bucket.index in self._before and self._merge_apart(bucket)

    @torch.no_grad()
    def _merge_apart(self, bucket: Bucket) -> bool:
        before, version = self._before[bucket.index]
        same = before == _bits(bucket)
        if bool(same.all()):
            if version != bucket.own_grads._version:
                self.refresh(bucket)
            return False
        if version != bucket.own_grads._version:
            raise RuntimeError(
                f"gradients of {bucket.dtype} were changed through optimizer.param_groups, as by a GradScaler, and "
                "then replaced in the model's parameters: change those in place, as by p.grad.mul_()"
            )
        shown = bucket.shard(bucket.grads, bucket.rank)
        bucket.own_grads.copy_(torch.where(same, bucket.own_grads, shown.float()))
        self._note(bucket)
        return True


def _bits(bucket: Bucket) -> torch.Tensor:
    """Returns this rank's shard of what the program sees, as integers: they are equal where NaNs are."""
    shown = bucket.shard(bucket.grads, bucket.rank)
    return shown.view(torch.int32 if shown.dtype.itemsize == 4 else torch.int16)
