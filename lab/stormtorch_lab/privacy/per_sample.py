"""Per-sample gradient clipping, which bounds the influence of each sample on a step (DP-SGD)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from stormtorch.checks import check

Loss = Callable[[Any, Any], torch.Tensor]
"""`loss(model, batch)` returns the mean loss of a batch; it calls the model that it is given."""


def backward(model: nn.Module, loss: Loss, batch: Any, *, clip: float, at_once: int | None = None) -> torch.Tensor:
    """Computes the gradient of each sample, clips it to a norm, and sets the mean as gradient; in place of backward.

    `optimizer.step()` of a prepared model then exchanges these gradients. Call `optimizer.zero_grad()` before. A sample
    whose gradient is not finite counts as one without a gradient.

    Args:
        model: Any module that treats samples apart: no batch normalisation.
        loss: Returns the loss of a batch, here of one sample; it must call the model that it is given, and no other.
        batch: A tensor, or tuples and dictionaries of tensors, whose first dimension counts samples.
        clip: Norm to which larger gradients of single samples are scaled down, over all parameters that are trained.
        at_once: Samples whose gradients are computed at a time; None takes all. Fewer take less memory.

    Returns:
        The mean loss.

    Raises:
        ValueError: A setting has no sensible value, or the model cannot tell samples apart.
    """
    check(clip > 0.0, "clip", "be above 0", clip)
    check(at_once is None or at_once >= 1, "at_once", "be at least 1", at_once)
    mixing = [name for name, each in model.named_modules() if isinstance(each, _BatchNorm) and each.training]
    if mixing:
        raise ValueError(f"{mixing[0]} mixes samples by batch normalisation: use GroupNorm, or a fixed eval() of it")
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if any(each.grad is not None for each in trained.values()):
        raise ValueError("there are gradients already: call optimizer.zero_grad() before")
    leaves = [len(each) for each in pytree.tree_leaves(batch)]
    if not leaves or min(leaves) != max(leaves) or not leaves[0]:
        raise ValueError(f"batch must have tensors with the same number of samples first, at least one, got {leaves}")
    samples = leaves[0]
    values = {name: each.detach() for name, each in trained.items()}

    def one(parameters: dict[str, torch.Tensor], sample: Any) -> torch.Tensor:
        def called(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(model, parameters, args, kwargs)

        return loss(called, pytree.tree_map(lambda each: each.unsqueeze(0), sample))

    each_sample = torch.func.vmap(torch.func.grad_and_value(one), in_dims=(None, 0), randomness="different")
    sums = {name: torch.zeros_like(each) for name, each in values.items()}
    losses = []
    for first in range(0, samples, at_once or samples):
        part = pytree.tree_map(lambda each, first=first: each[first : first + (at_once or samples)], batch)
        try:
            gradients, of_part = each_sample(values, part)
        except RuntimeError as error:
            if "mutate a captured Tensor" not in str(error):
                raise
            raise ValueError(
                "forward changes its own tensors: batch statistics, or parameters that are still arriving; "
                "set overlap=False in the policy"
            ) from error
        losses.append(of_part)
        _add_clipped(sums, gradients, clip)
    for name, parameter in trained.items():
        parameter.grad = sums[name].div_(samples)
    return torch.cat(losses).mean()


def _add_clipped(sums: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], clip: float) -> None:
    """Adds gradients (B, ...) of B samples to sums, each sample's scaled down to a norm over all of them."""
    norm_B = torch.stack([torch.linalg.vector_norm(each.flatten(1), dim=1) for each in gradients.values()]).norm(dim=0)
    factor_B = torch.ones_like(norm_B) if math.isinf(clip) else clip / norm_B.clamp(min=clip)
    finite_B = norm_B.isfinite()
    factor_B = torch.where(finite_B, factor_B, 0.0)
    for name, each in gradients.items():
        known = each.masked_fill(~finite_B.view(-1, *[1] * (each.dim() - 1)), 0.0)
        sums[name] += torch.tensordot(factor_B.to(each.dtype), known, dims=1)
