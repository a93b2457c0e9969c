"""A process that starts a job, joins it, or returns to it. It executes commands and reports results."""

import itertools
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but its types do not

import stormtorch
from stormtorch.collectives import Group, all_reduce
from stormtorch.udp.leaving import install_sigterm, say_goodbye_on_error
from stormtorch.udp.udp import UdpTransport


def enter(how: dict[str, Any]) -> UdpTransport:
    options = stormtorch.Options(
        silence_s=how["silence_s"],
        timeout_s=how.get("timeout_s", 30.0),
        linger_s=0.5,
        key=how["key"].encode() if how["key"] else None,
        rejoin=how.get("rejoin", False),
        spare_ranks=how.get("spare_ranks", 4),
        leave_s=how.get("leave_s", 30.0),
        lanes=how.get("lanes"),
        shared_memory=how.get("shared_memory", True),
    )
    if "faults" in how:
        stormtorch.faults(**how["faults"]).start()
    if "join" in how:
        transport: Any = stormtorch.join(how["join"], options).transport
    else:
        store = TCPStore("127.0.0.1", how["port"], is_master=False, timeout=timedelta(seconds=20))
        transport = stormtorch.connect(store, how["rank"], how["world"], options)
    transport.enter()
    return transport  # type: ignore[no-any-return]


class Rank:
    """Commands of a process."""

    def __init__(self, transport: UdpTransport) -> None:
        self.transport = transport

    def watch(self) -> None:
        self.transport.watch()

    def see(self, ranks: list[int], above: int = 0) -> dict[str, Any]:
        """Waits until a view has exactly these ranks, and knows the same processes."""
        deadline = time.monotonic() + 30.0
        while True:
            view = self.transport.view()
            if view is not None and view.number > above and [rank for rank, _ in view.members] == ranks:
                break
            assert time.monotonic() < deadline, f"saw {view and view.members}, not {ranks}"
            self.transport.wait_view(view.number if view else 0, 0.1)
        self.transport.install(view)
        return {"number": view.number, "members": view.members, "inside": self.transport.inside()}

    def add_up(self, number: int) -> float:
        """The sum over all members of a view of one more than their ranks, in exact arithmetic."""
        view = self.transport.view()
        assert view is not None and view.number == number
        group = Group(self.transport, [rank for rank, _ in view.members], name=f"sum {number}", view=number)
        tensor = torch.full((100_000,), self.transport.rank + 1.0)
        all_reduce(group, tensor).wait()
        assert tensor.min() == tensor.max()
        return tensor[0].item()

    def add_up_until_a_death(self, number: int) -> bool:
        """Adds up again and again until another view begins; returns whether all sums were right.

        Every sum is of other numbers. Those of a view that ends may lack what one rank would have given, which is dead,
        and the part that it would have added up.
        """
        view = self.transport.view()
        assert view is not None
        ranks = [rank for rank, _ in view.members]
        over = self._is_over(number)
        group = Group(self.transport, ranks, name=f"until {number}", view=number, interrupted=over)
        for turn in itertools.count():
            given = {rank: rank + 1.0 + 8.0 * (turn % 1000) for rank in ranks}
            whole, own = sum(given.values()), given[self.transport.rank]
            tensor = torch.full((100_000,), own)
            try:
                all_reduce(group, tensor).wait()
            except stormtorch.StormError:
                return True
            if not set(tensor.tolist()) <= {whole, own, *(whole - each for each in given.values())}:
                return False
            if over():
                return True
        raise AssertionError

    def _is_over(self, number: int) -> Callable[[], bool]:
        def over() -> bool:
            view = self.transport.view()
            return view is not None and view.number > number

        return over

    def listen_for_sigterm(self) -> None:
        """Leaves by SIGTERM. The training, which there is none of here, would hand over: it is only noted."""
        install_sigterm(self.transport)

    def leave(self) -> list[str]:
        """Leaves voluntarily; returns the called functions."""
        called: list[str] = []
        say_goodbye_on_error(self.transport)
        self.transport.on_leave.append(lambda: called.append("handed over"))
        stormtorch.leave()
        return [*called, "closed" if self.transport.closed else "open"]

    def leaving(self) -> bool:
        return self.transport.leaving


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    how = json.loads(sys.argv[1])
    try:
        transport = enter(how)
    except (stormtorch.StormError, ValueError) as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    card = transport.cards[transport.rank]
    say({"rank": transport.rank, "incarnation": card.incarnation, "address": f"{card.host}:{card.reception}"})
    rank = Rank(transport)
    for line in sys.stdin:
        request = json.loads(line)
        say(getattr(rank, request[0])(*request[1:]))
    transport.close()


if __name__ == "__main__":
    main()
