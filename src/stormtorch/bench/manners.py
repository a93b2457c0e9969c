"""Manners of the engine on a network that it does not know and has to share, with no rate given.

    report = run_manners(MannersSettings(only=("incast", "tcp")))

Each finding is one figure of one lab, beside the bound it should keep:
  all-to-all, incast    packets that met a full queue: what the engine inflicts on itself, its cold start included
  tcp                   the share of a line that the engine and one bulk TCP flow have of each other
  low                   what such a flow keeps of its own when the engine runs with rate="low"
  step                  exchanges until times are steady after the rate is halved and loss is switched on
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stormtorch.checks import check_between, check_subset
from stormtorch.collectives import Group, all_reduce, all_to_all, gather, receive, send
from stormtorch.jobs.ranks import Member, run_ranks
from stormtorch.lab import Conditions, Lab
from stormtorch.lab.access import available_tcp
from stormtorch.network.units import parse_rate
from stormtorch.results.progress import Advance, ignore_progress
from stormtorch.results.report import write_json
from stormtorch.results.statistics import median
from stormtorch.results.surroundings import surroundings
from stormtorch.transport.options import Options
from stormtorch.transport.rendezvous import connect

MANNERS = ("all-to-all", "incast", "tcp", "low", "step")
"""Things to look at."""

_PORT = 4001
# TCP and the engine run together for so long; the first part is not counted, as both still look for their share.
_TOGETHER_S, _SETTLING_S = 12.0, 4.0
_STEP_ROUNDS = 40
# Times count as steady when none of the later ones is longer than so many medians of the last rounds.
_STEADY = 1.3


@dataclass(frozen=True, kw_only=True)
class MannersSettings:
    """Settings: what to look at, and on which network."""

    only: tuple[str, ...] = MANNERS
    rate: str = "200mbit"
    """Rate of each host's line."""
    queue: str = "256kb"
    """Bytes that may wait at each end of a line."""
    delay: str = "0ms"
    ranks: int = 4
    """Ranks for all-to-all and incast; step has twice as many."""
    tcp: tuple[str, ...] = ("cubic", "bbr")
    """Congestion controls of the bulk flow."""
    timeout_s: float = 300.0
    """Seconds after which a finding must be there."""

    def __post_init__(self) -> None:
        check_subset("only", self.only, MANNERS)
        check_between("ranks", self.ranks, 3, 16)
        check_between("timeout_s", self.timeout_s, 30, 1e6)
        check_subset("tcp", self.tcp, available_tcp())
        Conditions(rate=self.rate, queue=self.queue, delay=self.delay)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Figure and its bound."""

    name: str
    what: str
    figure: float
    bound: float
    at_most: bool
    """Whether the bound is an upper one; it is a lower one otherwise."""
    requested: dict[str, Any]
    measured: dict[str, Any]
    details: dict[str, Any]

    @property
    def good(self) -> bool:
        """Whether the bound holds."""
        return self.figure <= self.bound if self.at_most else self.figure >= self.bound


@dataclass(frozen=True)
class MannersReport:
    """Results, and the conditions under which they came out."""

    conditions: dict[str, Any]
    findings: list[Finding]

    def write(self, path: Path) -> None:
        """Writes JSON; makes missing folders."""
        findings = [asdict(finding) | {"good": finding.good} for finding in self.findings]
        write_json(path, {"conditions": self.conditions, "findings": findings})


def run_manners(settings: MannersSettings, advance: Advance = ignore_progress) -> MannersReport:
    """Looks at one thing after the other, each in a lab of its own."""
    findings: list[Finding] = []
    for done, name in enumerate(settings.only):
        advance(name, done)
        findings += _LOOKS[name](settings)
    advance("done", len(settings.only))
    return MannersReport(surroundings() | {"settings": asdict(settings)}, findings)


# --- overflow --------------------------------------------------------------------------------------------------------


def _look_at_overflow(settings: MannersSettings, name: str) -> list[Finding]:
    bits = parse_rate(settings.rate)
    # A second's worth at the busiest line: the receiver's, in an incast.
    size = round(bits / 8 / (settings.ranks - 1))
    with _lab(settings, settings.ranks) as lab:
        times = run_ranks(exchange_often, settings.ranks, (name, size, 5), timeout_s=settings.timeout_s, lab=lab)
        return [_overflow(name, lab, settings.ranks, times)]


def _overflow(name: str, lab: Lab, hosts: int, times: list[list[float]]) -> Finding:
    measured = lab.measured()
    who = "everyone to everyone" if name == "all-to-all" else f"{hosts - 1} to one"
    return Finding(
        name=name,
        what=f"{name}, {who}: packets that met a full queue",
        figure=measured.overflow,
        bound=0.01,
        at_most=True,
        requested=lab.conditions.to_json(),
        measured=measured.to_json(),
        details={"times_s": [max(each) for each in zip(*times, strict=True)]},
    )


def exchange_often(member: Member, kind: str, size: int, rounds: int) -> list[float]:
    """A rank's part: exact exchanges, one after the other, from a cold start on. Returns their times."""
    with connect(member.store, member.rank, member.world, Options(interface=member.interface)) as transport:
        group = Group(transport)
        give = torch.ones(size // 4)
        take = [torch.empty_like(give) for _ in range(member.world)]
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            if kind == "incast":
                gather(group, give, take if member.rank == 0 else None, 0).wait()
            else:
                all_to_all(group, [give] * member.world, take).wait()
            times.append(time.perf_counter() - begin)
        return times


# --- sharing with TCP -------------------------------------------------------------------------------------------------


def _look_at_sharing(settings: MannersSettings, name: str) -> list[Finding]:
    findings = []
    for control in settings.tcp:
        # Host 0 sends with the engine, host 1 with TCP, and both to host 2: they meet at the switch.
        with _lab(settings, 3) as lab:
            alone = _rate_of(*_finish(_start_flow(lab, control, _TOGETHER_S)))
            flow: list[Any] = []

            def listen(
                _rank: int, _what: object, lab: Lab = lab, control: str = control, flow: list[Any] = flow
            ) -> None:
                flow.append(_start_flow(lab, control, _TOGETHER_S))

            rate = "low" if name == "low" else "auto"
            logs = run_ranks(
                send_for_a_while, 3, (rate, _TOGETHER_S + 2), timeout_s=settings.timeout_s, listen=listen, lab=lab
            )
            begin, log = _finish(flow[0])
            tcp = _rate_of(begin, log)
            own = _rate_between(logs[2], begin + _SETTLING_S, log[-1][0])
            findings.append(_sharing(name, settings, control, lab, alone, tcp, own))
    return findings


def _sharing(
    name: str, settings: MannersSettings, control: str, lab: Lab, alone: float, tcp: float, own: float
) -> Finding:
    low = name == "low"
    bits = parse_rate(settings.rate)
    details = {"tcp": control, "tcp_alone_bits_per_s": alone, "tcp_bits_per_s": tcp, "storm_bits_per_s": own}
    what = f"beside one flow of TCP {control}: "
    what += 'what that keeps of its own, with rate="low"' if low else "the smaller one's share of the line"
    return Finding(
        name=name,
        what=what,
        figure=tcp / alone if low else min(tcp, own) / bits,
        bound=0.9 if low else 0.3,
        at_most=False,
        requested=lab.conditions.to_json(),
        measured=lab.measured().to_json(),
        details=details,
    )


def send_for_a_while(member: Member, rate: str, seconds: float) -> list[tuple[float, int]]:
    """Rank 0 sends to rank 2, which logs when how much had arrived. Rank 1's host is TCP's."""
    log = [(time.monotonic(), 0)]
    options = Options(interface=member.interface, rate=rate)
    with connect(member.store, member.rank, member.world, options) as transport:
        group = Group(transport)
        data, again = torch.ones(250_000), torch.ones(1)
        end = time.monotonic() + seconds
        if member.rank == 0:
            member.tell("sending")
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


def _start_flow(lab: Lab, control: str, seconds: float) -> Flow:
    script = [sys.executable, "-ISs", str(Path(__file__).with_name("bulk.py"))]
    receiver = lab.start(2, [*script, "receive", str(_PORT)], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    sender = lab.start(1, [*script, "send", lab.address(2), str(_PORT), control, str(seconds)])
    return receiver, sender


def _finish(flow: Flow) -> tuple[float, list[tuple[float, int]]]:
    receiver, sender = flow
    output, _ = receiver.communicate(timeout=60)
    if sender.wait(60) != 0 or not output:
        raise RuntimeError("the TCP flow ended with an error")
    log = [(float(at), int(count)) for at, count in json.loads(output)]
    return log[0][0], log


def _rate_of(begin: float, log: Sequence[tuple[float, int]]) -> float:
    return _rate_between(log, begin + _SETTLING_S, log[-1][0])


def _rate_between(log: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Bits per second."""
    return 8 * (_count_at(log, end) - _count_at(log, begin)) / (end - begin)


def _count_at(log: Sequence[tuple[float, int]], moment: float) -> float:
    """Bytes until then, on a line between the entries around it."""
    before = max((entry for entry in log if entry[0] <= moment), default=log[0])
    after = min((entry for entry in log if entry[0] > moment), default=log[-1])
    if after[0] <= before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (moment - before[0]) / (after[0] - before[0])


# --- a network that changes -------------------------------------------------------------------------------------------


def _look_at_step(settings: MannersSettings, name: str) -> list[Finding]:
    hosts = 2 * settings.ranks
    bits = parse_rate(settings.rate)
    size = round(bits / 8 * 0.1)  # a few tenths of a second each
    with _lab(settings, hosts) as lab:

        def listen(_rank: int, _what: object) -> bool:
            lab.set(rate=bits / 2, loss=0.05)
            return True

        times = run_ranks(reduce_often, hosts, (size,), timeout_s=settings.timeout_s, listen=listen, lab=lab)
        slowest = [max(each) for each in zip(*times, strict=True)]
        after = slowest[_STEP_ROUNDS:]
        steady = _STEADY * median(after[_STEP_ROUNDS // 2 :])
        unsteady = [index for index, seconds in enumerate(after) if seconds > steady]
        return [
            Finding(
                name=name,
                what=f"{hosts} hosts, rate halved and 5 % loss switched on: exchanges until times are steady",
                figure=1 + max((index for index in unsteady if index < _STEP_ROUNDS), default=-1),
                bound=20,
                at_most=True,
                requested=lab.conditions.to_json(),
                measured=lab.measured().to_json(),
                details={"times_s": slowest, "changed_after": _STEP_ROUNDS},
            )
        ]


def reduce_often(member: Member, size: int) -> list[float]:
    """A rank's part: exact all-reduces, before and after the network changes."""
    with connect(member.store, member.rank, member.world, Options(interface=member.interface)) as transport:
        group = Group(transport)
        tensor = torch.ones(size // 4)
        times = []
        for index in range(2 * _STEP_ROUNDS):
            if index == _STEP_ROUNDS and member.rank == 0:
                member.ask("change")
            tensor.fill_(1)
            begin = time.perf_counter()
            all_reduce(group, tensor).wait()
            times.append(time.perf_counter() - begin)
            if not bool((tensor == member.world).all()):
                raise RuntimeError(f"wrong sum in round {index}")
        return times


def _lab(settings: MannersSettings, hosts: int) -> Lab:
    return Lab(hosts, Conditions(rate=settings.rate, queue=settings.queue, delay=settings.delay), management=True)


_LOOKS: dict[str, Callable[[MannersSettings], list[Finding]]] = {
    "all-to-all": lambda settings: _look_at_overflow(settings, "all-to-all"),
    "incast": lambda settings: _look_at_overflow(settings, "incast"),
    "tcp": lambda settings: _look_at_sharing(settings, "tcp"),
    "low": lambda settings: _look_at_sharing(settings, "low"),
    "step": lambda settings: _look_at_step(settings, "step"),
}
