"""Measures drift (replica divergence): at every step, all ranks compare their copies of a few random elements."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from stormtorch import theory
from stormtorch.runtime.memory.bucket import Bucket

_Picks = tuple[list[tuple[Bucket, torch.Tensor]], torch.Tensor]
"""Elements of the buckets of one device: their positions in each bucket, and where their values go."""
Values = npt.NDArray[np.float32]

# Steps for which elements are drawn at once: one draw per step would slow small models. More steps take more memory.
_AHEAD = 8


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
        # For each owner, with its pieces concatenated: the end of each piece, the offset from an element's position in
        # the concatenation to its position in the bucket, and the bucket of each piece.
        self._ends: list[torch.Tensor] = []
        self._firsts: list[torch.Tensor] = []
        self._bucket_indices: list[torch.Tensor] = []
        for owner in range(owners):
            pieces = [(bucket.index, piece) for bucket in buckets for piece in bucket.layout.pieces(owner)]
            counts = torch.tensor([piece.count for _, piece in pieces], dtype=torch.int64, device="cpu")
            ends = counts.cumsum(0)
            self._ends.append(ends)
            firsts = torch.tensor([piece.first for _, piece in pieces], dtype=torch.int64, device="cpu")
            self._firsts.append(firsts - (ends - counts))
            self._bucket_indices.append(torch.tensor([index for index, _ in pieces], device="cpu"))
        self._random = torch.Generator(device="cpu")
        # A fast path for small models, which have one bucket and feel every operation of a step.
        all_own = all(ends.numel() for ends in self._ends)
        self._only_bucket = buckets[0] if len(buckets) == 1 and self.each and all_own else None
        self._drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        """For each owner, the positions and piece indices of its elements for some steps, one row for each step."""
        self._drawn_for = -1
        self._rows = self._where = torch.empty(0, dtype=torch.int64, device="cpu")
        """Positions of the chosen elements if there is only one bucket: for some steps, and for this one."""
        self._positions: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._found: dict[range, list[_Picks]] = {}
        self._own = range(rank, rank + 1)
        self.update_variance = 0.0
        """Mean square of this rank's last update; NaN if it owns nothing."""
        self._before = torch.empty(0)
        self._square: float | None = None

    @property
    def samples(self) -> int:
        """Total number of elements."""
        return self.each * self.owners

    def choose(self, step: int) -> None:
        """Chooses the elements of a step, the same on all ranks."""
        block, row = divmod(step, _AHEAD)
        if block != self._drawn_for:
            self._random.manual_seed(block)
            self._drawn, self._drawn_for = [self._draw(owner) for owner in range(self.owners)], block
            if self._only_bucket is not None:
                self._rows = torch.cat([where for where, _ in self._drawn], dim=1).to(self._only_bucket.device)
                self._drawn = []
        if self._only_bucket is not None:
            self._where = self._rows[row]
            return
        self._found = {}
        self._positions = [
            (bucket_indices[pieces[row]], where[row]) if where.numel() else (where.flatten(), where.flatten())
            for bucket_indices, (where, pieces) in zip(self._bucket_indices, self._drawn, strict=True)
        ]

    def _draw(self, owner: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws elements of an owner, one row for each step. Returns their positions and piece indices."""
        ends, firsts = self._ends[owner], self._firsts[owner]
        total = int(ends[-1]) if ends.numel() else 0
        if total == 0:
            empty = torch.empty(_AHEAD, 0, dtype=torch.int64, device="cpu")
            return empty, empty
        at = torch.randint(total, (_AHEAD, self.each), generator=self._random, device="cpu")
        pieces = torch.searchsorted(ends, at, right=True)
        return firsts[pieces] + at, pieces

    def read(self) -> torch.Tensor:
        """Returns this rank's copies, owner after owner; NaN where an owner has nothing."""
        return self._read(range(self.owners)) if self.each else torch.empty(0)

    def before_step(self) -> None:
        """Reads the chosen elements that this rank owns, for `after_step`."""
        self._before = self._read(self._own)

    def after_step(self) -> None:
        """Measures how much the step has changed the chosen elements that this rank owns."""
        if self.each:
            update = self._read(self._own) - self._before
            self.update_variance = float(torch.dot(update, update)) / update.numel()

    def bound(self, update_variance: float, loss: float, lead: float, max_lag: int | None, *, again: bool) -> float:
        """Returns a bound on the expected mean squared difference of two replicas, under the policy in use.

        Args:
            update_variance: Mean square of the last update, over all ranks.
            loss: Loss of the broadcast.
            lead: Updates by which the broadcast was extrapolated.
            max_lag: Highest age of a copy, or None.
            again: Whether this update was counted before.
        """
        # The update of j steps ago has a weight of p^j in the difference, so this running mean gives it the same.
        if self._square is None:
            self._square = update_variance
        elif not again:
            self._square = (1.0 - loss) * update_variance + loss * self._square
        return theory.pair_bound(loss, lead=lead, max_lag=max_lag) * self._square

    def _read(self, owners: range) -> torch.Tensor:
        if self._only_bucket is not None:
            where = self._where.narrow(0, owners.start * self.each, len(owners) * self.each)
            values = self._only_bucket.flat.index_select(0, where)
            return values if values.dtype == torch.float32 and not self._only_bucket.on_gpu else values.float().cpu()
        if owners not in self._found:
            self._found[owners] = _find(self._buckets, [self._positions[owner] for owner in owners])
        values = torch.full((len(owners) * self.each,), torch.nan, dtype=torch.float32, device="cpu")
        # One copy for each device, as each copy waits for everything that the device still computes.
        for picks, into in self._found[owners]:
            values[into] = torch.cat([bucket.flat[where].float() for bucket, where in picks]).cpu()
        return values

    def compare(self, own_S: torch.Tensor, others: dict[int, torch.Tensor]) -> tuple[float | None, float | None]:
        """Returns the mean squared difference between this replica and others, and between it and the owners."""
        if not self.each:
            return None, None
        own = own_S.numpy().reshape(self.owners, -1)
        between: list[Values] = []
        from_owner: list[Values] = []
        for peer, theirs_S in others.items():
            square = np.square(theirs_S.numpy().reshape(self.owners, -1) - own)
            from_owner.append(square[peer])
            between += [square[owner] for owner in range(self.owners) if owner not in (peer, self._rank)]
        return _mean(between), _mean(from_owner)


def _find(buckets: Sequence[Bucket], positions: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[_Picks]:
    """Groups elements, given by bucket and position, by device."""
    bucket_indices, at = (torch.cat(each) for each in zip(*positions, strict=True))
    found: list[_Picks] = []
    for device in dict.fromkeys(bucket.device for bucket in buckets):
        here = [bucket for bucket in buckets if bucket.device == device]
        intos = [(bucket_indices == bucket.index).nonzero().flatten() for bucket in here]
        into = torch.cat(intos)
        if not into.numel():
            continue
        where = at[into]
        if device.type == "cuda":
            where = where.pin_memory().to(device, non_blocking=True)
        parts = torch.split(where, [each.numel() for each in intos])
        found.append(([(bucket, part) for bucket, part in zip(here, parts, strict=True) if part.numel()], into))
    return found


def mean_squared_difference(own_S: torch.Tensor, others: Iterable[torch.Tensor]) -> float | None:
    """Returns the mean squared difference between this replica and others, for policies without owners."""
    return _mean([np.square(each.numpy() - own_S.numpy()) for each in others]) if own_S.numel() else None


def _mean(squares: list[Values]) -> float | None:
    if not squares:
        return None
    known = squares[0] if len(squares) == 1 else np.concatenate(squares)
    mean = float(known.mean())
    if not math.isnan(mean):
        return mean
    known = known[~np.isnan(known)]
    return float(known.mean()) if known.size else None
