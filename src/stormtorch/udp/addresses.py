"""Network addresses: which local one to bind, how to parse "host:port", and the check for mixed IPv4 and IPv6."""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping

Address = tuple[str, int]
"""Host and port."""
_SIOCGIFADDR = 0x8915
_TABLE = "/proc/net/if_inet6"
# Its columns: scope (link-local), and flags (deprecated, tentative, duplicate address).
_LINK, _DOUBTFUL = "20", 0x20 | 0x40 | 0x08


def addresses(text: str) -> list[Address]:
    """Reads addresses such as "host:29500" or "[::1]:29500,other:29500"."""
    found: list[Address] = []
    for each in text.split(","):
        host, _, port = each.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= 0xFFFF:
            raise ValueError(f'addresses must be "host:port", separated by commas, got {text!r}')
        found.append((host.removeprefix("[").removesuffix("]"), int(port)))
    return found


def local_address(interface: str | None) -> str:
    """Numeric address to bind: that of the named interface, or of the route to the rendezvous (MASTER_ADDR)."""
    if interface is None:
        return _address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    try:
        ipaddress.ip_address(interface.partition("%")[0])
    except ValueError:
        pass
    else:
        return interface
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        pass
    six = _ipv6_of(interface)
    if six is not None:
        return six
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise ValueError(f"interface {interface!r} does not exist or has no address; this machine has {names}")


def interface_mbit(host: str) -> int:
    """Speed in Mbit/s of the interface with this numeric address; 0 if the kernel does not report one."""
    for _, name in socket.if_nameindex():
        try:
            if local_address(name) == host:
                with open(f"/sys/class/net/{name}/speed") as speed:
                    return max(int(speed.read()), 0)
        except (OSError, ValueError):  # no address, or an interface without a speed, such as loopback
            continue
    return 0


def _address_towards(master: str) -> str:
    family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the kernel only looks up the route
        host, *_, scope = probe.getsockname()
        # Python omits the interface, but no socket can use a link-local address without it.
        return f"{host}%{socket.if_indextoname(scope)}" if family == socket.AF_INET6 and scope else str(host)


def _ipv6_of(interface: str) -> str | None:
    try:
        with open(_TABLE) as table:
            rows = [line.split() for line in table]
    except OSError:
        return None
    # The kernel lists them in no order. Tentative and deprecated addresses sort last.
    found = [
        (scope == _LINK, int(flags, 16) & _DOUBTFUL, digits)
        for digits, _, _, scope, flags, name in rows
        if name == interface
    ]
    if not found:
        return None
    link_local, _, digits = min(found)
    address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return f"{address}%{interface}" if link_local else address


def from_here(host: str, own: str) -> str:
    """A peer's numeric address, as a process at `own` must use it.

    A link-local address names an interface, which may have another name on this machine than on the peer's.
    """
    (name, _, theirs), (_, _, ours) = host.partition("%"), own.partition("%")
    return f"{name}%{ours}" if theirs and ours else host


def check_families(hosts: Mapping[int, str]) -> None:
    """Raises ValueError if some ranks have IPv4 addresses and others IPv6."""
    six = [rank for rank, host in sorted(hosts.items()) if ":" in host]
    if not 0 < len(six) < len(hosts):
        return
    four = [rank for rank in sorted(hosts) if rank not in six]
    examples = [f"rank {ranks[0]} is at {hosts[ranks[0]]}" for ranks in (four, six)]
    raise ValueError(
        f"{' and '.join(examples)}: IPv4 and IPv6 cannot reach each other. Give all ranks addresses "
        "of one family, by `interface` in Options or STORM_SOCKET_IFNAME; an interface that has both is used by IPv4"
    )
