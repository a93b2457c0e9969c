"""A model's buffers, such as the statistics of batch normalisation: all-reduced to their mean when a call needs it."""

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from stormtorch import collectives
from stormtorch.collectives import Group, Op
from stormtorch.collectives.base.objects import complete
from stormtorch.runtime.memory.personal import personal_buffers


class Buffers:
    """A model's floating-point buffers without personal ones. Found by name, as forward may replace the tensors.

    All sessions of a model share one object, from `buffers_of`: each call starts from the result of the last one.

    Args:
        model: The model that has the buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._personal = personal_buffers(model)
        # Each initial buffer and its version. A weak reference, as the id of a tensor that is gone may be reused.
        self._first = {name: (weakref.ref(each), each._version) for name, each in self._all().items()}
        # Normalisation layers change their buffers without a new version, so these always count as changed.
        for prefix, module in model.named_modules():
            if isinstance(module, _NormBase):
                for name, _ in module.named_buffers(prefix):
                    self._first.pop(name, None)
        self._snapshot: dict[str, torch.Tensor] = {}

    def _all(self) -> dict[str, torch.Tensor]:
        return {
            name: each
            for name, each in self._model.named_buffers()
            if each.is_floating_point() and each.numel() and name not in self._personal
        }

    def remember(self) -> None:
        """Copies the buffers at the end of a step, to serve calls of ranks that have not begun the next step.

        Buffers that have never changed, such as lookup tables, are not copied.
        """
        now = self._all()
        self._snapshot = {
            name: each.detach().clone()
            for name, each in now.items()
            if name in self._snapshot or self._changed(name, each)
        }

    def _changed(self, name: str, buffer: torch.Tensor) -> bool:
        first, version = self._first.get(name, (None, 0))
        return first is None or first() is not buffer or buffer._version != version

    @torch.no_grad()
    def average(self, group: Group) -> None:
        """Sets the buffers to their mean over all ranks. Values that are equal on all ranks keep every bit.

        Raises:
            Interrupted: A rank is gone, and another view begins without it.
        """
        buffers = self._all()
        if not buffers:
            return
        mean = _mean(_flat(buffers.values()), group)
        # Before the buffers change: the next call may use the snapshot, which must then be this mean.
        self._update_snapshot(buffers, mean)
        self.set_mean(mean)

    @torch.no_grad()
    def set_mean(self, mean: torch.Tensor | None) -> None:
        """Sets the buffers to a mean that `contribute` has returned."""
        buffers = list(self._all().values())
        if mean is None or not buffers:
            return
        own, begin = _flat(buffers), 0
        for buffer in buffers:
            here = slice(begin, begin + buffer.numel())
            begin = here.stop
            if bool((own[here] != mean[here]).any()):
                buffer.copy_(mean[here].view(buffer.shape))

    def contribute(self, group: Group) -> torch.Tensor | None:
        """Contributes the last snapshot to the mean that other ranks compute. The buffers stay as they are.

        The mean replaces the snapshot, so that a second call at the same step does not count this rank twice.
        """
        given = {name: self._snapshot.get(name, each) for name, each in self._all().items()}
        if not given:
            return None
        mean = _mean(_flat(given.values()), group)
        self._update_snapshot(given, mean)
        return mean

    def _update_snapshot(self, given: Mapping[str, torch.Tensor], mean: torch.Tensor) -> None:
        """Stores the mean of some buffers. Tables, which the mean does not change, are still not copied."""
        parts = torch.split(mean, [each.numel() for each in given.values()])
        own = torch.split(_flat(given.values()), [each.numel() for each in given.values()])
        for (name, each), part, before in zip(given.items(), parts, own, strict=True):
            if name in self._snapshot or not torch.equal(part, before):
                self._snapshot[name] = part.view(each.shape)


# Weak on both sides, as `Buffers` holds its model.
_buffers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Buffers]] = weakref.WeakKeyDictionary()


def buffers_of(model: nn.Module) -> Buffers:
    """Returns the buffers of a model: the same object for all sessions."""
    known = _buffers.get(model)
    found = None if known is None else known()
    if found is None:
        found = Buffers(model)
        _buffers[model] = weakref.ref(found)
    return found


def _flat(buffers: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.detach().to("cpu", torch.float32).reshape(-1) for each in buffers])


def _mean(own: torch.Tensor, group: Group) -> torch.Tensor:
    # The first rank's values plus the mean difference from them: a plain mean would round, which changes equal values.
    first = own.clone()
    complete(collectives.broadcast(group, first, 0), group)
    difference = torch.where(own == first, 0.0, own - first)
    complete(collectives.all_reduce(group, difference, Op.AVG), group)
    return first + difference
