"""Integration with Accelerate: a `prepare` with the arguments and results of `accelerator.prepare`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stormtorch.policies.policy import Policy
from stormtorch.runtime import prepare as runtime
from stormtorch.runtime.session.session import sessions_of


def prepare(accelerator: Any, *objects: Any, policy: Policy | None = None) -> Any:
    """Prepares models with their optimizers by `stormtorch.prepare`, and all other objects by Accelerate.

    Write it in place of `accelerator.prepare(model, optimizer, loader, scheduler)`; the rest of the loop stays as it
    is. Create the group before the accelerator: `dist.init_process_group("storm")`.

    Args:
        accelerator: An `accelerate.Accelerator`.
        objects: Models, optimizers, data loaders and schedulers, in any order.
        policy: How ranks train together; None is `BoundedDrift()`.

    Returns:
        The objects, in the same order; a single one by itself.

    Raises:
        ValueError: An optimizer is passed without its model, or cannot be prepared.
    """
    return prepare_by(accelerator.prepare, accelerator, objects, policy)


def prepare_by(
    others: Callable[..., Any], accelerator: Any, objects: tuple[Any, ...], policy: Policy | None, **settings: Any
) -> Any:
    """Like `prepare`, with the function that prepares everything except models."""
    # evaluation_mode: place the model and apply mixed precision, but do not wrap it in DDP.
    models = {
        index: accelerator.prepare_model(each, evaluation_mode=True)
        for index, each in enumerate(objects)
        if isinstance(each, nn.Module)
    }
    indices = [index for index in range(len(objects)) if index not in models]
    if indices:
        rest = others(*(objects[index] for index in indices), **settings)
        models |= dict(zip(indices, rest if len(indices) > 1 else (rest,), strict=True))
    prepared = tuple(models[index] for index in range(len(objects)))
    for each in prepared:
        if isinstance(each, torch.optim.Optimizer):
            _prepare(prepared, getattr(each, "optimizer", each), policy)
    return prepared if len(prepared) > 1 else prepared[0]


def _prepare(objects: tuple[Any, ...], optimizer: torch.optim.Optimizer, policy: Policy | None) -> None:
    if "session" in optimizer.__dict__:
        return  # a second call, as the Trainer makes for a second training
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in objects:
        if isinstance(model, nn.Module) and any(id(each) in trained for each in model.parameters()):
            new = not sessions_of(model)
            runtime.prepare(model, optimizer, policy=policy)
            if new:
                # Parameters are views of flat buckets. Accelerate treats tensors of one storage as one tensor, and
                # would save only the first of them.
                model.register_state_dict_post_hook(_separate)  # type: ignore[no-untyped-call]  # torch's
            return
    raise ValueError(f"{type(optimizer).__name__} is passed without its model: pass both in one call of prepare()")


def _separate(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Copies the tensors of a state dict that are views of a bucket; tied ones stay tied.

    Others, such as frozen parameters and buffers, remain references to the model's memory, as torch returns them.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, torch.Tensor) and _is_part(value):
            key = value.data_ptr(), value.shape
            if key not in copies:
                copies[key] = value.clone()
            state[name] = copies[key]


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of a larger storage."""
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
