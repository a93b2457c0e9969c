"""The torch.distributed backend "storm": `dist.init_process_group("storm")`.

`register` is an entry point of torch (group "torch.backends") and runs at `import torch`, in every worker. So this
module imports nothing but what it must, and the rest when the first group is made.
"""

from typing import Any

NAME = "storm"


def register() -> None:
    """Makes the name "storm" known to torch.distributed. Does nothing the second time, or without torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(how: Any, options: Any) -> Any:
    from stormtorch.backend.creation import create

    return create(how, options)
