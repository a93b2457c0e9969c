"""What a model has beside parameters, such as the statistics of batch normalisation: averaged when it is asked for."""

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group, Op
from stormtorch.reliability import Reliability


@torch.no_grad()
def average_buffers(model: nn.Module, group: Group, reliability: Reliability, root: int = 0) -> None:
    """Floating-point buffers become the mean over all ranks. What is the same everywhere keeps every bit.

    Args:
        model: Whose buffers.
        group: Who takes part.
        reliability: How much may be missing.
        root: A rank that is there.
    """
    buffers = [each for each in model.buffers() if each.is_floating_point() and each.numel()]
    if not buffers:
        return
    own = torch.cat([each.detach().to("cpu", torch.float32).reshape(-1) for each in buffers])
    # The root's and the mean difference to it: a mean of equal numbers is rounded, and tables would change each time.
    first = own.clone()
    collectives.broadcast(group, first, root, reliability=reliability).wait()
    difference = torch.where(own == first, 0.0, own - first)
    collectives.all_reduce(group, difference, Op.AVG, reliability=reliability).wait()
    changed = (own != first) | (difference != 0.0)
    begin = 0
    for buffer in buffers:
        here = slice(begin, begin + buffer.numel())
        begin = here.stop
        if bool(changed[here].any()):
            buffer.copy_((first[here] + difference[here]).view(buffer.shape))
