"""Two hosts joined by a cable: one veth pair, without a switch between them.

Nothing limits, queues or loses packets. They travel in bundles, as between network cards with segmentation
offload: what remains is the cost of the two stacks, and of copying once.
"""

import json
from collections.abc import Sequence

from stormtorch_lab.netns.access import tool
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.netns.links.kernel_network import DEVICE, address, set_up
from stormtorch_lab.netns.measured import AccessLinkCount, LinkCount
from stormtorch_lab.netns.namespaces import Holder


class CableNetwork:
    """A veth pair between two hosts."""

    kind = "veth pair"

    def __init__(self, _switch: Holder, hosts: Sequence[Holder], conditions: Conditions) -> None:
        first, second = hosts
        self._hosts = hosts
        mtu = conditions.cable
        link = f"link add {DEVICE} mtu {mtu} type veth peer name {DEVICE} mtu {mtu} netns {second.pid}"
        first.run([tool("ip"), "-batch", "-"], link)
        for index, holder in enumerate(hosts):
            holder.run([tool("ip"), "-batch", "-"], "\n".join(set_up(DEVICE, address(index))))

    def apply(self, conditions: Conditions) -> None:
        """Does nothing: `Conditions` rejects everything that a cable cannot have."""

    def links(self) -> list[LinkCount]:
        """Packets of both directions since the network was made; a bundle counts as one."""
        sent = [self._counts(index)["tx"] for index in range(2)]
        return [
            LinkCount(source=index, target=1 - index, seen=each["packets"], lost=0) for index, each in enumerate(sent)
        ]

    def lines(self) -> list[AccessLinkCount]:
        """Packets of both ends since the network was made; a bundle counts as one."""
        counts = []
        for index, holder in enumerate(self._hosts):
            if not holder.alive:
                continue  # the counters of a killed host are gone
            for direction, each in zip(("up", "down"), ("tx", "rx"), strict=True):
                count = self._counts(index)[each]
                counts.append(
                    AccessLinkCount(
                        host=index, direction=direction, packets=count["packets"], overflowed=count["dropped"]
                    )
                )
        return counts

    def close(self) -> None:
        """Does nothing: the cable ends with the namespaces."""

    def _counts(self, host: int) -> dict[str, dict[str, int]]:
        listed = json.loads(self._hosts[host].run([tool("ip"), "-s", "-j", "link", "show", "dev", DEVICE]))
        counts: dict[str, dict[str, int]] = listed[0]["stats64"]
        return counts
