"""Trainings during changes of the network: new ports, queues of seconds, a smaller MTU with parity."""

import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from stormtorch import BoundedDrift, Options, Reliability, connect, prepare
from stormtorch.collectives import Group
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.netns import Lab
from stormtorch_lab.netns.conditions import AccessLink

MakeLab = Callable[..., Lab]
pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

KEY = bytes(range(32))
# Fills a queue for some seconds and then keeps it full: rate at first and afterwards, in bits per second. The buffer of
# the socket is larger than the queue, as packets on the way to another host of the lab still count in it.
FLOOD = """
import socket, sys, time
seconds, first, then = map(float, sys.argv[2:])
mouth = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mouth.setsockopt(socket.SOL_SOCKET, 32, 64 << 20)  # SO_SNDBUFFORCE
mouth.setsockopt(17, 103, 1400)  # UDP_SEGMENT
begin = at = time.monotonic()
while time.monotonic() < begin + seconds:
    mouth.sendto(bytes(10 * 1400), (sys.argv[1], 7000))
    at += 10 * 1442 * 8 / (first if time.monotonic() < begin + 4 else then)
    time.sleep(max(at - time.monotonic(), 0))
"""


def train_on(
    member: Member, options: Options, policy: BoundedDrift, steps: int, changes: tuple[int, ...]
) -> dict[str, Any]:
    """Trains a small model, and requests a change before some steps."""
    torch.set_num_threads(1)
    with connect(member.store, member.rank, member.world, options) as transport:
        torch.manual_seed(member.rank)
        model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 64))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = prepare(model, optimizer, policy=policy, group=Group(transport))
        ends = []
        for step in range(steps):
            if step in changes and member.rank == 0:
                member.request(step)
            model(torch.randn(16, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
        session: Any = optimizer.session  # type: ignore[attr-defined]
        return {
            "longest_s": max(after - before for before, after in pairwise(ends)),
            "members": list(session.view.members),
            "view": session.view.number,
            "arrived": [min(row.broadcast.values()) for row in session.ledger.rows],
            "path_bytes": [transport.path_bytes(peer) for peer in range(member.world) if peer != member.rank],
            "health": transport.health(),
        }


def assert_nobody_left(logs: list[dict[str, Any]], longest_s: float) -> None:
    for log in logs:
        assert log["members"] == [0, 1, 2] and log["view"] == 1, log
        assert log["longest_s"] < longest_s, log


@pytest.mark.parametrize(
    ("kinds", "key"),
    [
        ({1: "cone", 2: "cone"}, KEY),
        pytest.param({1: "symmetric"}, KEY, marks=pytest.mark.slow),
        pytest.param({1: "cone", 2: "cone"}, None, marks=pytest.mark.slow),
    ],
    ids=["two cones", "symmetric", "two cones without a key"],
)
def test_routers_that_forget_their_ports_cost_a_training_a_moment(
    lab: MakeLab, kinds: dict[int, str], key: bytes | None
) -> None:
    network = lab(3, rate="200mbit", management=True, probe=False, nat=kinds)

    def rebind(_rank: int, _step: object) -> bool:
        for host in kinds:
            network.rebind(host)
        return True

    options = Options(interface="eth0", key=key, lanes=2)
    logs = run_ranks(
        train_on, 3, (options, BoundedDrift(), 40, (10, 25)), timeout_s=200, on_message=rebind, lab=network
    )
    assert_nobody_left(logs, 8.0)
    assert sum(log["health"]["reroutes"] for log in logs) >= 2 * 2
    assert all(log["arrived"][-1] == 1.0 for log in logs)


@pytest.mark.slow
def test_a_router_that_gets_another_address_costs_a_training_a_moment(lab: MakeLab) -> None:
    network = lab(3, rate="200mbit", management=True, probe=False, nat={1: "cone", 2: "cone"})
    addresses = ["198.18.0.2/24", "198.18.0.77/24", "198.18.0.78/24"]

    def move(_rank: int, _step: object) -> bool:
        before = addresses.pop(0)
        ways = f"address delete {before} dev eth0\naddress add {addresses[0]} dev eth0"
        network._edge(1).run(["ip", "-batch", "-"], ways)
        network.rebind(1)
        return True

    options = Options(interface="eth0", key=KEY, lanes=2)
    logs = run_ranks(train_on, 3, (options, BoundedDrift(), 40, (10, 25)), timeout_s=200, on_message=move, lab=network)
    assert_nobody_left(logs, 8.0)
    assert all(log["arrived"][-1] == 1.0 for log in logs)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "path"])
def test_an_mtu_that_falls_beside_parity_and_lanes_costs_the_parity_alone(lab: MakeLab, where: str) -> None:
    network = lab(3, rate="200mbit", loss=0.05, management=True, probe=False)

    def narrow(_rank: int, _step: object) -> bool:
        if where == "host":
            network.holders[1].run(["ip", "link", "set", "eth0", "mtu", "1200"])
        else:
            network.set(mtu=1200)  # larger packets are dropped without an ICMP error
        return True

    options = Options(interface="eth0", lanes=2)
    policy = BoundedDrift(redundancy=0.3, gradients=Reliability(redundancy=0.3))
    logs = run_ranks(train_on, 3, (options, policy, 60, (20,)), timeout_s=200, on_message=narrow, lab=network)
    assert_nobody_left(logs, 8.0)
    for log in logs:
        assert min(log["path_bytes"]) == 1152
        assert log["health"]["recovered"] > 0
        before, after = log["arrived"][5:20], log["arrived"][40:]
        assert sum(before) / len(before) > 0.98
        # Chunks in two pieces have no parity: both of them must arrive, and 5 % of the packets are lost.
        assert sum(after) / len(after) == pytest.approx(0.95**2, abs=0.05)


@pytest.mark.slow
def test_a_queue_of_seconds_makes_steps_long_and_nobody_leaves(lab: MakeLab) -> None:
    lines = {0: AccessLink(down_bits=20e6, queue_bytes=10 << 20)}
    network = lab(3, rate="100mbit", management=True, probe=False, lines=lines)

    def fill(_rank: int, _step: object) -> bool:
        network.start(1, [sys.executable, "-c", FLOOD, network.address(0), "15", "40e6", "18e6"])
        return True

    began = time.monotonic()
    logs = run_ranks(
        train_on, 3, (Options(interface="eth0"), BoundedDrift(), 40, (10,)), timeout_s=200, on_message=fill, lab=network
    )
    assert_nobody_left(logs, 60.0)
    assert max(log["longest_s"] for log in logs) > 2.0, "the queue was full"
    assert all(log["arrived"][-1] == 1.0 for log in logs)
    assert time.monotonic() - began < 200.0
