"""Checks of this machine's network interfaces.

They use ioctl and /proc, which show the network namespace of this process; /sys may show another one.
"""

import array
import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from stormtorch.doctor.diagnosis import Diagnosis, Level
from stormtorch.telemetry.text import loss_text, rate_text

_ROUTES, _COUNTERS = Path("/proc/net/route"), Path("/proc/net/dev")
_GET_FLAGS, _GET_MTU, _ETHTOOL = 0x8913, 0x8921, 0x8946
_UP, _RUNNING = 0x1, 0x40
_GET_SETTINGS = 1  # of ethtool
_SETTINGS_BYTES, _SPEED_AT, _DUPLEX_AT, _SPEED_HIGH_AT = 44, 12, 14, 28
_UNKNOWN_MBITS = (0, 0xFFFF, 0xFFFFFFFF)
_MANY_DROPS = 0.001
_FEW_DROPS = 100
_SLOW_BITS = 100e6
_MOST_LISTED = 8


def check_interfaces() -> Iterator[Diagnosis]:
    """A diagnosis for each interface that is up, and one if there is no default route."""
    default = default_interface()
    names = [name for _, name in socket.if_nameindex() if name != "lo" and _runs(name)]
    # The default interface first: a machine with containers may have hundreds.
    names.sort(key=lambda name: (name != default, name))
    for name in names[:_MOST_LISTED]:
        yield _check_interface(name, name == default)
    if len(names) > _MOST_LISTED:
        yield Diagnosis(subject="interfaces", level=Level.OK, text=f"{len(names) - _MOST_LISTED} more are up")
    if default is None:
        yield Diagnosis(
            subject="default route",
            level=Level.NOTE,
            text="none: name the interface by STORM_SOCKET_IFNAME or Options(interface=...)",
            remedy="export STORM_SOCKET_IFNAME=" + (names[0] if names else "DEVICE"),
        )


def default_interface() -> str | None:
    """Interface of the default route; None if there is none."""
    with contextlib.suppress(OSError):
        for line in _ROUTES.read_text().splitlines()[1:]:
            name, target, *_ = line.split()
            if target == "00000000":
                return name
    return None


def _check_interface(name: str, default: bool) -> Diagnosis:
    words = ["default"] if default else []
    mtu = _mtu(name)
    words.append(f"MTU {mtu}")
    bits, duplex = _negotiated(name)
    if bits:
        words.append(rate_text(bits))
    if duplex:
        words.append(f"{duplex} duplex")
    lost, passed = _drops(name)
    if lost:
        words.append(f"{lost:,} packets dropped or damaged of {passed:,}")
    subject, text = f"interface {name}", ", ".join(words)
    if duplex == "half":
        return Diagnosis(
            subject=subject,
            level=Level.PROBLEM,
            text=f"{text}: sending and receiving collide",
            remedy=f"ethtool -s {name} autoneg on; check the cable and the switch port",
        )
    if lost > max(_MANY_DROPS * passed, _FEW_DROPS):
        return Diagnosis(
            subject=subject,
            level=Level.NOTE,
            text=f"{text}, which is {loss_text(lost / max(passed, 1))}",
            remedy=f"ethtool -S {name} | grep -i -E 'drop|err|miss'; a larger ring may help: ethtool -G {name} rx 4096",
        )
    if 0 < mtu < 1280:
        return Diagnosis(
            subject=subject,
            level=Level.NOTE,
            text=f"{text}: the MTU is small",
            remedy=f"Expected of a tunnel; otherwise: ip link set {name} mtu 1500",
        )
    if default and 0.0 < bits < _SLOW_BITS:
        return Diagnosis(
            subject=subject,
            level=Level.NOTE,
            text=f"{text}: a slow link",
            remedy=f"ethtool {name}; check the cable and the switch port",
        )
    return Diagnosis(subject=subject, level=Level.OK, text=text)


def _drops(name: str) -> tuple[int, int]:
    """Packets dropped or damaged, and packets in all, in both directions."""
    with contextlib.suppress(OSError, ValueError):
        for line in _COUNTERS.read_text().splitlines():
            device, _, numbers = line.partition(":")
            if device.strip() == name:
                values = [int(each) for each in numbers.split()]
                # Eight columns for each direction: bytes, packets, errors, drops and others.
                return sum(values[at] for at in (2, 3, 10, 11)), values[1] + values[9]
    return 0, 0


def _runs(name: str) -> bool:
    (flags,) = struct.unpack_from("=H", _ioctl(name, _GET_FLAGS), 16)
    return bool(flags & _UP and flags & _RUNNING)


def _mtu(name: str) -> int:
    return int(struct.unpack_from("=i", _ioctl(name, _GET_MTU), 16)[0])


def _negotiated(name: str) -> tuple[float, str]:
    """Bits per second, 0 if the driver does not report them, and duplex mode."""
    settings = array.array("B", struct.pack("=I", _GET_SETTINGS).ljust(_SETTINGS_BYTES, b"\0"))
    address, _ = settings.buffer_info()
    request = struct.pack("16sP", name.encode()[:15], address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            fcntl.ioctl(asking, _ETHTOOL, request.ljust(40, b"\0"))
    except OSError:
        return 0.0, ""
    low, high = (struct.unpack_from("=H", settings, at)[0] for at in (_SPEED_AT, _SPEED_HIGH_AT))
    mbits = high << 16 | low
    duplex = {0: "half", 1: "full"}.get(settings[_DUPLEX_AT], "")
    return (0.0, "") if mbits in _UNKNOWN_MBITS else (mbits * 1e6, duplex)


def _ioctl(name: str, what: int) -> bytes:
    """Result of an ioctl on an interface; zeros if it fails."""
    request = struct.pack("16s24x", name.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return fcntl.ioctl(asking, what, request)
    return bytes(len(request))
