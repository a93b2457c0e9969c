"""Measures drift: at every step all ranks compare their copies of the same few elements, chosen anew each time."""

from collections.abc import Iterable, Sequence

import torch

from stormtorch import theory
from stormtorch.runtime.bucket import Bucket


class DriftSamples:
    """Chooses elements of every owner's shards, reads this rank's copies of them, and compares copies.

    Args:
        buckets: Buckets that hold the parameters.
        owners: Number of owners.
        rank: Rank of this process, one of the owners.
        samples: Number of elements to compare, over all owners.
    """

    def __init__(self, buckets: Sequence[Bucket], owners: int, rank: int, samples: int) -> None:
        self.owners = owners
        self._rank = rank
        self._buckets = buckets
        self.each = -(-samples // owners) if samples else 0
        """Number of elements per owner."""
        # For each owner: where its pieces end if they are put in a row, how much to add to an element's place in that
        # row to get its place in a bucket, and the bucket of each piece.
        self._ends: list[torch.Tensor] = []
        self._firsts: list[torch.Tensor] = []
        self._homes: list[torch.Tensor] = []
        for owner in range(owners):
            pieces = [(bucket.index, piece) for bucket in buckets for piece in bucket.layout.pieces(owner)]
            counts = torch.tensor([piece.count for _, piece in pieces], dtype=torch.int64, device="cpu")
            ends = counts.cumsum(0)
            self._ends.append(ends)
            firsts = torch.tensor([piece.first for _, piece in pieces], dtype=torch.int64, device="cpu")
            self._firsts.append(firsts - (ends - counts))
            self._homes.append(torch.tensor([home for home, _ in pieces], device="cpu"))
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.update_variance = 0.0
        """Mean square of this rank's last update; NaN if it owns nothing."""
        self._before = torch.empty(0)
        self._square: float | None = None

    @property
    def samples(self) -> int:
        """Number of elements in all."""
        return self.each * self.owners

    def choose(self, step: int) -> None:
        """Chooses the elements of a step, the same on all ranks."""
        random = torch.Generator(device="cpu").manual_seed(step)
        self._places = []
        for ends, firsts, homes in zip(self._ends, self._firsts, self._homes, strict=True):
            total = int(ends[-1]) if ends.numel() else 0
            if total == 0:
                empty = torch.empty(0, dtype=torch.int64, device="cpu")
                self._places.append((empty, empty))
                continue
            at = torch.randint(total, (self.each,), generator=random, device="cpu")
            piece = torch.searchsorted(ends, at, right=True)
            self._places.append((homes[piece], firsts[piece] + at))

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """Returns this rank's copies, owner after owner; NaN where an owner has nothing."""
        return torch.cat([self._read(owner) for owner in range(self.owners)]) if self.each else torch.empty(0)

    def before_step(self) -> None:
        """Remembers the chosen elements that this rank owns."""
        self._before = self._read(self._rank)

    def after_step(self) -> None:
        """Measures how much the step has changed the chosen elements that this rank owns."""
        if self.each:
            update = self._read(self._rank) - self._before
            self.update_variance = float(update.square().mean())

    def bound(self, update_variance: float, loss: float, lead: float, max_lag: int | None, *, again: bool) -> float:
        """Returns a bound on the expected mean squared difference of two replicas, under the policy in use.

        Args:
            update_variance: Mean square of the last update, over all ranks.
            loss: Loss of the broadcast.
            lead: Updates by which the broadcast was ahead.
            max_lag: Highest age of a copy, or None.
            again: Whether this update was counted before.
        """
        # The update of j steps ago is in the difference with a weight of p^j, so this running mean weighs it the same.
        if self._square is None:
            self._square = update_variance
        elif not again:
            self._square = (1.0 - loss) * update_variance + loss * self._square
        return theory.pair_bound(loss, lead=lead, max_lag=max_lag) * self._square

    def _read(self, owner: int) -> torch.Tensor:
        values = torch.full((self.each,), torch.nan, dtype=torch.float32, device="cpu")
        homes, at = self._places[owner]
        for bucket in self._buckets:
            here = homes == bucket.index
            if bool(here.any()):
                where = at[here]
                values[here] = bucket.flat[where.to(bucket.device)].float().cpu()
        return values

    def compare(self, own_S: torch.Tensor, others: dict[int, torch.Tensor]) -> tuple[float | None, float | None]:
        """Returns the mean squared difference between this replica and others, and between it and the owners."""
        if not self.each:
            return None, None
        own = own_S.view(self.owners, -1)
        between: list[torch.Tensor] = []
        from_owner: list[torch.Tensor] = []
        for peer, theirs_S in others.items():
            square = (theirs_S.view(self.owners, -1) - own).square()
            from_owner.append(square[peer])
            between += [square[owner] for owner in range(self.owners) if owner not in (peer, self._rank)]
        return _mean(between), _mean(from_owner)


def apart(own_S: torch.Tensor, others: Iterable[torch.Tensor]) -> float | None:
    """Returns the mean squared difference between this replica and others, where nobody owns anything."""
    return _mean([(each - own_S).square() for each in others]) if own_S.numel() else None


def _mean(squares: list[torch.Tensor]) -> float | None:
    if not squares:
        return None
    known = torch.cat(squares)
    known = known[~known.isnan()]
    return float(known.mean()) if known.numel() else None
