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
    """Averages models, of which an owner sees no single one.

    A rank uploads its model with noise of its own, plus a mask for each later rank, less one for each earlier rank. Two
    ranks share a mask, so that masks are gone from the sum of all. If U uploads of a chunk arrive and S do not, the
    mean has the variance noise^2/U + S mask^2/U: masks whose other half is lost stay in it as noise. So masks belong on
    links that lose little, or on a `reliability` that repairs.

    Ranks agree on the secrets of their pairs by X25519, once in each view: `meet` returns what a rank tells the others,
    and `met` learns what they told. Virtual workers take them from `key_seed`.
    """

    name: ClassVar[str] = "light-dp"
    by_steps: ClassVar[bool] = False  # masks of models that weigh differently would not cancel out

    noise: float = 0.0
    """Standard deviation of the noise that each rank adds to each element of its own."""
    mask: float = 0.0
    """Standard deviation of the mask that two ranks share. Much more than a parameter is worth, so that it hides it;
    rounding of float32 leaves about a ten-millionth of it."""
    key_seed: int | None = None
    """Seed of noise and secrets, for tests and virtual workers alone: whoever knows it can take both off again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 <= self.noise < math.inf, "noise", "not be negative", self.noise)
        check(0.0 <= self.mask < math.inf, "mask", "not be negative", self.mask)
        exact = self.wire == torch.float32
        check(exact or not self.mask, "wire", "be float32 where there are masks: rounded ones do not cancel", self.wire)

    def meet(self, rank: Memory) -> bytes:
        """Returns what a rank tells all others when a view begins: the public part of a new key."""
        self._of("keys")[rank.index] = key = masks.new_key()
        return masks.public_part(key)

    def met(self, rank: Memory, everyone: list[bytes]) -> None:
        """Learns what all ranks have told, by their places; the rank's own is among them.

        Raises:
            ValueError: A rank has told something that is no key.
        """
        key = self._of("keys").pop(rank.index)  # of no use any more, and nobody can get hold of it later
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
        """Returns keys or secrets by the place of the rank that has them: ranks may be threads of one process."""
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
