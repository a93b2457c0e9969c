"""The settings of a transport, valid from birth."""

import re
from dataclasses import dataclass, field
from enum import IntEnum

from stormtorch.transport.keys import check_key

_RATE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg]?)(?:bit(?:/s)?|bps)\s*$", re.IGNORECASE)
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


class RateMode(IntEnum):
    """How a transport chooses its sending rate; the numbers are the engine's."""

    UNLIMITED = 0
    FIXED = 1
    AUTO = 2
    LOW_PRIORITY = 3


def parse_rate(rate: str | float) -> float:
    """Bits per second of a rate such as 400e6, "400mbit" or "1.5gbit"."""
    if isinstance(rate, int | float):
        bits = float(rate)
    else:
        match = _RATE.match(rate)
        if match is None:
            raise ValueError(
                f'rate must be "auto", "low", "unlimited", bits per second or such as "400mbit", got {rate!r}'
            )
        bits = float(match[1]) * _SCALE[match[2].lower()]
    if not 0.0 < bits < 1e15:
        raise ValueError(f"rate must be above 0 bits per second, got {rate!r}")
    return bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The settings of a transport. The defaults are right for most networks."""

    interface: str | None = None
    """Interface name or numeric address to use; None takes the one that leads to the rendezvous."""
    port: int = 0
    """UDP port; 0 lets the kernel choose, which suits all but firewalls."""
    rate: str | float = "auto"
    """"auto" finds the bottleneck; "low" also yields to all other traffic; "400mbit" or bits per second fixes it;
    "unlimited" leaves only the receivers' credit. On loopback, "auto" is unlimited."""
    datagram_bytes: int | None = None
    """UDP payload; None follows the interface's MTU. All ranks use the smallest of theirs."""
    key: bytes | None = field(default=None, repr=False)
    """Job key, the same on every rank: seals every datagram by AES-GCM, at the cost of a slower pass over all bytes at
    each end. None checks by CRC32C, which keeps out accidents and nobody who reaches the store. `stormtorch keygen`
    makes one."""
    check: bool = False
    """Check data by CRC32C also where all ranks are on loopback, where the kernel does not check either. Elsewhere it
    always is."""
    receive_buffer_bytes: int = 8 << 20
    """Asked of the kernel for the socket; its limit is net.core.rmem_max. Divided among the peers as their credit."""
    pool_bytes: int = 64 << 20
    """Bound of the memory for chunks of exchanges not posted yet, over all peers."""
    eager_bytes: int = 256 << 10
    """How much of a message may leave before its receiver says that it has posted the exchange."""
    silence_s: float = 10.0
    """A peer not heard of for so long, while needed, is lost: 100 % loss if lossy, an error if exact."""
    timeout_s: float = 1800.0
    """An exchange that has not ended by then raises an error. Where torch.distributed has a time-out too, of the group,
    of a call or of `wait`, the shorter one holds."""
    linger_s: float = 2.0
    """How long closing waits for the peers to hear of it."""
    segmentation: bool = True
    """Use UDP_SEGMENT where the kernel has it."""
    coalescing: bool = True
    """Use UDP_GRO where the kernel has it."""
    rejoin: bool = False
    """This process takes the place of a rank that died, in a job that goes on without it. `prepare` has the others let
    it in; without that they must readmit it (`stormtorch.transport.rendezvous.returned`, `UdpTransport.readmit`)."""

    def __post_init__(self) -> None:
        if self.rate not in ("auto", "low", "unlimited"):
            parse_rate(self.rate)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must lie in [0, 65535], got {self.port}")
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
        if not self.linger_s >= 0.0:
            raise ValueError(f"linger_s must not be negative, got {self.linger_s}")

    def rate_mode(self, *, loopback: bool) -> tuple[RateMode, float]:
        """The engine's mode and, where it is fixed, bytes per second."""
        if self.rate == "unlimited" or (self.rate == "auto" and loopback):
            # Loopback has no queue between sender and receiver but the socket's, which credit covers.
            return RateMode.UNLIMITED, 0.0
        if self.rate == "auto":
            return RateMode.AUTO, 0.0
        if self.rate == "low":
            return RateMode.LOW_PRIORITY, 0.0
        return RateMode.FIXED, parse_rate(self.rate) / 8.0
