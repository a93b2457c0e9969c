"""Warnings of a long wait: for which ranks, in which call, and whether the network explains it."""

import logging
import time
from typing import Any

import pytest

from stormtorch._engine import CanComplete
from stormtorch.exchange import waiting
from stormtorch.exchange.waiting import CollectiveServers, LongWait, in_call

pytestmark = pytest.mark.pure


class Store(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


class Rank:
    """Rank 0 of three, and what it knows of its links."""

    rank, world, silence_s, prefix, waits = 0, 3, 10.0, "storm", None

    def __init__(self, *, round_trip_s: float, bytes_per_look: int) -> None:
        self.collective_servers, self.store = CollectiveServers(), Store()
        self._trip_s, self._bytes, self._more = round_trip_s, 0, bytes_per_look

    def health(self) -> dict[str, int]:
        self._bytes += self._more
        return dict.fromkeys(
            ("bytes_received", "bytes_sent", "shared_bytes_received", "shared_bytes_sent"), self._bytes
        )

    def links(self, peers: list[int]) -> list[tuple[float, float, float, int]]:
        return [(self._trip_s * peer, 0.03, 250e3, 1472) for peer in peers]

    def connectivity(self) -> dict[str, Any]:
        return {"heard_s": {1: 0.1, 2: 0.1}, "quorum": True}


def waited(rank: Rank, waits: int, looks: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a rank says within one call that waits several times."""
    with caplog.at_level(logging.WARNING, "stormtorch"), in_call("backward()"):
        for _ in range(waits):
            patience = LongWait(rank, [1, 2])
            for _ in range(looks):
                time.sleep(0.02)
                patience.look()
            patience.end()
    return [each.getMessage() for each in caplog.records]


def test_a_wait_while_data_moves_is_said_once_and_names_the_slow_link(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several waits of one call count together, as each may be shorter than what is said."""
    monkeypatch.setattr(waiting, "ANNOUNCE_AFTER_S", 0.2)
    rank = Rank(round_trip_s=4.1, bytes_per_look=1 << 20)
    told = waited(rank, 4, 5, caplog)
    assert told == [
        "rank 0 has waited 0 s in backward(), while data moves: rank 1 computes or does something else; "
        "rank 2 computes or does something else. The network is slow: the round trip to rank 2 takes 8.2 s, "
        "3 % of its datagrams are lost, and this rank sends it 2.0 Mbit/s. Is a queue on the path full?"
    ]
    assert rank.store["storm/waits/0"] == b"", "nothing is left in the store"


def test_a_wait_in_which_nothing_moves_is_put_down_to_the_network_only_where_that_is_slow(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "ANNOUNCE_AFTER_S", 0.2)
    quick = waited(Rank(round_trip_s=0.001, bytes_per_look=0), 1, 20, caplog)
    assert len(quick) == 1 and quick[0].endswith("All ranks must make this call: has one taken another branch?")
    caplog.clear()
    slow = waited(Rank(round_trip_s=2.0, bytes_per_look=0), 1, 20, caplog)
    assert len(slow) == 1 and "the round trip to rank 2 takes 4.0 s" in slow[0] and "branch" not in slow[0]


def test_short_waits_are_not_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "ANNOUNCE_AFTER_S", 5.0)
    assert waited(Rank(round_trip_s=4.1, bytes_per_look=1 << 20), 2, 3, caplog) == []


def test_an_exchange_that_may_not_complete_is_aborted_after_a_while_and_one_that_cannot_at_once() -> None:
    own, unclear = waiting.Interruption(), CanComplete.UNCLEAR
    assert [own.should_abort(unclear, now, 0.5) for now in (5.0, 5.25, 5.5)] == [False, False, True]
    assert waiting.Interruption().should_abort(CanComplete.NONE, 0.0)
