"""Options of a transport: network interfaces, rate, key, timeouts, shared memory, membership. Checked when made."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from stormtorch.exchange.keys import check_key
from stormtorch.network.units import parse_rate

MOST_LANES = 8
"""Most lanes of a rank."""
MOST_PATHS = 4
"""Most interfaces that a rank uses together (multipath)."""


class RateMode(IntEnum):
    """Ways to choose the sending rate; the numbers are the engine's."""

    UNLIMITED = 0
    FIXED = 1
    AUTO = 2
    LOW_PRIORITY = 3
    LOW_LATENCY = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Settings of a transport. The defaults suit most networks."""

    interface: str | None = None
    """Name or numeric address of the interface; None takes the one with the route to the rendezvous."""
    interfaces: tuple[str, ...] = ()
    """Names or numeric addresses of several interfaces, at most 4, to use together (multipath) instead of `interface`.
    Data is divided by what each path carries, and a path that fails costs a moment. The first interface of a rank is
    paired with the first of another, and so on; ranks with fewer use the first ones. The ranks then have one lane."""
    port: int = 0
    """UDP port; 0 lets the kernel choose. Set it if a firewall admits only certain ports."""
    nat: bool | None = None
    """Whether there is NAT between ranks. The ranks then run NAT traversal when the job begins, and send keepalives to
    keep the routers' ports open. None decides by the ranks' addresses: True if some are private and not all are in one
    network. True on one rank decides for all."""
    rate: str | float = "auto"
    """Sending rate. "auto" runs congestion control; "low" is short for "auto" with `priority="low"` and
    `yield_to="queues"`; a rate such as "400mbit", or a number of bits per second, is fixed, for each of the
    `interfaces`; "unlimited" is bounded by the receivers' credit alone. On loopback, "auto" is unlimited."""
    priority: Literal["normal", "low", "both"] = "normal"
    """Priority of this rank's traffic against other traffic. "low" marks all datagrams with the DSCP of lower effort,
    so that networks which support it serve them last, and yields by itself as `yield_to` says. "both" is normal, and
    opens one more socket for groups and policies that ask for low priority; all ranks of a job must then set it."""
    yield_to: Literal["queues", "latency", "classes"] = "latency"
    """How low-priority traffic yields. "latency" slows down while other traffic makes packets queue for longer than
    `yield_delay_s` and than this job alone would; it fills an idle link. "queues" slows down as soon as any queue
    builds up: other traffic hardly notices it, but on an idle link it uses only about two thirds of the capacity.
    "classes" finds its rate like normal traffic and leaves the rest to the network: for switches with a low-priority
    class. A fixed `rate` never yields."""
    yield_delay_s: float = 0.001
    """Longest queueing delay before `yield_to="latency"` slows down."""
    datagram_bytes: int | None = None
    """UDP payload of a datagram; None follows the interface's MTU. All ranks use the smallest of their values."""
    key: bytes | None = field(default=None, repr=False)
    """Job key, the same on every rank. It encrypts and authenticates every datagram by AES-GCM, at the cost of a slower
    pass over all bytes at each end. Without a key, CRC32C detects corruption, but not forgery by anyone who can reach
    the store. `stormtorch keygen` makes a key."""
    check: bool = False
    """Check data by CRC32C even if all ranks are on loopback, where the kernel does not check either. Elsewhere data
    are always checked."""
    receive_buffer_bytes: int = 8 << 20
    """Receive buffer to request for the socket, up to net.core.rmem_max. The peers share it as their credit."""
    pool_bytes: int = 64 << 20
    """Most memory for unexpected messages: chunks of exchanges that this rank has not posted yet, over all peers. Peers
    on this machine may use 16 times their part."""
    eager_bytes: int = 256 << 10
    """Eager limit: bytes of a message that may be sent before the receiver reports that it has posted the exchange."""
    silence_s: float = 10.0
    """Time without any datagram after which a needed peer counts as lost. A lossy exchange then counts its data as
    lost; an exact one raises an error. About a second is enough if the kernel of the peer's machine reports that no
    process listens at its port, as after a crash."""
    timeout_s: float = 1800.0
    """Time after which an unfinished exchange raises an error. If torch.distributed has a timeout too (of the group,
    of a call or of `wait`), the shorter one applies."""
    linger_s: float = 2.0
    """Longest time for which closing waits until the peers have acknowledged the goodbye."""
    shared_memory: bool = True
    """Pass data between ranks of one machine through shared memory. It is not used if `rate` or `datagram_bytes` is a
    number, because both describe a network, nor while faults are injected."""
    lanes: int | None = None
    """Sockets, with a thread each, among which large messages are divided, so that several cores copy and sum at once.
    None chooses by the cores of each rank and, between machines, by the interface's speed: one lane up to 10 Gbit/s.
    All ranks use the smallest of their values. With `port`, None is one lane; several use that port and those after
    it. A fixed `rate` has one lane."""
    segmentation: bool = True
    """Use UDP_SEGMENT if the kernel has it."""
    coalescing: bool = True
    """Use UDP_GRO if the kernel has it."""
    rejoin: bool | Literal["auto"] = False
    """Take over a rank whose process died, in a job that goes on without it: the ranks agree on a view that includes
    this process. "auto" does so if the job already runs, and otherwise starts it together with the other ranks, so that
    one command serves the first start and every restart; all ranks must then set it."""
    spare_ranks: int = 16
    """Slots for late joins, beyond the ranks of the start. All ranks use the smallest of their values, and a job has at
    most 256 slots. A free slot costs a few kilobytes."""
    leave_s: float = 30.0
    """Time from SIGTERM to the end of the process, in which it transfers its shards of prepared models."""

    def __post_init__(self) -> None:
        if self.rate not in ("auto", "low", "unlimited"):
            try:
                parse_rate(self.rate)
            except ValueError as error:
                raise ValueError(f'{error}; or "auto", "low" or "unlimited"') from error
        self._check_interfaces()
        self._check_priority()
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must lie in [0, 65535], got {self.port}")
        if self.lanes is not None and not 1 <= self.lanes <= MOST_LANES:
            raise ValueError(f"lanes must lie in [1, {MOST_LANES}], got {self.lanes}")
        ports = (self.lanes or 1) + self.has_low_lane
        if self.port and self.port + ports - 1 > 65535:
            raise ValueError(f"port must leave {ports} ports below 65536, one per lane, got {self.port}")
        if self.datagram_bytes is not None and not 256 <= self.datagram_bytes <= 65507:
            raise ValueError(f"datagram_bytes must lie in [256, 65507], got {self.datagram_bytes}")
        if self.key is not None:
            check_key(self.key)
        for name in ("receive_buffer_bytes", "pool_bytes", "eager_bytes"):
            if getattr(self, name) < 4096:
                raise ValueError(f"{name} must be at least 4096, got {getattr(self, name)}")
        for name in ("silence_s", "timeout_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("linger_s", "spare_ranks", "leave_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.nat not in (True, False, None):
            raise ValueError(f"nat must be True, False or None, got {self.nat!r}")
        if self.rejoin not in (True, False, "auto"):
            raise ValueError(f'rejoin must be True, False or "auto", got {self.rejoin!r}')

    def _check_priority(self) -> None:
        if self.priority not in ("normal", "low", "both"):
            raise ValueError(f'priority must be "normal", "low" or "both", got {self.priority!r}')
        if self.yield_to not in ("queues", "latency", "classes"):
            raise ValueError(f'yield_to must be "queues", "latency" or "classes", got {self.yield_to!r}')
        if not 0.0 < self.yield_delay_s < 10.0:
            raise ValueError(f"yield_delay_s must lie between 0 and 10, got {self.yield_delay_s}")
        if self.priority == "both" and self.rate == "low":
            raise ValueError('priority must be "normal" or "low" with rate="low", got "both"')
        if self.priority == "both" and len(self.interfaces) > 1:
            raise ValueError('priority must be "normal" or "low" with several interfaces, got "both"')

    def _check_interfaces(self) -> None:
        names: object = self.interfaces  # callers without type checks give a text, or a list
        if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f'interfaces must be a tuple of names such as ("eth0", "wlan0"), got {names!r}')
        if names and self.interface is not None:
            raise ValueError(
                f"interfaces must not be given together with interface, got {names!r} and {self.interface!r}"
            )
        if len(names) > MOST_PATHS or len(set(names)) < len(names):
            raise ValueError(f"interfaces must name at most {MOST_PATHS} different ones, got {names!r}")
        if len(names) > 1 and (self.lanes or 1) > 1:
            raise ValueError(f"lanes must be 1 or None with several interfaces, got {self.lanes}")

    @property
    def is_low(self) -> bool:
        """Whether all of this rank's traffic has low priority."""
        return self.priority == "low" or self.rate == "low"

    @property
    def has_low_lane(self) -> bool:
        """Whether this rank has a separate socket for low-priority traffic."""
        return self.priority == "both"

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of one machine may pass data through shared memory."""
        return self.shared_memory and self.datagram_bytes is None and self.rate in ("auto", "low", "unlimited")

    @property
    def lanes_possible(self) -> bool:
        """Whether there may be several lanes: a fixed rate or several interfaces allow only one."""
        return self.rate in ("auto", "low", "unlimited") and len(self.interfaces) < 2

    def rate_mode(self, *, loopback: bool) -> tuple[RateMode, float]:
        """Rate mode of the engine and, if the rate is fixed, bytes per second."""
        marks_only = not self.is_low or self.yield_to == "classes"
        if self.rate == "unlimited" or (self.rate == "auto" and loopback and marks_only):
            # On loopback, the only queue between sender and receiver is the socket's, and credit bounds that.
            return RateMode.UNLIMITED, 0.0
        if self.rate == "low":
            return RateMode.LOW_PRIORITY, 0.0
        if self.rate == "auto":
            return self.low_rate_mode(loopback=loopback) if self.is_low else RateMode.AUTO, 0.0
        return RateMode.FIXED, parse_rate(self.rate) / 8.0

    def low_rate_mode(self, *, loopback: bool) -> RateMode:
        """Rate mode of the engine for low-priority traffic."""
        if self.yield_to == "classes":
            return RateMode.UNLIMITED if loopback else RateMode.AUTO
        return RateMode.LOW_PRIORITY if self.yield_to == "queues" else RateMode.LOW_LATENCY
