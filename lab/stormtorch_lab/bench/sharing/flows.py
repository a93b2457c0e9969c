"""Two competing flows with a bottleneck at the switch: the engine's, from host 0 to host 2, and TCP's, from host 1."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stormtorch.collectives import Group, receive, send
from stormtorch.exchange.options import Options
from stormtorch.joining.rendezvous import connect
from stormtorch_lab.jobs.ranks import Member
from stormtorch_lab.netns import Lab

SETTLING_S = 4.0
"""Seconds until TCP and the engine have converged; not measured."""
_PORT = 4001


def send_for_a_while(member: Member, how: dict[str, Any], seconds: float) -> list[tuple[float, int]]:
    """Rank 0 sends to rank 2, which logs times and received bytes. The host of rank 1 belongs to TCP."""
    log = [(time.monotonic(), 0)]
    options = Options(interface=member.interface, **how)
    with connect(member.store, member.rank, member.world, options) as transport:
        group = Group(transport)
        data, again = torch.ones(250_000), torch.ones(1)
        end = time.monotonic() + seconds
        if member.rank == 0:
            member.report("sending")
        while member.rank != 1 and again.item():
            if member.rank == 0:
                again.fill_(time.monotonic() < end)
                for each in [send(group, again, 2), send(group, data, 2)]:
                    each.wait()
            else:
                for each in [receive(group, again, 0), receive(group, data, 0)]:
                    each.wait()
                log.append((time.monotonic(), log[-1][1] + 4 * data.numel()))
    return log


Flow = tuple["subprocess.Popen[str]", "subprocess.Popen[str]"]


def start_flow(lab: Lab, control: str, seconds: float) -> Flow:
    """Starts a bulk TCP flow from host 1 to host 2."""
    script = [sys.executable, "-ISs", str(Path(__file__).with_name("bulk.py"))]
    receiver = lab.start(2, [*script, "receive", str(_PORT)], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    sender = lab.start(1, [*script, "send", lab.address(2), str(_PORT), control, str(seconds)])
    return receiver, sender


def finish(flow: Flow) -> tuple[float, list[tuple[float, int]]]:
    """Waits for the end of a flow; returns its start, and times with received bytes."""
    receiver, sender = flow
    output, _ = receiver.communicate(timeout=60)
    if sender.wait(60) != 0 or not output:
        raise RuntimeError("the TCP flow ended with an error")
    log = [(float(at), int(count)) for at, count in json.loads(output)]
    return log[0][0], log


def rate_of(begin: float, log: Sequence[tuple[float, int]]) -> float:
    """Bits per second of a flow after convergence."""
    return rate_between(log, begin + SETTLING_S, log[-1][0])


def rate_between(log: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Bits per second."""
    return 8 * (_count_at(log, end) - _count_at(log, begin)) / (end - begin)


def _count_at(log: Sequence[tuple[float, int]], moment: float) -> float:
    """Bytes received until a time, by linear interpolation."""
    before = max((entry for entry in log if entry[0] <= moment), default=log[0])
    after = min((entry for entry in log if entry[0] > moment), default=log[-1])
    if after[0] <= before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (moment - before[0]) / (after[0] - before[0])
