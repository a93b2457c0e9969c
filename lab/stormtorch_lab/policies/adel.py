"""ADEL: SALF with deadlines that change from step to step, to spend a total time optimally."""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

from stormtorch import theory
from stormtorch.checks import check
from stormtorch.policies.policy import Deadline
from stormtorch_lab.policies.salf import SALF


@dataclass(frozen=True, kw_only=True)
class ADEL(SALF):
    """Layer-wise training with stragglers, with a total time that `best_deadlines` divides among the steps.

    A longer deadline has more ranks in the mean of more layers. Noise of early steps is forgotten until the end, so
    that with a constant learning rate deadlines begin short and become longer; see `stormtorch.theory.layers` for the
    bound that they minimise. ADEL-FL also chooses batch sizes, which belong to the user's loop here.

    A round in which all ranks are in time ends before its deadline, so the total is an upper bound. After `steps`
    steps, the last deadline stays in force.
    """

    name: ClassVar[str] = "adel"
    inertia: float = 0.95
    """How much of what an owner remembers of how many ranks reach a layer stays at each step: less than SALF's, as what
    it remembers is of shorter deadlines. Layers that are often missed move too far where it is too much."""
    total_s: float = 600.0
    """Sum of the deadlines in seconds. A step's begins when a rank has its parameters, so that forward counts, too."""
    steps: int = 1000
    """Optimizer steps of the training."""
    ranks: int = 8
    """Ranks that take part."""
    layers: int = 8
    """Layers of the model: parts whose gradients are ready one after the other, each after about as long."""
    layer_s: float | tuple[float, ...] = 0.05
    """Mean seconds that the backward of a layer takes; a tuple has one number for each rank."""
    rates: tuple[float, ...] = (1.0,)
    """Learning rate at equal distances from the first step to the last, as parts of the largest, with lines between
    them: (1.0,) is constant, (1.0, 0.0) falls to zero."""
    contraction: float | None = None
    """Part of the gap to the minimum that a step takes away, in (0, 1]; None is such that a training takes it down to a
    three-thousandth, which a few times more or less change little."""
    curvature: float = 0.1
    """Learning rate as a part of the largest with which descent without noise would converge, in [0, 1)."""
    floor: float = 0.01
    """Final gap of a training without stragglers, due to noise, as a part of the initial gap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.deadline in (None, "auto"), "deadline", 'be "auto" or None: total_s sets it', self.deadline)
        check(self.ranks >= 1, "ranks", "be at least 1", self.ranks)
        check(self.steps >= 1, "steps", "be at least 1", self.steps)
        right = len(self.rates) > 0 and all(0.0 <= each <= 1.0 for each in self.rates)
        check(right, "rates", "have numbers in [0, 1], one at least", self.rates)
        if isinstance(self.layer_s, tuple):
            check(len(self.layer_s) == self.ranks, "layer_s", f"have {self.ranks} numbers, as ranks", self.layer_s)
        _ = self.schedule_s  # rejects settings without a schedule

    @property
    def schedule_s(self) -> tuple[float, ...]:
        """Deadline of each step."""
        layer_s = self.layer_s if isinstance(self.layer_s, tuple) else (self.layer_s,) * self.ranks
        contraction = min(8.0 / self.steps, 1.0) if self.contraction is None else self.contraction
        return _schedule(
            theory.Backward(layers=self.layers, layer_s=layer_s),
            theory.Descent(contraction=contraction, curvature=self.curvature, floor=self.floor),
            self.steps,
            self.total_s,
            self.rates,
        )

    def deadline_at(self, step: int) -> Deadline:
        """Returns the deadline of a step; None, which waits for all ranks, if `deadline` is None."""
        return None if self.deadline is None else self.schedule_s[min(step, self.steps - 1)]


@functools.lru_cache(maxsize=16)
def _schedule(
    backward: theory.Backward, descent: theory.Descent, steps: int, total_s: float, rates: tuple[float, ...]
) -> tuple[float, ...]:
    """Returns the best deadlines; cached, as a session calls it at every step."""
    factors = []
    for step in range(steps):
        place = step / max(steps - 1, 1) * (len(rates) - 1)
        first = math.floor(place)
        last = min(first + 1, len(rates) - 1)
        factors.append(rates[first] + (place - first) * (rates[last] - rates[first]))
    return tuple(theory.best_deadlines(backward, descent, steps, total_s, factors))
