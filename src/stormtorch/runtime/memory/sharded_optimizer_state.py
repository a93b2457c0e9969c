"""`optimizer.state` of a prepared optimizer: keyed by local pieces, but programs index it by model parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

_READ = (
    "optimizer.state of one of the model's parameters cannot be read: since prepare(), each rank has the state of the "
    "pieces that it owns. optimizer.state_dict() gathers all of it; optimizer.state[parameter] = {...} sets it, on all "
    "ranks alike"
)
_NONE: Any = object()


class ShardedOptimizerState(defaultdict[Any, Any]):
    """Optimizer state by local parameter. Setting or deleting a model parameter's state does so for its local pieces.

    Args:
        numbers: Numbers of the parameters that are split into pieces, by identity.
        local_params: Returns this rank's local parameters of a parameter, each with a function that slices its part
            out of a state.
    """

    def __init__(
        self,
        numbers: Mapping[int, int],
        local_params: Callable[[int], list[tuple[nn.Parameter, Callable[[dict[str, Any]], dict[str, Any]]]]],
    ) -> None:
        super().__init__(dict)
        self._numbers, self._local_params = numbers, local_params

    def __missing__(self, key: Any) -> Any:
        if id(key) in self._numbers:
            raise RuntimeError(_READ)
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        number = self._numbers.get(id(key))
        if number is None:
            super().__setitem__(key, value)
            return
        for local_param, slice_state in self._local_params(number):
            part = slice_state(value)
            if part:
                super().__setitem__(local_param, part)
            else:
                super().pop(local_param, None)

    def __delitem__(self, key: Any) -> None:
        if id(key) in self._numbers:
            self[key] = {}
        else:
            super().__delitem__(key)

    def __bool__(self) -> bool:
        return True  # torch.distributed.checkpoint steps an optimizer without state, to create some

    def __contains__(self, key: Any) -> bool:
        number = self._numbers.get(id(key))
        if number is None:
            return super().__contains__(key)
        return any(
            super(ShardedOptimizerState, self).__contains__(local_param)
            for local_param, _ in self._local_params(number)
        )

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns the state of a local parameter, or of a key that is no parameter."""
        if id(key) in self._numbers:
            raise RuntimeError(_READ)
        return super().get(key, default)

    def pop(self, key: Any, default: Any = _NONE) -> Any:
        """Removes the state of a local parameter. For a model parameter, removes that of its pieces; returns none."""
        if id(key) in self._numbers:
            self[key] = {}
            return {} if default is _NONE else default
        return super().pop(key) if default is _NONE else super().pop(key, default)

    def __reduce__(self) -> tuple[Any, Any, None, None, Iterator[tuple[Any, Any]]]:
        return defaultdict, (dict,), None, None, iter(self.items())
