"""Hosts with two interfaces: real packets take both, and one of them may fail and come back."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stormtorch import EXACT, Options, connect
from stormtorch.checks import BadCondition
from stormtorch.collectives import Group, all_reduce
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.netns import Lab

MakeLab = Callable[..., Lab]
ELEMENTS = 1_000_000


def reduce_on(member: Member, options: Options, rounds: int, changes: dict[int, int]) -> dict[str, Any]:
    """All-reduces. Rank 0 requests a change, given by its number, in the middle of some rounds."""
    times = []
    with connect(member.store, member.rank, member.world, options) as transport:
        group = Group(transport)
        for index in range(rounds):
            tensor = torch.full((ELEMENTS,), 1.0 + member.rank)
            begin = time.perf_counter()
            work = all_reduce(group, tensor, reliability=EXACT)
            if index in changes and member.rank == 0:
                time.sleep(0.1)
                member.request(changes[index])
            work.wait()
            times.append(time.perf_counter() - begin)
            assert torch.all(tensor == sum(range(1, member.world + 1)))
            if index in changes:
                time.sleep(1.5)  # time to detect the restored path
        peer = 1 - member.rank
        return {"times": times, "paths": transport.paths(peer), "outages": transport.health()["path_outages"]}


@pytest.mark.slow
@pytest.mark.lab
def test_two_paths_carry_more_than_one_and_one_may_fail_and_return(lab: MakeLab) -> None:
    network = lab(2, rate="100mbit", management=True, probe=False, paths=2)
    both = Options(interfaces=("eth0", "eth1"))

    def change(_rank: int, what: object) -> bool:
        network.set_path(1, cut={0, 1} if what == 1 else set())
        return True

    (one, _) = run_ranks(reduce_on, 2, (Options(interface="eth0"), 3, {}), timeout_s=60, lab=network)
    logs = run_ranks(reduce_on, 2, (both, 12, {4: 1, 7: 0}), timeout_s=60, on_message=change, lab=network)
    times = logs[0]["times"]
    alone_s = min(one["times"])
    assert min(times[2:4]) < 0.75 * alone_s and min(times[9:]) < 0.75 * alone_s
    assert min(times[5:7]) > 0.85 * alone_s  # one path has all traffic
    assert times[4] < 2.0 * alone_s + 1.0  # the cost of failure detection, without a timeout
    for log in logs:
        assert [path.outages for path in log["paths"]] == [0, 1] and log["outages"] == 1
        assert all(path.up for path in log["paths"])
    for path in range(2):
        assert all(link.seen > 1000 for link in network.path_links(path))


@pytest.mark.pure
def test_wrong_paths_are_refused() -> None:
    for paths in (0, 5, True, "2"):
        with pytest.raises(BadCondition, match="paths"):
            Lab(2, paths=paths)  # type: ignore[arg-type]
    with pytest.raises(BadCondition, match="cable"):
        Lab(2, cable=1500, paths=2)
    with pytest.raises(BadCondition, match="nat"):
        Lab(2, nat={1: "cone"}, paths=2)
    with pytest.raises(BadCondition, match="burst"):
        Lab(2, loss=0.1, burst="5ms", paths=2)
    with pytest.raises(BadCondition, match="several paths"):
        Lab(2).set_path(1, loss=0.1)
