"""Admission: a rank's answers to join requests, a join client whose rank dies, and cards as bytes."""

import json
import threading
import time
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
from conftest import OPTIONS, store_of_threads
from hypothesis import given
from hypothesis import strategies as st

from stormtorch import Options, connect
from stormtorch.backend.creation import _rejoin
from stormtorch.errors import NotAdmitted
from stormtorch.joining import join_client
from stormtorch.joining.join_client import admission_addresses, join_running_job
from stormtorch.udp import rpc
from stormtorch.udp.addresses import addresses
from stormtorch.udp.cards import MOST_BYTES, Card, pack, unpack
from stormtorch.udp.udp import UdpTransport

CARD = Card(
    host="fe80:1234:5678:9abc:def0:1234:5678:9abc%wlp0s20f3abc",
    port=65535,
    datagram_bytes=65507,
    chosen=False,
    receive_buffer=1 << 40,
    eager_bytes=1 << 40,
    loopback=False,
    checks_data=False,
    nonce="f" * 32,
    fingerprint="f" * 64,
    incarnation=65535,
    reception=65535,
    spare_ranks=65535,
)
QUICK = replace(OPTIONS, silence_s=2.0)


def connected(n: int, options: Options = QUICK) -> list[UdpTransport]:
    store, made = store_of_threads(), dict[int, UdpTransport]()
    threads = [
        threading.Thread(target=lambda rank=rank: made.update({rank: connect(store, rank, n, options)}))
        for rank in range(n)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    return [made[rank] for rank in range(n)]


def address(transport: UdpTransport) -> tuple[str, int]:
    return admission_addresses([transport.cards[transport.rank]])[0]


@pytest.mark.pure
def test_the_longest_card_fits_and_comes_back() -> None:
    assert len(pack(CARD)) <= MOST_BYTES
    assert unpack(pack(CARD)) == CARD
    with pytest.raises(ValueError, match="at most 400 bytes"):
        pack(replace(CARD, nonce="f" * 400))


@pytest.mark.pure
@given(
    st.binary(max_size=500) | st.builds(lambda value: json.dumps(value).encode(), st.lists(st.integers() | st.text()))
)
def test_bytes_of_strangers_are_no_card(garbage: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        unpack(garbage)


@pytest.mark.pure
@pytest.mark.parametrize(
    "change", [{"host": "example.org"}, {"port": 0}, {"incarnation": -1}, {"reception": 70000}, {"chosen": 1}]
)
def test_a_card_with_nonsense_in_it_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no card|does not appear"):
        unpack(pack(replace(CARD, **change)))


@pytest.mark.pure
def test_addresses_are_read() -> None:
    assert addresses("a:1, [::1]:2,10.0.0.1:3") == [("a", 1), ("::1", 2), ("10.0.0.1", 3)]
    for wrong in ("", "a", "a:", ":1", "a:0", "a:70000", "a:1,", "a:x"):
        with pytest.raises(ValueError, match='addresses must be "host:port"'):
            addresses(wrong)


@pytest.mark.pure
def test_rejoin_comes_from_the_environment_where_the_options_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _rejoin(None) is False
    monkeypatch.setenv("STORM_REJOIN", "auto")
    assert _rejoin(None) == "auto"
    assert _rejoin(Options(rejoin=True)) is True
    monkeypatch.setenv("STORM_REJOIN", "yes")
    with pytest.raises(ValueError, match="STORM_REJOIN must be auto, 1 or 0, got 'yes'"):
        _rejoin(None)


def test_strange_questions_change_nothing() -> None:
    transports = connected(2)
    try:
        fine = pack(transports[1].cards[1]).decode()
        questions: list[dict[str, Any]] = [
            {},
            {"op": "nothing"},
            {"op": ["learn"]},
            {"op": "ask"},
            {"op": "ask", "rank": 1, "incarnation": 1, "card": "garbage"},
            {"op": "ask", "rank": 1, "incarnation": 1, "card": fine},  # of another incarnation
            {"op": "ask", "rank": 10**9, "incarnation": 0, "card": fine},
            {"op": "ask", "rank": True, "incarnation": 1.5, "card": None},
        ]
        for question in questions:
            with pytest.raises((rpc.MalformedMessage, OSError)):
                rpc.request(address(transports[0]), question, key=None, version=version("stormtorch"))
        for rank in (-1, 10**9, "x", 0.5, True, 0):
            question = {"op": "seat", "rank": rank, "above": "x"}
            said = rpc.request(address(transports[0]), question, key=None, version=version("stormtorch"))
            assert said["state"] == "refused", said
        assert [each.incarnation(1 - rank) for rank, each in enumerate(transports)] == [0, 0]
    finally:
        for transport in transports:
            transport.close(0.0)


def test_numbers_of_different_ranks_never_meet() -> None:
    transports = connected(3)
    try:
        given_out = []
        for _ in range(3):
            for each in transports[:2]:
                question = {"op": "seat", "rank": 2}
                said = rpc.request(address(each), question, key=None, version=version("stormtorch"))
                given_out.append(said["incarnation"])
        assert len(set(given_out)) == len(given_out)
        assert min(given_out) >= 1
    finally:
        for transport in transports:
            transport.close(0.0)


@pytest.mark.thorough
def test_a_newcomer_goes_on_with_others_if_the_rank_that_it_asked_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    transports = connected(3)
    seat = join_client._JoinClient._request_slot

    def dies_after_it(self: Any, above: int) -> tuple[int, int]:
        given_out = seat(self, above)
        if not transports[1].closed:
            transports[1].close(0.0)
        return given_out

    monkeypatch.setattr(join_client._JoinClient, "_request_slot", dies_after_it)
    try:
        with join_running_job([address(transports[1])], QUICK) as new:
            new.enter()
            view = new.view()
            assert view is not None
            assert [rank for rank, _ in view.members if rank != 1] == [0, 2, new.rank]
    finally:
        for transport in transports:
            transport.close(0.0)


def test_a_job_that_has_ended_lets_nobody_in() -> None:
    transports = connected(2)
    where = [address(each) for each in transports]
    for transport in transports:
        transport.close(0.0)
    began = time.monotonic()
    with pytest.raises(
        NotAdmitted, match=r"no rank of the job answers: 127\.0\.0\.1:\d+: .*refused; 127\.0\.0\.1:\d+: "
    ):
        join_running_job(where, QUICK)
    assert time.monotonic() - began < 3.0
