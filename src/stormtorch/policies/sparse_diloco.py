"""DiLoCo with few bytes, as SparseLoCo does: only the largest changes travel, and the rest is kept for later."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from stormtorch.checks import check
from stormtorch.collectives.formats.sparse import Sparse
from stormtorch.policies.memory import NO_MEMORY, Memory
from stormtorch.policies.policy import Numbers
from stormtorch.policies.rank_policy import RankPolicy


@dataclass(frozen=True, kw_only=True)
class SparseDiLoCo(RankPolicy):
    """Training that talks rarely and says little: sparse changes go up, sparse parameters come down.

    A rank adds what it has learned to its error, sends the largest elements of it in two bits, and takes away from its
    error what owners report to have arrived: what was lost stays in it. Owners send the parameters that have changed
    most since they were last sent, and some in turn, so that what a rank has missed is healed after a while. Nothing is
    sent twice. Where the answer is lost, a rank goes on with its own parameters.
    """

    name: ClassVar[str] = "sparse-diloco"
    every: int = 30
    """Optimizer steps between two exchanges."""
    outer_lr: float = 1.0
    """Factor of the mean change."""
    decay: float = 0.95
    """Part of its error that a rank keeps at each exchange."""
    keep: int = 64
    """Elements of each block of `block` that a rank sends."""
    answer: int = 256
    """Elements of each block that an owner sends: half of them those that changed most, the others in turn."""
    block: int = 4096
    """Elements of a block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0.0 < self.outer_lr <= 10.0, "outer_lr", "lie in (0, 10]", self.outer_lr)
        check(0.0 <= self.decay <= 1.0, "decay", "lie in [0, 1]", self.decay)
        _ = self.codes  # refuses what is no sparse code

    @property
    def codes(self) -> tuple[Sparse, Sparse]:
        """How changes go up and parameters come down."""
        return (
            Sparse(keep=self.keep, of=self.block, bits=2),
            Sparse(keep=self.answer, of=self.block, bits=16),
        )

    def begin_owner(self, owner: Memory, values: torch.Tensor) -> None:
        """Takes the parameters at the beginning as what all ranks have."""
        owner["anchor"] = values
        owner["published"] = values

    def begin_rank(self, rank: Memory, values: torch.Tensor) -> None:
        """Begins without an error."""
        rank["start"] = values
        rank["known"] = values
        rank["error"] = torch.zeros_like(values)

    def send(self, own: torch.Tensor, loss: Numbers, rank: Memory = NO_MEMORY) -> torch.Tensor:
        """Offers the error with what was learned since the last exchange; the code takes its largest elements."""
        return rank["error"].mul_(self.decay).add_(own - rank["start"])

    def sent(self, rank: Memory, sent: torch.Tensor, arrived: torch.Tensor) -> None:
        """Takes away from the error what has arrived, exactly as it was rounded."""
        rank["error"].sub_(sent.masked_fill(~arrived, 0.0))

    def update(self, owner: Memory, combined: torch.Tensor) -> torch.Tensor:
        """Moves the anchor, and chooses the elements that ranks get."""
        anchor = owner["anchor"].add_(combined, alpha=self.outer_lr)
        scores = _blocks((anchor - owner["published"]).abs_(), self.block, -1.0)
        share = min(self.answer // 2, self.block)
        turn = (torch.arange(share, device=anchor.device) + owner.round * share) % self.block
        scores[..., turn] = torch.where(scores[..., turn] >= 0.0, torch.inf, scores[..., turn])
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, self.codes[1].choose(scores), True)
        chosen = (chosen & (scores >= 0.0)).flatten(-2)[..., : anchor.shape[-1]]
        answer = anchor.masked_fill(~chosen, torch.nan)
        owner["published"] = torch.where(chosen, anchor, owner["published"])
        return answer

    def accept(
        self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor, rank: Memory = NO_MEMORY
    ) -> torch.Tensor:
        """Continues with what is known of the anchor; with its own parameters where the answer was lost."""
        known = torch.where(arrived & ~received.isnan(), received, rank["known"])
        rank["known"] = known
        rank["start"] = torch.where(arrived, known, own)
        return rank["start"]


def _blocks(values: torch.Tensor, size: int, filler: float) -> torch.Tensor:
    """Cuts chunks (C, E) into blocks (C, B, size), the last of them filled up."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % size), value=filler)
    return padded.view(*values.shape[:-1], -1, size)
