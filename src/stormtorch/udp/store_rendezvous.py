"""Rendezvous in a store: waits until all ranks have published a key, and names those that are missing or failed."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from torch.distributed.distributed_c10d import Store

from stormtorch.errors import PeerFailed, RanksMissing

_log = logging.getLogger("stormtorch")
_WARN_AFTER_S = 10.0
_SHORTEST_NAP_S, _LONGEST_NAP_S = 1e-3, 0.05
_MOST_FAILURE_BYTES = 2000
_LOOK_EVERY_S = 0.5
"""Time between two checks of each rank alone, to name the missing ones and to find the failures of others."""


class StoreRendezvous:
    """The rendezvous of a job's ranks, as one of them sees it.

    Args:
        store: Store that all ranks share.
        prefix: Prefix of the job's keys in it.
        rank: This rank.
        world: Number of ranks.
        timeout_s: Longest total wait; the store's own timeout applies if it is shorter.
        meanwhile: Called every half second during a wait; it may raise to end the wait.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        world: int,
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._meanwhile = meanwhile
        self._store, self._prefix = store, prefix
        self._rank, self._world = rank, world
        self._began = time.monotonic()
        limit = store.timeout  # type: ignore[attr-defined]  # torch has it, but its type stubs do not
        self._timeout_s = min(timeout_s, limit.total_seconds())
        self._warned = False

    def wait(self, keys: Mapping[int, str]) -> None:
        """Blocks until each rank has written its key.

        Args:
            keys: Key of each rank to wait for.

        Raises:
            RanksMissing: Some ranks have not joined within the timeout; the error names all of them.
            PeerFailed: One of them has reported that it cannot join.
        """
        nap_s = _SHORTEST_NAP_S
        missing, look_at = dict(keys), time.monotonic()
        # Usually one request covers all ranks: hundreds of ranks poll the same store.
        while not self._store.check(list(missing.values())):
            waited_s = time.monotonic() - self._began
            warns = waited_s >= _WARN_AFTER_S and not self._warned
            if time.monotonic() >= look_at or warns or waited_s >= self._timeout_s:
                look_at = time.monotonic() + _LOOK_EVERY_S
                missing = {peer: key for peer, key in missing.items() if not self._store.check([key])}
                for peer in missing:
                    self._check_failure(peer)
                if not missing:
                    return
                if self._meanwhile is not None:
                    self._meanwhile()
            if waited_s >= self._timeout_s:
                error = RanksMissing(f"{self._missing(missing)} within {self._timeout_s:g} s (timeout_s). {_ADVICE}")
                error.culprit = min(missing)
                raise error
            if warns:
                self._warned = True
                _log.warning("%s for %.0f s. %s", self._missing(missing), waited_s, _ADVICE)
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    @contextlib.contextmanager
    def publish_failure(self) -> Iterator[None]:
        """If the block fails, writes the error into the store, so that the others do not wait for this rank."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # if the store is gone, no rank waits in it
                self._store.set(self._failure_key(self._rank), f"{type(error).__name__}: {error}")
            raise

    def _check_failure(self, peer: int) -> None:
        if self._store.check([self._failure_key(peer)]):
            why = self._store.get(self._failure_key(peer))[:_MOST_FAILURE_BYTES].decode(errors="replace")
            error = PeerFailed(f"rank {self._rank}: connecting: rank {peer} could not join the job: {why}")
            error.culprit = peer
            raise error

    def _failure_key(self, rank: int) -> str:
        return f"{self._prefix}/failed/{rank}"

    def _missing(self, missing: Mapping[int, str]) -> str:
        names = ", ".join(map(str, sorted(missing)))
        return (
            f"rank {self._rank}: connecting: rank{'s' if len(missing) > 1 else ''} {names} of {self._world} "
            f"{'have' if len(missing) > 1 else 'has'} not joined"
        )


_ADVICE = (
    "Are they running, with the same store and the same world size, and was no rank started twice? Look at the first "
    "error that they logged."
)
