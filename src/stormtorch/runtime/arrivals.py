"""What arrived of each peer, over several exchanges."""

from collections.abc import Collection

from stormtorch.collectives import Group
from stormtorch.transport.exchange import Arrival


class Links:
    """Counts chunks by peer, a rank in the group."""

    def __init__(self, size: int) -> None:
        self._chunks = [0] * size
        self._arrived = [0] * size

    def clear(self) -> None:
        """Begins anew."""
        self._chunks = [0] * len(self._chunks)
        self._arrived = [0] * len(self._arrived)

    def add(self, group: Group, arrival: Arrival, *, stage: int = 0) -> None:
        """Counts an exchange of that group."""
        for rank, (chunks, arrived) in arrival.links(stage=stage).items():
            peer = group.ranks.index(rank)
            self._chunks[peer] += chunks
            self._arrived[peer] += arrived

    def fraction(self, peer: int) -> float | None:
        """Of a peer's chunks, how much arrived; None if there were none."""
        return self._arrived[peer] / self._chunks[peer] if self._chunks[peer] else None

    def fractions(self) -> dict[int, float]:
        """Of every peer that was expected to send."""
        return {peer: fraction for peer in range(len(self._chunks)) if (fraction := self.fraction(peer)) is not None}

    def counts(self, without: Collection[int] = ()) -> tuple[int, int]:
        """Chunks that did not arrive, and how many there were; but for those of some peers."""
        peers = [peer for peer in range(len(self._chunks)) if peer not in without]
        chunks = sum(self._chunks[peer] for peer in peers)
        return chunks - sum(self._arrived[peer] for peer in peers), chunks
