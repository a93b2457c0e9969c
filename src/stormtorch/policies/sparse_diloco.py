"""SparseDiLoCo (SparseLoCo): top-k sparse updates with error feedback, over DiLoCo's local steps."""

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
    """Rare and small exchanges: sparse changes go up, sparse parameters come down.

    A rank adds its change since the last exchange to its error, sends the largest elements in two bits, and subtracts
    from its error what owners report as arrived, so that losses stay in it. Owners send the parameters that changed
    most since they were last sent, and others in turn, so that every loss is repaired in time. Nothing is
    retransmitted. If the answer is lost, a rank continues with its own parameters.
    """

    name: ClassVar[str] = "sparse-diloco"
    every: int = 30
    """Optimizer steps between two exchanges."""
    outer_lr: float = 1.0
    """Factor of the mean change."""
    decay: float = 0.95
    """Fraction of its error that a rank keeps at each exchange."""
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
        _ = self.codes  # raises for an invalid sparse code

    @property
    def codes(self) -> tuple[Sparse, Sparse]:
        """Sparse codes of changes (up) and of parameters (down)."""
        return (
            Sparse(keep=self.keep, of=self.block, bits=2),
            Sparse(keep=self.answer, of=self.block, bits=16),
        )

    def begin_owner(self, owner: Memory, values: torch.Tensor) -> None:
        """Begins with the initial parameters, which all ranks have."""
        owner["anchor"] = values
        owner["published"] = values

    def begin_rank(self, rank: Memory, values: torch.Tensor) -> None:
        """Begins with an error of zero."""
        rank["start"] = values
        rank["known"] = values
        rank["error"] = torch.zeros_like(values)

    def send(self, own: torch.Tensor, loss: Numbers, rank: Memory = NO_MEMORY) -> torch.Tensor:
        """Returns the error plus the change since the last exchange; the sparse code selects its largest elements."""
        return rank["error"].mul_(self.decay).add_(own - rank["start"])

    def sent(self, rank: Memory, sent: torch.Tensor, arrived: torch.Tensor) -> None:
        """Subtracts what arrived, as rounded, from the error."""
        rank["error"].sub_(sent.masked_fill(~arrived, 0.0))

    def update(self, owner: Memory, combined: torch.Tensor) -> torch.Tensor:
        """Moves the anchor and selects the elements to send."""
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
        """Continues with the known anchor, or with its own parameters where the answer was lost."""
        known = torch.where(arrived & ~received.isnan(), received, rank["known"])
        rank["known"] = known
        rank["start"] = torch.where(arrived, known, own)
        return rank["start"]


def _blocks(values: torch.Tensor, size: int, filler: float) -> torch.Tensor:
    """Reshapes chunks (C, E) into blocks (C, B, size); pads the last one."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % size), value=filler)
    return padded.view(*values.shape[:-1], -1, size)
