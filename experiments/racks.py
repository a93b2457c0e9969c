"""Packets at scale: how long does a step's exchange take on 16 to 1,024 endpoints in racks, beside what lines allow?

Every endpoint is the shipped core of the engine; the network is simulated under virtual time, packet by packet. Hosts
have a line up to the switch of their rack and one down from it, and racks have such lines (trunks) to the switch that
joins them. A step is what `BoundedDrift` exchanges: all send gradients to all owners at once, and each owner sends
parameters to all as soon as it has its mean. It needs no data, and about 20 minutes on two cores; the run of 1,024
endpoints takes 11 GB of memory.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from grid import RESULTS, keep, load, mean_and_bar, mean_text

import stormtorch._engine as _engine
from stormtorch.cli.screen import progress_bar
from stormtorch.collectives.spans import shards
from stormtorch.network.faults import faults
from stormtorch.network.loss import Bernoulli, LossModel, PerLink
from stormtorch.reliability import EXACT, LOSSY, Reliability
from stormtorch.results.surroundings import surroundings
from stormtorch.transport.exchange import Plan, Receive, ReduceMode, Reduction, Send, WireDtype
from stormtorch.transport.options import Options
from stormtorch.transport.simulated import core_settings

DELAY_S = 25e-6  # from host to host of a rack; twice that between racks
DATAGRAM_BYTES, PAYLOAD_BYTES, WIRE_BYTES = 1472, 1440, 1472 + 42  # on the wire with Ethernet, IPv4 and UDP
# Of the whole model, whatever the number of endpoints: one full datagram for each pair of 1,024.
MODEL_BYTES = 1024 * PAYLOAD_BYTES
# Ranks look whether their exchange has ended so many times in the ideal time of a step.
POLLS = 400
PATIENCE = 100  # times the ideal


@dataclass(frozen=True, kw_only=True)
class Network:
    """What the racks of a run are like."""

    label: str
    colour: str
    bytes_per_s: float = 1e9 / 8
    """Rate of each host's line, up and down."""
    sending: str = "auto"
    """Sending rate of each endpoint, as `Options.rate`."""
    oversubscribed: float = 1.0
    """Rate of a rack's hosts together, in multiples of its trunk's."""
    port_queue_bytes: int = 1 << 20
    trunk_queue_bytes: int = 4 << 20
    slow_rack: float = 1.0
    """How many times slower the trunk of the first rack is than the others."""
    rack_loss: float = 0.0
    """Fraction of the packets that is lost between the first rack and all others."""
    dark: float = 0.0
    """Fraction of the time for which a host's line loses everything, both ways."""
    dark_s: float = 2e-3
    """Mean duration of that."""

    @property
    def random(self) -> bool:
        """Whether runs of different seeds differ."""
        return self.rack_loss > 0 or self.dark > 0


NETWORKS = {
    "free": Network(label="no loss", colour="#2b8a3e"),
    "fast": Network(label="no loss, 10 Gbit/s", colour="#868e96", bytes_per_s=1e10 / 8),
    "incast": Network(
        label="trunks 4:1, small queues",
        colour="#d9480f",
        oversubscribed=4.0,
        port_queue_bytes=128 << 10,
        trunk_queue_bytes=256 << 10,
    ),
    "paced": Network(
        label="trunks 4:1, small queues, rate set",
        colour="#f08c00",
        sending="200mbit",  # of 250 that a trunk has for each host: not only data travels
        oversubscribed=4.0,
        port_queue_bytes=128 << 10,
        trunk_queue_bytes=256 << 10,
    ),
    "bursts": Network(label="bursts of loss on hosts' lines", colour="#1c7ed6", dark=0.025),
    "slow": Network(label="one rack's trunk ten times slower", colour="#862e9c", slow_rack=10.0),
    "lossy": Network(label="one rack loses 20 %", colour="#0b7285", rack_loss=0.2),
}
SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    network: str
    hosts: int
    exact: bool
    seed: int = 0

    @property
    def key(self) -> str:
        """Name of the run in the results."""
        return f"{self.network}/{self.hosts}/{'exact' if self.exact else 'lossy'}/{self.seed}"

    @property
    def hosts_per_rack(self) -> int:
        """As many hosts in a rack as there are racks."""
        return math.isqrt(self.hosts)

    @property
    def steps(self) -> int:
        """Steps of the run: fewer where each takes minutes."""
        return 5 if self.hosts <= 64 else 3 if self.hosts <= 256 else 1


def cases() -> list[Case]:
    """All runs, the largest first."""
    found = [Case(network="fast", hosts=1024, exact=False)]
    for hosts in (256, 64, 16):
        for name, network in NETWORKS.items():
            for exact in (False, True):
                if not exact or hosts <= 64:
                    seeds = range(SEEDS if network.random else 1)
                    found += [Case(network=name, hosts=hosts, exact=exact, seed=seed) for seed in seeds]
    return found


# --- the physical ideal -----------------------------------------------------------------------------------------------


def message_bytes(hosts: int) -> float:
    """Wire bytes of one message: the shard of one owner, without anything but data."""
    return MODEL_BYTES / hosts / PAYLOAD_BYTES * WIRE_BYTES


def ideal_s(case: Case) -> float:
    """Time of both stages if the narrowest line were busy all the time: its bytes over its speed, and the way."""
    network, hosts, rack = NETWORKS[case.network], case.hosts, case.hosts_per_rack
    by_host = (hosts - 1) * message_bytes(hosts) / network.bytes_per_s
    trunk_bytes_per_s = rack * network.bytes_per_s / network.oversubscribed / network.slow_rack
    by_trunk = rack * (hosts - rack) * message_bytes(hosts) / trunk_bytes_per_s
    return 2 * (max(by_host, by_trunk) + 2 * DELAY_S)


# --- one run ----------------------------------------------------------------------------------------------------------


class Bursts:
    """Hosts whose lines are dark for exponential times now and then, each by itself."""

    def __init__(self, sim: _engine.Sim, case: Case) -> None:
        network = NETWORKS[case.network]
        self._sim, self._random = sim, random.Random(case.seed)
        self._mean_s = {True: network.dark_s, False: network.dark_s * (1 - network.dark) / max(network.dark, 1e-9)}
        self._dark = [self._random.random() < network.dark for _ in range(case.hosts)] if network.dark else []
        self._until = [sim.now_s + self._lasts(dark) for dark in self._dark]
        for host, dark in enumerate(self._dark):
            sim.set_dark(host, dark)

    def _lasts(self, dark: bool) -> float:
        return self._random.expovariate(1 / self._mean_s[dark])

    def go_on(self) -> None:
        """Switches the lines whose time has come."""
        for host, until in enumerate(self._until):
            if self._sim.now_s >= until:
                self._dark[host] = not self._dark[host]
                self._until[host] = self._sim.now_s + self._lasts(self._dark[host])
                self._sim.set_dark(host, self._dark[host])


def make_sim(case: Case) -> _engine.Sim:
    """The network of a case, with a core for every host."""
    network, rack = NETWORKS[case.network], case.hosts_per_rack
    loss: float | LossModel = 0.0
    if network.rack_loss:
        loss = PerLink.bad_rack(range(rack), case.hosts, Bernoulli(p=network.rack_loss), Bernoulli(p=0.0))
    trunk_bytes_per_s = rack * network.bytes_per_s / network.oversubscribed
    options = Options(rate=network.sending, datagram_bytes=DATAGRAM_BYTES)
    sim = _engine.Sim(
        case.hosts,
        core_settings(case.hosts, options, unlimited=False, seed=case.seed),
        dict(faults(loss=loss, seed=case.seed).settings),
        DELAY_S,
        0.0,
        0,
        {
            "bytes_per_s": network.bytes_per_s,
            "queue_bytes": network.port_queue_bytes,
            "up_queue_bytes": 0,  # a kernel holds its own sockets back
            "low_queue_bytes": network.port_queue_bytes,
            "low_share": 0.0,
            "burst_bytes": 0.0,
            "low": False,
            "hosts_per_rack": rack,
            "trunk_bytes_per_s": trunk_bytes_per_s,
            "trunk_queue_bytes": network.trunk_queue_bytes,
        },
    )
    if network.slow_rack != 1.0:
        sim.set_trunk(0, trunk_bytes_per_s / network.slow_rack)
    return sim


class Steps:
    """Steps of all hosts over one network."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.sim = make_sim(case)
        self.bursts = Bursts(self.sim, case)
        self.poll_s = ideal_s(case) / POLLS
        elements = MODEL_BYTES // 4
        # Nobody looks at the values: all hosts send from the same memory and write into the same.
        self._gradients, self._parameters = torch.zeros(elements), torch.zeros(elements)
        self._means = torch.zeros(case.hosts, -(-elements // case.hosts) + PAYLOAD_BYTES)
        self._shards = [(4 * first, 4 * count) for first, count in shards(elements, 4, case.hosts)]

    def _plan(self, rank: int, step: int, stage: int) -> Plan:
        reliability: Reliability = EXACT if self.case.exact else LOSSY
        others = [(rank + ahead) % self.case.hosts for ahead in range(1, self.case.hosts)]
        base = (self._gradients if stage == 0 else self._parameters).data_ptr()
        spans = [(base + first, length) for first, length in self._shards]
        own, length = spans[rank]
        if stage == 1:
            sends = [Send(peer, own, length) for peer in others]
            return Plan(
                "parameters", 1, step, sends, [Receive(peer, *spans[peer]) for peer in others], None, reliability
            )
        mode = ReduceMode.IN_ORDER if self.case.exact else ReduceMode.ARRIVED
        wire, out = WireDtype.FLOAT32, self._means[rank].data_ptr()
        return Plan(
            "gradients",
            0,
            step,
            [Send(peer, *spans[peer]) for peer in others],
            [Receive(peer, 0, length, False, True) for peer in sorted(others)],
            Reduction(mode, wire, wire, own, out, length, rank, True),
            reliability,
        )

    def run(self, step: int) -> dict[str, float]:
        """One step, from the first datagram until the last host has all that it will get."""
        case, sim = self.case, self.sim
        before, began_s = self._counts(), sim.now_s
        stage = [0] * case.hosts
        wanted, missing, took_s = 0, 0, 0.0
        for rank in range(case.hosts):
            sim.post(rank, *self._plan(rank, step, 0).arguments())
        running = set(range(case.hosts))
        while running:
            self._pass(self.poll_s)
            if sim.now_s - began_s > PATIENCE * ideal_s(case):
                raise RuntimeError(f"{case.key}: {len(running)} hosts are not done after {PATIENCE} times the ideal")
            for rank in sorted(running):
                for _, outcome in sim.take_finished(rank):
                    if outcome.status != _engine.Status.OK:
                        raise RuntimeError(f"{case.key}: rank {rank} ended with {outcome.status}")
                    wanted += sum(each.total_bytes for each in outcome.arrivals)
                    missing += sum(each.missing_bytes for each in outcome.arrivals)
                    if stage[rank] == 0:
                        stage[rank] = 1
                        sim.post(rank, *self._plan(rank, step, 1).arguments())
                    else:
                        running.remove(rank)
                        took_s = sim.now_s - began_s
        messages = 2 * case.hosts * (case.hosts - 1)
        counts = {name: value - before[name] for name, value in self._counts().items()}
        self._pass(ideal_s(case))  # in which a training would compute
        return {
            "times_ideal": took_s / ideal_s(case),
            "lost": missing / wanted,
            "bytes": counts["bytes"] / messages / message_bytes(case.hosts),
            "port_drops": counts["drops"] - counts["trunk_drops"],
            "trunk_drops": counts["trunk_drops"],
            **{
                f"{name}_per_message": counts[name] / messages
                for name in ("packets", "reports", "probes", "asks", "repaired", "late")
            },
        }

    def _pass(self, time_s: float) -> None:
        end_s = self.sim.now_s + time_s
        while self.sim.now_s < end_s - 1e-9:
            self.sim.run_until(min(self.sim.now_s + self.poll_s, end_s))
            self.bursts.go_on()

    def _counts(self) -> dict[str, int]:
        """Counters since the network was made."""
        hosts = range(self.case.hosts)
        lines = [self.sim.line_counts(host)["up"] for host in hosts]
        health = [self.sim.health(host) for host in hosts]
        return {
            "bytes": sum(line["bytes"] for line in lines),
            "packets": sum(line["packets"] for line in lines),
            "drops": self.sim.queue_drops,
            "trunk_drops": self.sim.trunk_drops(),
        } | {name: sum(each[name] for each in health) for name in ("reports", "probes", "asks", "repaired", "late")}


def run_one(case: Case) -> dict[str, Any]:
    """Computes a run, ready to be kept."""
    began = time.monotonic()
    steps = Steps(case)
    found = [steps.run(step) for step in range(case.steps)]
    return {
        "network": case.network,
        "hosts": case.hosts,
        "exact": case.exact,
        "ideal_s": ideal_s(case),
        "steps": found,
        "seconds": round(time.monotonic() - began, 1),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        **surroundings(),
    }


def run_all(wanted: Sequence[Case], processes: int) -> dict[str, dict[str, Any]]:
    """Computes what is missing, and keeps each run as soon as it is done."""
    found = load("racks")
    left = [case for case in wanted if case.key not in found]
    context = multiprocessing.get_context("spawn")
    # A process for each run: the peak of its memory is measured.
    with (
        ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool,
        progress_bar(len(wanted), "racks", unit="runs") as advance,
    ):
        running = {pool.submit(run_one, case): case for case in left}
        for future in as_completed(running):
            case = running[future]
            found = load("racks") | {case.key: future.result()}  # another command may have kept runs meanwhile
            keep("racks", found)
            advance(case.key, sum(each.key in found for each in wanted))
            print(f"racks {case.key}: {found[case.key]['seconds']} s", flush=True)
    return found


# --- results ----------------------------------------------------------------------------------------------------------


def values(found: dict[str, Any], network: str, hosts: int, exact: bool, name: str, *, first: bool) -> list[float]:
    """One value for each seed: of the first step, or the mean of later ones."""
    runs = [
        run
        for _, run in sorted(found.items())
        if (run["network"], run["hosts"], run["exact"]) == (network, hosts, exact)
    ]
    each = [run["steps"][:1] if first else run["steps"][1:] for run in runs]
    return [sum(step[name] for step in steps) / len(steps) for steps in each if steps]


def sizes(found: dict[str, Any]) -> list[int]:
    """Numbers of endpoints that were run."""
    return sorted({run["hosts"] for run in found.values()})


def table(found: dict[str, Any]) -> list[str]:
    """Rows of the page's table, one for each network and number of endpoints."""
    columns = [
        ("times_ideal", ".2f", 1.0, False, True),
        ("times_ideal", ".2f", 1.0, False, False),
        ("lost", ".1f", 100.0, False, True),
        ("lost", ".1f", 100.0, False, False),
        ("bytes", ".2f", 1.0, False, True),
        ("bytes", ".2f", 1.0, False, False),
        ("times_ideal", ".2f", 1.0, True, False),
        ("bytes", ".2f", 1.0, True, False),
    ]
    rows = []
    for name, network in NETWORKS.items():
        for hosts in sizes(found):
            ideals = [run["ideal_s"] for run in found.values() if (run["network"], run["hosts"]) == (name, hosts)]
            if not ideals:
                continue
            cells = [f"{1e3 * ideals[0]:.0f} ms"]
            for what, form, scale, exact, first in columns:
                got = values(found, name, hosts, exact, what, first=first)
                cells.append(mean_text([scale * each for each in got], form))
            rows.append(f"| {network.label} | {hosts:,} | {' | '.join(cells)} |")
    return rows


def draw(found: dict[str, Any], path: Path) -> None:
    """Time, loss and bytes against the number of endpoints."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    axes = figure.subplots(1, 3)
    panels: list[tuple[str, str, Callable[[float], float]]] = [
        ("times_ideal", "time of a step, of what the narrowest line needs", lambda value: value),
        ("lost", "lost for good, per cent of the data", lambda value: 100 * value),
        ("bytes", "bytes on hosts' lines, of what the data needs", lambda value: value),
    ]
    for axis, (what, title, scaled) in zip(axes, panels, strict=True):
        for place, (name, network) in enumerate(NETWORKS.items()):
            for first in (False, True):
                points = [
                    (hosts, *mean_and_bar([scaled(each) for each in got]))
                    for hosts in sizes(found)
                    if (got := values(found, name, hosts, False, what, first=first))
                ]
                if not points:
                    continue
                where, middle, bar = zip(*points, strict=True)
                axis.errorbar(
                    [hosts * 1.03 ** (place - 2) for hosts in where],
                    middle,
                    yerr=bar,
                    color=network.colour,
                    marker="o",
                    markersize=5,
                    markerfacecolor="white" if first else network.colour,
                    linestyle=":" if first else "-",
                    linewidth=1 if first else 1.6,
                    capsize=2,
                    label=None if first else network.label,
                )
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes(found), [f"{hosts:,}" for hosts in sizes(found)])
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("endpoints")
        axis.minorticks_off()
        if what == "times_ideal":
            axis.set_yscale("log", base=2)
            axis.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        else:
            axis.set_ylim(bottom=0 if what == "lost" else 0.95)
        axis.grid(axis="y", color="#e9ecef")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in (axes[0], axes[2]):
        axis.axhline(1, color="#343a40", linewidth=1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(
        "One step of a model of 1.5 MB at 1 Gbit/s (filled: later steps; hollow, dotted: the first)", fontsize=11
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--only", default="", help="only runs whose key contains this")
    parser.add_argument("--draw", action="store_true", help="compute nothing, draw what is there")
    chosen = parser.parse_args()
    wanted: Iterable[Case] = (case for case in cases() if chosen.only in case.key)
    found = load("racks") if chosen.draw else run_all(list(wanted), chosen.processes)
    draw(found, RESULTS / "racks.png")
    print(f"{RESULTS / 'racks.png'} is drawn")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
