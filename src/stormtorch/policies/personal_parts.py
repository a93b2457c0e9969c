"""Personal parts of a model: modules and parameters that ranks never exchange."""

from collections.abc import Sequence

from torch import nn


def check_parts(model: nn.Module, parts: Sequence[nn.Module | nn.Parameter]) -> None:
    """Checks that parts belong to the model.

    Raises:
        TypeError: A part is neither a module nor a parameter.
        ValueError: A part does not belong to the model.
    """
    modules = {id(each) for each in model.modules()}
    parameters = {id(each) for each in model.parameters()}
    for index, part in enumerate(parts):
        if not isinstance(part, nn.Module | nn.Parameter):
            raise TypeError(f"personal[{index}] must be a module or a parameter, got {type(part).__name__}")
        if id(part) not in (modules if isinstance(part, nn.Module) else parameters):
            raise ValueError(f"personal[{index}] is not part of the model: name modules and parameters of it")


def names_of(model: nn.Module, parts: Sequence[nn.Module | nn.Parameter]) -> frozenset[str]:
    """Returns the names of all parameters and buffers in personal parts, which must have been checked."""
    modules = {id(module) for part in parts if isinstance(part, nn.Module) for module in part.modules()}
    parameters = {id(each) for part in parts if isinstance(part, nn.Module) for each in part.parameters()}
    parameters |= {id(part) for part in parts}
    buffers = (
        name
        for prefix, module in model.named_modules()
        if id(module) in modules
        for name, _ in module.named_buffers(prefix, recurse=False)
    )
    return frozenset(name for name, each in model.named_parameters() if id(each) in parameters).union(buffers)
