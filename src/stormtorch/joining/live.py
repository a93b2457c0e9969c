"""Live client: fetches the records of a running job over the network. One address is enough: ranks know all others."""

from __future__ import annotations

import ipaddress
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from stormtorch.errors import NotAdmitted
from stormtorch.joining.admission import MOST_FORWARDED_REQUESTS
from stormtorch.telemetry.records import ProcessId, Record, checked
from stormtorch.udp import rpc
from stormtorch.udp.addresses import Address, addresses

_ASK_S = 2.0
_FORWARD_S = 4.0
# Time until a request to an unreachable rank is repeated, and a direct one to a rank that only others reach.
_AGAIN_S = 5.0
_DIRECT_AGAIN_S = 30.0
_MOST_RANKS = 1024
_MOST_ANSWERS = 64
_MOST_TALKS = 16
# Requests to ranks that this process cannot reach are forwarded by others: total time at each read, and delay before a
# busy rank is tried again. A rank that had no turn is requested at the next read.
_FORWARDS_TIMEOUT_S = 6.0
_BUSY_AGAIN_S = 0.1


@dataclass(slots=True)
class _Rank:
    """What this process knows about one rank."""

    address: Address
    incarnation: int = -1
    pid: int = 0
    known: int = -1
    """Newest incarnation that other ranks have reported."""
    since: int = 0
    direct_at: float = 0.0
    """Time of the next direct request."""
    at: float = 0.0
    """Time of the next request of any kind."""
    way: str = ""
    """"direct", "through rank 3", or why it cannot be reached."""


class LiveJob:
    """The records of all ranks of a running job. Ranks may die, return and join meanwhile.

    Args:
        where: Address of any rank, "host:port"; several are separated by commas, and one that answers is enough.
        key: The job's key, if it has one.
    """

    def __init__(self, where: str, *, key: bytes | None = None) -> None:
        self._addresses = addresses(where)
        self._key = key
        self._version = version("stormtorch")  # reads a file, and every request names it
        self._ranks: dict[int, _Rank] = {}
        self._pool = ThreadPoolExecutor(_MOST_TALKS, "watch")

    def read(self) -> dict[ProcessId, list[Record]]:
        """Returns the records that have arrived since the last call, by process.

        It takes up to some seconds if ranks are unreachable, and goes on without them: see `ways`.

        Raises:
            ConnectionError: No rank has ever answered at the addresses.
            NotAdmitted: The job has another key, or another version of this package.
        """
        now = time.monotonic()
        found: dict[ProcessId, list[Record]] = {}
        if not any(rank.way == "direct" for rank in self._ranks.values()):
            self._find(found)
        # A copy: answers add ranks that were not known before.
        due = [(number, rank) for number, rank in sorted(self._ranks.items()) if now >= rank.at]
        for each in self._pool.map(lambda item: self._ask_directly(item[1], now), due):
            _merge(found, each)
        others = [(number, rank) for number, rank in due if rank.way != "direct"]
        through = [number for number, rank in self._ranks.items() if rank.way == "direct"]
        if others and through:
            seats = {helper: threading.Semaphore(MOST_FORWARDED_REQUESTS) for helper in through}
            for each in self._pool.map(lambda item: self._ask_through(item[0], item[1], seats, now), others):
                _merge(found, each)
        return found

    def ways(self) -> dict[int, str]:
        """Returns by rank how it was reached: "direct", "through rank 3", or why it was not."""
        return {number: rank.way for number, rank in sorted(self._ranks.items())}

    def close(self) -> None:
        """Ends all requests."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _find(self, found: dict[ProcessId, list[Record]]) -> None:
        """Learns which ranks are at the addresses that the user gave."""
        errors: list[str] = []
        for address in self._addresses:
            try:
                answer = self._request(address, {"op": "tell", "since": 0}, _ASK_S)
            except NotAdmitted:
                raise
            except (OSError, rpc.MalformedMessage) as error:
                errors.append(f"{address[0]}:{address[1]}: {error}")
                continue
            number = answer.get("rank")
            if answer.get("state") == "running" and type(number) is int and 0 <= number < _MOST_RANKS:
                rank = self._ranks.setdefault(number, _Rank(address))
                rank.address, rank.at, rank.direct_at = address, 0.0, 0.0
                if rank.since == 0:
                    self._take(rank, answer, found, "direct")
            else:
                errors.append(f"{address[0]}:{address[1]}: its training has ended or has not begun")
        if not self._ranks:
            raise ConnectionError(
                f"no rank of a job answers ({'; '.join(errors)}): give the address of a rank that trains, which its "
                "log and its records name, or the folder of STORM_RECORD"
            )

    def _request(self, address: Address, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return rpc.request(address, request, key=self._key, version=self._version, timeout_s=timeout_s)

    def _ask_directly(self, rank: _Rank, now: float) -> dict[ProcessId, list[Record]]:
        if now < rank.direct_at:
            return {}
        found: dict[ProcessId, list[Record]] = {}
        try:
            for _ in range(_MOST_ANSWERS):
                answer = self._request(rank.address, {"op": "tell", "since": rank.since}, _ASK_S)
                if not self._take(rank, answer, found, "direct"):
                    break
        except (OSError, rpc.MalformedMessage, NotAdmitted) as error:
            rank.way, rank.direct_at = f"{rank.address[0]}:{rank.address[1]}: {error}", now + _DIRECT_AGAIN_S
        return found

    def _ask_through(
        self, number: int, rank: _Rank, seats: dict[int, threading.Semaphore], now: float
    ) -> dict[ProcessId, list[Record]]:
        """Sends a request through another rank, a different one each time, within the limit of what each forwards."""
        found: dict[ProcessId, list[Record]] = {}
        helper = list(seats)[(number + int(now)) % len(seats)]
        until = now + _FORWARDS_TIMEOUT_S
        if not seats[helper].acquire(timeout=max(0.0, until - time.monotonic())):
            return found
        try:
            for _ in range(_MOST_ANSWERS):
                answer = self._ask_patiently(helper, {"op": "tell", "since": rank.since, "for": number}, until)
                if answer is None:
                    return found
                if answer.get("state") == "running" and answer.get("rank") != number:
                    break
                if not self._take(rank, answer, found, f"through rank {helper}"):
                    break
        except (OSError, rpc.MalformedMessage, NotAdmitted):
            pass  # the next request goes through another rank
        finally:
            seats[helper].release()
        if not rank.way.startswith("through"):
            rank.at = now + _AGAIN_S
        return found

    def _ask_patiently(self, helper: int, request: dict[str, Any], until: float) -> dict[str, Any] | None:
        """Repeats a request while the rank is busy with other watchers and joiners; None if it stays busy."""
        while time.monotonic() < until:
            try:
                answer = self._request(self._ranks[helper].address, request, _FORWARD_S)
            except (rpc.MalformedMessage, ConnectionResetError):
                answer = {"state": "busy"}  # too many connections: the rank closes before the handshake
            if answer.get("state") != "busy":
                return answer
            time.sleep(_BUSY_AGAIN_S)
        return None

    def _take(self, rank: _Rank, answer: dict[str, Any], found: dict[ProcessId, list[Record]], way: str) -> bool:
        """Keeps the records in a rank's answer. Returns whether it has more. The answer is untrusted."""
        number, incarnation, pid = answer.get("rank"), answer.get("incarnation"), answer.get("pid")
        following, received = answer.get("next"), answer.get("records")
        if answer.get("state") != "running":
            if answer.get("state") != "busy":
                rank.way = str(answer.get("why", "its training has ended"))[:300]
            return False
        numbers = (number, incarnation, pid, following)
        if not all(type(each) is int and each >= 0 for each in numbers) or not isinstance(received, list):
            rank.way = "it sent a malformed answer"
            return False
        assert isinstance(number, int) and isinstance(incarnation, int) and isinstance(pid, int)
        assert isinstance(following, int)
        rank.way = way
        if (incarnation, pid) != (rank.incarnation, rank.pid):
            # The rank has another process now, which counts its records from 0.
            again = rank.since > 0
            rank.incarnation, rank.pid, rank.since = incarnation, pid, 0
            if again:
                return True
        records = [record for each in received if (record := checked(each)) is not None]
        if records:
            found.setdefault(ProcessId(number, incarnation, pid), []).extend(records)
        more = following > rank.since and answer.get("more") is True
        rank.since = following
        self._learn(answer)
        return more

    def _learn(self, answer: dict[str, Any]) -> None:
        """Learns other ranks' addresses, and which of them have a new process."""
        received = answer.get("receptions")
        for text, place in received.items() if isinstance(received, dict) and len(received) <= _MOST_RANKS else ():
            try:
                number, (host, port, incarnation) = int(text), place
                ipaddress.ip_address(str(host).partition("%")[0])
                if not 0 <= number < _MOST_RANKS or not 0 < port <= 0xFFFF or incarnation < 0:
                    continue
                address = (str(host), int(port))
            except (TypeError, ValueError):
                continue
            rank = self._ranks.setdefault(number, _Rank(address))
            if incarnation > max(rank.known, rank.incarnation):
                rank.known = incarnation
                if rank.way != "direct":
                    rank.address, rank.at, rank.direct_at = address, 0.0, 0.0


def _merge(found: dict[ProcessId, list[Record]], more: dict[ProcessId, list[Record]]) -> None:
    for who, records in more.items():
        found.setdefault(who, []).extend(records)
