"""Differentially private `BoundedDrift` (DP-SGD): ranks add noise to their gradients before they send them."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from stormtorch.checks import check
from stormtorch.policies import rules
from stormtorch.policies.bounded_drift import BoundedDrift
from stormtorch.policies.policy import Numbers
from stormtorch_lab.privacy.noise import secret_generator, share_of_noise


@dataclass(frozen=True, kw_only=True)
class PrivateDrift(BoundedDrift):
    """`BoundedDrift` whose ranks add Gaussian noise to their gradients before these leave them (DP-SGD).

    Gradients must be clipped sample by sample, as `stormtorch_lab.privacy.backward` does; this policy cannot check it.
    `stormtorch_lab.privacy.epsilon` computes the guarantee of a noise multiplier.

    With `sharers=1` each message by itself has all the noise, so that the guarantee holds against the other ranks, too,
    and whatever is lost. With all n ranks as sharers, each adds 1/sqrt(n) of it, and only their sum has it: the
    guarantee then holds for those who see parameters but no rank's messages, and it depends on what arrives. A mean
    over k of n ranks has the noise multiplier `noise` sqrt(k/n): its noise is larger than that of n, but one sample
    counts for more in it. So account for the least k of any chunk.

    Gradients that are exchanged again, because a rank died in the midst of it, count as one more step.
    """

    name: ClassVar[str] = "private-drift"
    noise: float = 0.0
    """Noise multiplier: standard deviation of the noise in the sum of clipped gradients, over `clip`. 0 adds none."""
    clip: float = math.inf
    """Norm to which the gradient of each sample was clipped."""
    batch: int = 1
    """Samples of one rank in a step: its gradient is the mean over them."""
    sharers: int = 1
    """Ranks that share the noise: 1 gives each rank all of it."""
    seed: int | None = None
    """Seed of the noise, only for tests and virtual workers: knowledge of the seed removes the noise. None draws from
    the system's randomness, on every rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 <= self.noise < math.inf, "noise", "not be negative", self.noise)
        check(self.clip > 0.0, "clip", "be above 0", self.clip)
        check(not self.noise or math.isfinite(self.clip), "clip", "be finite where there is noise", self.clip)
        check(self.batch >= 1, "batch", "be at least 1", self.batch)
        check(self.sharers >= 1, "sharers", "be at least 1", self.sharers)
        # A late rank's gradients have more weight, and so would each of its samples.
        check(not self.noise or self.deadline is None, "deadline", "be None where there is noise", self.deadline)
        # The torch functions for per-sample gradients do not allow parameters to arrive meanwhile.
        check(not self.noise or not self.overlap, "overlap", "be False where there is noise", self.overlap)

    @property
    def weighs(self) -> bool:
        """Whether `send` modifies its input."""
        return self.noise > 0.0 or super().weighs

    def send(self, own: torch.Tensor, loss: Numbers) -> torch.Tensor:
        """Returns a rank's gradients with noise, divided by their chance to arrive if `weights` says so."""
        if self.noise:
            scale = share_of_noise(self.noise, self.clip, self.batch, self.sharers)
            drawn = torch.randn(own.shape, generator=self._random(), dtype=torch.float32, device="cpu")
            own = own + drawn.mul_(scale).to(own.device, own.dtype)
        return own * rules.inverse_probability_weight(loss) if super().weighs else own

    def combine(self, mean: torch.Tensor, count: Numbers, present: int) -> torch.Tensor:
        """Returns the mean of what arrived; for weighed gradients the mean over all ranks, where what is lost is 0."""
        return mean.mul_(rules.share_of_all(count, present)) if super().weighs else mean

    def _random(self) -> torch.Generator:
        if "_generator" not in self.__dict__:
            self.__dict__["_generator"] = secret_generator(self.seed)
        generator: torch.Generator = self.__dict__["_generator"]
        return generator

    def __getstate__(self) -> dict[str, object]:
        # A copy in another process must not draw the same noise.
        return {name: value for name, value in self.__dict__.items() if name != "_generator"}
