"""One command for the first start and for every restart of a rank, by a store that outlives the ranks.

The ranks of a job that is started anew meet under a number, the job's *generation*. Rank 0 counts it up when it finds
that nobody of the earlier generations is alive. A process that is started looks at the latest ones: if a rank answers
as part of a running job, it comes into that job; if the ranks are still meeting, it meets them.
"""

import logging
import time
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from stormtorch.errors import RanksMissing
from stormtorch.exchange.options import Options
from stormtorch.joining.join_client import admission_addresses, probe
from stormtorch.udp.addresses import Address
from stormtorch.udp.cards import Card, first_card_if_published, known_cards

_log = logging.getLogger("stormtorch")
_NAP_S = 0.3
_WARN_EVERY_S = 10.0
# A rank 0 that could reach nobody for a while may have begun a generation in vain: the running one is an earlier one.
_LOOK_BACK = 3
_LOOK_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLocation:
    """How a process gets into its job."""

    prefix: str
    """Prefix of the job's keys in the store."""
    where: list[Address]
    """Ranks of the running job; empty if this process must meet the other ranks in the store."""


class JobAlreadyRuns(Exception):
    """Another generation of the job turned out to be running."""


class Generations:
    """The generations of a job, as one rank sees them.

    Args:
        store: Store that outlives the ranks.
        rank: This rank.
        world: Number of ranks at the start.
        options: Settings of this process.
        prefix: Prefix of all keys of the job.
    """

    def __init__(self, store: Store, rank: int, world: int, options: Options, prefix: str) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._options, self._prefix = options, prefix
        self._look_at = 0.0

    def find_job(self) -> JobLocation:
        """Finds out whether the job runs, and waits until there is one to come into or to start together.

        Raises:
            RanksMissing: Rank 0 has not begun a new generation within `timeout_s`, although the last one is over.
        """
        began = time.monotonic()
        warn_at = began + _WARN_EVERY_S
        while True:
            latest = self._store.add(self._counter, 0)
            location = self._running(latest)
            if location is not None:
                return location
            may_start, waits = self._rendezvous_state(latest)
            if may_start:
                return JobLocation(prefix=self._name(latest), where=[])
            if self._rank == 0 and not waits:
                # Rank 0 alone counts, so nobody else can have counted meanwhile.
                return JobLocation(prefix=self._name(self._store.add(self._counter, 1)), where=[])
            now = time.monotonic()
            if now >= began + self._options.timeout_s:
                error = RanksMissing(
                    f"rank {self._rank}: connecting: no rank of the last job answers, and rank 0 has not begun a new "
                    f"one within {self._options.timeout_s:g} s (timeout_s). Is it running, with the same store?"
                )
                error.culprit = 0
                raise error
            if now >= warn_at:
                warn_at = now + _WARN_EVERY_S
                _log.warning("rank %d: no job runs yet, %.0f s after this process began", self._rank, now - began)
            time.sleep(_NAP_S)

    def check_earlier_generations(self, rendezvous: str) -> None:
        """Looks, while this rank meets the others, whether the job runs in another generation after all.

        Args:
            rendezvous: Prefix under which they meet. Those who have seen the last card before this rank run there already.

        Raises:
            JobAlreadyRuns: It does.
        """
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY_S
            if self._running(self._store.add(self._counter, 0), rendezvous) is not None:
                raise JobAlreadyRuns

    def _running(self, latest: int, rendezvous: str = "") -> JobLocation | None:
        for generation in range(latest, max(latest - _LOOK_BACK, 0), -1):
            name = self._name(generation)
            if name == rendezvous:
                continue
            others = admission_addresses(self._others(name))
            states = probe(others, self._options, name)
            if "running" in states.values():
                first = [each for each, state in states.items() if state == "running"]
                return JobLocation(prefix=name, where=[*first, *(each for each in others if each not in first)])
        return None

    def _rendezvous_state(self, latest: int) -> tuple[bool, bool]:
        """Whether this process may meet the others in the latest generation, and whether it must wait for them."""
        if latest == 0:
            return False, False
        name = self._name(latest)
        others = self._others(name)
        rendezvous = "founding" in probe(admission_addresses(others), self._options, name).values()
        if first_card_if_published(self._store, name, self._rank) is None:
            # Its place among the first is still free: it meets those who wait, or is the first to come.
            return rendezvous or not others, False
        # An earlier process of this rank has been there: the others begin with its card, and this one comes in later.
        return False, rendezvous

    def _others(self, name: str) -> list[Card]:
        return [card for rank, card in known_cards(self._store, name, self._world).items() if rank != self._rank]

    def _name(self, generation: int) -> str:
        return f"{self._prefix}/{generation}"

    @property
    def _counter(self) -> str:
        return f"{self._prefix}/generations"
