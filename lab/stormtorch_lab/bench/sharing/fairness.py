"""Congestion control and fairness of the engine on an unknown, shared network, with no rate given.

    report = run_fairness(FairnessSettings(only=("incast", "tcp")))

Each result is one figure from one lab, with the bound that it should keep:
  all-to-all, incast    packets that found a full queue: congestion loss of the engine itself, cold start included
  tcp                   the smaller share of a link between the engine and one bulk TCP flow
  low, latency          the share of its own rate that such a flow keeps beside an engine of low priority, which yields
                        to any queue, or to queues that last
  alone                 time of exchanges of low priority on an idle network, as a multiple of normal ones
  pause                 seconds until an engine of low priority regains the link when the competing flow pauses
  step                  exchanges until times are steady after the rate is halved and loss is switched on
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stormtorch.collectives import Group, all_reduce, all_to_all, gather
from stormtorch.exchange.options import Options
from stormtorch.joining.rendezvous import connect
from stormtorch.network.units import parse_rate
from stormtorch.telemetry.json_files import write_json
from stormtorch.telemetry.progress import Advance, ignore_progress
from stormtorch.telemetry.statistics import median
from stormtorch_lab.bench.sharing.fairness_results import FairnessResult, FairnessSettings, lab_of
from stormtorch_lab.bench.sharing.flows import SETTLING_S, finish, rate_between, rate_of, send_for_a_while, start_flow
from stormtorch_lab.bench.sharing.low_priority import measure_alone, measure_resumption
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.netns import Lab

# Seconds for which TCP and the engine run side by side.
_TOGETHER_S = 12.0
# Options of the engine's flow.
_HOW: dict[str, dict[str, Any]] = {
    "tcp": {},
    "low": {"priority": "low", "yield_to": "queues"},
    "latency": {"priority": "low", "yield_to": "latency"},
}
_STEP_ROUNDS = 40
# Times are steady if no later one exceeds this multiple of the median of the last rounds.
_STEADY = 1.3


@dataclass(frozen=True)
class FairnessReport:
    """Results with the conditions of their measurement."""

    conditions: dict[str, Any]
    findings: list[FairnessResult]

    def write(self, path: Path) -> None:
        """Writes JSON and creates missing folders."""
        findings = [asdict(finding) | {"good": finding.good} for finding in self.findings]
        write_json(path, {"conditions": self.conditions, "findings": findings})


def run_fairness(settings: FairnessSettings, advance: Advance = ignore_progress) -> FairnessReport:
    """Runs the checks one after the other, each in its own lab."""
    findings: list[FairnessResult] = []
    for done, name in enumerate(settings.only):
        advance(name, done)
        findings += _MEASUREMENTS[name](settings)
    advance("done", len(settings.only))
    return FairnessReport(surroundings() | {"settings": asdict(settings)}, findings)


# --- overflow --------------------------------------------------------------------------------------------------------


def _measure_overflow(settings: FairnessSettings, name: str) -> list[FairnessResult]:
    bits = parse_rate(settings.rate)
    # The bytes of one second at the bottleneck: the receiver's link, in an incast.
    size = round(bits / 8 / (settings.ranks - 1))
    with lab_of(settings, settings.ranks) as lab:
        times = run_ranks(exchange_often, settings.ranks, (name, size, 5), timeout_s=settings.timeout_s, lab=lab)
        return [_overflow(name, lab, settings.ranks, times)]


def _overflow(name: str, lab: Lab, hosts: int, times: list[list[float]]) -> FairnessResult:
    measured = lab.measured()
    who = "all to all" if name == "all-to-all" else f"{hosts - 1} to one"
    return FairnessResult(
        name=name,
        what=f"{name}, {who}: packets that found a full queue",
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


def _measure_sharing(settings: FairnessSettings, name: str) -> list[FairnessResult]:
    findings = []
    for control in settings.tcp:
        # Host 0 sends with the engine, host 1 with TCP, both to host 2: the bottleneck is at the switch.
        with lab_of(settings, 3) as lab:
            alone = rate_of(*finish(start_flow(lab, control, _TOGETHER_S)))
            flow: list[Any] = []

            def on_message(
                _rank: int, _what: object, lab: Lab = lab, control: str = control, flow: list[Any] = flow
            ) -> None:
                flow.append(start_flow(lab, control, _TOGETHER_S))

            logs = run_ranks(
                send_for_a_while,
                3,
                (_HOW[name], _TOGETHER_S + 2),
                timeout_s=settings.timeout_s,
                on_message=on_message,
                lab=lab,
            )
            begin, log = finish(flow[0])
            tcp = rate_of(begin, log)
            own = rate_between(logs[2], begin + SETTLING_S, log[-1][0])
            findings.append(_sharing(name, settings, control, lab, alone, tcp, own))
    return findings


def _sharing(
    name: str, settings: FairnessSettings, control: str, lab: Lab, alone: float, tcp: float, own: float
) -> FairnessResult:
    low = name != "tcp"
    bits = parse_rate(settings.rate)
    details = {"tcp": control, "tcp_alone_bits_per_s": alone, "tcp_bits_per_s": tcp, "storm_bits_per_s": own}
    what = f"beside one flow of TCP {control}: "
    yields = f'share of its own rate that TCP keeps beside low priority, yield_to="{_HOW[name].get("yield_to")}"'
    what += yields if low else "the smaller one's share of the link"
    return FairnessResult(
        name=name,
        what=what,
        figure=tcp / alone if low else min(tcp, own) / bits,
        bound=0.9 if low else 0.3,
        at_most=False,
        requested=lab.conditions.to_json(),
        measured=lab.measured().to_json(),
        details=details,
    )


# --- a network that changes -------------------------------------------------------------------------------------------


def _measure_step(settings: FairnessSettings, name: str) -> list[FairnessResult]:
    hosts = 2 * settings.ranks
    bits = parse_rate(settings.rate)
    size = round(bits / 8 * 0.1)  # a few tenths of a second each
    with lab_of(settings, hosts) as lab:

        def on_message(_rank: int, _what: object) -> bool:
            lab.set(rate=bits / 2, loss=0.05)
            return True

        times = run_ranks(reduce_often, hosts, (size,), timeout_s=settings.timeout_s, on_message=on_message, lab=lab)
        slowest = [max(each) for each in zip(*times, strict=True)]
        after = slowest[_STEP_ROUNDS:]
        steady = _STEADY * median(after[_STEP_ROUNDS // 2 :])
        unsteady = [index for index, seconds in enumerate(after) if seconds > steady]
        return [
            FairnessResult(
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
                member.request("change")
            tensor.fill_(1)
            begin = time.perf_counter()
            all_reduce(group, tensor).wait()
            times.append(time.perf_counter() - begin)
            if not bool((tensor == member.world).all()):
                raise RuntimeError(f"wrong sum in round {index}")
        return times


_MEASUREMENTS: dict[str, Callable[[FairnessSettings], list[FairnessResult]]] = {
    "all-to-all": lambda settings: _measure_overflow(settings, "all-to-all"),
    "incast": lambda settings: _measure_overflow(settings, "incast"),
    "tcp": lambda settings: _measure_sharing(settings, "tcp"),
    "low": lambda settings: _measure_sharing(settings, "low"),
    "latency": lambda settings: _measure_sharing(settings, "latency"),
    "alone": measure_alone,
    "pause": measure_resumption,
    "step": lambda settings: _measure_step(settings, "step"),
}
