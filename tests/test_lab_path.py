"""Paths of the lab that carry less than the job's datagrams: a host's MTU falls while ranks talk or train, and rises again."""

import time
from collections.abc import Callable

import pytest
import torch

from stormtorch import EXACT, LOSSY, Options, Reliability, connect, prepare
from stormtorch.bench.ranks import Member, run_ranks
from stormtorch.collectives import Group, all_reduce
from stormtorch.lab import Lab

MakeLab = Callable[..., Lab]
pytestmark = pytest.mark.lab

ELEMENTS = 250_000


def set_mtu(network: Lab, host: int, mtu: int) -> None:
    network.holders[host].run(["ip", "link", "set", "eth0", "mtu", str(mtu)])


def reduce_on(member: Member, reliability: Reliability, options: Options, rounds: int) -> list[dict[str, float]]:
    """All-reduces before and after a change that rank 0 asks for; what each took and brought."""
    rows = []
    with connect(member.store, member.rank, member.world, options) as transport:
        group = Group(transport)
        for index in range(rounds):
            if index == 3 and member.rank == 0:
                member.ask(index)
            tensor = torch.full((ELEMENTS,), 1.0 + member.rank)
            begin = time.perf_counter()
            arrivals = all_reduce(group, tensor, reliability=reliability).wait()
            rows.append(
                {
                    "time_s": time.perf_counter() - begin,
                    "arrived": min(arrival.arrived for arrival in arrivals),
                    "wrong": float((tensor != sum(range(1, member.world + 1))).float().mean()),
                    "path_bytes": transport.path_bytes((member.rank + 1) % member.world),
                }
            )
    return rows


@pytest.mark.parametrize("knobs", [{}, {"delay": "10ms"}, {"loss": 0.1}], ids=["plain", "delay", "loss"])
def test_exact_sums_go_on_within_seconds_when_a_hosts_mtu_falls(lab: MakeLab, knobs: dict[str, object]) -> None:
    network = lab(3, rate="200mbit", management=True, probe=False, **knobs)

    def narrow(_rank: int, _what: object) -> bool:
        set_mtu(network, 1, 1200)
        return True

    options = Options(interface="eth0", silence_s=8.0)
    logs = run_ranks(reduce_on, 3, (EXACT, options, 12), timeout_s=60, listen=narrow, lab=network)
    print([[round(row["time_s"], 3) for row in log] for log in logs])
    assert all(row["wrong"] == 0.0 for log in logs for row in log)
    assert max(row["time_s"] for log in logs for row in log) < 5.0
    assert logs[0][2]["path_bytes"] > 1172
    assert logs[1][-1]["path_bytes"] == 1152
    if "delay" not in knobs:  # the relay hands a host more than its interface would send
        assert logs[0][-1]["path_bytes"] == 1152
    assert logs[2][-1]["path_bytes"] > 1172
