"""Several interfaces: data is divided between paths, and the result does not show it."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import OPTIONS, local_world

from stormtorch import LOSSY, Options, faults
from stormtorch.backend.creation import _checked
from stormtorch.collectives import Group, Op, all_gather, all_reduce
from stormtorch.joining.starting import bind
from stormtorch.udp.cards import agree, pack, unpack
from stormtorch.udp.udp import Path, UdpTransport

KEY = bytes(range(32))
# Without a rate, loopback carries more than one path gets to send.
TWO = replace(OPTIONS, interfaces=("127.0.0.1", "127.0.0.2"), rate="200mbit")
LARGE = 1_000_001


def reduced(transport: UdpTransport) -> tuple[list[bytes], dict[int, list[Path]]]:
    """Results of some collectives as bytes, and the paths to each peer."""
    group = Group(transport)
    results: list[torch.Tensor] = []
    for count in (LARGE, 17, LARGE):
        own = torch.randn(count, generator=torch.Generator().manual_seed(count + transport.rank))
        all_reduce(group, summed := own.clone(), Op.AVG).wait()
        rooms = [torch.empty_like(own) for _ in range(group.size)]
        all_gather(group, rooms, own).wait()
        results += [summed, *rooms]
    paths = {peer: transport.paths(peer) for peer in range(group.size) if peer != transport.rank}
    return [each.view(torch.uint8).numpy().tobytes() for each in results], paths


@pytest.mark.parametrize("changes", [{}, {"key": KEY}, {"datagram_bytes": 1472}])
def test_results_have_the_same_bits_over_several_paths_and_both_are_used(changes: dict[str, Any]) -> None:
    expected = [results for results, _ in local_world(2, reduced)]
    for (results, paths), alone in zip(local_world(2, reduced, options=replace(TWO, **changes)), expected, strict=True):
        assert results == alone
        (each,) = paths.values()
        assert len(each) == 2 and all(path.up and path.round_trip_s > 0 for path in each)
        assert all(path.bytes_sent > 100_000 and path.bytes_received > 100_000 for path in each)


@pytest.mark.thorough
def test_ranks_with_fewer_interfaces_use_the_first_ones() -> None:
    one = replace(OPTIONS, interface="127.0.0.1")
    found = local_world(3, reduced, options=[TWO, TWO, one])
    assert [{peer: len(paths) for peer, paths in each.items()} for _, each in found] == [
        {1: 2, 2: 1},
        {0: 2, 2: 1},
        {0: 1, 1: 1},
    ]


def test_exact_and_lossy_collectives_work_while_both_paths_lose() -> None:
    def work(transport: UdpTransport) -> float:
        group = Group(transport)
        all_reduce(group, exact := torch.ones(LARGE)).wait()
        all_reduce(group, lossy := torch.ones(LARGE), Op.AVG, reliability=LOSSY).wait()
        assert torch.all(lossy == 1.0)
        return float(exact.min())

    with faults(loss=0.1, seed=3):
        assert local_world(2, work, options=TWO) == [2.0, 2.0]


def refusal(**changes: Any) -> str:
    with pytest.raises(ValueError, match=r".*") as refused:
        Options(**changes)
    return str(refused.value)


@pytest.mark.pure
def test_wrong_interfaces_are_refused_by_the_name_of_the_knob() -> None:
    assert "interfaces must" in refusal(interfaces="eth0")
    assert "interfaces must" in refusal(interfaces=("eth0", ""))
    assert "interfaces must name at most 4" in refusal(interfaces=("a", "b", "c", "d", "e"))
    assert "different" in refusal(interfaces=("eth0", "eth0"))
    assert "interfaces must not be given together with interface" in refusal(interface="eth0", interfaces=("eth1",))
    assert "lanes must be 1 or None" in refusal(interfaces=("eth0", "eth1"), lanes=2)
    assert Options(interfaces=("eth0",), lanes=2).lanes_possible


def test_interface_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"nosuch0.*does not exist"):
        bind(Options(interfaces=("127.0.0.1", "nosuch0")))
    with pytest.raises(ValueError, match=r"interfaces .* must have different addresses"):
        bind(Options(interfaces=("127.0.0.1", "lo")))
    with pytest.raises(ValueError, match="interfaces: this job has 2 lanes"):
        bind(TWO, replace(agree([bind(Options(interface="127.0.0.1"))[1]]), lanes=2))


def test_environment_names_interfaces_if_options_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORM_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("STORM_INTERFACES", "eth0, eth1")
    assert _checked(None, 5.0).interfaces == ("eth0", "eth1")
    assert _checked(Options(interface="lo"), 5.0).interfaces == ()
    assert _checked(Options(interfaces=("lo",)), 5.0).interfaces == ("lo",)
    monkeypatch.setenv("STORM_INTERFACES", "a,b,c,d,e")
    with pytest.raises(ValueError, match="STORM_INTERFACES: interfaces must"):
        _checked(None, 5.0)
    monkeypatch.setenv("STORM_SOCKET_IFNAME", "eth0")
    with pytest.raises(ValueError, match="either STORM_SOCKET_IFNAME or STORM_INTERFACES"):
        _checked(None, 5.0)


def test_card_tells_of_all_paths_and_nonsense_is_no_card() -> None:
    endpoint, card = bind(TWO)
    endpoint.close(0.0)
    assert card.lanes == [] and [host for host, _ in card.more_paths()] == ["127.0.0.2"]
    assert unpack(pack(card)) == card
    good = json.loads(pack(card))
    good_path, wrong = ["127.0.0.2", 1], [["127.0.0.2", 0], ["nowhere", 1], [1, 2], ["127.0.0.2"], "x", []]
    nonsense: list[list[Any]] = [[each] for each in wrong]
    for paths in [*nonsense, [good_path] * 4]:
        with pytest.raises(ValueError, match=r".*"):
            unpack(json.dumps([*good[:-1], paths]).encode())
