"""Personal parts of a model, which never travel: the modules and parameters that a user may name as such."""

from collections.abc import Sequence

from torch import nn


def check_parts(model: nn.Module, parts: Sequence[nn.Module | nn.Parameter]) -> None:
    """Checks that parts can be personal.

    Raises:
        TypeError: A part is neither a module nor a parameter.
        ValueError: A part is not the model's.
    """
    modules = {id(each) for each in model.modules()}
    parameters = {id(each) for each in model.parameters()}
    for place, part in enumerate(parts):
        if not isinstance(part, nn.Module | nn.Parameter):
            raise TypeError(f"personal[{place}] must be a module or a parameter, got {type(part).__name__}")
        if id(part) not in (modules if isinstance(part, nn.Module) else parameters):
            raise ValueError(f"personal[{place}] is no part of the model: give modules and parameters of it")


def names_of(model: nn.Module, parts: Sequence[nn.Module | nn.Parameter]) -> frozenset[str]:
    """Returns the names of all parameters and buffers in personal parts, which must be right."""
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
