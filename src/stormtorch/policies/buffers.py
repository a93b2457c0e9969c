"""What a model has beside parameters, such as the statistics of batch normalisation: averaged when it is asked for."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from stormtorch import collectives
from stormtorch.collectives import Group, Op
from stormtorch.reliability import Reliability


class Buffers:
    """A model's floating-point buffers.

    Args:
        model: Whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._versions: dict[int, int] = {id(each): each._version for each in self._all()}
        # Normalisation changes its statistics without a new version.
        self._unnoticed = {
            id(each) for module in model.modules() if isinstance(module, _NormBase) for each in module.buffers()
        }
        self._kept: dict[int, torch.Tensor] = {}

    def _all(self) -> list[torch.Tensor]:
        return [each for each in self._model.buffers() if each.is_floating_point() and each.numel()]

    @torch.no_grad()
    def remember(self) -> None:
        """Keeps what they are at the end of a step, for calls of ranks that have not begun the next one.

        Those that nothing has ever changed, such as tables, are not copied.
        """
        for each in self._all():
            version = each._version
            if id(each) in self._unnoticed or self._versions.get(id(each)) != version or id(each) in self._kept:
                self._versions[id(each)] = version
                self._kept[id(each)] = each.detach().clone()

    @torch.no_grad()
    def average(self, group: Group, reliability: Reliability, root: int = 0) -> None:
        """They become the mean over all ranks. What is the same everywhere keeps every bit.

        Args:
            group: Who takes part.
            reliability: How much may be missing.
            root: A rank that is there.
        """
        buffers = self._all()
        if not buffers:
            return
        self.become(_mean(_flat(buffers), group, reliability, root))

    @torch.no_grad()
    def become(self, mean: torch.Tensor | None) -> None:
        """They become a mean that `give` has returned."""
        buffers = self._all()
        if mean is None or not buffers:
            return
        own, begin = _flat(buffers), 0
        for buffer in buffers:
            here = slice(begin, begin + buffer.numel())
            begin = here.stop
            if bool((own[here] != mean[here]).any()):
                buffer.copy_(mean[here].view(buffer.shape))

    def give(self, group: Group, reliability: Reliability, root: int = 0) -> torch.Tensor | None:
        """Takes part in the others' mean with what was last remembered. The buffers stay as they are.

        What is remembered becomes the mean: a second call at the same step must not weigh this rank's once more.
        """
        buffers = self._all()
        if not buffers:
            return None
        mean = _mean(_flat([self._kept.get(id(each), each) for each in buffers]), group, reliability, root)
        parts = torch.split(mean, [each.numel() for each in buffers])
        self._kept.update((id(each), part.view(each.shape)) for each, part in zip(buffers, parts, strict=True))
        return mean


def _flat(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.detach().to("cpu", torch.float32).reshape(-1) for each in buffers])


def _mean(own: torch.Tensor, group: Group, reliability: Reliability, root: int) -> torch.Tensor:
    # The root's and the mean difference to it: a mean of equal numbers is rounded, and tables would change each time.
    first = own.clone()
    collectives.broadcast(group, first, root, reliability=reliability).wait()
    difference = torch.where(own == first, 0.0, own - first)
    collectives.all_reduce(group, difference, Op.AVG, reliability=reliability).wait()
    return first + difference
