import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OPTIONS, local_world, processes, store_of_threads

from reference import reduced, same_bits, values
from stormtorch import Options, connect, faults
from stormtorch.collectives import Group, Op, all_reduce, barrier
from stormtorch.errors import PeerFailed, RanksMissing
from stormtorch.joining import rendezvous, starting
from stormtorch.udp import addresses, store_rendezvous
from stormtorch.udp.addresses import local_address
from stormtorch.udp.udp import UdpTransport

KEY = b"a job key of any length from sixteen bytes"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def summed(transport: UdpTransport) -> torch.Tensor:
    tensor = values(transport.rank, 60_000)
    all_reduce(Group(transport), tensor).wait()
    return tensor


def assert_summed(results: list[torch.Tensor]) -> None:
    wanted = reduced([values(rank, 60_000) for rank in range(len(results))], Op.SUM)
    assert all(same_bits(result, wanted) for result in results)


def connect_all(
    n: int, options: Callable[[int], Options], *, store: Any = None, absent: tuple[int, ...] = ()
) -> list[Any]:
    """What each rank's connect gave: None, or its error. Everything is closed."""
    store = store or store_of_threads(3.0)
    said: list[Any] = [None] * n

    def body(rank: int) -> None:
        try:
            connect(store, rank, n, options(rank)).close()
        except Exception as error:
            said[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(n) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    return said


def test_an_interface_is_found_by_its_name_or_is_an_address_itself() -> None:
    assert local_address("lo") == "127.0.0.1"
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("::1") == "::1"
    assert local_address("fe80::1%lo") == "fe80::1%lo"
    with pytest.raises(ValueError, match=r"interface 'nosuch0' does not exist or has no address; .*\blo\b"):
        local_address("nosuch0")


def test_an_address_for_all_networks_comes_before_one_of_a_single_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lists the addresses of an interface in any order."""
    rows = [
        "fe800000000000000000000000000003 02 40 20 80    other0",
        "fe800000000000000000000000000001 02 40 20 80     only0",
        "fe800000000000000000000000000003 02 40 20 80     wide0",
        "fd000005000000000000000000000009 02 40 00 20     wide0",
        "fd000005000000000000000000000003 02 40 00 80     wide0",
    ]
    table = tmp_path / "if_inet6"
    monkeypatch.setattr(addresses, "_TABLE", str(table))
    for order in (rows, rows[::-1]):
        table.write_text("\n".join(order))
        assert local_address("wide0") == "fd00:5::3"
        assert local_address("only0") == "fe80::1%only0"


def test_a_link_local_address_is_on_this_machines_interface_whatever_the_peer_calls_its_own() -> None:
    assert addresses.from_here("fe80::2%enp3s0", "fe80::1%eth0") == "fe80::2%eth0"
    assert addresses.from_here("fd00::2", "fe80::1%eth0") == "fd00::2"
    assert addresses.from_here("fe80::2%eth0", "fd00::1") == "fe80::2%eth0"
    assert addresses.from_here("198.18.0.2", "198.18.0.1") == "198.18.0.2"


def test_ranks_of_ipv4_and_of_ipv6_are_told_so_at_once() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    began = time.monotonic()
    message = r"rank 0 is at 127\.0\.0\.1 and rank 1 is at ::1: IPv4 and IPv6 cannot reach each other"
    with pytest.raises(ValueError, match=message):
        local_world(3, summed, options=[replace(OPTIONS, interface=each) for each in ("lo", "::1", "lo")])
    assert time.monotonic() - began < 10.0


def test_without_an_interface_the_route_to_the_rendezvous_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert local_address(None) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert local_address(None) in ("127.0.0.1", "::1")
    if has_ipv6():
        monkeypatch.setenv("MASTER_ADDR", "::1")
        assert local_address(None) == "::1"


@pytest.mark.parametrize("interface", ["lo", "127.0.0.1", "::1"])
def test_ranks_meet_on_the_interface_they_were_given(interface: str) -> None:
    if interface == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    assert_summed(local_world(3, summed, options=replace(OPTIONS, interface=interface)))


def test_datagrams_on_loopback_are_large_and_can_be_chosen() -> None:
    def size(transport: UdpTransport) -> int:
        return transport.chunk_bytes

    large = local_world(2, size)
    assert len(set(large)) == 1
    assert 60_000 < large[0] < 65_507
    chosen = local_world(2, size, options=replace(OPTIONS, datagram_bytes=1472))
    assert 1472 - 64 <= chosen[0] < 1472
    sealed = local_world(2, size, options=replace(OPTIONS, datagram_bytes=1472, key=KEY))
    assert sealed[0] == chosen[0] - 16, "the seal takes its room"
    assert large[0] % 16 == chosen[0] % 16 == 0, "no element is ever cut"


def test_all_ranks_use_the_smallest_datagram_that_any_of_them_asks_for() -> None:
    options = [replace(OPTIONS, datagram_bytes=size) for size in (9_000, 1472, None)]
    assert len(set(local_world(3, lambda transport: transport.chunk_bytes, options=options))) == 1
    assert_summed(local_world(3, summed, options=options))


@pytest.mark.parametrize("keys", [(KEY, KEY[::-1]), (KEY, None), (None, KEY)])
def test_different_keys_are_an_error_on_every_rank_that_names_both(keys: tuple[bytes | None, bytes | None]) -> None:
    said = connect_all(2, lambda rank: replace(OPTIONS, key=keys[rank]))
    for rank, error in enumerate(said):
        # One that has not looked yet when the other ends says what that one has said.
        assert isinstance(error, ValueError | PeerFailed)
        first = rank if isinstance(error, ValueError) else 1 - rank
        assert f"rank {first} and rank {1 - first} have different keys" in str(error)
        assert "`key` must be the same" in str(error)
        assert "job key" not in str(error), "a key is never printed"


def test_a_taken_port_and_a_wrong_rank_are_clear_errors() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        said = connect_all(1, lambda _: replace(OPTIONS, port=port))
    assert f"UDP port {port}" in str(said[0])
    store = store_of_threads(0.3)
    with pytest.raises(ValueError, match=r"^rank must lie in \[0, world\), got rank 2 of 2"):
        connect(store, 2, 2, OPTIONS)


@pytest.mark.thorough
@pytest.mark.parametrize(("store_s", "options_s"), [(0.4, 30.0), (30.0, 0.4)])
def test_ranks_that_do_not_come_are_named_first_in_a_warning_and_then_in_the_error(
    store_s: float, options_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_rendezvous, "_WARN_AFTER_S", 0.1)
    store = store_of_threads(store_s)
    said = connect_all(4, lambda _: replace(OPTIONS, timeout_s=options_s), store=store, absent=(1, 3))
    for rank in (0, 2):
        assert isinstance(said[rank], RanksMissing) and said[rank].culprit == 1
        assert str(said[rank]).startswith(f"rank {rank}: connecting: ranks 1, 3 of 4 have not joined within 0.4 s")
        warned = [text for text in caplog.messages if text.startswith(f"rank {rank}: ")]
        assert len(warned) == 1 and "ranks 1, 3 of 4 have not joined for" in warned[0]


def test_absence_of_rank_0_from_whom_the_others_have_their_cookie_is_told_by_its_name() -> None:
    said = connect_all(2, lambda _: replace(OPTIONS, timeout_s=0.3), absent=(0,))
    assert "rank 1: connecting: rank 0 of 2 has not joined within 0.3 s" in str(said[1])


def test_rank_that_cannot_join_tells_the_others_at_once() -> None:
    began = time.monotonic()
    said = connect_all(3, lambda rank: replace(OPTIONS, interface="nosuch0" if rank == 1 else None))
    assert time.monotonic() - began < OPTIONS.timeout_s / 2
    assert isinstance(said[1], ValueError)
    for rank in (0, 2):
        assert isinstance(said[rank], PeerFailed) and said[rank].culprit == 1
        assert f"rank {rank}: connecting: rank 1 could not join the job: ValueError: interface 'nosuch0'" in str(
            said[rank]
        )


def test_several_transports_share_a_store_by_prefix() -> None:
    store = store_of_threads()
    results: dict[tuple[int, str], torch.Tensor] = {}

    def body(rank: int) -> None:
        with (
            connect(store, rank, 2, OPTIONS, prefix="one") as one,
            connect(store, rank, 2, OPTIONS, prefix="two") as two,
        ):
            for name, transport in (("one", one), ("two", two)):
                results[rank, name] = summed(transport)
            barrier(Group(one)).wait()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    for name in ("one", "two"):
        assert_summed([results[rank, name] for rank in range(2)])


@pytest.mark.thorough
def test_ranks_meet_across_processes() -> None:
    assert_summed(processes(2, summed, options=replace(OPTIONS, key=KEY)))


@pytest.mark.parametrize("storm", [{}, {"loss": 0.2, "duplicate": 0.1, "reorder": 0.1}, {"corrupt": 0.05}])
@pytest.mark.parametrize("datagram_bytes", [None, 1472])
def test_a_sealed_all_reduce_is_exact(storm: dict[str, Any], datagram_bytes: int | None) -> None:
    def work(transport: UdpTransport) -> torch.Tensor:
        for _ in range(5):
            result = summed(transport)
        return result

    with faults(seed=6, **storm):
        assert_summed(local_world(3, work, options=replace(OPTIONS, key=KEY, datagram_bytes=datagram_bytes)))


@pytest.mark.parametrize("key", [KEY, None])
def test_a_corrupted_datagram_never_passes(key: bytes | None) -> None:
    def work(transport: UdpTransport) -> dict[str, Any]:
        for turn in range(10):
            tensor = values(transport.rank, 40_000, seed=turn)
            all_reduce(Group(transport), tensor).wait()
            wanted = reduced([values(rank, 40_000, seed=turn) for rank in range(3)], Op.SUM)
            assert same_bits(tensor, wanted)
        return transport.health()

    with faults(corrupt=0.05, seed=7):
        for health in local_world(3, work, options=replace(OPTIONS, key=key, datagram_bytes=1472)):
            assert health["faults"]["corrupted"] > 10
            # A flipped bit may also make a datagram foreign, malformed or seemingly a duplicate; it is dropped as that.
            found = health["corrupt"] + health["foreign"] + health["malformed"] + health["duplicates"]
            assert found >= 0.9 * health["faults"]["corrupted"]


@pytest.mark.thorough
@pytest.mark.parametrize("check", [False, True])
def test_nothing_corrupted_passes_on_loopback_whether_data_is_checked_or_not(check: bool) -> None:
    def work(transport: UdpTransport) -> dict[str, Any]:
        for turn in range(30):
            tensor = values(transport.rank, 100_000, seed=turn)
            all_reduce(Group(transport), tensor).wait()
            assert same_bits(tensor, reduced([values(rank, 100_000, seed=turn) for rank in range(2)], Op.SUM))
        return transport.health()

    # One rank that wants it is enough.
    options = [OPTIONS, replace(OPTIONS, check=check)]
    with faults(corrupt=0.2, seed=8):
        for health in local_world(2, work, options=options):
            assert health["faults"]["corrupted"] > 10


def test_datagrams_of_strangers_are_counted_and_change_nothing() -> None:
    def work(transport: UdpTransport) -> tuple[torch.Tensor, dict[str, Any]]:
        barrier(Group(transport)).wait()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for length in (0, 1, 31, 32, 33, 1472, 60_000):
                for _ in range(20):
                    stranger.sendto(os.urandom(length), ("127.0.0.1", transport.endpoint.ports[0]))
        time.sleep(0.1)
        return summed(transport), transport.health()

    results = local_world(2, work)
    assert_summed([tensor for tensor, _ in results])
    for _, health in results:
        assert health["malformed"] + health["foreign"] + health["corrupt"] >= 100


def forged_ping(transport: UdpTransport) -> bytes:
    """A forged ping of rank 1: half of the cookie is right, but not the check or the seal."""
    cookie = int(transport.store.get("storm/cookie"), 16) & 0xFFFFFFFF
    kind_ping, number, no_exchange = 0x17, 1_000, (0, 0, 0, 0)
    return struct.pack("<BBHIIIIIII", kind_ping, 0, 1, 0x12345678, cookie, number, *no_exchange)


@pytest.mark.parametrize("key", [None, KEY])
def test_only_datagrams_of_peers_count_as_life(key: bytes | None) -> None:
    """Forged datagrams are no sign of life: the next view depends on authentic ones only."""
    heard = threading.Event()

    def work(transport: UdpTransport) -> None:
        group = Group(transport)
        barrier(group).wait()
        if transport.rank == 1:
            assert heard.wait(20.0)
            transport.watch()
            barrier(group).wait()
            return
        time.sleep(0.1)
        before, since_s = transport.health(), time.monotonic()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for datagram in (b"hello", os.urandom(200), forged_ping(transport)) * 5:
                stranger.sendto(datagram, ("127.0.0.1", transport.endpoint.ports[0]))
        time.sleep(0.4)
        after = transport.health()
        assert after["datagrams_received"] >= before["datagrams_received"] + 15
        assert after["authenticated"] == before["authenticated"], "a stranger's datagram passed for a peer's"
        heard.set()
        transport.watch()
        barrier(group).wait()
        assert transport.health()["authenticated"] > before["authenticated"]
        assert transport.connectivity()["heard_s"][1] < time.monotonic() - since_s

    local_world(2, work, options=replace(OPTIONS, key=key))


@pytest.mark.parametrize(
    ("host", "strangers"),
    [("192.0.2.1", True), ("198.18.0.3", False), ("127.0.0.1", False), ("2001:db8::1", True), ("fe80::1%eth0", True)],
)
def test_strangers_are_neither_on_loopback_nor_in_the_lab(host: str, strangers: bool) -> None:
    endpoint, card = starting.bind(OPTIONS)
    endpoint.close(0.0)
    assert rendezvous._on_shared_network(replace(card, host=host, loopback=host == "127.0.0.1")) == strangers


@pytest.mark.parametrize(("loopback", "key", "warnings"), [(False, None, 1), (False, KEY, 0), (True, None, 0)])
def test_job_that_leaves_the_machine_without_a_key_is_warned_of_strangers_once(
    loopback: bool,
    key: bytes | None,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The ranks stay on loopback, where traffic of tests belongs, and say in their cards that they do not."""
    rendezvous._warn_without_key.cache_clear()
    bind = starting.bind

    def elsewhere(options: Options) -> Any:
        endpoint, card = bind(options)
        return endpoint, replace(card, loopback=loopback)

    monkeypatch.setattr(rendezvous, "bind", elsewhere)
    for _ in range(2):
        local_world(2, lambda _: None, options=replace(OPTIONS, key=key))
    said = [text for text in caplog.messages if "without a key" in text]
    assert len(said) == warnings
    for words in ("read the cookie", "forge", "silences a link", "stormtorch keygen", "Options(key=...)", "STORM_KEY"):
        assert all(words in text for text in said)
