"""Attacks by replay and forgery: each cell of the table in docs/security.md names the test that tries it."""

import ast
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OPTIONS, local_world
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but its types do not

from hostile import HEADER_BYTES, Datagram, TappedNetwork, cookie_of, entries, forge, on_ranks
from reference import same_bits, values
from stormtorch import Options
from stormtorch.collectives import Group, Op, all_reduce, barrier
from stormtorch.udp.udp import UdpTransport

# One lane and small datagrams, so that a message is many of them.
PLAIN = replace(OPTIONS, lanes=1, datagram_bytes=1472, silence_s=5.0, timeout_s=20.0, linger_s=0.2)
SEALED = replace(PLAIN, key=b"a job key of any length from sixteen bytes")
BOTH = pytest.mark.parametrize("options", [PLAIN, SEALED], ids=["plain", "sealed"])
COUNT = 20_000

# --- the table -------------------------------------------------------------------------------------------------------

SECURITY, HERE = "test_security.py", "test_adversaries.py"
TRIED: dict[str, tuple[list[str], list[str]]] = {
    "can send packets to a rank, sees none": (
        ["test_who_sees_nothing_and_sends_anything_changes_nothing_and_is_counted"],
        ["test_who_sees_nothing_and_sends_anything_changes_nothing_and_is_counted"],
    ),
    "sees the packets of a job": (
        ["test_who_sees_packets_reads_gradients_only_without_a_key", "test_who_knows_the_cookie_forges_without_a_key"],
        [
            "test_who_sees_packets_reads_gradients_only_without_a_key",
            "test_who_sees_packets_cannot_change_a_bit_of_them_where_there_is_a_key",
            "test_no_datagram_is_sealed_like_another",
            "test_no_datagram_of_a_sealed_job_counts_once_it_is_altered",
        ],
    ),
    "replays packets, of this job or of an earlier one": (
        [
            "test_who_replays_packets_of_the_same_job_changes_nothing",
            "test_datagrams_for_one_rank_do_not_count_at_another",
            "test_datagrams_of_an_earlier_process_do_not_count_for_a_later_one",
            "test_datagrams_of_an_earlier_job_are_foreign_by_its_cookie",
        ],
        [
            "test_who_replays_packets_of_the_same_job_changes_nothing",
            "test_datagrams_for_one_rank_do_not_count_at_another",
            "test_datagrams_of_an_earlier_process_do_not_count_for_a_later_one",
            "test_datagrams_of_an_earlier_job_are_not_authentic_in_a_later_one_whatever_the_store_shows",
            "test_datagrams_of_another_job_with_the_same_key_are_corrupt_under_this_ones_cookie",
            "test_keys_of_an_earlier_job_never_come_again_whatever_the_store_shows",
        ],
    ),
    "can drop or delay packets": (
        [
            "test_who_drops_and_delays_packets_costs_time_and_no_bit",
            "test_a_rank_whose_packets_are_all_dropped_counts_as_gone",
        ],
        [
            "test_who_drops_and_delays_packets_costs_time_and_no_bit",
            "test_a_rank_whose_packets_are_all_dropped_counts_as_gone",
        ],
    ),
    "reaches the store": (
        ["test_who_knows_the_cookie_forges_without_a_key"],
        [
            "test_who_knows_the_cookie_forges_without_a_key",
            "test_who_reaches_the_store_makes_the_start_fail_by_a_clear_error",
            "test_a_store_that_changes_a_cookie_is_noticed_by_the_rank_that_drew_it",
            "test_an_entry_that_is_deleted_once_it_was_seen_ends_the_start_within_the_stores_timeout",
            "test_own_nonce_is_never_taken_from_the_store",
            "test_datagrams_of_an_earlier_process_do_not_count_for_a_later_one",
            "test_who_stands_between_a_newcomer_and_a_rank_changes_what_they_say_only_without_a_key",
            "test_a_wrong_number_of_returned_processes_is_an_error_or_nobody",
        ],
    ),
    "reaches the TCP port of a rank": (
        [
            "test_who_reaches_the_tcp_port_learns_about_the_job_only_without_a_key",
            "test_who_stands_between_a_newcomer_and_a_rank_changes_what_they_say_only_without_a_key",
        ],
        [
            "test_who_reaches_the_tcp_port_learns_about_the_job_only_without_a_key",
            "test_who_stands_between_a_newcomer_and_a_rank_changes_what_they_say_only_without_a_key",
        ],
    ),
    "is a rank of the job, or has its key": (
        ["test_a_rank_can_send_any_gradient"],
        ["test_a_rank_can_send_any_gradient"],
    ),
    "announces another address for a rank": (
        [
            "test_who_relays_packets_faster_than_the_wire_gets_no_datagrams",
            "test_who_names_another_address_and_answers_nothing_gets_no_datagrams",
        ],
        [
            "test_who_relays_packets_faster_than_the_wire_gets_no_datagrams",
            "test_who_names_another_address_and_answers_nothing_gets_no_datagrams",
        ],
    ),
}
"""For each attacker of docs/security.md, the tests of what he can do without a key, and with one."""


def attackers(page: str) -> list[list[str]]:
    """Rows of the table about who can do what."""
    table = page.partition("## Attackers\n")[2].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def written_tests() -> set[str]:
    """Names of the tests of these two files."""
    trees = (ast.parse((Path(__file__).parent / name).read_text(encoding="utf-8")) for name in (SECURITY, HERE))
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_cell_of_the_table_is_tried() -> None:
    rows = attackers((Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8"))
    assert [row[0] for row in rows] == list(TRIED)
    assert all(len(row) == 3 and all(row) for row in rows)
    named = {name for cells in TRIED.values() for cell in cells for name in cell}
    assert all(cell for cells in TRIED.values() for cell in cells)
    assert named <= written_tests(), named - written_tests()


# --- jobs ------------------------------------------------------------------------------------------------------------


def summed(transport: UdpTransport, turns: int = 3) -> tuple[list[torch.Tensor], dict[str, Any]]:
    group = Group(transport)
    results = []
    for turn in range(turns):
        tensor = values(transport.rank + 10 * turn, COUNT)
        all_reduce(group, tensor, Op.SUM).wait()
        results.append(tensor)
    # Nobody leaves before what the attacker has sent is counted.
    time.sleep(0.3)
    barrier(Group(transport, name="end")).wait()
    return results, transport.health()


def assert_undisturbed(said: list[Any]) -> None:
    expected = local_world(len(said), summed, options=PLAIN)[0][0]
    for each in said:
        assert isinstance(each, tuple), each
        assert all(same_bits(one, other) for one, other in zip(each[0], expected, strict=True))


# --- sees the packets of a job ---------------------------------------------------------------------------------------

Change = Callable[[random.Random, Datagram], Datagram]


def altered(change: Callable[[random.Random, bytearray], object]) -> Change:
    def apply(draw: random.Random, datagram: Datagram) -> Datagram:
        data = bytearray(datagram.data)
        change(draw, data)
        return datagram._replace(data=bytes(data))

    return apply


def flip(begin: int, end: int | None) -> Change:
    """Another bit in some part of the datagram."""

    def change(draw: random.Random, data: bytearray) -> None:
        at = draw.choice(range(len(data))[begin:end])
        data[at] ^= 1 << draw.randrange(8)

    return altered(change)


def cut(draw: random.Random, data: bytearray) -> None:
    del data[draw.randrange(len(data)) :]


def turned(_draw: random.Random, datagram: Datagram) -> Datagram:
    """Reflected to its sender, under the name of its receiver."""
    data = datagram.data[:2] + struct.pack("<H", datagram.target) + datagram.data[4:]
    return Datagram(datagram.target, datagram.source, data)


def to_a_third(_draw: random.Random, datagram: Datagram) -> Datagram:
    return datagram._replace(target=3 - datagram.source - datagram.target)


def of_a_third(_draw: random.Random, datagram: Datagram) -> Datagram:
    third = 3 - datagram.source - datagram.target
    return Datagram(third, datagram.target, datagram.data[:2] + struct.pack("<H", third) + datagram.data[4:])


CHANGES: dict[str, Change] = {
    "another kind or version": flip(0, 1),
    "another flag": flip(1, 2),
    "another source": flip(2, 4),
    "another check": flip(4, 8),
    "another cookie": flip(8, 12),
    "another number": flip(12, 16),
    "another exchange": flip(16, 24),
    "another chunk": flip(24, 28),
    "another size": flip(28, 32),
    "another content": flip(HEADER_BYTES, None),
    "another tag": flip(-16, None),
    "cut off": altered(cut),
    "without its last byte": altered(lambda _, data: data.pop()),
    "longer": altered(lambda draw, data: data.extend(draw.randbytes(draw.randrange(1, 50)))),
    "unsealed": altered(lambda _, data: data.__setitem__(1, data[1] & ~8)),
    "in the other direction": turned,
    "to a third rank": to_a_third,
    "of a third rank": of_a_third,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHANGES)
def test_no_datagram_of_a_sealed_job_counts_once_it_is_altered(name: str) -> None:
    """Altered datagrams overtake their originals, so that no packet number has been seen before."""
    draw = random.Random(9)
    passed = [0, 0, 0]
    with TappedNetwork(3) as wire:

        def forged(datagram: Datagram) -> bytes:
            other = CHANGES[name](draw, datagram)
            wire.send(*other)
            passed[datagram.target] += 1
            return datagram.data

        wire.tap = forged
        said = on_ranks(3, summed, SEALED, wire=wire)
    assert_undisturbed(said)
    for rank, (_, health) in enumerate(said):
        assert health["authenticated"] <= passed[rank]
        rejected = health["corrupt"] + health["malformed"] + health["foreign"]
        # Under another rank's name, a packet number may have arrived already: a duplicate before its seal is read.
        assert rejected > 0 and rejected + health["duplicates"] > 20, health


@BOTH
def test_datagrams_for_one_rank_do_not_count_at_another(options: Options) -> None:
    """A replay that no rank has received there; or a rank that has another one's former address."""
    passed = [0, 0, 0]
    with TappedNetwork(3) as wire:

        def misled(datagram: Datagram) -> bytes:
            wire.send(datagram.source, 3 - datagram.source - datagram.target, datagram.data)
            passed[datagram.target] += 1
            return datagram.data

        wire.tap = misled
        said = on_ranks(3, summed, options, wire=wire)
    assert_undisturbed(said)
    for rank, (_, health) in enumerate(said):
        assert health["authenticated"] <= passed[rank]
        # A packet number that has arrived already is a duplicate before anyone looks at its seal.
        assert health["corrupt"] > 0 and health["corrupt"] + health["duplicates"] > 20, health


# --- forges ----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("known_from", ["store", "packets"])
def test_who_knows_the_cookie_forges_without_a_key(options: Options, known_from: str) -> None:
    """Packets show half of it, and its other half follows from their checks; all else is known from the protocol.

    What is forged overtakes what it replaces, which is then a duplicate.
    """
    store = HashStore()
    with TappedNetwork(2) as wire:

        def forged(datagram: Datagram) -> bytes:
            if datagram.source == 0 and datagram.is_data:
                twos = struct.pack("<f", 2.0) * ((len(datagram.payload) - 16 * (options.key is not None)) // 4)
                told = entries(store, 2)["storm/cookie"] if known_from == "store" else cookie_of(datagram)
                wire.send(0, 1, forge(datagram, told, payload=twos))
            return datagram.data

        def work(transport: UdpTransport) -> tuple[torch.Tensor, dict[str, Any]]:
            tensor = torch.ones(COUNT)
            all_reduce(Group(transport), tensor, Op.MAX).wait()
            barrier(Group(transport, name="end")).wait()
            return tensor, transport.health()

        wire.tap = forged
        said = on_ranks(2, work, options, wire=wire, store=store)
    assert all(isinstance(each, tuple) for each in said), said
    tensor, health = said[1]
    if options.key is None:
        assert bool((tensor == 2.0).all()) and health["corrupt"] == 0 and health["duplicates"] > 10
    else:
        assert bool((tensor == 1.0).all()) and health["corrupt"] + health["malformed"] > 10, health


# --- replays packets of another job ----------------------------------------------------------------------------------


def recorded(options: Options) -> list[Datagram]:
    """All datagrams of an earlier job of two ranks."""
    with TappedNetwork(2) as wire:
        assert_undisturbed(on_ranks(2, summed, options, wire=wire))
    return wire.seen


def replayed(options: Options, old: list[Datagram], *, under_its_cookie: bool) -> list[dict[str, Any]]:
    """Plays a recorded job into a new one, from its beginning on, before each of its own datagrams."""
    rest = {target: [each for each in old if each.target == target] for target in (0, 1)}
    with TappedNetwork(2) as wire:

        def mixed(datagram: Datagram) -> bytes:
            for each in [rest[datagram.target].pop(0) for _ in range(min(3, len(rest[datagram.target])))]:
                cookie = datagram.data[8:12] if under_its_cookie else each.data[8:12]
                wire.send(each.source, each.target, each.data[:8] + cookie + each.data[12:])
            return datagram.data

        wire.tap = mixed
        said = on_ranks(2, summed, options, wire=wire)
    assert_undisturbed(said)
    return [health for _, health in said]


@pytest.mark.thorough
def test_datagrams_of_an_earlier_job_are_foreign_by_its_cookie() -> None:
    for health in replayed(PLAIN, recorded(PLAIN), under_its_cookie=False):
        assert health["foreign"] > 50, health


@pytest.mark.thorough
def test_datagrams_of_another_job_with_the_same_key_are_corrupt_under_this_ones_cookie() -> None:
    for health in replayed(SEALED, recorded(SEALED), under_its_cookie=True):
        assert health["corrupt"] > 50, health


# --- names another address -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@BOTH
def test_who_names_another_address_and_answers_nothing_gets_no_datagrams(options: Options) -> None:
    """The newest datagram of a rank comes from elsewhere, and the rank's own datagrams come later or never."""
    with TappedNetwork(2) as wire, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
        attacker.bind(("127.0.0.1", 0))
        attacker.setblocking(False)

        def diverted(datagram: Datagram) -> bytes | None:
            if datagram.source == 0 and len(wire.seen) % 2:
                attacker.sendto(datagram.data, wire.addresses[1])
                return None
            return datagram.data

        wire.tap = diverted
        said = on_ranks(2, summed, options, wire=wire)
        got = []
        while True:
            try:
                got.append(attacker.recv(1 << 16))
            except BlockingIOError:
                break
    assert_undisturbed(said)
    assert said[1][1]["reroutes"] == 0
    assert {each[0] & 15 for each in got} <= {2, 7}, "pings, and what answers them: no data"
