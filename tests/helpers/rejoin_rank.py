"""A process of a rank that may be killed and return as another. It executes commands and reports results."""

import dataclasses
import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but its types do not

import stormtorch
from reference import reduced, same_bits, values
from stormtorch.collectives import Group, Op, all_reduce, barrier, reduce_scatter
from stormtorch.joining.rendezvous import connect, newer_card, rejoin
from stormtorch.udp.udp import UdpTransport

ELEMENTS = 300_000  # several datagrams, also of 64 KB
LOSSY = stormtorch.Reliability(budget=1.0)


def open_transport(how: dict[str, Any]) -> UdpTransport:
    options = stormtorch.Options(
        silence_s=how["silence_s"], timeout_s=20.0, linger_s=0.5, key=how["key"].encode() if how["key"] else None
    )
    store = TCPStore("127.0.0.1", how["port"], is_master=False, timeout=timedelta(seconds=20))
    if how["torch"]:
        options = dataclasses.replace(options, rejoin=how["again"])
        dist.init_process_group("storm", store=store, rank=how["rank"], world_size=how["world"], pg_options=options)
        group = dist.distributed_c10d._get_default_group()
        transport: UdpTransport = group.group.transport  # type: ignore[attr-defined]
        transport.enter()  # `prepare` would do it: until then, the others go on without a process that has returned
        return transport
    return (rejoin if how["again"] else connect)(store, how["rank"], how["world"], options, prefix="job")


class Rank:
    """Commands of a rank."""

    def __init__(self, transport: UdpTransport) -> None:
        self.transport = transport

    def exact(self, name: str) -> dict[str, Any]:
        """Collectives of all ranks on a group of this name: whether they give the right bits."""
        group = Group(self.transport, name=name)
        wanted = reduced([values(rank, ELEMENTS) for rank in range(group.size)], Op.SUM)
        tensor = values(group.rank, ELEMENTS)
        all_reduce(group, tensor).wait()
        barrier(group).wait()
        small = torch.full((7,), group.rank + 1.0)
        all_reduce(group, small).wait()
        right = same_bits(tensor, wanted) and small.tolist() == [sum(range(1, group.size + 1))] * 7
        return {"right": right, "incarnations": [self.transport.incarnation(rank) for rank in range(group.size)]}

    def lossy(self, name: str, rounds: int) -> dict[str, Any]:
        """Lossy collectives on a group of this name: how much of each peer's came and how long it took, by round."""
        group = Group(self.transport, name=name)
        came: list[dict[int, float]] = []
        took: list[float] = []
        for _ in range(rounds):
            start = time.monotonic()
            tensor = torch.full((ELEMENTS,), group.rank + 1.0)
            (arrival,) = all_reduce(group, tensor, Op.AVG, reliability=LOSSY).wait()
            out = torch.empty(ELEMENTS)
            (shard,) = reduce_scatter(group, out, [tensor] * group.size, Op.AVG, reliability=LOSSY).wait()
            took.append(time.monotonic() - start)
            came.append(
                {
                    peer: min(arrival.fraction(peer=peer, stage=0), shard.fraction(peer=peer))
                    for peer in set(range(group.size)) - {group.rank}
                }
            )
        return {"came": came, "took": took}

    def readmit(self, peer: int) -> dict[str, Any]:
        """Waits until a new process has replaced a peer, and goes on with it."""
        transport = self.transport
        deadline = time.monotonic() + 20.0
        while (card := newer_card(transport.store, peer, transport.incarnation(peer), prefix=transport.prefix)) is None:
            assert time.monotonic() < deadline, f"rank {peer} did not return"
            time.sleep(0.02)
        transport.readmit(peer, card)
        again = newer_card(transport.store, peer, transport.incarnation(peer), prefix=transport.prefix)
        return {"incarnation": card.incarnation, "again": again is not None}

    def await_return(self, peer: int, above: int) -> dict[str, Any]:
        """Waits until this rank has readmitted a newer process by itself, as a view told it to."""
        deadline = time.monotonic() + 20.0
        while self.transport.incarnation(peer) <= above:
            assert time.monotonic() < deadline, f"rank {peer} did not return"
            time.sleep(0.02)
        return {"incarnation": self.transport.incarnation(peer)}

    def readmit_in_the_middle(self, name: str, peer: int) -> dict[str, Any]:
        """The same with a lossy and an exact exchange of all under way, of which the peer knows nothing."""
        group = Group(self.transport, name=name)
        lossy = all_reduce(group, torch.ones(ELEMENTS), Op.AVG, reliability=LOSSY)
        exact = all_reduce(group, torch.ones(ELEMENTS), Op.AVG)
        start = time.monotonic()
        said = self.readmit(peer)
        try:
            exact.wait()
        except stormtorch.StormError as error:
            said |= {"error": type(error).__name__, "culprit": error.culprit}
        lossy.wait()
        return said | {"took": time.monotonic() - start}

    def readmit_if_unknown(self, peer: int, incarnation: int) -> dict[str, Any]:
        """The same, unless the process was known from the start."""
        known = self.transport.incarnation(peer) == incarnation
        return {"known": known} if known else self.readmit(peer)


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    how = json.loads(sys.argv[1])
    rank = Rank(open_transport(how))
    say({"up": True})
    for line in sys.stdin:
        request = json.loads(line)
        say(getattr(rank, request[0])(*request[1:]))
    if how["torch"]:
        dist.destroy_process_group()
    else:
        rank.transport.close()


if __name__ == "__main__":
    main()
