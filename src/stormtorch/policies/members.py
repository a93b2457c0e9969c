"""Who is there: ranks that fall silent are done without, named, and after a while given up."""

import logging
import time

from stormtorch.collectives import Group
from stormtorch.errors import StormError

_log = logging.getLogger("stormtorch")


class Members:
    """Watches which ranks were heard of.

    Args:
        group: All of them.
        warn_every: Steps between two warnings about the same rank.
        give_up_s: A rank missing for longer ends the job.
    """

    def __init__(self, group: Group, warn_every: int, give_up_s: float) -> None:
        self._group = group
        self._warn_every = warn_every
        self._give_up_s = give_up_s
        self._missing: dict[int, tuple[float, int]] = {}  # since when, and since which step

    def hear(self, heard: set[int], step: int, events: list[str]) -> list[int]:
        """Takes notice of one step.

        Args:
            heard: The others that were heard of.
            step: Which one.
            events: What is new is added to it.

        Returns:
            Who is missing.

        Raises:
            StormError: Somebody has been for too long.
        """
        now = time.monotonic()
        for peer in range(self._group.size):
            if peer == self._group.rank:
                continue
            if peer in heard:
                if self._missing.pop(peer, None) is not None:
                    events.append(f"rank {peer} is back")
                    _log.warning("rank %d: rank %d is back at step %d", self._group.rank, peer, step)
                continue
            if peer not in self._missing:
                self._missing[peer] = (now, step)
                events.append(f"rank {peer} is missing")
            since, first = self._missing[peer]
            if (step - first) % self._warn_every == 0:
                _log.warning(
                    "rank %d: nothing was heard of rank %d for %.0f s, at step %d: training goes on without its "
                    "gradients, and its shard of the parameters stays as it is",
                    *(self._group.rank, peer, now - since, step),
                )
            if now - since > self._give_up_s:
                error = StormError(
                    f"rank {self._group.rank}: rank {peer} has been missing for {now - since:.0f} s: restart it, or "
                    f"raise give_up_s ({self._give_up_s:g}) to go on without it for longer"
                )
                error.culprit = self._group.ranks[peer]
                raise error
        return sorted(self._missing)
