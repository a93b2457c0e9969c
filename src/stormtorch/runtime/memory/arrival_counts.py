"""Counts of the chunks that arrived from each peer, over several exchanges."""

from collections.abc import Collection

from stormtorch.collectives import Group
from stormtorch.exchange.exchange import ExchangeResult


class ArrivalCounts:
    """Counts the chunks that came, or should have come, from each peer, a rank in the group."""

    def __init__(self, size: int) -> None:
        self._chunks = [0] * size
        self._arrived = [0] * size
        self._recovered = [0] * size
        self.longest_s = 0.0
        """Seconds that the longest exchange took."""

    def clear(self) -> None:
        """Resets all counts."""
        self._chunks = [0] * len(self._chunks)
        self._arrived = [0] * len(self._arrived)
        self._recovered = [0] * len(self._recovered)
        self.longest_s = 0.0

    def add(self, group: Group, arrival: ExchangeResult, *, stage: int = 0) -> None:
        """Counts an exchange of a group that has the same ranks."""
        self.longest_s = max(self.longest_s, arrival.elapsed_s)
        for rank, (chunks, arrived) in arrival.links(stage=stage).items():
            peer = group.ranks.index(rank)
            self._chunks[peer] += chunks
            self._arrived[peer] += arrived
        for rank, recovered in arrival.recovered(stage=stage).items():
            if recovered:
                self._recovered[group.ranks.index(rank)] += recovered

    def fraction(self, peer: int) -> float | None:
        """Returns the fraction of a peer's chunks that arrived; None if there were none."""
        return self._arrived[peer] / self._chunks[peer] if self._chunks[peer] else None

    def lost_before_parity(self, peer: int) -> tuple[int, int]:
        """Returns the chunks of a peer that were lost, also where parity brought them back, and all of them."""
        chunks = self._chunks[peer]
        return chunks - self._arrived[peer] + self._recovered[peer], chunks

    def fractions(self) -> dict[int, float]:
        """Returns the fraction that arrived from every peer that was to send something."""
        return {peer: fraction for peer in range(len(self._chunks)) if (fraction := self.fraction(peer)) is not None}

    def counts(self, without: Collection[int] = ()) -> tuple[int, int]:
        """Returns the number of chunks that did not arrive, and of all chunks, leaving out some peers."""
        if not without:
            chunks = sum(self._chunks)
            return chunks - sum(self._arrived), chunks
        peers = [peer for peer in range(len(self._chunks)) if peer not in without]
        chunks = sum(self._chunks[peer] for peer in peers)
        return chunks - sum(self._arrived[peer] for peer in peers), chunks
