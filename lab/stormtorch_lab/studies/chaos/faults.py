"""Fault schedule of a chaos run: kind, hosts, time and duration of each fault; a pure function of its arguments.

schedule(hosts=5, minutes=3, seed=1)      # the same list on every call and machine
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stormtorch_lab.netns.conditions import AccessLink, Conditions, between

KINDS = ("kill", "pause", "cut", "link", "outage", "partition", "storm", "mtu", "join", "leave")
"""Kinds of faults. kill: SIGKILL, then the same command again. pause: SIGSTOP, then SIGCONT. cut: a host is cut off.
link: a link between two hosts is cut, in both directions or in one. outage: all links are cut.
partition: the network splits into two sides. storm: half of the packets are lost. mtu: a host's large packets are lost.
join: an additional host joins, and leaves later. leave: SIGTERM, then the same command again."""
STORM_LOSS = 0.5
NARROW_MTU = 1000
# Seconds between the starts of two faults, unless the second has to wait.
_GAP_S = (3.0, 9.0)
_FIRST_S = 3.0
# Range of the duration of each kind in seconds, log-uniform: most faults are short.
_LASTS_S = {
    "kill": (0.2, 3.0),
    "pause": (0.5, 15.0),
    "cut": (1.0, 15.0),
    "link": (1.0, 15.0),
    "outage": (2.0, 15.0),
    "partition": (2.0, 15.0),
    "storm": (2.0, 10.0),
    "mtu": (2.0, 15.0),
    "join": (15.0, 40.0),
    "leave": (3.0, 15.0),
}
# Seconds after its end for which a fault still counts: a process must start, and hosts must be admitted again.
_SETTLES_S = {"kill": 12.0, "leave": 12.0, "join": 0.0, "storm": 0.0, "mtu": 0.0}
_SETTLES_OTHERS_S = 3.0
# Seconds for which a join counts as a fault; after them, the new host is like the others.
_JOIN_COUNTS_S = 8.0
_MOST_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault of a schedule, in seconds since the faults began."""

    kind: str
    at_s: float
    lasts_s: float
    hosts: tuple[int, ...] = ()
    """Affected hosts, without which the training may have to go on; empty if all are affected alike."""
    links: tuple[tuple[int, int], ...] = ()
    """Links (source, target) that are cut meanwhile."""

    @property
    def ends_s(self) -> float:
        """Time of its end."""
        return self.at_s + self.lasts_s

    @property
    def description(self) -> str:
        """Short description: "cut h2"."""
        if self.kind == "link":
            (source, target), *back = self.links
            return f"link h{source}{'-' if back else '>'}h{target}"
        return " ".join([self.kind, *(f"h{host}" for host in self.hosts)])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data: dict[str, Any] = {"kind": self.kind, "at_s": self.at_s, "lasts_s": self.lasts_s, "hosts": self.hosts}
        return data | ({"links": [f"{source}>{target}" for source, target in self.links]} if self.links else {})


def schedule(
    *, hosts: int, minutes: float, seed: int, kinds: Sequence[str] = KINDS, spares: int = 1
) -> tuple[Fault, ...]:
    """Draws the faults of a run in order of their start; all end within the time.

    At most two faults are active at once, and a quorum of the hosts stays connected; an outage is never combined.
    All kinds are equally frequent.

    Args:
        hosts: Hosts of the training, numbered from 0; at least 3, so that a majority can lose one.
        minutes: Time in which faults begin and end.
        seed: Random seed.
        kinds: Kinds to draw from, of `KINDS`.
        spares: Additional hosts that may join, numbered from `hosts`.
    """
    dice = random.Random(f"chaos {seed} {hosts} {minutes:g} {spares} {' '.join(kinds)}")
    end_s = 60.0 * minutes
    faults: list[Fault] = []
    deck: list[str] = []
    now_s = _FIRST_S
    while now_s < end_s:
        if not deck:
            deck = dice.sample(list(kinds), len(kinds))
        # The first kind that may begin now; the others stay in the deck.
        for position, kind in enumerate(deck):
            fault = _draw(dice, kind, now_s, hosts, spares, faults)
            if fault is not None and fault.ends_s <= end_s:
                faults.append(fault)
                del deck[position]
                now_s += dice.uniform(*_GAP_S)
                break
        else:
            now_s += 0.5
            if now_s > end_s - min(_LASTS_S[kind][0] for kind in kinds):
                break
    return tuple(faults)


def _draw(
    dice: random.Random, kind: str, at_s: float, hosts: int, spares: int, before: Sequence[Fault]
) -> Fault | None:
    """Draws a fault that may begin now, or none if its kind must wait."""
    holding = [fault for fault in before if _counts_until(fault) > at_s]
    low, high = _LASTS_S[kind]
    lasts_s = round(math.exp(dice.uniform(math.log(low), math.log(high))), 2)
    at_s = round(at_s, 2)
    if len(holding) >= _MOST_AT_ONCE or any(fault.kind in (kind, "outage") for fault in holding):
        return None
    if kind == "join":
        # It has not left yet, or only just.
        taken = {fault.hosts[0] for fault in before if fault.kind == "join" and fault.ends_s + 10.0 > at_s}
        free = [host for host in range(hosts, hosts + spares) if host not in taken]
        return Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, hosts=(free[0],)) if free else None
    if kind == "outage":
        return None if holding else Fault(kind=kind, at_s=at_s, lasts_s=lasts_s)
    if kind == "storm":
        return Fault(kind=kind, at_s=at_s, lasts_s=lasts_s)
    struck = {host for fault in holding for host in fault.hosts}
    whole = [host for host in range(hosts) if host not in struck]
    left = (hosts - 1) // 2 - sum(_weight(fault) for fault in holding)
    if kind == "mtu":
        return Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, hosts=(dice.choice(whole),))
    if left < 1:
        return None
    if kind == "partition":
        side = tuple(sorted(dice.sample(whole, dice.randint(1, left))))
        others = set(range(hosts + spares)) - set(side)
        return Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, hosts=side, links=tuple(sorted(between(side, others))))
    if kind == "link":
        source, target = dice.sample(whole, 2)
        links = ((source, target), (target, source)) if dice.random() < 0.5 else ((source, target),)
        return Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, hosts=(source, target), links=links)
    return Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, hosts=(dice.choice(whole),))


def _counts_until(fault: Fault) -> float:
    if fault.kind == "join":
        return fault.at_s + min(fault.lasts_s, _JOIN_COUNTS_S)
    return fault.ends_s + _SETTLES_S.get(fault.kind, _SETTLES_OTHERS_S)


def _weight(fault: Fault) -> int:
    """Number of hosts that the training may lose by a fault; for a link, one of its ends."""
    return 0 if fault.kind in ("join", "storm", "mtu") else 1 if fault.kind == "link" else len(fault.hosts)


def network(base: Conditions, active: Iterable[Fault], hosts: int) -> dict[str, Any]:
    """Conditions of a lab of `hosts` hosts under exactly the active faults, as changes."""
    cut: set[int] = set()
    links: set[tuple[int, int]] = set()
    lines = dict(base.lines)
    storm = False
    for fault in active:
        links |= set(fault.links)
        storm |= fault.kind == "storm"
        if fault.kind == "outage":
            cut |= set(range(hosts))
        elif fault.kind == "cut":
            cut |= set(fault.hosts)
        elif fault.kind == "mtu":
            lines |= {host: AccessLink(mtu=NARROW_MTU) for host in fault.hosts}
    return {
        "cut": frozenset(cut),
        "cut_links": frozenset(links),
        "lines": lines,
        "loss": STORM_LOSS if storm else base.loss,
    }
