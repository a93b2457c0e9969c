"""What each attacker of docs/security.md can do, without a key and with one. test_adversaries.py has the table."""

import contextlib
import json
import logging
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from conftest import OPTIONS, local_world
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but its types do not

from hostile import HEADER_BYTES, Datagram, Tamper, TappedNetwork, changed, entries, on_ranks
from reference import same_bits, values
from stormtorch import Options, StormError
from stormtorch.collectives import Group, Op, all_reduce, barrier
from stormtorch.errors import NotAdmitted, PeerFailed, PeerLeft, PeerSilent, RanksMissing
from stormtorch.udp import cards, rpc
from stormtorch.udp.cards import LinkKeys, unpack
from stormtorch.udp.rpc import MalformedMessage
from stormtorch.udp.udp import UdpTransport

KEY = b"a job key of any length from sixteen bytes"
# One lane and small datagrams, so that a message is many of them.
PLAIN = replace(OPTIONS, lanes=1, datagram_bytes=1472, silence_s=3.0, timeout_s=10.0, linger_s=0.2)
SEALED = replace(PLAIN, key=KEY)
HASTY = replace(SEALED, timeout_s=2.0, silence_s=1.0)
BOTH = pytest.mark.parametrize("options", [PLAIN, SEALED], ids=["plain", "sealed"])
COUNT = 20_000


def summed(transport: UdpTransport, turns: int = 3) -> list[torch.Tensor]:
    group = Group(transport)
    results = []
    for turn in range(turns):
        tensor = values(transport.rank + 10 * turn, COUNT)
        all_reduce(group, tensor, Op.SUM).wait()
        results.append(tensor)
    return results


def with_health(transport: UdpTransport) -> tuple[list[torch.Tensor], dict[str, Any]]:
    results = summed(transport)
    # Nobody leaves before what the attacker has sent is counted.
    time.sleep(0.3)
    barrier(Group(transport, name="end")).wait()
    return results, transport.health()


def undisturbed(world: int) -> list[torch.Tensor]:
    return local_world(world, summed, options=PLAIN)[0]


def assert_equal(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(same_bits(one, other) for one, other in zip(results, expected, strict=True))


# --- can send packets to a rank, sees none ---------------------------------------------------------------------------


@pytest.mark.thorough
@BOTH
def test_who_sees_nothing_and_sends_anything_changes_nothing_and_is_counted(options: Options) -> None:
    draw, passed = random.Random(5), [0, 0]
    with TappedNetwork(2) as wire:

        def forged(datagram: Datagram) -> bytes:
            # The attacker knows the protocol and the links, but neither half of the cookie.
            header = bytearray(datagram.data[:HEADER_BYTES])
            for _ in range(2):
                header[8:12] = draw.randbytes(4)
                wire.send(datagram.source, datagram.target, bytes(header) + draw.randbytes(draw.randrange(200)))
                # With luck he has guessed the half that packets show, or knows one datagram's header.
                header[4:8], header[8:12] = draw.randbytes(4), datagram.data[8:12]
                wire.send(datagram.source, datagram.target, bytes(header) + draw.randbytes(len(datagram.payload)))
                wire.send(datagram.source, datagram.target, draw.randbytes(draw.randrange(1500)))
            passed[datagram.target] += 1
            return datagram.data

        wire.tap = forged
        said = on_ranks(2, with_health, options, wire=wire)
    expected = undisturbed(2)
    for rank, (results, health) in enumerate(said):
        assert_equal(results, expected)
        assert health["foreign"] > 20 and health["malformed"] > 20 and health["corrupt"] > 20
        assert health["authenticated"] <= passed[rank]


# --- sees the packets of a job ---------------------------------------------------------------------------------------


@BOTH
def test_who_sees_packets_reads_gradients_only_without_a_key(options: Options) -> None:
    secret = b"this was learned from a patient."
    word = torch.frombuffer(bytearray(secret), dtype=torch.int32)

    def work(transport: UdpTransport) -> None:
        all_reduce(Group(transport), word.repeat(1000), Op.MAX).wait()

    with TappedNetwork(2) as wire:
        assert on_ranks(2, work, options, wire=wire) == [None, None]
    readable = [datagram for datagram in wire.seen if secret in datagram.data]
    assert bool(readable) == (options.key is None)
    # Who, to whom, and how much: that is there for all to see.
    assert {datagram.name[:2] for datagram in wire.seen} == {(0, 1), (1, 0)}


def test_who_sees_packets_cannot_change_a_bit_of_them_where_there_is_a_key() -> None:
    draw = random.Random(6)
    with TappedNetwork(2) as wire:

        def forged(datagram: Datagram) -> bytes:
            other = bytearray(datagram.data)
            other[draw.randrange(len(other))] ^= 1 << draw.randrange(8)
            wire.send(datagram.source, datagram.target, bytes(other))
            # Another number, so that it is no duplicate, and another source: all as if it were new.
            other = bytearray(datagram.data)
            other[12:16] = struct.pack("<I", struct.unpack("<I", other[12:16])[0] + 1000)
            wire.send(datagram.source, datagram.target, bytes(other))
            return datagram.data

        wire.tap = forged
        said = on_ranks(2, with_health, SEALED, wire=wire)
    expected = undisturbed(2)
    for results, health in said:
        assert_equal(results, expected)
        assert health["corrupt"] > 20


def test_no_datagram_is_sealed_like_another() -> None:
    """Equal bytes to several ranks, at several times: a key and packet number that repeat would show here."""
    with TappedNetwork(3) as wire:

        def work(transport: UdpTransport) -> None:
            for turn in range(3):
                all_reduce(Group(transport, name=f"group {turn}"), torch.zeros(5000), Op.SUM).wait()

        assert on_ranks(3, work, SEALED, wire=wire) == [None] * 3
    names = [datagram.name for datagram in wire.seen]
    assert len(set(names)) == len(names), "a packet number was used twice"
    starts = [datagram.payload[:16] for datagram in wire.seen if len(datagram.payload) >= 1000]
    assert len(set(starts)) == len(starts) > 50


# --- replays packets -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@BOTH
def test_who_replays_packets_of_the_same_job_changes_nothing(options: Options) -> None:
    with TappedNetwork(2) as wire:

        def twice(datagram: Datagram) -> bytes:
            for old in random.Random(len(wire.seen)).sample(wire.seen, min(3, len(wire.seen))):
                wire.send(old.source, old.target, old.data)
            return datagram.data

        wire.tap = twice
        said = on_ranks(2, with_health, options, wire=wire)
    expected = undisturbed(2)
    for results, health in said:
        assert_equal(results, expected)
        assert health["duplicates"] > 50


def recorded(options: Options, world: int = 2) -> tuple[dict[str, bytes], list[Datagram]]:
    """What an attacker has of an earlier job: all entries of its store, and all its datagrams."""
    store = HashStore()
    with TappedNetwork(world) as wire:
        said = on_ranks(world, summed, options, wire=wire, store=store)
    assert all(isinstance(each, list) for each in said), said
    return entries(store, world), wire.seen


def shows(old: dict[str, bytes], *but: str) -> Tamper:
    """Shows the entries of an earlier job, apart from some."""
    return lambda key, value: old.get(key, value) if key not in but else value


def test_datagrams_of_an_earlier_job_are_not_authentic_in_a_later_one_whatever_the_store_shows() -> None:
    old, seen = recorded(SEALED)
    began = {datagram.source for datagram in seen if datagram.target == 1}
    assert began == {0}
    with TappedNetwork(2) as wire:

        def work(transport: UdpTransport) -> dict[str, Any]:
            for datagram in seen:
                if datagram.target == 1:
                    wire.send(0, 1, datagram.data)
            health = transport.health()
            end = time.monotonic() + 10.0
            while health["datagrams_received"] < 5 and time.monotonic() < end:
                time.sleep(0.02)
                health = transport.health()
            time.sleep(0.3)
            return transport.health()

        # Rank 0 is the attacker: the store shows the cookie and the card of the one that was there before.
        lies = {1: shows(old, "storm/card/1")}
        said = on_ranks(2, work, replace(SEALED, linger_s=0.0), lies=lies, wire=wire, absent=[0])
    health = said[1]
    assert health["datagrams_received"] >= 5, health
    assert health["authenticated"] == 0
    assert health["corrupt"] + health["duplicates"] == health["datagrams_received"]


@pytest.mark.thorough
def test_keys_of_an_earlier_job_never_come_again_whatever_the_store_shows() -> None:
    """Both jobs send the same bytes under the same numbers: with the same key, the ciphertext would be the same."""
    old, before = recorded(SEALED, world=3)
    with TappedNetwork(3) as wire:
        # Each rank sees its own card as it wrote it, and otherwise only what was there before.
        lies = {rank: shows(old, f"storm/card/{rank}") for rank in (1, 2)}
        said = on_ranks(3, summed, HASTY, lies=lies, wire=wire, absent=[0])
    assert all(isinstance(said[rank], StormError) for rank in (1, 2)), said
    sealed = {datagram.name: datagram.payload for datagram in before}
    both = [datagram for datagram in wire.seen if datagram.name in sealed]
    assert both, "they send before they hear anything"
    assert not [datagram for datagram in both if datagram.payload[:8] == sealed[datagram.name][:8]]


def test_every_direction_process_and_lane_has_a_key_of_its_own() -> None:
    card = unpack(recorded(replace(SEALED), world=1)[0]["storm/card/0"])
    ends = [
        (rank, replace(card, nonce=nonce * 32, incarnation=incarnation))
        for rank in (0, 1, 258)
        for nonce in "0f"
        for incarnation in (0, 1)
    ]
    keys = []
    for own in ends:
        for peer in ends:
            for lane in (0, 1):
                ours = LinkKeys(KEY, b"0" * 16, *own)(*peer, lane)
                theirs = LinkKeys(KEY, b"0" * 16, *peer)(*own, lane)
                assert ours[:16] == theirs[16:] and ours[16:] == theirs[:16], "what one seals the other opens"
                keys.append(ours[:16])
    assert len(set(keys)) == len(keys) == 2 * len(ends) ** 2
    assert LinkKeys(KEY, b"1" * 16, *ends[0])(*ends[1], 0)[:16] not in keys
    assert LinkKeys(None, b"0" * 16, *ends[0])(*ends[1], 0) == b""


# --- can drop or delay packets ---------------------------------------------------------------------------------------


@BOTH
def test_who_drops_and_delays_packets_costs_time_and_no_bit(options: Options) -> None:
    draw = random.Random(7)
    with TappedNetwork(2) as wire:
        held: list[Datagram] = []

        def lossy(datagram: Datagram) -> bytes | None:
            if draw.random() < 0.1:
                return None
            if draw.random() < 0.1:
                held.append(datagram)
                return None
            while len(held) > 5:
                late = held.pop(0)
                wire.send(late.source, late.target, late.data)
            return datagram.data

        wire.tap = lossy
        said = on_ranks(2, summed, options, wire=wire)
    expected = undisturbed(2)
    for results in said:
        assert_equal(results, expected)


@pytest.mark.thorough
@BOTH
def test_a_rank_whose_packets_are_all_dropped_counts_as_gone(options: Options) -> None:
    with TappedNetwork(3) as wire:
        wire.tap = lambda datagram: None if 2 in datagram[:2] else datagram.data
        began = time.monotonic()
        said = on_ranks(3, summed, replace(options, silence_s=1.0), wire=wire)
    assert time.monotonic() - began < 20.0
    for rank in (0, 1):
        assert isinstance(said[rank], PeerSilent | PeerFailed | PeerLeft) and said[rank].culprit == 2, said[rank]


# --- reaches the store -----------------------------------------------------------------------------------------------

OWN, PEER = "storm/card/1", "storm/card/0"
GIANT = b"[" * 1_000_000


def on_card(place: str, **changes: Any) -> Tamper:
    return lambda key, value: changed(value, **changes) if key == place and value else value


def instead(place: str, shown: bytes | None) -> Tamper:
    return lambda key, value: shown if key == place and value else value


def of_another(key: str, value: bytes) -> bytes | None:
    """Shows the card of rank 2 in the place of rank 0's."""
    if key == PEER:
        return of_another.card or None  # type: ignore[attr-defined]
    if key == "storm/card/2" and value:
        of_another.card = value  # type: ignore[attr-defined]
    return value


of_another.card = b""  # type: ignore[attr-defined]

LIES: dict[str, tuple[Tamper, str]] = {
    "another own card": (on_card(OWN, nonce="0" * 32), "rank 1: the store has another card than this process"),
    "another own address": (on_card(OWN, port=7), "rank 1: the store has another card than this process"),
    "another own key": (on_card(OWN, fingerprint="0"), "rank 1: the store has another card than this process"),
    "no own card": (instead(OWN, None), "rank 1 of 3 has not joined within 2 s"),
    "card of another": (of_another, "the store has the same card for ranks 0 and 2"),
    "missing card": (instead(PEER, None), "rank 0 of 3 has not joined within 2 s"),
    "garbage": (instead(PEER, b"\xff\x00"), "no valid card of rank 0 at storm/card/0"),
    "half a card": (lambda key, value: value[:40] if key == PEER else value, "no valid card of rank 0"),
    "giant card": (instead(PEER, GIANT), "no valid card of rank 0"),
    "giant number": (on_card(PEER, receive_buffer=10**30), "a size is out of range"),
    "negative size": (on_card(PEER, datagram_bytes=-1), "a size is out of range"),
    "giant port": (on_card(PEER, port=1 << 20), "out of range"),
    "name for an address": (on_card(PEER, host="evil.example"), "no valid card of rank 0"),
    "nonce of another length": (on_card(PEER, nonce="0" * 31), "nonce is"),
    "later process": (on_card(PEER, incarnation=3), "the card of process 3"),
    "keys that differ": (on_card(PEER, fingerprint="0"), "the store has entries of another job"),
    "another cookie": (instead("storm/cookie", b"0" * 16), "the store has entries of another job"),
    "giant cookie": (instead("storm/cookie", GIANT), "no valid cookie at storm/cookie"),
    "no cookie": (instead("storm/cookie", None), "rank 0 of 3 has not joined within 2 s"),
    "giant start": (instead("storm/start", GIANT), "no valid start entry of rank 0 at storm/start"),
    "nonsense start": (instead("storm/start", b"[1]"), "no valid start entry of rank 0 at storm/start"),
    "no start": (instead("storm/start", None), "an older version"),
    "another version": (instead("storm/start", b'{"world": 3, "version": "9"}'), "install the same version"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LIES)
def test_who_reaches_the_store_makes_the_start_fail_by_a_clear_error(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    lie, expected = LIES[name]
    began = time.monotonic()
    with caplog.at_level(logging.DEBUG, "stormtorch"):
        said = on_ranks(3, summed, HASTY, lies={1: lie})
    assert time.monotonic() - began < 20.0
    error = said[1]
    assert isinstance(error, ValueError | RanksMissing), repr(error)
    assert expected in str(error)
    # The others, to whom it does not lie, wait for no longer than they must; none trains with fewer.
    assert all(isinstance(each, ValueError | StormError) for each in said), said
    everything = caplog.text + "".join(map(str, said))
    assert len(everything) < 50_000
    for secret in (KEY.decode(), KEY.hex(), repr(KEY)):
        assert secret not in everything


def test_a_store_that_changes_a_cookie_is_noticed_by_the_rank_that_drew_it() -> None:
    said = on_ranks(2, summed, HASTY, lies={0: instead("storm/cookie", b"0" * 16)})
    assert isinstance(said[0], ValueError) and "another cookie than this process has written" in str(said[0])
    assert isinstance(said[1], PeerFailed | RanksMissing)


@pytest.mark.thorough
def test_an_entry_that_is_deleted_once_it_was_seen_ends_the_start_within_the_stores_timeout() -> None:
    looks: dict[str, int] = {}

    def vanishes(key: str, value: bytes) -> bytes | None:
        looks[key] = looks.get(key, 0) + bool(value)
        return None if key == PEER and looks[key] > 1 else value or None

    began = time.monotonic()
    said = on_ranks(2, summed, HASTY, lies={1: vanishes})
    assert isinstance(said[1], RuntimeError | RanksMissing) and time.monotonic() - began < 20.0


@pytest.mark.thorough
def test_own_nonce_is_never_taken_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the check of the own card is left out, keys follow from what the process itself has drawn."""
    old, before = recorded(SEALED)
    monkeypatch.setattr("stormtorch.joining.rendezvous._check_cards", lambda *_: None)
    with TappedNetwork(2) as wire:
        on_ranks(2, summed, HASTY, lies={1: shows(old)}, wire=wire, absent=[0])
    sealed = {datagram.name: datagram.payload for datagram in before}
    both = [datagram for datagram in wire.seen if datagram.name in sealed and datagram.source == 1]
    assert both
    assert not [datagram for datagram in both if datagram.payload[:8] == sealed[datagram.name][:8]]


@BOTH
def test_datagrams_of_an_earlier_process_do_not_count_for_a_later_one(options: Options) -> None:
    """The store shows the same process under a higher number, so that packet numbers and window restart."""
    store = HashStore()
    with TappedNetwork(2) as wire:

        def work(transport: UdpTransport) -> dict[str, Any] | None:
            summed(transport)
            if transport.rank == 1:
                hold.wait(30.0)
                return None
            before = transport.health()
            transport.readmit(1, replace(transport.cards[1], incarnation=1))
            for datagram in list(wire.seen):
                if datagram.target == 0:
                    wire.send(1, 0, datagram.data)
            time.sleep(0.5)
            after = transport.health()
            hold.set()
            return {name: after[name] - before[name] for name in ("authenticated", "corrupt")}

        hold = threading.Event()
        said = on_ranks(2, work, replace(options, linger_s=0.0), wire=wire, store=store)
    assert said[0]["corrupt"] > 20, said
    assert said[0]["authenticated"] == 0


@pytest.mark.parametrize("shown", [b"garbage", b"9" * 5000, b"-5", b"65535"])
def test_a_wrong_number_of_returned_processes_is_an_error_or_nobody(shown: bytes) -> None:
    store = HashStore()
    options = replace(SEALED, linger_s=0.0)

    def work(transport: UdpTransport) -> str:
        transport.store.set("storm/incarnations/1", shown.decode())
        began = time.monotonic()
        try:
            card = cards.newest_card(transport.store, "storm", 1, 0)
        except ValueError as error:
            assert "no valid number at storm/incarnations/1" in str(error)
            return "error"
        assert card is None and time.monotonic() - began < 5.0
        return "nobody"

    (said,) = on_ranks(1, work, options, store=store)
    assert said == ("error" if shown in (b"garbage", b"9" * 5000) else "nobody")


# --- reaches the TCP port of a rank ----------------------------------------------------------------------------------


def talk(address: tuple[str, int], said: bytes) -> tuple[dict[str, Any], bytes]:
    """The handshake of an admission port, and its answer to some bytes."""
    with socket.create_connection(address, timeout=10.0) as connection:
        head = connection.recv(5, socket.MSG_WAITALL)
        _, length = struct.unpack("!BI", head)
        greeting = json.loads(connection.recv(length, socket.MSG_WAITALL))
        rest = b""
        with contextlib.suppress(OSError):  # malformed input closes the connection
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                rest += piece
        return greeting, rest


def frame(what: object) -> bytes:
    body = json.dumps(what).encode()
    return struct.pack("!BI", 0, len(body)) + body


@BOTH
def test_who_reaches_the_tcp_port_learns_about_the_job_only_without_a_key(options: Options) -> None:
    def work(transport: UdpTransport) -> list[Any]:
        card = transport.cards[transport.rank]
        address = (card.host, card.reception)
        found = [
            talk(address, frame({"nonce": "0" * 32}) + frame({"op": operation})) for operation in ("learn", "tell")
        ]
        # None of that disturbs the rank.
        talk(address, random.Random(8).randbytes(3000))
        summed(transport)
        return found

    for said in sorted(on_ranks(2, work, options), key=lambda each: isinstance(each, StormError)):
        assert isinstance(said, list), said
        for greeting, rest in said:
            assert set(greeting) == {"storm", "version", "nonce", "keyed"}
            assert re.fullmatch("[0-9a-f]{32}", greeting["nonce"])
            if options.key is None:
                assert b'"running"' in rest
            else:
                assert json.loads(rest[5:]) == {"refused": "key"}
        if options.key is None:
            assert b'"cookie"' in said[0][1] and b'"cards"' in said[0][1]


@pytest.mark.thorough
@BOTH
def test_who_stands_between_a_newcomer_and_a_rank_changes_what_they_say_only_without_a_key(options: Options) -> None:
    """Any process that reaches the store can make a rejoining process connect to any address."""
    draw = random.Random(10)

    def work(transport: UdpTransport) -> list[Any]:
        card = transport.cards[transport.rank]
        question = {"op": "learn"}
        found: list[Any] = []
        for turn in range(12):
            with between((card.host, card.reception), altered=turn % 2, draw=draw) as (address, heard):
                try:
                    found.append(rpc.request(address, question, key=options.key, version=version("stormtorch")))
                except (MalformedMessage, NotAdmitted, OSError) as error:
                    found.append(error)
            # A recorded response is not valid for another handshake.
            found.append(talk((card.host, card.reception), b"".join(heard))[1])
        return found

    (said,) = on_ranks(1, work, replace(options, linger_s=0.0))
    assert isinstance(said, list), said
    answers, replays = said[::2], said[1::2]
    believed = [each for each in answers if isinstance(each, dict)]
    if options.key is None:
        assert any(each.get("world") == 9 for each in believed)
    else:
        assert not believed and all(json.loads(each[5:]) == {"refused": "key"} for each in replays)


@contextlib.contextmanager
def between(address: tuple[str, int], *, altered: int, draw: random.Random) -> Iterator[tuple[Any, list[bytes]]]:
    """Listens in the place of a rank, passes on what is said, and alters the question (0) or the answer (1).

    Yields its address, and what it has received from the join client.
    """
    heard: list[bytes] = []

    def alter(said: bytes) -> bytes:
        other = said.replace(b'"world":1', b'"world":9').replace(b'"learn"', b'"tell",  ')
        if other == said:
            at = draw.randrange(5, len(said))
            other = said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :]
        return other

    def carry() -> None:
        newcomer, _ = listening.accept()
        with newcomer, socket.create_connection(address, timeout=5.0) as rank, contextlib.suppress(OSError):
            newcomer.settimeout(5.0)
            newcomer.sendall(whole(rank))
            heard.append(whole(newcomer))
            rank.sendall(heard[-1])
            heard.append(whole(newcomer))
            rank.sendall(heard[-1] if altered else alter(heard[-1]))
            newcomer.sendall(alter(whole(rank)) if altered else whole(rank))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=carry, daemon=True)
        thread.start()
        yield listening.getsockname(), heard
        thread.join(10.0)


def whole(connection: socket.socket) -> bytes:
    """One frame."""
    head = connection.recv(5, socket.MSG_WAITALL)
    _, length = struct.unpack("!BI", head)
    return head + connection.recv(length, socket.MSG_WAITALL)


# --- is a rank of the job, or has its key ----------------------------------------------------------------------------


@BOTH
def test_a_rank_can_send_any_gradient(options: Options) -> None:
    def work(transport: UdpTransport) -> float:
        tensor = torch.full((10,), 1e30 if transport.rank == 1 else 1.0)
        all_reduce(Group(transport), tensor, Op.SUM).wait()
        return float(tensor[0])

    assert on_ranks(2, work, options) == [pytest.approx(1e30)] * 2


# --- names another address for a rank --------------------------------------------------------------------------------


@BOTH
def test_who_relays_packets_faster_than_the_wire_gets_no_datagrams(options: Options) -> None:
    with TappedNetwork(2) as wire, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
        attacker.bind(("127.0.0.1", 0))
        attacker.setblocking(False)

        def relayed(datagram: Datagram) -> bytes:
            if len(wire.seen) % 4 == 0:  # now and then, so that both addresses are alive
                attacker.sendto(datagram.data, wire.addresses[datagram.target])
            return datagram.data

        wire.tap = relayed

        def work(transport: UdpTransport) -> tuple[Any, Any, int]:
            before = transport.endpoint.routes()
            for _ in range(5):
                summed(transport)
            return before, transport.endpoint.routes(), transport.health()["reroutes"]

        said = on_ranks(2, work, options, wire=wire)
        got = []
        while True:
            try:
                got.append(attacker.recv(1 << 16))
            except BlockingIOError:
                break
    for before, after, reroutes in said:
        assert [lane[peer][:2] for lane in before for peer in (0, 1)] == [
            lane[peer][:2] for lane in after for peer in (0, 1)
        ]
        assert reroutes == 0
    # Pings, to validate the address, and answers to the pings that were relayed: no data.
    assert {each[0] & 15 for each in got} <= {2, 7}
