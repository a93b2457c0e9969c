"""LightDP-FL: ranks average models that carry noise, and masks that cancel out in the sum of all ranks."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from stormtorch.checks import check
from stormtorch.errors import StormError
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.policy import Numbers
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch_lab.privacy import masks
from stormtorch_lab.privacy.noise import secret_generator


@dataclass(frozen=True, kw_only=True)
class LightDp(RankPolicy):
    """Averages models without showing any single one to an owner.

    A rank uploads its model with noise of its own, plus a mask for each later rank, less one for each earlier rank. Two
    ranks share a mask, so that masks cancel out in the sum of all. If U uploads of a chunk arrive and S do not, the
    mean has the variance noise^2/U + S mask^2/U: masks whose counterpart is lost stay in it as noise. So use masks on
    links with little loss, or with a `reliability` that retransmits.

    Ranks agree on the secrets of their pairs by X25519, once in each view: `meet` returns the public key that a rank
    announces, and `met` receives those of all ranks. Virtual workers derive the secrets from `key_seed`.
    """

    name: ClassVar[str] = "light-dp"
    by_steps: ClassVar[bool] = False  # masks of models with different weights would not cancel out

    noise: float = 0.0
    """Standard deviation of the noise that each rank adds to each element of its own."""
    mask: float = 0.0
    """Standard deviation of the mask that two ranks share. Choose it much larger than any parameter, so that it hides
    the value; float32 rounding leaves an error of about a ten-millionth of it."""
    key_seed: int | None = None
    """Seed of noise and secrets, only for tests and virtual workers: knowledge of the seed removes both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 <= self.noise < math.inf, "noise", "not be negative", self.noise)
        check(0.0 <= self.mask < math.inf, "mask", "not be negative", self.mask)
        exact = self.wire == torch.float32
        check(exact or not self.mask, "wire", "be float32 with masks: rounded masks do not cancel", self.wire)

    def meet(self, rank: Memory) -> bytes:
        """Returns the public part of a new key, which the rank announces when a view begins."""
        self._of("keys")[rank.index] = key = masks.new_key()
        return masks.public_part(key)

    def met(self, rank: Memory, everyone: list[bytes]) -> None:
        """Receives the public keys of all ranks, by index, including the rank's own.

        Raises:
            ValueError: A rank announced something that is not a key.
        """
        key = self._of("keys").pop(rank.index)  # deleted after use, so that it cannot leak later
        self._of("secrets")[rank.index] = {
            peer: masks.shared_secret(key, theirs) for peer, theirs in enumerate(everyone) if peer != rank.index
        }

    def send(self, own: torch.Tensor, loss: Numbers, rank: Memory = NO_MEMORY) -> torch.Tensor:
        """Returns a rank's values with its noise and its masks."""
        sent = own
        if self.noise:
            drawn = torch.randn(own.shape, generator=self._random(), dtype=torch.float32, device="cpu")
            sent = sent + drawn.mul_(self.noise).to(own.device, own.dtype)
        if self.mask and rank.ranks > 1:
            secrets = self._shared_by(rank)
            mask = masks.pairwise_mask(rank.index, secrets, rank.round, rank.offset, own.numel(), self.mask)
            sent = sent + mask.view(own.shape).to(own.device, own.dtype)
        return sent

    def _shared_by(self, rank: Memory) -> dict[int, bytes]:
        if self.key_seed is not None:
            others = (peer for peer in range(rank.ranks) if peer != rank.index)
            return {peer: masks.pretended_secret(self.key_seed, rank.index, peer) for peer in others}
        known: dict[int, bytes] = self._of("secrets").get(rank.index, {})
        if len(known) != rank.ranks - 1:
            raise StormError(
                f"rank {rank.index} shares secrets with {len(known)} of {rank.ranks - 1} other ranks: masks need "
                "meet() and met() in every view, or key_seed on virtual workers"
            )
        return known

    def _of(self, name: str) -> dict[int, Any]:
        """Returns keys or secrets by the index of their rank: ranks may be threads of one process."""
        found: dict[int, Any] = self.__dict__.setdefault(f"_{name}", {})
        return found

    def _random(self) -> torch.Generator:
        if "_generator" not in self.__dict__:
            self.__dict__["_generator"] = secret_generator(self.key_seed)
        generator: torch.Generator = self.__dict__["_generator"]
        return generator

    def __getstate__(self) -> dict[str, object]:
        # Secrets do not leave the process, and a copy must not draw the same noise.
        return {name: value for name, value in self.__dict__.items() if name not in ("_keys", "_secrets", "_generator")}
