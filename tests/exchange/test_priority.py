"""Priorities: a job, or some groups of it, whose traffic is marked as low and yields."""

import contextlib
import copy
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import OPTIONS, SHARING, local_world, wait_until_near

from stormtorch import EXACT, BoundedDrift, Options, exact, prepare
from stormtorch.collectives import Group, Op, all_reduce
from stormtorch.exchange.options import RateMode
from stormtorch.exchange.reliability import Priority
from stormtorch.joining.starting import bind
from stormtorch.udp.cards import agree
from stormtorch.udp.udp import UdpTransport
from training import perceptron, vectors

BOTH = replace(OPTIONS, priority="both")
KEY = bytes(range(32))
LARGE = 600_001
LOOKING = threading.Lock()


def marks(transport: UdpTransport) -> list[int]:
    """DSCP of each UDP socket of this process that is one of the transport's lanes."""
    ports = transport.endpoint.ports
    found = {}
    with LOOKING:  # ranks are threads here, and would see each other's copies of descriptors come and go
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # another thread may close a socket of its own at any moment
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.type == socket.SOCK_DGRAM and each.family == socket.AF_INET:
                        port = each.getsockname()[1]
                        found[port] = each.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) >> 2
    return [found[port] for port in ports]


def side_by_side(transport: UdpTransport) -> tuple[list[bytes], list[int], list[int]]:
    """Collectives of two priorities at the same time: results, bytes by lane before and after those of low priority."""
    normal, low = Group(transport), Group(transport, name="low", priority="low")
    results, tensors = [], []
    before = transport.lane_bytes_sent()
    for turn, count in enumerate((LARGE, 17, 100_000)):
        pairs = []
        for group in (low, normal):
            source = torch.Generator().manual_seed(10 * turn + transport.rank)
            tensor = torch.randn(count, generator=source)
            pairs.append((all_reduce(group, tensor, Op.AVG), tensor))
        for pending, tensor in pairs:
            pending.wait()
            tensors.append(tensor)
    results = [each.numpy().tobytes() for each in tensors]
    after = transport.lane_bytes_sent()
    return results, marks(transport), [b - a for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize(
    "options", [BOTH, replace(BOTH, key=KEY, lanes=2), replace(BOTH, datagram_bytes=1472, yield_to="queues")]
)
def test_groups_of_both_priorities_run_side_by_side(options: Options) -> None:
    results = local_world(3, side_by_side, options=options)
    for all_bytes, dscp, _ in results:
        assert all_bytes == results[0][0]
        assert all_bytes[0::2] == all_bytes[1::2], "both priorities give the same bits"
        assert dscp == [0] * (len(dscp) - 1) + [1], "the last lane is marked, and no other"
    for _, _, sent in results:
        assert sent[-1] > 0.9 * sum(sent[:-1]), "what is low went by the marked lane"


def near(transport: UdpTransport) -> list[bytes]:
    wait_until_near(transport)
    return side_by_side(transport)[0]


def test_low_priority_passes_through_shared_memory_too() -> None:
    results = local_world(2, near, options=replace(SHARING, priority="both"))
    assert results[0] == results[1]


def low_groups(transport: UdpTransport) -> list[Any]:
    tensor = torch.ones(1000)
    all_reduce(Group(transport, priority="low"), tensor, Op.SUM).wait()
    with pytest.raises(ValueError, match=r'priority must be None or "low" in this job, got "normal".*"both"'):
        Group(transport, priority="normal")
    return [tensor[0].item(), marks(transport)]


def test_job_of_low_priority_is_marked_as_a_whole() -> None:
    for options in (replace(OPTIONS, priority="low"), replace(OPTIONS, rate="low")):
        assert local_world(2, low_groups, options=options) == [[2.0, [1]]] * 2


def refused(transport: UdpTransport) -> str:
    with pytest.raises(ValueError, match="priority") as error:
        Group(transport, priority="low")
    return str(error.value)


def test_job_without_low_priority_says_how_to_get_it() -> None:
    for text in local_world(2, refused, options=OPTIONS):
        assert text == (
            'priority must be None or "normal" in this job, got "low": a job that begins with '
            'Options(priority="both"), on all ranks, has both'
        )


def test_ranks_that_disagree_about_priority_are_named() -> None:
    cards = [bind(replace(OPTIONS, priority=each))[1] for each in ("both", "normal", "both", "low")]
    with pytest.raises(ValueError, match=r'priority must be "both" .* all ranks or of none: ranks 1, 3 did not'):
        agree(cards)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"priority": "high"}, 'priority must be "normal", "low" or "both"'),
        ({"yield_to": "mercy"}, 'yield_to must be "queues", "latency" or "classes"'),
        ({"yield_delay_s": 0.0}, "yield_delay_s must lie between 0 and 10"),
        ({"priority": "both", "rate": "low"}, 'priority must be "normal" or "low" with rate="low"'),
        ({"priority": "both", "interfaces": ("eth0", "eth1")}, "with several interfaces"),
        ({"priority": "both", "port": 65535}, "port must leave 2 ports below"),
    ],
)
def test_bad_priorities_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Options(**given)


def test_rate_follows_priority_and_what_it_yields_to() -> None:
    assert Options().rate_mode(loopback=False) == (RateMode.AUTO, 0.0)
    assert Options(priority="both").rate_mode(loopback=False) == (RateMode.AUTO, 0.0)
    assert Options(priority="low").rate_mode(loopback=False) == (RateMode.LOW_LATENCY, 0.0)
    assert Options(priority="low", yield_to="queues").rate_mode(loopback=True) == (RateMode.LOW_PRIORITY, 0.0)
    assert Options(priority="low", yield_to="classes").rate_mode(loopback=False) == (RateMode.AUTO, 0.0)
    assert Options(priority="low", yield_to="classes").rate_mode(loopback=True) == (RateMode.UNLIMITED, 0.0)
    assert Options(priority="low", rate="8mbit").rate_mode(loopback=False) == (RateMode.FIXED, 1e6)
    assert Options(rate="low").rate_mode(loopback=False) == (RateMode.LOW_PRIORITY, 0.0)


def training(priority: Priority | None) -> Callable[[UdpTransport], tuple[list[torch.Tensor], list[int]]]:
    first = perceptron(inside=20_000)

    def work(transport: UdpTransport) -> tuple[list[torch.Tensor], list[int]]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        policy = BoundedDrift(gradients=EXACT, broadcast=EXACT, priority=priority)
        prepare(model, optimizer, policy=policy, group=Group(transport))
        before = transport.lane_bytes_sent()
        for step in range(4):
            optimizer.zero_grad()
            model(vectors(step, transport.rank)).square().mean().backward()
            optimizer.step()
        after = transport.lane_bytes_sent()
        with exact(model):
            return [each.detach().clone() for each in model.parameters()], [
                b - a for a, b in zip(before, after, strict=True)
            ]

    return work


def test_training_of_low_priority_goes_by_the_marked_lane_and_learns_the_same() -> None:
    plain = local_world(3, training(None), options=BOTH)
    low = local_world(3, training("low"), options=BOTH)
    for (expected, _), (found, sent) in zip(plain, low, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
        assert sent[-1] > 50 * sent[0], "only what ranks tell each other about a step has normal priority"
    assert all(sent[-1] == 0 for _, sent in plain)
    with pytest.raises(ValueError, match=r'priority must be None or "normal" in this job'):
        local_world(2, training("low"), options=OPTIONS)
