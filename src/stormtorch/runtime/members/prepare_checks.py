"""Checks of `prepare`: rejects models and optimizers that cannot be trained over the network."""

import logging
from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from stormtorch.exchange.exchange import WIRE_DTYPES
from stormtorch.runtime.members.wrappers import refuse_wrapped

_log = logging.getLogger("stormtorch")
# Names of parameters in one warning; more are only counted.
_MOST_NAMES = 8


def check_model(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Raises a ValueError unless the model is plain and has at least one of the optimizer's parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for parameter in parameters):
        raise ValueError(
            "the optimizer has none of the model's parameters: make it from model.parameters() of this very model, "
            "not of a copy or of what it was before it was converted"
        )
    refuse_wrapped(model)
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ValueError("prepare() takes the place of FSDP, and does not support DTensors: give it a plain model")


def check_parameters(parameters: Sequence[nn.Parameter]) -> None:
    """Raises a ValueError if a parameter occurs twice, or its dtype, layout or device cannot be sent."""
    seen: set[int] = set()
    for number, parameter in enumerate(parameters):
        if parameter.requires_grad and parameter.dtype not in WIRE_DTYPES:
            raise ValueError(
                f"parameter {number} is {parameter.dtype}: only float32, bfloat16 and float16 can be prepared"
            )
        if id(parameter) in seen:
            raise ValueError(f"parameter {number} is in the optimizer twice")
        seen.add(id(parameter))
        if parameter.is_sparse or parameter.is_meta:
            raise ValueError(f"parameter {number} is {'sparse' if parameter.is_sparse else 'on meta'}")
    devices = {parameter.device.type for parameter in parameters}
    if not devices <= {"cpu", "cuda"}:
        raise ValueError(f"parameters must be on the CPU or on CUDA, got {', '.join(sorted(devices))}")


def check_frozen(frozen: Sequence[nn.Parameter]) -> None:
    """Raises a RuntimeError if a parameter that was frozen at `prepare` now requires a gradient."""
    if any(parameter.requires_grad for parameter in frozen):
        raise RuntimeError(
            "a parameter that was frozen when the model was prepared now requires a gradient, but has no place in what "
            "ranks exchange: let all that will ever be trained require a gradient at prepare(), then freeze it"
        )


def warn_of_left_out(model: nn.Module, prepared: Sequence[nn.Parameter], rank: int) -> None:
    """Warns of parameters that require a gradient but belong to no prepared optimizer."""
    known = {id(parameter) for parameter in prepared}
    left_out = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in known]
    if left_out:
        more = len(left_out) - _MOST_NAMES
        names = ", ".join(left_out[:_MOST_NAMES]) + (f" and {more} others" if more > 0 else "")
        _log.warning(
            "rank %d: no prepared optimizer has %s: they require a gradient and will never change. Give them to an "
            "optimizer before prepare(), or freeze them",
            *(rank, names),
        )
