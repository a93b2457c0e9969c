"""Backend "storm" of torch.distributed: `dist.init_process_group("storm")`.

torch calls `register` (entry point "torch.backends") on import, in every process. So this module imports as little as
possible, and the rest when the first group is made.
"""

import os
import warnings
from typing import Any

NAME = "storm"
DEFAULT_VARIABLE = "STORM_DEFAULT_BACKEND"
"""Environment variable with the devices whose default backend is storm: "cpu" (or 1), "cuda" or "cpu,cuda"."""
_DEFAULTS = {"": (), "0": (), "1": ("cpu",), "cpu": ("cpu",), "cuda": ("cuda",), "cpu,cuda": ("cpu", "cuda")}


def register() -> None:
    """Registers the name "storm" with torch.distributed. Does nothing the second time, or without torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    asked = os.environ.get(DEFAULT_VARIABLE, "")
    if asked not in _DEFAULTS:
        # Only warn: an exception here would make `import torch` fail.
        warnings.warn(
            f'{DEFAULT_VARIABLE} must be 1, "cpu", "cuda" or "cpu,cuda", got {asked!r}: ignored', stacklevel=2
        )
    for device in _DEFAULTS.get(asked, ()):
        dist.Backend.default_device_backend_map[device] = NAME


def use_as_default(*, cuda: bool = False) -> None:
    """Makes storm the default backend of torch.distributed, for programs that name none.

    Call it before anything asks torch for its default: `init_process_group()`, `init_device_mesh` or
    `get_default_backend_for_device`. The environment variable STORM_DEFAULT_BACKEND does the same for programs that
    you cannot change.

    Args:
        cuda: Use storm for tensors on GPUs too, instead of nccl. On a machine with a GPU, `init_process_group()` asks
            for the default of the GPU, not of the CPU.
    """
    import torch.distributed as dist

    register()
    for device in ("cpu", "cuda") if cuda else ("cpu",):
        dist.Backend.default_device_backend_map[device] = NAME


def _create(how: Any, options: Any) -> Any:
    from stormtorch.backend.creation import create

    return create(how, options)
