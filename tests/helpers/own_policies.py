"""Policies as users write them: one for each extension point."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from stormtorch.policies import OwnerPolicy, RankPolicy
from stormtorch.policies.policy import Numbers


@dataclass(frozen=True, kw_only=True)
class Blended(RankPolicy):
    """Ranks go a part of the way to the mean."""

    part: float = 0.5

    def accept(self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # it may leave out rank
        return torch.where(arrived, own.lerp(received, self.part), own)


@dataclass(frozen=True, kw_only=True)
class Anchored(RankPolicy):
    """Owners keep an anchor with momentum, and all ranks go on from it: DiLoCo's kind."""

    every: int = 2
    momentum: float = 0.5

    def update(self, owner: MutableMapping[str, torch.Tensor], combined: torch.Tensor) -> torch.Tensor:
        anchor = owner.setdefault("anchor", torch.zeros_like(combined))
        speed = owner.setdefault("speed", torch.zeros_like(combined))
        speed.mul_(self.momentum).add_(combined - anchor)
        anchor.add_(speed)
        return anchor.clone()


@dataclass(frozen=True, kw_only=True)
class Weighed(RankPolicy):
    """Models are averaged as if what is lost were zero, each weighed by the inverse of its chance to arrive."""

    def send(self, own: torch.Tensor, loss: Numbers) -> torch.Tensor:  # type: ignore[override]  # it may leave out rank
        return own / (1.0 - loss)

    def combine(self, mean: torch.Tensor, count: Numbers, present: int) -> torch.Tensor:
        return mean * count / present


@dataclass(frozen=True, kw_only=True)
class Damped(OwnerPolicy):
    """Owners send what lies a little behind their parameters, and ranks take a part of it."""

    def publish(self, before: torch.Tensor, now: torch.Tensor, ahead: Numbers) -> torch.Tensor:
        return now - 0.25 * (now - before)

    def accept(self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        return torch.where(arrived, 0.25 * own + 0.75 * received, own)
