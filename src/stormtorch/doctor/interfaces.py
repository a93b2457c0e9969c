"""Checks of this machine's network interfaces."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from stormtorch.doctor.finding import Finding, Level
from stormtorch.results.text import loss_text, rate_text

_CLASS = Path("/sys/class/net")
_ROUTES = Path("/proc/net/route")
_MANY_DROPS = 0.001
_FEW_DROPS = 100
_SLOW_BITS = 100e6
_MOST_LISTED = 8


def check_interfaces() -> Iterator[Finding]:
    """A finding for each interface that is up, and one if none leads out."""
    default = default_interface()
    names = [name for name in _names() if name != "lo" and _text(name, "operstate") in ("up", "unknown")]
    # The one that leads out first; a machine with containers may have hundreds.
    names.sort(key=lambda name: (name != default, name))
    for name in names[:_MOST_LISTED]:
        yield _check_interface(name, name == default)
    if len(names) > _MOST_LISTED:
        yield Finding(subject="interfaces", level=Level.OK, text=f"{len(names) - _MOST_LISTED} more are up")
    if default is None:
        yield Finding(
            subject="default route",
            level=Level.NOTE,
            text="there is none: name the interface by STORM_SOCKET_IFNAME or Options(interface=...)",
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


def _check_interface(name: str, default: bool) -> Finding:
    words = ["default"] if default else []
    mtu = _number(name, "mtu")
    words.append(f"MTU {mtu}")
    speed = _number(name, "speed")
    if speed is not None and speed > 0:
        words.append(rate_text(speed * 1e6))
    duplex = _text(name, "duplex")
    if duplex in ("full", "half"):
        words.append(f"{duplex} duplex")
    lost, passed = _drops(name)
    if lost:
        words.append(f"{lost:,} packets dropped or damaged of {passed:,}")
    subject, text = f"interface {name}", ", ".join(words)
    if duplex == "half":
        return Finding(
            subject=subject,
            level=Level.PROBLEM,
            text=f"{text}: sending and receiving collide",
            remedy=f"ethtool -s {name} autoneg on; look at cable and switch port",
        )
    if lost > max(_MANY_DROPS * passed, _FEW_DROPS):
        return Finding(
            subject=subject,
            level=Level.NOTE,
            text=f"{text}, which is {loss_text(lost / max(passed, 1))}",
            remedy=f"ethtool -S {name} | grep -i -E 'drop|err|miss'; a larger ring may help: ethtool -G {name} rx 4096",
        )
    if mtu is not None and mtu < 1280:
        return Finding(subject=subject, level=Level.NOTE, text=f"{text}: the MTU is small", remedy="Is it a tunnel?")
    if default and speed is not None and 0 < speed * 1e6 < _SLOW_BITS:
        return Finding(
            subject=subject,
            level=Level.NOTE,
            text=f"{text}: a slow line",
            remedy=f"ethtool {name}; look at cable and switch port",
        )
    return Finding(subject=subject, level=Level.OK, text=text)


def _drops(name: str) -> tuple[int, int]:
    counters = {
        each: _number(name, f"statistics/{each}") or 0
        for each in ("rx_dropped", "tx_dropped", "rx_errors", "tx_errors", "rx_packets", "tx_packets")
    }
    lost = sum(value for key, value in counters.items() if not key.endswith("packets"))
    return lost, counters["rx_packets"] + counters["tx_packets"]


def _names() -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(each.name for each in _CLASS.iterdir() if each.is_dir())
    return []


def _text(name: str, what: str) -> str:
    with contextlib.suppress(OSError):
        return (_CLASS / name / what).read_text().strip()
    return ""


def _number(name: str, what: str) -> int | None:
    with contextlib.suppress(ValueError):
        return int(_text(name, what))
    return None
