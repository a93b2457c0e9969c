"""The torch.distributed backend "storm": `dist.init_process_group("storm")`.

`register` is an entry point of torch (group "torch.backends") and runs at `import torch`, in every worker. So this
module imports nothing but what it must, and the rest when the first group is made.
"""

import os
import warnings
from typing import Any

NAME = "storm"
DEFAULT_VARIABLE = "STORM_DEFAULT_BACKEND"
"""Devices for which storm is torch's default from the start: "cpu", or 1, which is the same, or "cpu,cuda"."""
_DEFAULTS = {"": (), "0": (), "1": ("cpu",), "cpu": ("cpu",), "cuda": ("cuda",), "cpu,cuda": ("cpu", "cuda")}


def register() -> None:
    """Makes the name "storm" known to torch.distributed. Does nothing the second time, or without torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    asked = os.environ.get(DEFAULT_VARIABLE, "")
    if asked not in _DEFAULTS:
        # An exception here would be one of `import torch`.
        warnings.warn(f'{DEFAULT_VARIABLE} must be 1, "cpu" or "cpu,cuda", got {asked!r}: ignored', stacklevel=2)
    for device in _DEFAULTS.get(asked, ()):
        dist.Backend.default_device_backend_map[device] = NAME


def use_as_default(*, cuda: bool = False) -> None:
    """Makes storm the backend that torch.distributed takes where a program names none.

    Call it before the program does: in `init_process_group()`, `init_device_mesh`, or
    `get_default_backend_for_device`. The environment variable STORM_DEFAULT_BACKEND does the same for programs that
    cannot be changed.

    Args:
        cuda: For tensors on GPUs too, in place of nccl. Where there is a GPU, `init_process_group()` asks for its
            default, not the CPU's.
    """
    import torch.distributed as dist

    register()
    for device in ("cpu", "cuda") if cuda else ("cpu",):
        dist.Backend.default_device_backend_map[device] = NAME


def _create(how: Any, options: Any) -> Any:
    from stormtorch.backend.creation import create

    return create(how, options)
