"""Addresses of this machine: which one to bind, and towards whom; and addresses as people write them."""

import fcntl
import ipaddress
import os
import socket
import struct

Address = tuple[str, int]
"""Host and port."""
_SIOCGIFADDR = 0x8915


def addresses(text: str) -> list[Address]:
    """Reads addresses such as "host:29500" or "[::1]:29500,other:29500"."""
    found: list[Address] = []
    for each in text.split(","):
        host, _, port = each.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= 0xFFFF:
            raise ValueError(f'an address is "host:port", several are divided by commas, got {text!r}')
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


def line_mbit(host: str) -> int:
    """Speed of the interface that has a numeric address, in Mbit/s; 0 if the kernel does not tell."""
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
        return str(probe.getsockname()[0])


def _ipv6_of(interface: str) -> str | None:
    try:
        with open("/proc/net/if_inet6") as table:
            rows = [line.split() for line in table]
    except OSError:
        return None
    for digits, _, _, scope, _, name in rows:
        if name == interface:
            address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
            return f"{address}%{name}" if scope == "20" else address
    return None
