"""Connection migration: when this host's address changes, the sockets rebind to the new one, and the peers follow."""

from __future__ import annotations

import errno
import logging
import socket
import time
from dataclasses import replace
from typing import Any

from stormtorch.udp.addresses import local_address

_log = logging.getLogger("stormtorch")
_EVERY_S = 1.0


class Roaming:
    """Watches the local addresses of a rank's sockets.

    Args:
        hosts: Local address of each path.
        interfaces: Interface that the user named for each path; None is the route to the rendezvous.
    """

    def __init__(self, hosts: list[str], interfaces: list[str | None]) -> None:
        self._hosts = hosts
        self._names = [_interface_of(host) or given for host, given in zip(hosts, interfaces, strict=True)]
        self._look_at = 0.0
        self._without_address: set[int] = set()

    def look(self, transport: Any) -> None:
        """Rebinds each socket whose address this host has lost to its interface's present address."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _EVERY_S
        for path, host in enumerate(self._hosts):
            if _has_address(host):
                self._without_address.discard(path)
            else:
                self._move(transport, path, host)

    def _move(self, transport: Any, path: int, host: str) -> None:
        name = self._names[path]
        where = f"interface {name}" if name else "the interface towards the other ranks"
        try:
            new = local_address(name)
            if new != host and _has_address(new):
                transport.endpoint.rebind(path, new)
                self._hosts[path] = new
                self._without_address.discard(path)
                if path == 0:
                    own = transport.cards[transport.rank]
                    transport.cards[transport.rank] = replace(own, host=new)
                _log.warning(
                    "rank %d: %s now has the address %s instead of %s: the sockets moved there, and the peers follow",
                    *(transport.rank, where, new, host),
                )
                return
        except (OSError, ValueError) as error:
            _log.debug("rank %d: %s has no other address: %s", transport.rank, where, error)
        if path not in self._without_address:
            self._without_address.add(path)
            _log.error(
                "rank %d: this host has lost the address %s, from which it sends, and %s has no other: no peer can "
                "reach this rank. It goes on as soon as the interface has an address again; or restart it elsewhere "
                'with Options(rejoin="auto")',
                *(transport.rank, host, where),
            )


def _has_address(host: str) -> bool:
    """Whether this host has an address."""
    family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    try:
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _interface_of(host: str) -> str | None:
    """Name of the interface whose first address this is, if there is one."""
    for _, name in socket.if_nameindex():
        try:
            if local_address(name) == host:
                return name
        except (OSError, ValueError):  # no address
            continue
    return None
