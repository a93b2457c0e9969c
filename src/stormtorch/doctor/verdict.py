"""The verdict: which hosts and links are at fault for the measurements, and the remedies.

A fault of one direction is attributed to that link, unless all links into or out of a host share it: then the host is
at fault. If all links share it, no single host is. Faults are looked for from the gravest to the mildest; a mild fault
that a graver one explains is not reported.
"""

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from stormtorch.doctor.diagnosis import Diagnosis, Level
from stormtorch.doctor.examination import DirectedLink, Examination
from stormtorch.doctor.sockets import REQUESTED_BUFFER_BYTES
from stormtorch.telemetry.statistics import median, percentile
from stormtorch.telemetry.text import loss_text, rate_text, signed_time_text, size_text, time_text

LOSS_PROBLEM, LOSS_NOTE = 0.01, 0.001
"""Loss of a link from which it is a problem, and from which it is worth knowing."""
_FEWEST_LOST = 3
_SLOW = 0.25  # of the median rate of all links
_FAR, _FAR_S = 5.0, 0.005  # times the median round trip, and seconds
_REORDERED, _DUPLICATED = 0.01, 0.001
_SKEW_S = 0.5
LEAST_BUFFER_BYTES = 128 << 10
"""A smaller receive buffer overflows as soon as a few peers send at once."""
Direction = tuple[int, int]


@dataclass(frozen=True)
class _Culprit:
    """Host, link or whole network that has a fault."""

    ranks: tuple[int, ...]
    """One rank for a host, two for a link, none for the whole network."""
    links: tuple[Direction, ...]
    """Directions whose fault it explains."""
    into: bool
    """Whether traffic into the host, or the first direction of the link, has the fault."""
    out: bool

    @property
    def host(self) -> bool:
        return len(self.ranks) == 1

    @property
    def everything(self) -> bool:
        return not self.ranks

    def verb(self, word: str) -> str:
        """Inflects a verb: all links lose, the link loses."""
        return word if len(self.ranks) < 2 else {"carry": "carries"}.get(word, f"{word}s")


def examine(found: Examination) -> list[Diagnosis]:
    """All diagnoses of an examination, the gravest first."""
    diagnoses = [
        Diagnosis(
            subject="missing rank",
            level=Level.PROBLEM,
            text=f"{_capital(why)}.",
            remedy="Start it, or run without it.",
            ranks=(rank,),
        )
        for rank, why in sorted(found.missing.items())
    ]
    received = {direction: link for direction, link in found.links.items() if link.received}
    diagnoses += _unreachable(found)
    diagnoses += _lossy(found, received)
    diagnoses += _low_path_mtu(found, received)
    diagnoses += _low_rate(found, received)
    diagnoses += _buffers(found)
    diagnoses += _behind_nat(found)
    diagnoses += _versions(found)
    diagnoses += _reordering(found, received)
    diagnoses += _long_round_trip(found, received)
    diagnoses += _clock_skew(found)
    order = (Level.PROBLEM, Level.NOTE, Level.OK)
    return sorted(diagnoses, key=lambda each: order.index(each.level))


def sentence(found: Examination, diagnoses: Iterable[Diagnosis]) -> str:
    """The verdict in one sentence, or one for each problem."""
    problems = [each for each in diagnoses if each.level is Level.PROBLEM]
    if not problems:
        links = len(found.links)
        worst = max((link.loss for link in found.links.values()), default=0.0)
        return f"All {links} links among {len(found.ranks)} ranks are fine: the worst loses {loss_text(worst)}."
    count = "One problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{count}: " + " ".join(each.text for each in problems)


# --- culprits ---------------------------------------------------------------------------------------------------------


def culprits(bad: Iterable[Direction], measured: Iterable[Direction]) -> list[_Culprit]:
    """Hosts and links that explain the bad directions, of all that were measured.

    A host with two or more peers is a culprit if nearly all directions into it, or out of it, are bad. The host that
    explains most is taken first. If all directions among three or more hosts are bad, the whole network is the culprit.
    """
    everyone, everything = set(bad), set(measured)
    left = set(everyone)
    hosts = {rank for direction in everything for rank in direction}
    found = []
    if left == everything and len(hosts) > 2:
        return [_Culprit((), tuple(sorted(left)), True, True)]
    while left:
        candidates = []
        for host in hosts:
            into = {direction for direction in everything if direction[1] == host}
            out = {direction for direction in everything if direction[0] == host}
            is_into, is_out = (_mostly(side, everyone) for side in (into, out))
            explained = ((into if is_into else set()) | (out if is_out else set())) & left
            if len(explained) > 1:
                candidates.append((len(explained), -host, _Culprit((host,), tuple(sorted(explained)), is_into, is_out)))
        if not candidates:
            break
        _, _, best = max(candidates, key=lambda each: each[:2])
        found.append(best)
        left -= set(best.links)
    for source, target in sorted(left):
        back = (target, source) in left
        if back and source > target:
            continue  # reported with the other direction
        links = ((source, target), (target, source)) if back else ((source, target),)
        found.append(_Culprit((source, target), links, True, back))
    return found


def _mostly(side: set[Direction], bad: set[Direction]) -> bool:
    """Whether a host's links in one direction are bad: at least four in five, as chance may spare some."""
    return len(side) > 1 and len(side & bad) >= 0.8 * len(side)


def _where(found: Examination, culprit: _Culprit) -> str:
    if culprit.everything:
        return "all links"
    first = found.name(culprit.ranks[0])
    if culprit.host:
        way = {(True, True): "to and from", (True, False): "to", (False, True): "from"}[culprit.into, culprit.out]
        return f"all links {way} {first}"
    second = found.name(culprit.ranks[1])
    return f"the link between {first} and {second}" if culprit.out else f"the link from {first} to {second}"


def _range(values: list[float], text: Callable[[float], str]) -> str:
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"


# --- faults -----------------------------------------------------------------------------------------------------------


def _unreachable(found: Examination) -> list[Diagnosis]:
    diagnoses = []
    silent = [direction for direction, link in found.links.items() if not link.received]
    for culprit in culprits(silent, found.links):
        rank = found.ranks[culprit.links[0][1]]
        if culprit.host:
            who = found.name(culprit.ranks[0])
            at = f"port {rank.port} of {who}" if rank.chosen_port else who
            ways = {(True, True): f"to and from {at}", (True, False): f"to {at}", (False, True): f"from {who}"}
            where = ways[culprit.into, culprit.out]
        else:
            where = f"on {_where(found, culprit)}"
        if all(found.links[direction].tcp for direction in culprit.links):
            rule = f"udp dport {rank.port}" if rank.chosen_port else "meta l4proto udp"
            diagnoses.append(
                Diagnosis(
                    subject="UDP blocked",
                    level=Level.PROBLEM,
                    text=f"UDP {where} is blocked, but TCP gets through: a firewall drops UDP.",
                    remedy=f"Allow UDP: `nft insert rule inet filter input {rule} accept`, or in the cloud's "
                    "security group; set Options(port=...) if only certain ports may be open.",
                    ranks=culprit.ranks,
                )
            )
        else:
            diagnoses.append(
                Diagnosis(
                    subject="unreachable",
                    level=Level.PROBLEM,
                    text=f"Nothing gets through {where}, neither UDP nor TCP.",
                    remedy="Check the cable, the route (`ip route get ADDRESS`) and the firewall; if the machine has "
                    "several networks, choose the right one by --interface.",
                    ranks=culprit.ranks,
                )
            )
    return diagnoses


def _lossy(found: Examination, received: Mapping[Direction, DirectedLink]) -> list[Diagnosis]:
    diagnoses = []
    losses = [link.loss for link in received.values()]
    # The lower quartile is the network's own loss; only links far above it have a culprit.
    common = percentile(losses, 25) if len(found.ranks) > 2 and losses else 0.0
    if common >= LOSS_PROBLEM:
        diagnoses.append(_loss_diagnosis(found, _Culprit((), tuple(received), True, True), received, Level.PROBLEM))
    least = max(LOSS_PROBLEM, 2 * common)
    # Loss at a tiny receive buffer is reported for the buffer alone: the kernel does not count drops by sender.
    flooded = {
        number
        for number, rank in found.ranks.items()
        if rank.receive_buffer < LEAST_BUFFER_BYTES
        and any(link.overflowed for direction, link in received.items() if direction[1] == number)
    }
    clear = {direction: link for direction, link in received.items() if direction[1] not in flooded}
    for level, low, high in ((Level.PROBLEM, least, 1.01), (Level.NOTE, LOSS_NOTE, LOSS_PROBLEM)):
        bad = [
            direction
            for direction, link in clear.items()
            if low <= link.loss < high and link.loss * link.sent >= _FEWEST_LOST
        ]
        diagnoses += [_loss_diagnosis(found, culprit, received, level) for culprit in culprits(bad, clear)]
    return diagnoses


def _loss_diagnosis(
    found: Examination, culprit: _Culprit, received: Mapping[Direction, DirectedLink], level: Level
) -> Diagnosis:
    links = [received[direction] for direction in culprit.links]
    losses = [link.loss for link in links]
    bursts = median([link.burst for link in links])
    amount = loss_text(median(losses)) if culprit.everything else _range(losses, loss_text)
    text = f"{_capital(_where(found, culprit))} {culprit.verb('lose')} {amount} of the datagrams"
    text += f", in runs of {bursts:.1f} on average" if bursts >= 2.0 else ""
    if culprit.host:
        who = found.name(culprit.ranks[0])
        text += f": the fault is at {who}"
        look = f"Check the cable, port, duplex mode and drop counters of {who} (`ethtool -S`, `ip -s link`)."
    elif culprit.everything:
        text += ": no single host is at fault"
        look = "Check what all links share: a switch, a radio network, an uplink that is too slow."
    else:
        look = "Check what lies between the two: a switch, a radio link, a congested route."
    remedy = f"{look} Until then, train with BoundedDrift(), which does not wait for lost data."
    return Diagnosis(subject="loss", level=level, text=f"{text}.", remedy=remedy, ranks=culprit.ranks)


def _low_path_mtu(found: Examination, received: Mapping[Direction, DirectedLink]) -> list[Diagnosis]:
    known = {direction: link for direction, link in received.items() if link.path_bytes}
    bad = [
        direction
        for direction, link in known.items()
        if link.path_bytes < min(found.ranks[rank].mtu for rank in direction)
    ]
    diagnoses = []
    for culprit in culprits(bad, known):
        lowest = min(known[direction].path_bytes for direction in culprit.links)
        own = min(found.ranks[rank].mtu for direction in culprit.links for rank in direction)
        six = ":" in found.ranks[culprit.links[0][0]].address
        diagnoses.append(
            Diagnosis(
                subject="path MTU",
                level=Level.PROBLEM,
                text=f"{_capital(_where(found, culprit))} {culprit.verb('carry')} no packets above {lowest} bytes, "
                f"although the MTU of the interfaces is {own}.",
                remedy=f"Use Options(datagram_bytes={lowest - (48 if six else 28)}) on all ranks, or correct the MTU "
                "of the tunnel or VPN between them.",
                ranks=culprit.ranks,
            )
        )
    return diagnoses


def _low_rate(found: Examination, received: Mapping[Direction, DirectedLink]) -> list[Diagnosis]:
    known = {direction: link for direction, link in received.items() if link.rate_bits}
    if len(known) < 3:
        return []
    usual = median([link.bottleneck_bits for link in known.values()])
    bad = [direction for direction, link in known.items() if link.limited and link.bottleneck_bits < _SLOW * usual]
    return [
        Diagnosis(
            subject="slow",
            level=Level.PROBLEM,
            text=f"{_capital(_where(found, culprit))} {culprit.verb('carry')} only "
            f"{_range([known[direction].bottleneck_bits for direction in culprit.links], rate_text)}, "
            f"where others carry {rate_text(usual)}.",
            remedy="Check the negotiated speed (`ethtool DEVICE`), other traffic and rate limits. All ranks wait for "
            "the slowest link: remove the host, or send fewer bytes by BoundedDrift(wire=torch.bfloat16).",
            ranks=culprit.ranks,
        )
        for culprit in culprits(bad, known)
    ]


def _buffers(found: Examination) -> list[Diagnosis]:
    diagnoses = []
    for number, rank in sorted(found.ranks.items()):
        into = [link for (_, target), link in found.links.items() if target == number]
        overflowed = sum(link.overflowed for link in into)
        if rank.receive_buffer >= REQUESTED_BUFFER_BYTES and not overflowed:
            continue
        tiny = rank.receive_buffer < LEAST_BUFFER_BYTES
        dropped = f"; its kernel dropped {overflowed:,} datagrams when the buffer was full" if overflowed else ""
        if rank.asked_buffer < REQUESTED_BUFFER_BYTES:
            remedy = f"Request more there: Options(receive_buffer_bytes={REQUESTED_BUFFER_BYTES}), the default."
        else:
            remedy = f"On {found.name(number)}: `sysctl -w net.core.rmem_max={REQUESTED_BUFFER_BYTES}`."
        diagnoses.append(
            Diagnosis(
                subject="receive buffer",
                level=Level.PROBLEM if tiny else Level.NOTE,
                text=f"{_capital(found.name(number))} has a receive buffer of {size_text(rank.receive_buffer)}, where "
                f"the engine requests {size_text(REQUESTED_BUFFER_BYTES)}{dropped}.",
                remedy=remedy,
                ranks=(number,),
            )
        )
    return diagnoses


def _behind_nat(found: Examination) -> list[Diagnosis]:
    diagnoses = []
    for number, rank in sorted(found.ranks.items()):
        seen = {
            link.seen
            for (source, _), link in found.links.items()
            if source == number and link.seen and _plain(link.seen) != _plain(rank.address)
        }
        if seen:
            diagnoses.append(
                Diagnosis(
                    subject="NAT",
                    level=Level.NOTE,
                    text=f"{_capital(found.name(number))} has the address {rank.address}, but others see "
                    f"{', '.join(sorted(seen))}: a NAT lies between them.",
                    remedy="Options(nat=True) traverses it, if at least one rank is reachable from all others. "
                    "If that fails with `Unreachable`, connect the hosts by a VPN, and name its interface by "
                    "STORM_SOCKET_IFNAME or Options(interface=...).",
                    ranks=(number,),
                )
            )
    return diagnoses


def _versions(found: Examination) -> list[Diagnosis]:
    diagnoses = []
    for package, level in (("stormtorch", Level.PROBLEM), ("torch", Level.NOTE), ("python", Level.NOTE)):
        holders: dict[str, list[int]] = {}
        for number, rank in sorted(found.ranks.items()):
            holders.setdefault(rank.versions.get(package, "none"), []).append(number)
        if len(holders) > 1:
            text = "; ".join(
                f"{version} on {', '.join(found.name(each) for each in numbers)}"
                for version, numbers in holders.items()
            )
            fewest = min(holders.values(), key=len)
            diagnoses.append(
                Diagnosis(
                    subject="versions",
                    level=level,
                    text=f"Versions of {package} differ: {text}.",
                    remedy=f"Install the same {package} everywhere.",
                    ranks=(fewest[0],) if len(fewest) == 1 else (),
                )
            )
    return diagnoses


def _reordering(found: Examination, received: Mapping[Direction, DirectedLink]) -> list[Diagnosis]:
    diagnoses = []
    kinds: tuple[tuple[str, float, Callable[[DirectedLink], int]], ...] = (
        ("out of order", _REORDERED, lambda link: link.reordered),
        ("twice", _DUPLICATED, lambda link: link.duplicates),
    )
    for word, least, count in kinds:
        bad = [
            direction for direction, link in received.items() if link.sent and count(link) > max(least * link.sent, 2)
        ]
        for culprit in culprits(bad, received):
            shares = [count(received[direction]) / received[direction].sent for direction in culprit.links]
            diagnoses.append(
                Diagnosis(
                    subject="order",
                    level=Level.NOTE,
                    text=f"On {_where(found, culprit)}, {_range(shares, loss_text)} of the datagrams arrive {word}.",
                    remedy="No action needed: the engine accepts datagrams in any order and drops duplicates.",
                    ranks=culprit.ranks,
                )
            )
    return diagnoses


def _long_round_trip(found: Examination, received: Mapping[Direction, DirectedLink]) -> list[Diagnosis]:
    trips = {direction: link.round_trip_s for direction, link in received.items() if link.round_trip_s is not None}
    if len(trips) < 3:
        return []
    usual = median(list(trips.values()))
    bad = [direction for direction, trip in trips.items() if trip > max(_FAR * usual, usual + _FAR_S)]
    return [
        Diagnosis(
            subject="round trip",
            level=Level.NOTE,
            text=f"On {_where(found, culprit)}, a round trip takes "
            f"{_range([trips[direction] for direction in culprit.links], time_text)}, elsewhere {time_text(usual)}.",
            remedy="No action needed; it adds to the latency of small messages.",
            ranks=culprit.ranks,
        )
        for culprit in culprits(bad, trips)
    ]


def _clock_skew(found: Examination) -> list[Diagnosis]:
    skewed = {
        direction: link.clock_ahead_s for direction, link in found.links.items() if link.clock_ahead_s is not None
    }
    bad = [direction for direction, ahead in skewed.items() if abs(ahead) > _SKEW_S]
    diagnoses = []
    for culprit in culprits(bad, skewed):
        source, target = culprit.links[0]
        if culprit.everything:
            most = max(abs(ahead) for ahead in skewed.values())
            text = f"The clocks of all hosts differ, by up to {time_text(most)}: timestamps of logs cannot be compared."
            diagnoses.append(
                Diagnosis(subject="clock", level=Level.NOTE, text=text, remedy="`timedatectl set-ntp true`")
            )
            continue
        other = target if culprit.ranks[0] == source else source
        ahead = skewed[culprit.links[0]] * (-1 if culprit.ranks[0] == source else 1)
        diagnoses.append(
            Diagnosis(
                subject="clock",
                level=Level.NOTE,
                text=f"The clock of {found.name(culprit.ranks[0])} is {signed_time_text(ahead)} ahead of that of "
                f"{found.name(other)}: timestamps of logs cannot be compared.",
                remedy="`timedatectl set-ntp true`",
                ranks=culprit.ranks,
            )
        )
    return diagnoses


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Address without its interface, in normal form."""
    return ipaddress.ip_address(address.partition("%")[0])


def _capital(text: str) -> str:
    # Names of hosts keep their case.
    return text[0].upper() + text[1:] if text.startswith(("all ", "the ", "rank ")) else text
