"""Steps of many endpoints in racks: networks, their physical ideal, and the shipped core under virtual time in them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

import stormtorch._engine as _engine
from stormtorch.collectives.base.spans import shards
from stormtorch.exchange.exchange import Plan, Receive, ReduceMode, Reduction, Send, WireDtype
from stormtorch.exchange.options import Options
from stormtorch.exchange.reliability import EXACT, LOSSY, Reliability
from stormtorch.exchange.simulated import core_settings
from stormtorch.network.faults import faults
from stormtorch.network.loss import Bernoulli, LossModel, PerLink
from stormtorch_lab._engine import SharedNetwork

DELAY_S = 25e-6  # from host to host of a rack; twice that between racks
DATAGRAM_BYTES, PAYLOAD_BYTES, WIRE_BYTES = 1472, 1440, 1472 + 42  # on the wire with Ethernet, IPv4 and UDP
# Of the whole model, whatever the number of endpoints: one full datagram for each pair of 1,024.
MODEL_BYTES = 1024 * PAYLOAD_BYTES
# Ranks look whether their exchange has ended so many times in the ideal time of a step.
POLLS = 400
PATIENCE_S = 20.0


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
    "fast": Network(label="no loss, 10 Gbit/s", colour="#2b8a3e", bytes_per_s=1e10 / 8),
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
# The same with lines of 10 Gbit/s: at 1 Gbit/s, the first contact of 1,024 endpoints takes more memory than we have.
NETWORKS |= {
    f"fast-{name}": replace(
        NETWORKS[name],
        label=f"{NETWORKS[name].label}, 10 Gbit/s",
        bytes_per_s=NETWORKS["fast"].bytes_per_s,
        sending=NETWORKS[name].sending.replace("200mbit", "2gbit"),
        dark_s=NETWORKS[name].dark_s / 10,
    )
    for name in ("incast", "paced", "bursts", "lossy")
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
        return 5 if self.hosts <= 64 else 3 if self.hosts <= 256 else 2


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
            sim.set_unreachable(host, dark)

    def _lasts(self, dark: bool) -> float:
        return self._random.expovariate(1 / self._mean_s[dark])

    def go_on(self) -> None:
        """Switches the lines whose time has come."""
        for host, until in enumerate(self._until):
            if self._sim.now_s >= until:
                self._dark[host] = not self._dark[host]
                self._until[host] = self._sim.now_s + self._lasts(self._dark[host])
                self._sim.set_unreachable(host, self._dark[host])


def make_sim(case: Case) -> tuple[_engine.Sim, SharedNetwork]:
    """The network of a case, with a core for every host."""
    network, rack = NETWORKS[case.network], case.hosts_per_rack
    loss: float | LossModel = 0.0
    if network.rack_loss:
        loss = PerLink.bad_rack(range(rack), case.hosts, Bernoulli(p=network.rack_loss), Bernoulli(p=0.0))
    trunk_bytes_per_s = rack * network.bytes_per_s / network.oversubscribed
    options = Options(rate=network.sending, datagram_bytes=DATAGRAM_BYTES)
    shared = SharedNetwork(
        case.hosts,
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
        DELAY_S,
    )
    sim = _engine.Sim(
        case.hosts,
        core_settings(case.hosts, options, unlimited=False, seed=case.seed),
        dict(faults(loss=loss, seed=case.seed).settings),
        DELAY_S,
        0.0,
        0,
        shared,
    )
    if network.slow_rack != 1.0:
        shared.set_trunk(0, trunk_bytes_per_s / network.slow_rack)
    return sim, shared


class Steps:
    """Steps of all hosts over one network."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.sim, self.network = make_sim(case)
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
            if sim.now_s - began_s > PATIENCE_S:
                raise RuntimeError(f"{case.key}: {len(running)} hosts are not done after {PATIENCE_S:g} s")
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
        lines = [self.network.access_link_counts(host)["up"] for host in hosts]
        health = [self.sim.health(host) for host in hosts]
        return {
            "bytes": sum(line["bytes"] for line in lines),
            "packets": sum(line["packets"] for line in lines),
            "drops": self.sim.queue_drops,
            "trunk_drops": self.network.trunk_drops(),
        } | {name: sum(each[name] for each in health) for name in ("reports", "probes", "asks", "repaired", "late")}
