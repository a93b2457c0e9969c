"""Counts of the chunks that arrived from each peer, over several exchanges."""

from collections.abc import Collection

from stormtorch.collectives import Group
from stormtorch.exchange.exchange import ExchangeResult


class ArrivalCounts:
    """Counts expected and arrived chunks by peer, a rank in the group."""

    def __init__(self, size: int) -> None:
        self._chunks = [0] * size
        self._arrived = [0] * size
        self._recovered = [0] * size
        self.longest_s = 0.0
        """Duration of the longest exchange, in seconds."""

    def clear(self) -> None:
        """Resets all counts."""
        self._chunks = [0] * len(self._chunks)
        self._arrived = [0] * len(self._arrived)
        self._recovered = [0] * len(self._recovered)
        self.longest_s = 0.0

    def add(self, group: Group, arrival: ExchangeResult, *, stage: int = 0) -> None:
        """Adds the counts of an exchange of a group with the same ranks."""
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
        """Returns the number of a peer's chunks lost before parity recovered any, and the number of all its chunks."""
        chunks = self._chunks[peer]
        return chunks - self._arrived[peer] + self._recovered[peer], chunks

    def fractions(self) -> dict[int, float]:
        """Returns the fraction that arrived, by peer, for peers that had chunks to send."""
        return {peer: fraction for peer in range(len(self._chunks)) if (fraction := self.fraction(peer)) is not None}

    def counts(self, without: Collection[int] = ()) -> tuple[int, int]:
        """Returns the number of missing chunks and of all chunks, without those of some peers."""
        if not without:
            chunks = sum(self._chunks)
            return chunks - sum(self._arrived), chunks
        peers = [peer for peer in range(len(self._chunks)) if peer not in without]
        chunks = sum(self._chunks[peer] for peer in peers)
        return chunks - sum(self._arrived[peer] for peer in peers), chunks
