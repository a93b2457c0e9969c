"""Schedules of faults: drawn from a seed, always leaving a quorum."""

import itertools
from collections import Counter
from typing import Any

import pytest

from stormtorch.checks import BadSetting
from stormtorch_lab.netns.conditions import Conditions, both_ways
from stormtorch_lab.studies.chaos.faults import KINDS, NARROW_MTU, Fault, network, schedule
from stormtorch_lab.studies.chaos.settings import ChaosSettings

pytestmark = pytest.mark.pure
HARMLESS = ("join", "storm", "mtu")


def cost(fault: Fault) -> int:
    return 0 if fault.kind in HARMLESS else 1 if fault.kind == "link" else len(fault.hosts)


def test_schedule_depends_on_its_arguments_alone() -> None:
    first = schedule(hosts=5, minutes=3, seed=1)
    assert schedule(hosts=5, minutes=3, seed=1) == first
    assert schedule(hosts=5, minutes=3, seed=2) != first
    assert schedule(hosts=4, minutes=3, seed=1) != first
    # Must be the same on all machines: the first faults of that seed.
    assert [fault.description for fault in first[:3]] == ["outage", "partition h0", "pause h1"]


@pytest.mark.parametrize("seed", range(3))
def test_half_an_hour_has_two_hundred_faults_and_every_kind_equally_often(seed: int) -> None:
    faults = schedule(hosts=5, minutes=30, seed=seed)
    assert len(faults) >= 200
    counts = Counter(fault.kind for fault in faults)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 2


@pytest.mark.parametrize("hosts", [3, 4, 5, 8])
def test_faults_leave_a_majority_and_end_in_time(hosts: int) -> None:
    for seed in range(5):
        faults = schedule(hosts=hosts, minutes=10, seed=seed)
        assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
        assert all(0 < fault.at_s < fault.ends_s <= 600 for fault in faults)
        for moment in (fault.at_s + 1e-6 for fault in faults):
            holding = [fault for fault in faults if fault.at_s <= moment < fault.ends_s]
            if any(fault.kind == "outage" for fault in holding):
                assert [fault.kind for fault in holding if fault.kind != "join"] == ["outage"]
            assert sum(cost(fault) for fault in holding) <= (hosts - 1) // 2
            struck = [host for fault in holding for host in fault.hosts if fault.kind != "join"]
            assert len(struck) == len(set(struck)), "a host is struck by one fault at a time"
            assert len([fault for fault in holding if fault.kind != "join"]) <= 2


def test_spare_hosts_join_when_they_are_not_there() -> None:
    faults = [fault for fault in schedule(hosts=5, minutes=30, seed=3, spares=2) if fault.kind == "join"]
    assert {fault.hosts for fault in faults} <= {(5,), (6,)}
    for host in (5, 6):
        own = [fault for fault in faults if fault.hosts == (host,)]
        assert all(before.ends_s < after.at_s for before, after in itertools.pairwise(own))


def test_kinds_that_were_not_asked_for_do_not_come() -> None:
    assert {fault.kind for fault in schedule(hosts=5, minutes=5, seed=1, kinds=("kill", "cut"))} == {"kill", "cut"}


def test_partition_cuts_all_links_between_its_sides_and_no_other() -> None:
    (fault, *_) = schedule(hosts=5, minutes=5, seed=1, kinds=("partition",), spares=1)
    side, rest = set(fault.hosts), set(range(6)) - set(fault.hosts)
    assert set(fault.links) == {(a, b) for a in range(6) for b in range(6) if (a in side) != (b in side)}
    assert len(side) < len(rest)


def test_network_suffers_from_what_is_active_and_from_nothing_else() -> None:
    base = Conditions(loss=0.1)
    calm = network(base, [], 4)
    assert calm == {"cut": frozenset(), "cut_links": frozenset(), "lines": {}, "loss": base.loss}
    active = [
        Fault(kind="cut", at_s=0, lasts_s=1, hosts=(1,)),
        Fault(kind="link", at_s=0, lasts_s=1, hosts=(2, 3), links=tuple(both_ways((2, 3)))),
        Fault(kind="mtu", at_s=0, lasts_s=1, hosts=(0,)),
        Fault(kind="storm", at_s=0, lasts_s=1),
        Fault(kind="kill", at_s=0, lasts_s=1, hosts=(3,)),
    ]
    found = network(base, active, 4)
    assert found["cut"] == {1} and found["cut_links"] == {(2, 3), (3, 2)} and found["loss"] == 0.5
    assert base.changed(**found).line(0).mtu == NARROW_MTU
    assert network(base, [Fault(kind="outage", at_s=0, lasts_s=1)], 4)["cut"] == {0, 1, 2, 3}
    for fault in active:
        base.changed(**network(base, [fault], 4)).check(4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hosts", 2),
        ("minutes", 0),
        ("seed", -1),
        ("silence_s", 0),
        ("patience_s", 0),
        ("policy", "none"),
        ("spares", 99),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadSetting) as refused:
        ChaosSettings(**{name: value})
    assert refused.value.name == name


def test_unknown_kinds_are_refused_by_the_name_of_the_option() -> None:
    with pytest.raises(BadSetting, match="kill") as refused:
        ChaosSettings(kinds=("kil",))
    assert refused.value.name == "faults"
