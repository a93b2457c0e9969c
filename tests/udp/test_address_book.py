"""NAT traversal: whether there may be NAT between ranks, and the addresses that they publish in the store."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not marked as exported

from stormtorch import Options, connect
from stormtorch.udp.address_book import behind_nat
from stormtorch.udp.cards import Card
from stormtorch.udp.udp import UdpTransport

OPTIONS = Options(interface="127.0.0.1", nat=True, shared_memory=False)
CARD = Card(
    host="203.0.113.1",
    port=29500,
    datagram_bytes=1472,
    chosen=False,
    receive_buffer=1 << 20,
    eager_bytes=1 << 18,
    loopback=False,
    checks_data=True,
    nonce="",
    fingerprint="",
)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["203.0.113.1", "198.51.100.1"], False),
        (["203.0.113.1", "192.168.1.5"], True),
        (["203.0.113.1", "100.64.3.4"], True),
        (["10.0.0.1", "10.0.7.2"], False),
        (["10.0.0.1", "10.1.0.1"], True),
        (["127.0.0.1", "127.0.0.1"], False),
        (["fd00::1", "2001:db8::1"], True),
        (["fe80::1%eth0", "fe80::2%eth0"], False),
    ],
)
def test_private_addresses_in_different_networks_may_be_translated(hosts: list[str], expected: bool) -> None:
    assert behind_nat(replace(CARD, host=host) for host in hosts) is expected


def test_one_rank_that_says_so_decides_for_all() -> None:
    near, far = replace(CARD, host="10.0.0.1"), replace(CARD, host="192.168.0.1")
    assert not behind_nat([near, near])
    assert behind_nat([near, replace(near, nat=1)])
    assert behind_nat([near, far])
    assert not behind_nat([near, replace(far, nat=-1)])
    assert behind_nat([replace(near, nat=1), replace(far, nat=-1)])


def test_wrong_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="nat must be"):
        Options(nat="yes")  # type: ignore[arg-type]


def on_two_ranks(work: Callable[[UdpTransport], None]) -> None:
    """Runs `work` on rank 0 of two ranks that take each other for translated, on loopback."""
    store, done = HashStore(), threading.Event()

    def second() -> None:
        with connect(store, 1, 2, OPTIONS):
            done.wait(20.0)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second)
        try:
            with connect(store, 0, 2, OPTIONS) as transport:
                work(transport)
        finally:
            done.set()
        other.result()


def tell(transport: UdpTransport, observer: int, told: object) -> None:
    transport.store.set(f"{transport.prefix}/seen/{observer}", json.dumps(told))
    transport.store.add(f"{transport.prefix}/seen", 1)


@pytest.mark.thorough
def test_addresses_in_the_store_are_tried_and_not_believed() -> None:
    def work(transport: UdpTransport) -> None:
        before = transport.endpoint.routes()
        assert before[0][1][2]  # rank 1 has answered before `connect` returned
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.bind(("127.0.0.1", 0))
            stranger.settimeout(5.0)
            tell(transport, 1, {"1": [list(stranger.getsockname())]})
            stranger.recv(2048)
        time.sleep(0.5)
        assert transport.endpoint.routes() == before
        assert transport.health()["reroutes"] == 0

    on_two_ranks(work)


def test_nonsense_in_the_store_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: UdpTransport) -> None:
        assert transport.address_book is not None
        nonsense = ("text", [1], {"one": 2}, {"1": [["no address", 7]]}, {"1": [["127.0.0.1", 1 << 20]]})
        for told in (*nonsense, {"99": [["127.0.0.1", 7]]}, {"-1": [["127.0.0.1", 7]]}):
            tell(transport, 1, told)
            transport.address_book.look()
        assert transport.endpoint.routes()[0][1][2]

    with caplog.at_level(logging.WARNING):
        on_two_ranks(work)
    assert caplog.text.count("malformed address") >= 7
