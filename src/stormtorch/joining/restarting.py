"""Elastic restart: one command serves the first start and every restart of a rank, by a store that outlives the ranks.

Each rendezvous of a job has a number, the job's *generation*. Rank 0 increments it when no process of earlier
generations answers. A process that starts probes the latest generations: if one of them is a running job, it joins that
job; if the latest is still in its rendezvous, it takes part in it.
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
# Generations to probe: a rank 0 that reached no rank for a while may have begun new ones while an earlier one runs.
_LOOK_BACK = 3
_LOOK_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLocation:
    """Where a process joins its job."""

    prefix: str
    """Prefix of the job's keys in the store."""
    where: list[Address]
    """Admission ports of the running job; empty if this process takes part in the rendezvous in the store."""


class JobAlreadyRuns(Exception):
    """Another generation of the job is running."""


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
        """Waits until there is a running job to join, or a rendezvous to take part in.

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
                # Only rank 0 increments the counter, so it cannot have changed meanwhile.
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
                _log.warning("rank %d: no job runs yet, %.0f s after this process started", self._rank, now - began)
            time.sleep(_NAP_S)

    def check_earlier_generations(self, rendezvous: str) -> None:
        """Checks, during the rendezvous, whether the job runs in another generation after all.

        Args:
            rendezvous: Prefix of the present rendezvous, which is not checked: ranks that saw the last card before this
                one run there already.

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
        """Whether this process may take part in the latest generation's rendezvous, and whether it must wait for it."""
        if latest == 0:
            return False, False
        name = self._name(latest)
        others = self._others(name)
        rendezvous = "founding" in probe(admission_addresses(others), self._options, name).values()
        if first_card_if_published(self._store, name, self._rank) is None:
            # This rank has no card in it yet: it joins the ranks that wait, or is the first.
            return rendezvous or not others, False
        # An earlier process of this rank has published its card: the others start with it, and this one joins later.
        return False, rendezvous

    def _others(self, name: str) -> list[Card]:
        return [card for rank, card in known_cards(self._store, name, self._world).items() if rank != self._rank]

    def _name(self, generation: int) -> str:
        return f"{self._prefix}/{generation}"

    @property
    def _counter(self) -> str:
        return f"{self._prefix}/generations"
