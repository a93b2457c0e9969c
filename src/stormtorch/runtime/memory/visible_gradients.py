"""Averaged gradients as the program sees them after backward: its changes to them reach the optimizer.

In a float32 bucket, the program sees the memory that the optimizer uses. In other buckets the optimizer has float32
copies, which keep their extra bits where the program has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stormtorch.runtime.memory.bucket import Bucket


class VisibleGradients:
    """The averaged gradients that the program sees in `grad` of its parameters.

    Args:
        buckets: Buckets that hold the gradients.
        views: Tensors that parameters get as gradients, by bucket.
    """

    def __init__(self, buckets: Sequence[Bucket], views: Sequence[Sequence[torch.Tensor]]) -> None:
        self._buckets = buckets
        self._views = views
        self._before: dict[int, tuple[torch.Tensor, int]] = {}
        """Bits shown last, and the version of the optimizer's copy, for buckets whose optimizer has other memory."""
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when the program has replaced a gradient by one that is not computed from it."""

    def show(self) -> None:
        """Copies the averaged gradients of this rank's shard to where the program sees gradients."""
        for bucket in self._buckets:
            bucket.show_own_gradients()
            self._note(bucket)

    @torch.no_grad()
    def refresh(self, bucket: Bucket) -> None:
        """Shows the optimizer's gradients again after they changed, if they are in other memory."""
        if bucket.index in self._before:
            bucket.show_own_gradients()
            self._note(bucket)

    def _note(self, bucket: Bucket) -> None:
        if bucket.step_grads is bucket.own_grads:
            self._before[bucket.index] = _bits(bucket).clone(), bucket.own_grads._version

    def settle(self, *, replace: bool) -> bool:
        """Applies the program's changes to its gradients. Returns whether there were any.

        Args:
            replace: Whether to make the gradients views of the buckets again.

        Raises:
            RuntimeError: Gradients were changed both here and in the optimizer's copy, in an unknown order.
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
        """Copies the program's changes to the optimizer's gradients, if in other memory. Returns whether it did."""
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
    """Returns this rank's shard of the visible gradients as integers, which compare equal also for NaNs."""
    shown = bucket.shard(bucket.grads, bucket.rank)
    return shown.view(torch.int32 if shown.dtype.itemsize == 4 else torch.int16)
