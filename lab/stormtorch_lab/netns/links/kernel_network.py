"""The lab's network in the kernel: a bridge, a veth pair to each host, tbf or htb for rates, nft for loss.

Functions make command lines for ip, tc and nft; `KernelNetwork` runs them. Packets are lost on the bridge, between the
uplink of one host and the downlink of another, by counting them through a trace drawn in advance: nft's own random
numbers have neither a seed nor bursts.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stormtorch.network.loss import Bernoulli, GilbertElliott, LinkModel, Trace
from stormtorch_lab.netns.access import LabError, has_netem, tool
from stormtorch_lab.netns.conditions import AccessLink, Conditions
from stormtorch_lab.netns.measured import AccessLinkCount, LinkCount
from stormtorch_lab.netns.namespaces import Holder

DEVICE = "eth0"
"""Interface of every host to the network under test."""
MANAGEMENT_DEVICE = "mgmt0"
"""Interface of every host to the management network, if there is one: without loss or limits."""
# Number of packets after which the losses of a link repeat.
_PERIOD = 1 << 16
# Number of bursty traces to draw; the one with the loss nearest to the requested loss is used.
_DRAWS = 8
_TABLE = "stormtorch"
# Most text in a transaction of nft, which sends six times as much to the kernel; and most numbers added to a set at
# once, each of which is sent as 20 bytes.
_TRANSACTION_BYTES, _NUMBERS = 50_000, 12_000
LOW_DSCP = (1, 8)
"""Differentiated services that mean low priority: lower effort (RFC 8622), and its predecessor CS1."""
# Handle of the low-priority queue.
_LOW = "20:"
_ROUTER_RULES = "/proc/sys/net/bridge/bridge-nf-call-iptables"
NO_BUNDLES = ("gso", "off", "tso", "off", "gro", "off", "tx-udp-segmentation", "off")
"""Settings for ethtool that switch segmentation offload off, so that packets are not bundled."""


def address(host: int, path: int = 0) -> str:
    """Address of a host in the network under test; the range is reserved for benchmarks (RFC 2544)."""
    return f"198.18.{path}.{host + 1}"


@dataclass(frozen=True, slots=True)
class Wiring:
    """Names of one path of the network under test: each path is a bridge, with an interface of every host."""

    path: int = 0
    turned: bool = False
    """Whether the rules are in the second of two tables, which alternate."""

    @property
    def bridge(self) -> str:
        """Bridge in the switch."""
        return "br0" if self.path == 0 else f"path{self.path}"

    @property
    def device(self) -> str:
        """Interface of every host."""
        return DEVICE if self.path == 0 else f"eth{self.path}"

    @property
    def port(self) -> str:
        """Prefix of the bridge's ports."""
        return "p" if self.path == 0 else f"p{self.path}."

    @property
    def table(self) -> str:
        """Table of nft."""
        return f"{_TABLE}{self.path}{'b' if self.turned else ''}"

    def address(self, host: int) -> str:
        """Address of a host."""
        return address(host, self.path)


def management_address(host: int) -> str:
    """Address of a host in the management network."""
    return f"198.19.0.{host + 1}"


class Network(Protocol):
    """A network between the hosts."""

    kind: str
    """Kind of the network, for messages and results."""

    def apply(self, conditions: Conditions) -> None:
        """Gives the network these conditions from now on."""
        ...

    def links(self) -> list[LinkCount]:
        """Packets of every link since the network was made."""
        ...

    def lines(self) -> list[AccessLinkCount]:
        """Packets of every line between a host and the switch since the network was made."""
        ...

    def close(self) -> None:
        """Ends what does not end with the namespaces."""
        ...


class KernelNetwork:
    """A bridge in its own namespace, which acts as the switch."""

    def __init__(
        self, switch: Holder, hosts: Sequence[Holder], conditions: Conditions, wiring: Wiring | None = None
    ) -> None:
        self._wiring = wiring or Wiring()
        self.kind = "bridge, tbf, netem, nft" if conditions.delayed else "bridge, tbf, nft"
        if conditions.low_share is not None:
            self.kind = "bridge, htb, nft"
        self._switch = switch
        self._hosts = hosts
        self._conditions: Conditions | None = None
        # The kernel's counters restart with every change; this keeps the sums of their earlier values.
        self._seen: dict[tuple[int, int], int] = {}
        self._lost: dict[tuple[int, int], int] = {}
        self._passed: dict[tuple[int, str], AccessLinkCount] = {}
        names = self._wiring
        make_bridge(switch, hosts, names.bridge, names.device, names.address, names.port)
        self.apply(conditions)

    def apply(self, conditions: Conditions) -> None:
        """Gives the network these conditions from now on."""
        before, names = self._conditions, self._wiring
        if conditions.delayed and not has_netem():
            raise RuntimeError("this kernel cannot delay packets: use the relay")
        if conditions.timed:
            raise RuntimeError("nft counts packets and no time: use the relay")
        for index, holder in enumerate(self._hosts):
            line = conditions.line(index)
            delay = (conditions.delay_s, conditions.jitter_s)
            low = None if conditions.low_share is None else (conditions.low_share, conditions.low_queue_bytes)
            if before is not None:
                old = None if before.low_share is None else (before.low_share, before.low_queue_bytes)
                same = (before.delay_s, before.jitter_s) == delay and old == low
                if replace(before.line(index), mtu=line.mtu) == line and same:
                    continue
                self._keep_counts(index, before.line(index), line, recreated=(old, low) != (None, None))
            holder.run([tool("tc"), "-batch", "-"], "\n".join(shape(names.device, line.up_bits, line, low=low)))
            self._switch.run(
                [tool("tc"), "-batch", "-"],
                "\n".join(shape(f"{names.port}{index}", line.down_bits, line, delay, low)),
            )
        if before is not None and (before.loss, before.seed) == (conditions.loss, conditions.seed):
            # Only cuts and MTUs changed: the links keep their counters and their positions in the loss traces.
            self._switch.run([tool("nft"), "-f", "-"], barriers(conditions, len(self._hosts), names))
            self._conditions = conditions
            return
        self._count()
        new = replace(names, turned=not names.turned)
        for transaction in ruleset(conditions, len(self._hosts), new, former="" if before is None else names.table):
            self._switch.run([tool("nft"), "-f", "-"], transaction)
        self._conditions, self._wiring = conditions, new

    def links(self) -> list[LinkCount]:
        """Packets of every link since the network was made."""
        self._count(reset=True)
        return [
            LinkCount(source=source, target=target, seen=seen, lost=self._lost[source, target])
            for (source, target), seen in sorted(self._seen.items())
        ]

    def lines(self) -> list[AccessLinkCount]:
        """Packets of every line between a host and the switch since the network was made."""
        down = self._switch.run([tool("tc"), "-s", "-j", "qdisc", "show"])
        counts = []
        for index, holder in enumerate(self._hosts):
            if not holder.alive:
                continue  # the counters of a killed host are gone
            up = holder.run([tool("tc"), "-s", "-j", "qdisc", "show"])
            counts.append(_access_link_count(index, "up", up, self._wiring.device))
            counts.append(_access_link_count(index, "down", down, f"{self._wiring.port}{index}"))
        return [_sum(count, self._passed.get((count.host, count.direction))) for count in counts]

    def _keep_counts(self, host: int, before: AccessLink, after: AccessLink, *, recreated: bool) -> None:
        """Saves the counters of a queue that is about to change its kind, which resets them; a new rate does not.

        Args:
            host: Number of the host.
            before: Its present access link.
            after: Its new access link.
            recreated: Whether the queues are recreated in any case.
        """
        changed = {"up": (before.up_bits, after.up_bits), "down": (before.down_bits, after.down_bits)}
        for count in self.lines():
            old, new = changed[count.direction]
            if count.host == host and (recreated or (old is None) != (new is None)):
                self._passed[count.host, count.direction] = count

    def close(self) -> None:
        """Does nothing: the kernel's network ends with the namespaces."""

    def _count(self, *, reset: bool = False) -> None:
        if self._conditions is None:
            return
        verb = "reset" if reset else "list"
        listed = json.loads(
            self._switch.run([tool("nft"), "-j", verb, "counters", "table", "bridge", self._wiring.table])
        )
        for item in listed["nftables"]:
            if "counter" not in item:
                continue
            kind, source, target = item["counter"]["name"].split("_")
            if kind in ("seen", "lost"):
                total = self._seen if kind == "seen" else self._lost
                link = int(source), int(target)
                total[link] = total.get(link, 0) + item["counter"]["packets"]


def make_bridge(
    switch: Holder, hosts: Sequence[Holder], bridge: str, device: str, address_of: Callable[[int], str], port: str = "p"
) -> None:
    """Makes a bridge in the switch, and a veth pair to each host."""
    # With br_netfilter, every packet would also pass the rules for routers; there are none.
    switch.run(["sh", "-c", f"[ ! -e {_ROUTER_RULES} ] || echo 0 > {_ROUTER_RULES}"])
    lines = [f"link add {bridge} type bridge stp_state 0 mcast_snooping 0", f"link set {bridge} up"]
    for index, holder in enumerate(hosts):
        lines += [
            f"link add {port}{index} type veth peer name {device} netns {holder.pid}",
            f"link set {port}{index} master {bridge} up",
        ]
    switch.run([tool("ip"), "-batch", "-"], "\n".join(lines))
    for index, holder in enumerate(hosts):
        holder.run([tool("ip"), "-batch", "-"], "\n".join(set_up(device, address_of(index))))
        # Send packets of the size on a real wire, not bundles of forty, so that each can be lost alone. (gso_max_segs 1
        # would do this, too, but TCP would then send one segment at a time, and BBR would lose most of its rate.)
        for end, name in ((holder, device), (switch, f"{port}{index}")):
            end.run([tool("ethtool"), "-K", name, *NO_BUNDLES])
        # Packets may be bundled after arrival, as any network card does: by then, losses have happened.
        holder.run([tool("ethtool"), "-K", device, "gro", "on"])


def set_up(device: str, own: str) -> list[str]:
    """Commands for ip -batch that make a new device of a host usable."""
    return [
        "link set lo up",
        f"link set {device} addrgenmode none up",
        f"address add {own}/24 dev {device}",
    ]


def shape(
    device: str,
    bits: float | None,
    line: AccessLink,
    delay: tuple[float, float] = (0.0, 0.0),
    low: tuple[float, int] | None = None,
) -> list[str]:
    """Commands for tc -batch that give a device its rate, queue and delay.

    Args:
        device: The device.
        bits: Its rate in bits per second; None is unlimited.
        line: The access link that it is an end of.
        delay: Delay and jitter in seconds.
        low: Share and bytes of the queue of low priority; None treats all packets alike.
    """
    assert line.queue_bytes is not None
    if low is not None:
        assert bits is not None
        return _classes(device, bits, line.queue_bytes, *low)
    commands = []
    parent = "root handle 1:"
    if delay[0]:
        # Delayed packets wait in netem, which must never drop any.
        commands.append(
            f"qdisc replace dev {device} root handle 9: netem delay {delay[0] * 1e6:.0f}us {delay[1] * 1e6:.0f}us "
            "limit 1000000"
        )
        parent = "parent 9: handle 1:"
    if bits is not None:
        # A burst of one millisecond, so that timers which fire late on a busy machine do not lower the rate.
        burst_bytes = max(bits / 8 * 1e-3, 4 * 1514)
        commands.append(
            f"qdisc replace dev {device} {parent} tbf rate {bits:.0f}bit burst {burst_bytes:.0f} "
            f"limit {line.queue_bytes}"
        )
    elif not delay[0]:
        # Another handle: a queue cannot be replaced by one of another kind under the same handle.
        commands.append(f"qdisc replace dev {device} root handle 2: bfifo limit {line.queue_bytes}")
    return commands


def _classes(device: str, bits: float, queue_bytes: int, low_share: float, low_queue_bytes: int) -> list[str]:
    """Commands for tc -batch that give a device two traffic classes, normal and low priority."""
    burst_bytes = max(bits / 8 * 1e-3, 4 * 1514)
    # htb needs a rate above 0 for every class; a class of the lowest priority gets a hundredth.
    low_bits = max(low_share, 0.01) * bits
    common = f"ceil {bits:.0f}bit burst {burst_bytes:.0f} cburst {burst_bytes:.0f} quantum 1514"
    one = f"class replace dev {device} parent"
    both = f"filter replace dev {device} parent 3: protocol ip"
    return [
        # An existing htb cannot be changed, so another queue replaces it for a moment.
        f"qdisc replace dev {device} root handle 2: bfifo limit {queue_bytes}",
        f"qdisc replace dev {device} root handle 3: htb default 10",
        f"{one} 3: classid 3:1 htb rate {bits:.0f}bit {common}",
        f"{one} 3:1 classid 3:10 htb rate {bits - low_bits:.0f}bit {common} prio 0",
        f"{one} 3:1 classid 3:20 htb rate {low_bits:.0f}bit {common} prio 1",
        f"qdisc replace dev {device} parent 3:10 handle 10: bfifo limit {queue_bytes}",
        f"qdisc replace dev {device} parent 3:20 handle {_LOW} bfifo limit {low_queue_bytes}",
        *(
            f"{both} prio {place} u32 match ip dsfield {dscp << 2:#x} 0xfc flowid 3:20"
            for place, dscp in enumerate(LOW_DSCP, 1)
        ),
    ]


def ruleset(conditions: Conditions, hosts: int, names: Wiring | None = None, former: str = "") -> list[str]:
    """Transactions of nft that make the rules in a new table; the last one replaces the former table.

    There are several, as the kernel accepts only about 400 kB from an unprivileged user at a time.
    """
    names = names or Wiring()
    address, table = names.address, f"bridge {names.table}"
    links = [(source, target) for source in range(hosts) for target in range(hosts) if source != target]
    sets: dict[LinkModel, str] = {}
    rules: list[str] = []
    for source, target in links:
        model = conditions.model(source, target)
        chain = f"{table} link_{source}_{target}"
        rules += [f"add chain {chain}", f"add rule {chain} counter name seen_{source}_{target}"]
        if not _harmless(model):
            name = sets.setdefault(model, f"lost{len(sets)}")
            length = len(model.bits) if isinstance(model, Trace) else _PERIOD
            start = random.Random(f"{conditions.seed} {source} {target}").randrange(length)
            rules.append(f"add rule {chain} meta mark set numgen inc mod {length} offset {start}")
            rules.append(f"add rule {chain} meta mark @{name} counter name lost_{source}_{target} drop")
    made = [f"add table {table}", f"delete table {table}", f"add table {table}", f"add chain {table} barriers"]
    made += [f"add counter {table} {kind}_{a}_{b}" for a, b in links for kind in ("seen", "lost")]
    for model, name in sets.items():
        # The trace stands twice in a row: each link starts elsewhere in it, and nft cannot wrap an offset around.
        positions = _positions(_bits(model, conditions.seed) * 2)
        # With a given size, the kernel uses a plain hash table instead of a growing one, which is faster.
        made.append(f"add set {table} {name} {{ type mark; size {len(positions)}; }}")
        made += _elements(f"{table} {name}", list(map(str, positions)), _NUMBERS)
    made += rules
    made.append(f"add map {table} links {{ type ipv4_addr . ipv4_addr : verdict; }}")
    made += _elements(f"{table} links", [f"{address(a)} . {address(b)} : jump link_{a}_{b}" for a, b in links], 1000)
    switched = [
        f"add chain {table} forward {{ type filter hook forward priority 0; policy accept; }}",
        f"add rule {table} forward jump barriers",
        f"add rule {table} forward ip saddr . ip daddr vmap @links",
        *([f"delete table bridge {former}"] if former else []),
    ]
    return [*_transactions(made), "\n".join([barriers(conditions, hosts, names), *switched, ""])]


def _elements(name: str, elements: Sequence[str], most: int) -> list[str]:
    portions = (elements[first : first + most] for first in range(0, len(elements), most))
    return [f"add element {name} {{ {', '.join(each)} }}" for each in portions]


def _transactions(commands: Sequence[str]) -> Iterator[str]:
    """Groups commands into transactions that the kernel accepts."""
    some: list[str] = []
    size = 0
    for each in commands:
        if some and size + len(each) > _TRANSACTION_BYTES:
            yield "\n".join([*some, ""])
            some, size = [], 0
        some.append(each)
        size += len(each)
    yield "\n".join([*some, ""])


def barriers(conditions: Conditions, hosts: int, names: Wiring | None = None) -> str:
    """Rules of nft for cut hosts and links and for the MTU, in one transaction that replaces the former rules."""
    names = names or Wiring()
    address = names.address
    rules = [f"ip {side} {address(host)} drop" for host in sorted(conditions.cut) for side in ("saddr", "daddr")]
    if conditions.cut_links:
        pairs = ", ".join(f"{address(source)} . {address(target)}" for source, target in sorted(conditions.cut_links))
        rules.append(f"ip saddr . ip daddr {{ {pairs} }} drop")
    for host in range(hosts):
        if (mtu := conditions.line(host).mtu) is not None:
            rules += [f"ip {side} {address(host)} ip length > {mtu} drop" for side in ("saddr", "daddr")]
    chain = f"bridge {names.table} barriers"
    return "\n".join([f"flush chain {chain}", *(f"add rule {chain} {rule}" for rule in rules), ""])


def _harmless(model: LinkModel) -> bool:
    return not any(_bits(model, 0)) if isinstance(model, Trace) else model.p * _PERIOD < 0.5


def _positions(bits: bytes) -> list[int]:
    return [at for at, bit in enumerate(bits) if bit]


def _bits(model: LinkModel, seed: int) -> bytes:
    """Trace drawn from the model: 1 is lost."""
    if isinstance(model, Trace):
        return model.bits
    dice = random.Random(f"{seed} {model}")
    if isinstance(model, Bernoulli):
        lost = set(dice.sample(range(_PERIOD), round(model.p * _PERIOD)))
        return bytes(at in lost for at in range(_PERIOD))
    assert isinstance(model, GilbertElliott)  # `apply` refuses bursts by time
    draws = [_chain(model, dice) for _ in range(_DRAWS)]
    return min(draws, key=lambda bits: abs(sum(bits) - model.p * _PERIOD))


def _chain(model: GilbertElliott, dice: random.Random) -> bytes:
    leave = 1 / model.burst
    enter = model.p / ((1 - model.p) * model.burst)
    bits = bytearray()
    lost = dice.random() < model.p
    for _ in range(_PERIOD):
        bits.append(lost)
        lost = dice.random() >= leave if lost else dice.random() < enter
    return bytes(bits)


def _access_link_count(host: int, direction: str, text: str, device: str) -> AccessLinkCount:
    # Count at tbf, not at netem: only the queue of tbf can overflow.
    rows = {row.get("handle"): row for row in json.loads(text) if row.get("dev") == device}
    whole = next((rows[handle] for handle in ("1:", "2:", "3:") if handle in rows), None)
    if whole is None:
        raise LabError(f"tc does not list the queue of {device}")  # zero would look like a measurement
    count = AccessLinkCount(host=host, direction=direction, packets=whole["packets"], overflowed=whole["drops"])
    if (low := rows.get(_LOW)) is None:
        return count
    return count._replace(low_packets=low["packets"], low_overflowed=low["drops"])


def _sum(count: AccessLinkCount, before: AccessLinkCount | None) -> AccessLinkCount:
    if before is None:
        return count
    return count._replace(
        packets=count.packets + before.packets,
        overflowed=count.overflowed + before.overflowed,
        low_packets=_both(count.low_packets, before.low_packets),
        low_overflowed=_both(count.low_overflowed, before.low_overflowed),
    )


def _both(now: int | None, before: int | None) -> int | None:
    return before if now is None else now + (before or 0)


def _block(head: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{head} {{", *lines, "}"])
