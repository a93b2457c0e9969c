"""Checks at `prepare` that an optimizer is separable: it updates each parameter independently, as sharding requires.

A copy of the optimizer steps on small proxies of some of its parameters: on all of them, then with other values and
gradients for every second one, then without those. The updates of the rest must not depend on them. The real optimizer
and the state of random number generators stay as they were.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stormtorch.backend import within_step
from stormtorch.backend.within_step import CalledWithinStep
from stormtorch.collectives.base.objects import pack, unpack

# The random numbers and the compiler's stance belong to the process: two trials at a time would restore each other's.
_one_trial = threading.Lock()
_MOST_PROXIES = 6
"""Most parameters in the trial."""
_LONGEST = 6
"""Largest dimension of a proxy."""
_SCALES = (1.0, 30.0, 0.1, 1000.0)
"""Scale of the gradients in each step. They differ, so that effects of only large or only small norms are found."""
_ROUNDED = 0.02
"""Fraction of an update that rounding may change when other parameters are absent: bfloat16 matrices round by nearly as
much, and some optimizers compute several at once."""
_WHAT_ELSE = (
    "Prepare it with policy=GradientAveraging(reliability=EXACT), under which every rank has the whole optimizer, or "
    "use DistributedDataParallel, with stormtorch.lossy_hook if gradients may be lossy"
)


class _Inconclusive(Exception):
    """The trial would write to memory of the real optimizer, so it was stopped without a result."""


class _OperationGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Intercepts every operation of a trial: forbids writes to memory that it does not own, and collectives."""

    def __init__(self, kept: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self.random = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CalledWithinStep("a trial is under way", func.__name__)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = kwargs.get(argument.name, args[position] if position < len(args) else None)
                for each in given if isinstance(given, list | tuple) else [given]:
                    if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() in self._kept:
                        raise _Inconclusive
        return func(*args, **kwargs)


def check_separable(optimizer: torch.optim.Optimizer) -> None:
    """Raises a ValueError if a trial shows that an optimizer does not update each parameter independently."""
    if type(optimizer) is getattr(torch.optim, type(optimizer).__name__, None):
        return  # all of torch's own do
    with _one_trial, _as_before(optimizer):
        found = _run_trials(optimizer)
    if found is not None:
        raise ValueError(f"{type(optimizer).__name__} {found}")


def _run_trials(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why an optimizer cannot work on shards, as found by a trial; None if it can, or no trial could run."""
    # float64 separates small effects from rounding. Some optimizers support only float32, or need a closure.
    for dtype in (torch.float64, torch.float32):
        for closure in (False, True):
            for with_state in (True, False):
                try:
                    return _Trial(optimizer, dtype, closure=closure, with_state=with_state).verdict()
                except CalledWithinStep as error:
                    return (
                        f"calls a collective within step ({error.args[1]}), but ranks own different parameters: give "
                        "prepare() the variant that is made for one process"
                    )
                except Exception:
                    continue  # the optimizer needs something that this trial lacks
    return None


class _Run(NamedTuple):
    """Result of one run of a copy."""

    after: list[list[torch.Tensor]]
    """Parameters after each step."""
    settings: list[dict[str, Any]]
    """Settings of the parameter groups at the end."""
    shapes: list[dict[str, Any]]
    """Shapes of the state of each parameter."""
    random: bool
    """Whether the optimizer drew random numbers."""
    unsendable: str
    """Description of state that cannot be sent to another rank; empty if there is none."""


class _Trial:
    """Steps copies of an optimizer.

    Args:
        optimizer: The user's optimizer, before it is prepared.
        dtype: Type of the proxies.
        closure: Whether steps are given a closure.
        with_state: Whether copies begin with the optimizer's present state.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, dtype: torch.dtype, *, closure: bool, with_state: bool
    ) -> None:
        self._optimizer, self._dtype = optimizer, dtype
        self._closure, self._with_state = closure, with_state
        self._chosen = _choose(optimizer)
        self.moved = False
        """Whether a closure was called while parameters differed from those before the step."""

    def verdict(self) -> str | None:
        """Returns why the optimizer cannot work on shards; None if nothing speaks against it."""
        indices = range(len(self._chosen))
        together = self._run(set(indices), set())
        if self.moved:
            return (
                "evaluates the model within a step, at parameters that it has moved, as SAM does, while other ranks' "
                f"parameters are not. {_WHAT_ELSE}"
            )
        if together.unsendable:
            return f"keeps {together.unsendable}, which cannot go to another rank when its owner dies. {_WHAT_ELSE}"
        for half in (set(indices[::2]), set(indices[1::2])):
            if not half:
                continue
            # With the same shapes and random numbers, not a bit may differ.
            found = self._differs(together, self._run(set(indices), set(indices) - half), half, 1e-9)
            if found is None:
                try:
                    alone = self._run(half, set())
                except CalledWithinStep:
                    raise
                except Exception:
                    continue  # if it cannot step on a shard, that rank raises an error then
                if any(alone.shapes[index] != together.shapes[index] for index in half):
                    return (
                        "keeps the state of several parameters as one, which cannot follow each of them to another "
                        "rank: give every parameter a parameter group of its own"
                    )
                if not together.random:  # alone, it draws other random numbers
                    found = self._differs(together, alone, half, _ROUNDED)
            if found is not None:
                return f"{found}, but under this policy each rank has the optimizer on its own shard. {_WHAT_ELSE}"
        return None

    def _differs(self, one: _Run, other: _Run, indices: set[int], tolerance: float) -> str | None:
        if self._dtype != torch.float64:
            tolerance = max(tolerance, 1e-4)
        for index in indices:
            difference = _relative_difference(
                [each[index] for each in one.after], [each[index] for each in other.after]
            )
            if not difference <= tolerance:
                return (
                    "looks beyond single parameters, as by a norm or a mean over all: in a trial on a copy, "
                    f"{min(100 * difference, 999.0):.2g} % of the update of one depended on others"
                )
        for number in {self._chosen[index][0] for index in indices}:
            for name, value in one.settings[number].items():
                theirs = other.settings[number].get(name)
                if isinstance(value, float | torch.Tensor) and not _alike(value, theirs, tolerance):
                    return f"computes {name!r}, a setting of its groups, from several parameters together"
        return None

    def _run(self, present: set[int], changed: set[int]) -> _Run:
        """Steps a copy.

        Args:
            present: Indices of the proxies that the copy's groups have.
            changed: Indices of the proxies that have other values and gradients than usual.
        """
        proxies, ways = [], []
        for index, (_, parameter) in enumerate(self._chosen):
            chance = torch.Generator().manual_seed(2 * index + (index in changed))
            shape = tuple(min(length, _LONGEST) for length in parameter.shape)
            proxies.append(nn.Parameter(torch.randn(shape, generator=chance).to(self._dtype)))
            # All gradients have one direction, so that optimizers that measure progress find some.
            way = torch.randn(shape, generator=chance) * (50.0 if index in changed else 2.0)
            ways.append(
                [(scale * (way + 0.3 * torch.randn(shape, generator=chance))).to(self._dtype) for scale in _SCALES]
            )
        optimizer_copy = _OptimizerCopy(self._optimizer, self._chosen, proxies, with_state=self._with_state).made
        for number, group in enumerate(optimizer_copy.param_groups):
            group["params"][:] = [proxies[at] for at in sorted(present) if self._chosen[at][0] == number]
        train = getattr(optimizer_copy, "train", None)
        if callable(train):
            train()  # optimizers with a mode for evaluation step only in training mode
        torch.manual_seed(0)
        after: list[list[torch.Tensor]] = []
        watch = _OperationGuard(_memory(self._optimizer))
        step: Any = getattr(type(optimizer_copy).step, "__wrapped__", type(optimizer_copy).step)
        for gradients in zip(*ways, strict=True):
            before = [each.detach().clone() for each in proxies]

            def set_gradients(gradients: Sequence[torch.Tensor] = gradients) -> torch.Tensor:
                for proxy, gradient in zip(proxies, gradients, strict=True):
                    proxy.grad = gradient.clone()
                return torch.ones(())

            def closure(
                set_gradients: Callable[[], torch.Tensor] = set_gradients, before: Any = before
            ) -> torch.Tensor:
                self.moved |= not all(map(torch.equal, before, proxies))
                return set_gradients()

            set_gradients()
            with watch, within_step.trial():
                step(optimizer_copy, closure) if self._closure else step(optimizer_copy)
            after.append([each.detach().clone() for each in proxies])
        settings = [
            {name: each for name, each in group.items() if name != "params"} for group in optimizer_copy.param_groups
        ]
        states = [optimizer_copy.state.get(each, {}) for each in proxies]
        return _Run(after, settings, [_shapes(each) for each in states], watch.random, _unsendable_state(states))


class _OptimizerCopy:
    """Copies an optimizer with other parameters. Its constructor is not called, as the arguments are unknown.

    Args:
        optimizer: The user's optimizer.
        chosen: Parameters that have a proxy, each with the number of its group. The copy has no others.
        proxies: Small parameters that replace the chosen ones.
        with_state: Whether the copy has the optimizer's state of the chosen parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chosen: Sequence[tuple[int, nn.Parameter]],
        proxies: Sequence[nn.Parameter],
        *,
        with_state: bool,
    ) -> None:
        self._with_state = with_state
        self._copies: dict[int, Any] = {}
        self._cut = {id(each): proxy.shape for (_, each), proxy in zip(chosen, proxies, strict=True)}
        for (_, each), proxy in zip(chosen, proxies, strict=True):
            self._copies[id(each)] = proxy
        self._left_out = {
            id(each) for group in optimizer.param_groups for each in group["params"] if id(each) not in self._copies
        }
        self.made: torch.optim.Optimizer = self.of(optimizer)

    def of(self, value: Any) -> Any:
        """Returns the copy of a value. References between copied values are preserved."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, nn.Module):
            raise _Inconclusive
        if isinstance(value, torch.Tensor):
            if id(value) in self._left_out:
                raise _Inconclusive
            made: Any = nn.Parameter(value.detach().clone()) if isinstance(value, nn.Parameter) else value.clone()
        elif isinstance(value, torch.optim.Optimizer):
            made = self._copies[id(value)] = object.__new__(type(value))
            made.__dict__.update({name: self._attribute(name, each) for name, each in vars(value).items()})
            made.__dict__.pop("step", None)  # a scheduler's wrapper, which counts steps of the real optimizer
        elif type(value) is list:
            made = self._copies[id(value)] = []
            made.extend(self.of(each) for each in value if id(each) not in self._left_out)
        elif isinstance(value, dict):
            made = self._copies[id(value)] = copy.copy(value)
            made.clear()
            made.update({self.of(key): self.of(each) for key, each in value.items() if id(key) not in self._left_out})
        elif type(value) in (tuple, set):
            made = type(value)(self.of(each) for each in value if id(each) not in self._left_out)
        elif getattr(value, "__self__", None) is not None and id(value.__self__) in self._copies:
            made = getattr(self._copies[id(value.__self__)], value.__name__)
        else:
            try:
                made = copy.deepcopy(value, self._copies)
            except Exception:
                made = value  # such as a process group
        self._copies[id(value)] = made
        return made

    def _attribute(self, name: str, value: Any) -> Any:
        if name.startswith("_optimizer_") and isinstance(value, dict):
            return type(value)()  # hooks of the program
        if name == "state":
            return self._state(value)
        return self.of(value)

    def _state(self, state: Mapping[Any, Any]) -> Any:
        made: Any = copy.copy(state)
        made.clear()
        for key, value in state.items():
            if not isinstance(key, torch.Tensor):
                made[key] = self.of(value)
            elif self._with_state and id(key) in self._cut:
                shape = self._cut[id(key)]
                made[self.of(key)] = {name: self._part(each, key.shape, shape) for name, each in value.items()}
        return made

    def _part(self, value: Any, whole: torch.Size, shape: torch.Size) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == whole:
            return value.detach()[tuple(slice(0, length) for length in shape)].to("cpu", torch.float32, copy=True)
        return self.of(value)


@contextlib.contextmanager
def _as_before(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restores the random number generators and the state of the real optimizer at the end."""
    states, chance = torch.get_rng_state(), random.getstate()
    kept = set(map(id, optimizer.state))
    try:
        with contextlib.ExitStack() as stack:
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        torch.set_rng_state(states)
        random.setstate(chance)
        for key in list(optimizer.state):
            if id(key) not in kept:
                del optimizer.state[key]


def _choose(optimizer: torch.optim.Optimizer) -> list[tuple[int, nn.Parameter]]:
    """Returns some parameters of different kinds, each with the number of its group."""
    chosen: list[tuple[int, nn.Parameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        kinds: dict[int, list[nn.Parameter]] = {}
        for each in group["params"]:
            kind = kinds.setdefault(each.dim(), [])
            if each.requires_grad and each.numel() and len(kind) < 2:
                kind.append(each)
        # Two of a kind are adjacent, so that one of them is changed.
        chosen += [(number, each) for kind in kinds.values() for each in kind][:4]
    return chosen[:_MOST_PROXIES]


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def _unsendable_state(states: Sequence[Mapping[str, Any]]) -> str:
    """Describes state that cannot be sent to another rank; empty if all can."""
    for state in states:
        for name, value in state.items():
            try:
                unpack(pack(value))
            except Exception:
                return f"{name!r}, of the class {type(value).__name__}, in the state of a parameter"
    return ""


def _alike(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.shape != other.shape:
            return False
        return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=0.0, equal_nan=True)
    return one == other or (isinstance(other, float | int) and abs(one - other) <= tolerance * abs(one))


def _relative_difference(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Returns the largest difference between two trajectories of a parameter, relative to how far it moved."""
    way = max(float((left - one[0]).abs().max()) for left in one)
    # Where a parameter hardly moved, the difference is mostly rounding.
    way += 1e3 * torch.finfo(one[0].dtype).eps * float(one[0].abs().max()) + 1e-30
    return max(float((left - right).abs().max()) / way for left, right in zip(one, other, strict=True))


def _memory(optimizer: torch.optim.Optimizer) -> set[int]:
    """Returns the addresses of memory that a trial must not write to."""
    found: set[int] = set()
    for group in optimizer.param_groups:
        for each in group["params"]:
            found.update(part.untyped_storage().data_ptr() for part in (each, each.grad) if part is not None)
            state = optimizer.state.get(each, {})
            found.update(part.untyped_storage().data_ptr() for part in state.values() if isinstance(part, torch.Tensor))
    return found - {0}
