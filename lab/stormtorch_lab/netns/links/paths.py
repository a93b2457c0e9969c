"""Multipath: further paths between the lab's hosts, each a bridge with its own conditions."""

from collections.abc import Sequence
from typing import Any

from stormtorch.checks import BadCondition
from stormtorch_lab.netns.access import has_netem
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.netns.links.kernel_network import KernelNetwork, Wiring
from stormtorch_lab.netns.measured import LinkCount
from stormtorch_lab.netns.namespaces import Holder

MOST_PATHS = 4


def check_paths(paths: object, conditions: Conditions) -> int:
    """Returns the number of paths if the conditions allow it; raises `BadCondition` otherwise."""
    if isinstance(paths, bool) or not isinstance(paths, int) or not 1 <= paths <= MOST_PATHS:
        raise BadCondition("paths", f"must lie in [1, {MOST_PATHS}], got {paths!r}")
    if paths == 1:
        return paths
    if conditions.cable is not None:
        raise BadCondition("cable", "has one path: leave out one of cable and paths")
    if conditions.nat:
        raise BadCondition("nat", "works with one path only: leave out one of nat and paths")
    _check(conditions)
    return paths


def _check(conditions: Conditions) -> None:
    if conditions.timed:
        raise BadCondition("burst", "must be in packets, not in time, if there are several paths")
    if conditions.delayed and (conditions.delays or not has_netem()):
        raise BadCondition(
            "delay", "needs netem in the kernel, and must be the same for all links, if there are several paths"
        )


class FurtherPaths:
    """Paths 1 and up of an open lab."""

    def __init__(self, count: int, switch: Holder, hosts: Sequence[Holder], conditions: Conditions) -> None:
        self._conditions = [conditions] * count
        self._hosts = len(hosts)
        self._networks = [KernelNetwork(switch, hosts, conditions, Wiring(path)) for path in range(1, 1 + count)]

    def conditions_of(self, path: int) -> Conditions:
        """Conditions of one path."""
        if type(path) is not int or not 1 <= path <= len(self._networks):
            raise BadCondition("path", f"must lie in [0, {len(self._networks)}], got {path!r}")
        return self._conditions[path - 1]

    def change(self, path: int, **changes: Any) -> Conditions:
        """Changes single conditions of one path."""
        conditions = self.conditions_of(path).changed(**changes)
        conditions.check(self._hosts)
        _check(conditions)
        self._networks[path - 1].apply(conditions)
        self._conditions[path - 1] = conditions
        return conditions

    def change_all(self, **changes: Any) -> None:
        """Changes single conditions of all of them."""
        for path in range(1, 1 + len(self._networks)):
            self.change(path, **changes)

    def links(self, path: int) -> list[LinkCount]:
        """Packets of every link of a path since the lab opened."""
        return self._networks[path - 1].links()
