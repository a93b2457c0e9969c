"""What a model has beside parameters, such as the statistics of batch normalisation: averaged when it is asked for."""

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from stormtorch import collectives
from stormtorch.collectives import Group, Op
from stormtorch.reliability import Reliability


class Buffers:
    """A model's floating-point buffers, by name: forward may replace them by new tensors.

    `buffers_of` gives one to all optimizers of a model: what one call has made of the buffers holds for the next.

    Args:
        model: Whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # What each was at first, and its version. Not by id: that of a tensor that is gone is soon another one's.
        self._first = {name: (weakref.ref(each), each._version) for name, each in self._all().items()}
        # Normalisation changes its statistics without a new version.
        for prefix, module in model.named_modules():
            if isinstance(module, _NormBase):
                for name, _ in module.named_buffers(prefix):
                    self._first.pop(name, None)
        self._kept: dict[str, torch.Tensor] = {}

    def _all(self) -> dict[str, torch.Tensor]:
        return {name: each for name, each in self._model.named_buffers() if each.is_floating_point() and each.numel()}

    @torch.no_grad()
    def remember(self) -> None:
        """Keeps what they are at the end of a step, for calls of ranks that have not begun the next one.

        Those that nothing has ever changed, such as tables, are not copied.
        """
        now = self._all()
        self._kept = {
            name: each.detach().clone() for name, each in now.items() if name in self._kept or self._changed(name, each)
        }

    def _changed(self, name: str, buffer: torch.Tensor) -> bool:
        first, version = self._first.get(name, (None, 0))
        return first is None or first() is not buffer or buffer._version != version

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
        mean = _mean(_flat(buffers.values()), group, reliability, root)
        # Before they change: what was remembered is of before this call, and the next one may ask for it.
        self._keep(buffers, mean)
        self.become(mean)

    @torch.no_grad()
    def become(self, mean: torch.Tensor | None) -> None:
        """They become a mean that `give` has returned."""
        buffers = list(self._all().values())
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
        given = {name: self._kept.get(name, each) for name, each in self._all().items()}
        if not given:
            return None
        mean = _mean(_flat(given.values()), group, reliability, root)
        self._keep(given, mean)
        return mean

    def _keep(self, given: Mapping[str, torch.Tensor], mean: torch.Tensor) -> None:
        """Remembers the mean of what was given. Tables, which it does not change, are still not copied."""
        parts = torch.split(mean, [each.numel() for each in given.values()])
        own = torch.split(_flat(given.values()), [each.numel() for each in given.values()])
        for (name, each), part, before in zip(given.items(), parts, own, strict=True):
            if name in self._kept or not torch.equal(part, before):
                self._kept[name] = part.view(each.shape)


# Weak on both sides, as it holds its model.
_buffers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Buffers]] = weakref.WeakKeyDictionary()


def buffers_of(model: nn.Module) -> Buffers:
    """The model's, which all that ask for them share."""
    known = _buffers.get(model)
    found = None if known is None else known()
    if found is None:
        found = Buffers(model)
        _buffers[model] = weakref.ref(found)
    return found


def _flat(buffers: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.detach().to("cpu", torch.float32).reshape(-1) for each in buffers])


def _mean(own: torch.Tensor, group: Group, reliability: Reliability, root: int) -> torch.Tensor:
    # The root's and the mean difference to it: a mean of equal numbers is rounded, and tables would change each time.
    first = own.clone()
    collectives.broadcast(group, first, root, reliability=reliability).wait()
    difference = torch.where(own == first, 0.0, own - first)
    collectives.all_reduce(group, difference, Op.AVG, reliability=reliability).wait()
    return first + difference
