"""NAT routers, each between one host and the network, as in a home.

The host has a private address; others see that of its router, under a port that the router chooses. A router
accepts only replies: packets from an address and a port to which its host has sent.
"""

import sys

from stormtorch_lab.netns.access import tool
from stormtorch_lab.netns.conditions import SYMMETRIC
from stormtorch_lab.netns.links.kernel_network import DEVICE, NO_BUNDLES, set_up
from stormtorch_lab.netns.namespaces import Holder

_INSIDE = "lan0"
# Ports for datagrams, outside the range from which hosts choose; each rebinding takes the next ones.
_FIRST_PORT, _PORTS, _RANGES = 20_000, 4_000, 3
# Deletes all entries of the connection tracker, as `conntrack -F` does: IPCTNL_MSG_CT_DELETE without attributes.
_FORGET = """
import socket, struct
line = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
line.send(struct.pack("=IHHIIBBH", 20, 1 << 8 | 2, 1 | 4, 1, 0, 2, 0, 0))
error = struct.unpack_from("=i", line.recv(4096), 16)[0]
raise SystemExit(error and f"cannot forget connections: error {-error}")
"""


def private_address(host: int) -> str:
    """Address of a host behind its router (RFC 1918)."""
    return f"10.{host + 1}.0.2"


class Router:
    """A router of one host. `holder` replaces the host in the network under test."""

    def __init__(self, holder: Holder, index: int, kind: str) -> None:
        self.holder = holder
        self._index = index
        self._kind = kind
        self._bindings = 0

    def join(self, host: Holder) -> None:
        """Puts the host behind the router, which must be in the network already."""
        within, own = f"10.{self._index + 1}.0.1", private_address(self._index)
        link = f"link add {_INSIDE} type veth peer name {DEVICE} netns {host.pid}"
        self.holder.run([tool("ip"), "-batch", "-"], "\n".join([link, *set_up(_INSIDE, within)]))
        ways = [*set_up(DEVICE, own), f"route add default via {within}"]
        host.run([tool("ip"), "-batch", "-"], "\n".join(ways))
        for end, name in ((self.holder, _INSIDE), (host, DEVICE)):
            end.run([tool("ethtool"), "-K", name, *NO_BUNDLES])
        self.holder.run(["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        self.holder.run([tool("nft"), "-f", "-"], self._rules())

    def rebind(self) -> None:
        """Clears its translation table: the host's datagrams come from other ports from now on, and replies to the
        former ports are dropped. TCP connections keep their ports, and so go on.
        """
        self._bindings += 1
        self.holder.run([tool("nft"), "-f", "-"], self._rules())
        self.holder.run([sys.executable, "-ISs", "-c", _FORGET])

    def _rules(self) -> str:
        first = _FIRST_PORT + _PORTS * (self._bindings % _RANGES)
        ports = "fully-random" if self._kind == SYMMETRIC else f"to :{first}-{first + _PORTS - 1}"
        # Dropped before the connection tracker records it: otherwise a peer that sends first would occupy the port that
        # the host needs for its own datagrams to that address.
        answers_only = f'iifname "{DEVICE}" ct state new drop'
        table = "table ip stormtorch"
        return f"""{table}
delete {table}
{table} {{
    chain translation {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname "{DEVICE}" meta l4proto udp masquerade {ports}
        oifname "{DEVICE}" masquerade
    }}
    chain inward {{
        type filter hook input priority filter; policy accept;
        {answers_only}
    }}
    chain across {{
        type filter hook forward priority filter; policy accept;
        {answers_only}
    }}
}}
"""
