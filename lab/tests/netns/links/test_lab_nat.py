"""NAT traversal: hosts behind routers, and ranks that reach each other through them."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stormtorch import EXACT, Options, connect
from stormtorch.checks import BadCondition
from stormtorch.collectives import Group, all_reduce
from stormtorch.errors import Unreachable
from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.netns import Lab

MakeLab = Callable[..., Lab]
pytestmark = pytest.mark.lab

KEY = bytes(range(32))
ELEMENTS = 100_000
# Waits for datagrams and prints their source addresses; or sends datagrams from one port to each address repeatedly.
HEAR = """
import json, socket, sys
ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ear.bind(("0.0.0.0", 4000))
ear.settimeout(float(sys.argv[2]))
heard = []
try:
    for _ in range(int(sys.argv[1])):
        heard.append(ear.recvfrom(100)[1])
except TimeoutError:
    pass
print(json.dumps(heard))
"""
SPEAK = """
import socket, sys, time
mouth = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mouth.bind(("0.0.0.0", 4000))
for _ in range(20):
    for host in sys.argv[1:]:
        mouth.sendto(b"here", (host, 4000))
    time.sleep(0.05)
"""


def source_at(network: Lab, listeners: list[int], speaker: int) -> list[tuple[str, int]]:
    """Addresses of one socket of a host as seen by others."""
    ears = [network.start(host, [sys.executable, "-c", HEAR, "1", "5"], stdout=-1) for host in listeners]
    places = [f"198.18.0.{host + 1}" for host in listeners]
    mouth = network.start(speaker, [sys.executable, "-c", SPEAK, *places])
    seen = [json.loads(ear.communicate(timeout=10)[0])[0] for ear in ears]
    mouth.wait(10)
    return [(host, port) for host, port in seen]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["cone", "symmetric"])
def test_router_shows_its_own_address_and_a_port_by_its_kind(lab: MakeLab, kind: str) -> None:
    network = lab(4, probe=False, nat={3: kind})
    assert network.address(3) == "10.4.0.2"
    seen = source_at(network, [0, 1, 2], 3)
    assert {host for host, _ in seen} == {"198.18.0.4"}
    assert (len({port for _, port in seen}) == 1) is (kind == "cone")
    network.rebind(3)
    again = source_at(network, [0], 3)
    assert again[0] != seen[0]


def test_router_lets_in_nothing_that_its_host_did_not_ask_for(lab: MakeLab) -> None:
    network = lab(2, probe=False, nat={1: "cone"})
    ear = network.start(1, [sys.executable, "-c", HEAR, "1", "1.5"], stdout=-1)
    mouth = network.start(0, [sys.executable, "-c", SPEAK, "198.18.0.2", "10.2.0.2"])
    assert json.loads(ear.communicate(timeout=10)[0]) == []
    mouth.wait(10)


def test_wrong_routers_are_refused() -> None:
    with pytest.raises(BadCondition, match="cone or symmetric"):
        Lab(2, nat={1: "full"})
    with pytest.raises(BadCondition, match="host 5"):
        Lab(2, nat={5: "cone"})
    with pytest.raises(BadCondition, match="host 0"):
        Lab(2, nat={0: "cone"})


def reduce_on(member: Member, options: Options, rounds: int, change_at: int, pause_s: float) -> dict[str, Any]:
    """All-reduces, with a change requested by rank 0 before one of them."""
    times = []
    begin = time.perf_counter()
    with connect(member.store, member.rank, member.world, options) as transport:
        connected_s = time.perf_counter() - begin
        group = Group(transport)
        for index in range(rounds):
            if index == change_at and member.rank == 0:
                member.request(index)
            tensor = torch.full((ELEMENTS,), 1.0 + member.rank)
            begin = time.perf_counter()
            all_reduce(group, tensor, reliability=EXACT).wait()
            times.append(time.perf_counter() - begin)
            assert torch.all(tensor == sum(range(1, member.world + 1)))
            time.sleep(pause_s)
        lane = transport.endpoint.routes()[0]
        return {
            "connected_s": connected_s,
            "times": times,
            "learned": [peer for peer in range(member.world) if peer != member.rank and lane[peer][3]],
            "hosts": [host for host, *_ in lane],
            "reroutes": transport.health()["reroutes"],
        }


@pytest.mark.thorough
@pytest.mark.parametrize("key", [None, KEY], ids=["unsealed", "sealed"])
def test_ranks_behind_two_routers_find_each_other_and_survive_new_ports(lab: MakeLab, key: bytes | None) -> None:
    network = lab(3, rate="200mbit", management=True, probe=False, nat={1: "cone", 2: "cone"})

    def rebind(_rank: int, _what: object) -> bool:
        network.rebind(1)
        return True

    options = Options(interface="eth0", key=key)
    logs = run_ranks(reduce_on, 3, (options, 8, 4, 0.0), timeout_s=60, on_message=rebind, lab=network)
    assert [log["learned"] for log in logs] == [[1, 2], [2], [1]]
    assert logs[1]["hosts"][2] == "198.18.0.3" and logs[2]["hosts"][1] == "198.18.0.2"
    assert logs[0]["reroutes"] >= 3 and logs[2]["reroutes"] >= 2  # both found rank 1 again


@pytest.mark.thorough
def test_ranks_reach_a_public_one_through_a_symmetric_router_at_loss(lab: MakeLab) -> None:
    network = lab(2, rate="200mbit", loss=0.1, management=True, probe=False, nat={1: "symmetric"})
    logs = run_ranks(reduce_on, 2, (Options(interface="eth0"), 3, -1, 0.0), timeout_s=60, lab=network)
    assert [log["learned"] for log in logs] == [[1], []]


@pytest.mark.slow
def test_two_symmetric_routers_are_an_error_that_names_both_ranks(lab: MakeLab) -> None:
    network = lab(3, management=True, probe=False, nat={1: "symmetric", 2: "symmetric"})
    options = Options(interface="eth0", silence_s=3.0)
    with pytest.raises(RankFailed) as failed:
        run_ranks(reduce_on, 3, (options, 1, -1, 0.0), timeout_s=60, lab=network)
    text = str(failed.value)
    assert Unreachable.__name__ in text and "symmetric NAT" in text
    assert "rank 1 and rank 2 cannot reach" in text or "rank 2 and rank 1 cannot reach" in text
    assert "seen by rank 0 at 198.18.0." in text
