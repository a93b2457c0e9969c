"""Path MTU discovery: a host's MTU falls below the size of datagrams while ranks communicate or train."""

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from stormtorch import EXACT, LOSSY, Options, Reliability, connect, prepare
from stormtorch.collectives import Group, all_reduce
from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.netns import Lab

MakeLab = Callable[..., Lab]
pytestmark = pytest.mark.lab

ELEMENTS = 250_000


def set_mtu(network: Lab, host: int, mtu: int) -> None:
    network.holders[host].run(["ip", "link", "set", "eth0", "mtu", str(mtu)])


def reduce_on(member: Member, reliability: Reliability, options: Options, rounds: int) -> list[dict[str, float]]:
    """All-reduces before and after a change requested by rank 0; times and results."""
    rows = []
    with connect(member.store, member.rank, member.world, options) as transport:
        group = Group(transport)
        for index in range(rounds):
            if index == 3 and member.rank == 0:
                member.request(index)
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


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({}, id="plain"),
        pytest.param({"delay": "10ms"}, id="delay", marks=pytest.mark.slow),
        pytest.param({"loss": 0.1}, id="loss", marks=pytest.mark.slow),
    ],
)
def test_exact_sums_go_on_within_seconds_when_a_hosts_mtu_falls(lab: MakeLab, knobs: dict[str, object]) -> None:
    network = lab(3, rate="200mbit", management=True, probe=False, **knobs)

    def narrow(_rank: int, _what: object) -> bool:
        set_mtu(network, 1, 1200)
        return True

    options = Options(interface="eth0", silence_s=8.0)
    logs = run_ranks(reduce_on, 3, (EXACT, options, 12), timeout_s=60, on_message=narrow, lab=network)
    assert all(row["wrong"] == 0.0 for log in logs for row in log)
    assert max(row["time_s"] for log in logs for row in log) < 5.0
    assert logs[0][2]["path_bytes"] > 1172
    assert logs[1][-1]["path_bytes"] == 1152
    if "delay" not in knobs:  # the relay delivers packets larger than the interface would send
        assert logs[0][-1]["path_bytes"] == 1152
    assert logs[2][-1]["path_bytes"] > 1172


@pytest.mark.slow
def test_path_that_becomes_wide_again_is_used_so_and_lossy_sums_lose_nothing_on_it(lab: MakeLab) -> None:
    network = lab(2, rate="200mbit", management=True, probe=False)
    set_mtu(network, 1, 1200)

    def widen(_rank: int, _what: object) -> bool:
        set_mtu(network, 1, 1500)
        return True

    # By default, the ranks agree on the MTU of the narrow interface.
    options = Options(interface="eth0", datagram_bytes=1472)
    logs = run_ranks(reduce_on, 2, (LOSSY, options, 60), timeout_s=60, on_message=widen, lab=network)
    assert logs[0][2]["path_bytes"] == logs[1][2]["path_bytes"] == 1152
    assert logs[0][2]["arrived"] == 1.0
    assert logs[0][-1]["path_bytes"] == logs[1][-1]["path_bytes"] == 1472
    assert logs[0][-1]["arrived"] == 1.0


@pytest.mark.slow
def test_host_that_answers_but_gets_no_data_is_named(lab: MakeLab) -> None:
    network = lab(2, rate="200mbit", management=True, probe=False)

    def shut(_rank: int, _what: object) -> bool:
        set_mtu(network, 1, 400)
        return True

    options = Options(interface="eth0", silence_s=3.0)
    # Any rank may fail first: the one that waited reports the time, the notified one reports the rank and the cause.
    with pytest.raises(RankFailed, match=r"rank \d answers, but no data (reached it for 3 s|reaches it)"):
        run_ranks(reduce_on, 2, (EXACT, options, 12), timeout_s=60, on_message=shut, lab=network)


def train_on(member: Member, steps: int) -> tuple[list[float], float]:
    """Steps of a prepared model: their times, and the received fraction of the parameters."""
    options = Options(interface="eth0")
    with connect(member.store, member.rank, member.world, options) as transport:
        torch.manual_seed(member.rank)
        model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 64))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = prepare(model, optimizer, group=Group(transport))
        begin = time.perf_counter()
        times = []
        for step in range(steps):
            if step == 10 and member.rank == 0:
                member.request(step)
            model(torch.randn(16, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begin)
        return times, min(optimizer.ledger.rows[-1].broadcast.values())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_training_goes_on_within_seconds_when_a_hosts_mtu_falls(lab: MakeLab) -> None:
    network = lab(3, rate="200mbit", management=True, probe=False)

    def narrow(_rank: int, _what: object) -> bool:
        set_mtu(network, 1, 1200)
        return True

    logs = run_ranks(train_on, 3, (60,), timeout_s=90, on_message=narrow, lab=network)
    for times, arrived in logs:
        assert max(after - before for before, after in pairwise(times)) < 5.0
        assert arrived == 1.0
