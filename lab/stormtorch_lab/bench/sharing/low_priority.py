"""Low priority (scavenger): its cost on an idle link, and how soon it regains the link from a pausing TCP flow."""

import time
from typing import Any

import torch

from stormtorch.collectives import Group, all_reduce
from stormtorch.exchange.options import Options
from stormtorch.joining.rendezvous import connect
from stormtorch.network.units import parse_rate
from stormtorch.telemetry.statistics import median
from stormtorch_lab.bench.sharing.fairness_results import FairnessResult, FairnessSettings, lab_of
from stormtorch_lab.bench.sharing.flows import finish, send_for_a_while, start_flow
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.netns import Lab

# Exchanges of both priorities alternate, so that other load on the machine affects both alike.
_TURNS = 25
# How often the flow sends and pauses, and for how long each time.
_PAUSES, _ON_S, _OFF_S = 4, 3.0, 3.0
# The link is regained when the engine uses this fraction of it over so many seconds.
_BACK, _OVER_S = 0.8, 0.1


def measure_alone(settings: FairnessSettings) -> list[FairnessResult]:
    """Compares exchanges of low and of normal priority, side by side in one job that has the network to itself."""
    size = round(parse_rate(settings.rate) / 8 * 0.1)
    with lab_of(settings, settings.ranks) as lab:
        times = run_ranks(take_turns, settings.ranks, (size,), timeout_s=settings.timeout_s, lab=lab)
        slowest = [[max(each) for each in zip(*(rank[kind] for rank in times), strict=True)] for kind in (0, 1)]
        # The first exchanges of each probe the rate.
        normal, low = (median(each[5:]) for each in slowest)
        return [
            FairnessResult(
                name="alone",
                what="alone on the link: time of an exchange of low priority, as a multiple of a normal one's",
                figure=low / normal,
                bound=1.05,
                at_most=True,
                requested=lab.conditions.to_json(),
                measured=lab.measured().to_json(),
                details={"normal_s": slowest[0], "low_s": slowest[1]},
            )
        ]


def take_turns(member: Member, size: int) -> tuple[list[float], list[float]]:
    """A rank's part: all-reduces of normal and of low priority in turn. Returns the times of both."""
    options = Options(interface=member.interface, priority="both")
    with connect(member.store, member.rank, member.world, options) as transport:
        groups = Group(transport), Group(transport, name="low", priority="low")
        tensor = torch.ones(size // 4)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(_TURNS):
            for group, log in zip(groups, times, strict=True):
                begin = time.perf_counter()
                all_reduce(group, tensor).wait()
                log.append(time.perf_counter() - begin)
        return times


def measure_resumption(settings: FairnessSettings) -> list[FairnessResult]:
    """Starts and pauses a TCP flow beside a low-priority flow that yields to latency."""
    findings = []
    bits = parse_rate(settings.rate)
    for control in settings.tcp:
        with lab_of(settings, 3) as lab:
            flows: list[list[tuple[float, int]]] = []

            def on_message(
                _rank: int, _what: object, lab: Lab = lab, control: str = control, flows: list[Any] = flows
            ) -> None:
                for _ in range(_PAUSES):
                    time.sleep(_OFF_S)
                    flows.append(finish(start_flow(lab, control, _ON_S))[1])
                time.sleep(_OFF_S)

            seconds = _PAUSES * (_ON_S + _OFF_S) + _OFF_S + 2.0
            how = {"priority": "low", "yield_to": "latency"}
            logs = run_ranks(
                send_for_a_while, 3, (how, seconds), timeout_s=settings.timeout_s, on_message=on_message, lab=lab
            )
            waits = [_back_after(logs[2], log[-1][0], bits) for log in flows]
            findings.append(
                FairnessResult(
                    name="pause",
                    what=f"TCP {control} pauses: seconds until low priority has {_BACK:.0%} of the link again, at most",
                    figure=max(waits),
                    bound=1.0,
                    at_most=True,
                    requested=lab.conditions.to_json(),
                    measured=lab.measured().to_json(),
                    details={"tcp": control, "seconds": waits, "tcp_shares": [_share(log, bits) for log in flows]},
                )
            )
    return findings


def _back_after(log: list[tuple[float, int]], paused_at: float, bits: float) -> float:
    """Returns the seconds from a pause until the first interval in which the engine fills the link."""
    for at, (begin, before) in enumerate(log):
        if begin < paused_at:
            continue
        until = next(((end, count) for end, count in log[at:] if end - begin >= _OVER_S), None)
        if until is None:
            break
        if 8.0 * (until[1] - before) / (until[0] - begin) >= _BACK * bits:
            return begin - paused_at
    return _OFF_S


def _share(log: list[tuple[float, int]], bits: float) -> float:
    return 8.0 * (log[-1][1] - log[0][1]) / (log[-1][0] - log[0][0]) / bits
