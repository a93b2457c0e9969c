"""A training step under DistributedDataParallel or `prepare`, against gloo, in interleaved rounds.

report = run_ddp(DdpSettings(ranks=4))
report = run_ddp(DdpSettings(ranks=4, network=Conditions(rate="400mbit", loss=0.1), backends=LAB_DEFAULT))
report.write(Path("ddp.json"))
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from stormtorch.checks import BadSetting, check_between, check_subset
from stormtorch.collectives.formats.grid import GRIDS
from stormtorch.telemetry.progress import Advance, ignore_progress
from stormtorch.telemetry.statistics import median
from stormtorch.theory.shards import HostSpeed, ShardTimes
from stormtorch_lab.bench.backends import check_backends, congestion_controls
from stormtorch_lab.bench.replicas import (
    BACKENDS,
    DEFAULT,
    DRIFT,
    DRIFT_FLAT,
    DRIFT_RATE,
    LEARNING_RATE,
    NO_SYNC,
    GlooReplica,
    Replica,
    StormReplica,
    close_groups,
    contenders,
    open_groups,
    open_replica,
    transformer_task,
    wire_of,
)
from stormtorch_lab.bench.results import CPU, BackendResult, BenchReport, ideal_s, statistics
from stormtorch_lab.jobs.control import BARRIER, ORDER, Call, LabRequest, RoundRobin, Stage
from stormtorch_lab.jobs.counters import Counters, Log, Sample, merge
from stormtorch_lab.jobs.launch import open_lab, run_in_lab, run_local
from stormtorch_lab.jobs.ranks import Member
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.policies.presets import WIRES

STEP = (
    "zero_grad, forward, backward and the update by SGD; DistributedDataParallel has its default buckets "
    "(gradient_as_bucket_view=True), storm-drift is stormtorch.prepare with the defaults of BoundedDrift, storm-alone "
    "the same without standbys, storm-drift-flat without hierarchy, storm-drift-rate with shards by measured rates; "
    "one torch thread per rank"
)
TIMES = (
    "wall time of the slowest rank, from the end of the barrier to the end of its call, divided by the steps of a "
    "call. All calls have the same number of steps, without a barrier between them; a call ends when the parameters of "
    "its last step have arrived or are lost"
)
IDEAL = (
    "2(n-1)/n x bytes of the parameters on the wire, which each of n hosts must send and receive, at the rate of its "
    "line"
)
MODEL = "transformer of 8 layers, float32; each rank has its own sequence"
# Sums in another order differ by the rounding of a few additions; narrower types are rounded twice.
_TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3, "int8": 5e-2, "int4": 0.6}
# Rounding error of gradients recovered from parameters: two parameters of up to 2 were rounded, and their
# difference was divided by the learning rate.
_DRIFT_ROUNDING = 2 * 2**-24 * 2 / LEARNING_RATE


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """Settings of the benchmark."""

    ranks: int = 4
    """Processes of this machine, or of all hosts of a lab together."""
    ranks_per_host: int = 1
    """Ranks on each host of a lab. With several, storm-drift reduces inside a host first."""
    params_m: float = 25.0
    """Parameters of the model in millions; about, as its width is a multiple of 8."""
    tokens: int = 16
    """Tokens of each rank per step: few, so that computation does not hide the cost of communication."""
    iters: int = 20
    """Timed rounds."""
    steps: int = 1
    """Steps of a backend in each round, without a barrier between them. With more than one, prepared replicas receive
    parameters while they compute, as in a training, and DistributedDataParallel's ranks need not wait for the slowest
    one at the end of every step."""
    warmup: int = 3
    """Rounds before them that are checked but not counted."""
    backends: tuple[str, ...] = DEFAULT
    wires: tuple[str, ...] = ("float32",)
    """Wires of storm-lossy and storm-drift: each wire is a separate backend."""
    device: str = "cpu"
    """Device of the model: "cpu", or "cuda", where all ranks share a GPU."""
    network: Conditions | None = None
    """Conditions of a lab, whose loss affects all backends; None is loopback."""
    patience_s: float = 30.0
    """Wait limit in seconds, in a lab: a call over TCP is aborted after it; a backend whose rounds have taken as long
    skips the remaining ones."""
    timeout_s: float = 600.0
    """Seconds after which the benchmark times out."""

    def __post_init__(self) -> None:
        check_between("ranks", self.ranks, 2, 64)
        check_between("ranks_per_host", self.ranks_per_host, 1, 32)
        if self.ranks_per_host > 1 and self.network is None:
            raise BadSetting("ranks_per_host", "needs a lab, as loopback has one host: give a --rate")
        if self.ranks % self.ranks_per_host or self.hosts < 2:
            raise BadSetting("ranks_per_host", f"must divide the ranks, {self.ranks}, among two hosts or more")
        check_between("params_m", self.params_m, 0.01, 1000)
        check_between("tokens", self.tokens, 1, 100_000)
        check_between("iters", self.iters, 1, 1_000_000)
        check_between("steps", self.steps, 1, 10_000)
        check_between("warmup", self.warmup, 0, 1_000_000)
        check_backends(self.backends, self.network, BACKENDS, further=(DRIFT_FLAT, DRIFT_RATE))
        check_subset("wire", self.wires, tuple(WIRES))
        check_subset("device", (self.device,), ("cpu", "cuda"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise BadSetting("device", "must be cpu on this machine: torch finds no GPU")
        check_between("patience_s", self.patience_s, 0.1, 1e5)
        check_between("timeout_s", self.timeout_s, 1, 1e6)

    @property
    def hosts(self) -> int:
        """Number of hosts of a lab."""
        return self.ranks // self.ranks_per_host

    @property
    def contenders(self) -> tuple[str, ...]:
        """Backends, with one for each of the wires in place of storm-lossy and of storm-drift."""
        return contenders(self.backends, self.wires)


@dataclass(frozen=True, kw_only=True)
class StepResult(BackendResult):
    """Result of one backend's steps."""

    adds_s: float
    """Time that communication adds to a step: the median minus that of a step without communication."""
    moved_bytes: float
    """Bytes that each of n hosts must send and receive in a step: 2(n-1)/n of the parameters on the wire. On one
    machine, each rank counts as a host."""
    sent_bytes: float | None
    """Bytes that a rank's engine sent in a step, on average, with headers and control messages; None over TCP."""
    copied_bytes: float | None
    """Bytes that a rank copied into shared memory in a step, or read from it, on average; None over TCP. Copies
    of gradients into buckets, or from and to a GPU, are not counted; every backend makes them."""
    host_bytes: float | None
    """Bytes of the datagrams that a host's ranks sent in a step, on average, counted the same way: the load of its
    link. Shared memory is not included."""
    ideal_s: float | None
    """Time of `moved_bytes` at the rate of a link; None if links have no rate."""
    adds_over_ideal: float | None
    over_gloo: float | None
    """Median divided by that of the first gloo; None without one."""
    speedup: float | None
    """Inverse of `over_gloo`."""
    gloo_gave_up: bool
    """Whether that gloo's median comes from an aborted call: `speedup` is then a lower, `over_gloo` an upper bound."""
    cpu_s: float
    """Mean CPU seconds of all ranks per step."""
    cpu_s_per_gb: float
    """CPU seconds of all ranks that communication adds to a step, per 10^9 bytes of gradients; gradients count once, as
    float32, on any wire."""


DdpReport: TypeAlias = BenchReport[StepResult]


def run_ddp(settings: DdpSettings, advance: Advance = ignore_progress) -> DdpReport:
    """Runs the benchmark, and returns when all ranks have ended.

    Raises:
        stormtorch_lab.jobs.failed.RankFailed: A rank failed, had wrong gradients, or timed out.
        stormtorch_lab.netns.LabError: The lab failed, or this machine cannot make one.
    """
    conditions = {
        "ranks": settings.ranks,
        "ranks_per_host": settings.ranks_per_host,
        "params_asked": settings.params_m * 1e6,
        "tokens": settings.tokens,
        "iters": settings.iters,
        "steps": settings.steps,
        "warmup": settings.warmup,
        "backends": list(settings.contenders),
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "model": MODEL,
        "step": STEP,
        "times": TIMES,
        "barrier": BARRIER,
        "order": ORDER,
        "ideal": IDEAL,
        "cpu": CPU + "; here the gradients are the tensor, and the time of a step without communication is subtracted",
    } | surroundings()
    if settings.network is None:
        logs, where = run_local(_rank_steps, settings.ranks, (settings,), timeout_s=settings.timeout_s, advance=advance)
    else:
        with open_lab(settings.hosts, settings.network, congestion_controls(settings.backends)) as lab:
            logs, where = run_in_lab(
                _rank_steps,
                lab,
                settings.network,
                settings.hosts,
                (settings,),
                timeout_s=settings.timeout_s,
                advance=advance,
                per_host=settings.ranks_per_host,
            )
        where["patience_s"] = settings.patience_s
    return _report(settings, conditions | where, merge(logs))


def _report(settings: DdpSettings, conditions: dict[str, Any], log: Log) -> DdpReport:
    by_name: dict[str, list[Sample]] = {}
    for sample in log.samples:
        by_name.setdefault(sample.backend, []).append(sample)
    size_bytes = log.samples[0].bytes
    no_sync_s = median([sample.seconds for sample in by_name[NO_SYNC]])
    rate_bits = None if settings.network is None else settings.network.rate_bits
    conditions |= {
        "params": size_bytes // 4,
        "no_sync_s": no_sync_s,
        "no_sync_cpu_s": _mean_cpu_s(by_name[NO_SYNC]),
        "line_s": None if rate_bits is None else ideal_s(settings.hosts, size_bytes, rate_bits),
        "kernel_drops": sum(counters.kernel_drops for counters in log.counters.values()),
        "chunk_bytes": log.chunk_bytes,
    }
    if settings.network is not None and settings.network.lines:
        conditions["shards"] = _shards(settings.network, settings.hosts, size_bytes)
    gloo = next((name for name in settings.backends if name.startswith("gloo") and name in by_name), None)
    peer = None if gloo is None else BackendResult(**statistics(log, gloo, by_name[gloo]))
    results = []
    for name in settings.contenders:
        samples = by_name.get(name)
        if not samples:
            continue
        found = statistics(log, name, samples)
        adds_s = found["median_s"] - no_sync_s
        cpu_s = _mean_cpu_s(samples)
        travels = _travelling_bytes(name, size_bytes // 4, log.chunk_bytes)
        ideal = None if rate_bits is None else ideal_s(settings.hosts, travels, rate_bits)
        counters = log.counters.get((name, size_bytes))
        results.append(
            StepResult(
                adds_s=adds_s,
                moved_bytes=2 * (settings.hosts - 1) / settings.hosts * travels,
                sent_bytes=counters.sent_bytes / (settings.ranks * len(samples) * settings.steps) if counters else None,
                copied_bytes=counters.copied_bytes / (settings.ranks * len(samples) * settings.steps)
                if counters
                else None,
                host_bytes=counters.datagram_bytes / (settings.hosts * len(samples) * settings.steps)
                if counters
                else None,
                ideal_s=ideal,
                adds_over_ideal=adds_s / ideal if ideal else None,
                over_gloo=found["median_s"] / peer.median_s if peer else None,
                speedup=peer.median_s / found["median_s"] if peer else None,
                gloo_gave_up=peer is not None and peer.median_is_bound,
                cpu_s=cpu_s,
                cpu_s_per_gb=(cpu_s - conditions["no_sync_cpu_s"]) / size_bytes * 1e9,
                **found,
            )
        )
    return DdpReport(conditions, results, log.samples)


def _shards(network: Conditions, hosts: int, size_bytes: int) -> dict[str, Any]:
    """Predicts the time of a step's exchange with equal and with optimal shards, if links differ."""
    lines = [network.line(host) for host in range(hosts)]
    speeds = [HostSpeed((line.up_bits or math.inf) / 8, (line.down_bits or math.inf) / 8) for line in lines]
    times = ShardTimes(speeds, size_bytes)
    best = times.best()
    return {
        "of": "float32, one rank per host, no loss, no headers, no standby, no optimizer: theory.ShardTimes",
        "equal_s": times.step_s([1 / hosts] * hosts),
        "best_s": times.step_s(best),
        "best": [round(share, 4) for share in best],
    }


def _mean_cpu_s(samples: list[Sample]) -> float:
    return sum(sample.cpu_s for sample in samples) / len(samples)


def _travelling_bytes(name: str, params: int, chunk_bytes: int | None) -> int:
    wire = WIRES[wire_of(name)]
    if wire in GRIDS:
        assert chunk_bytes is not None
        return GRIDS[wire].message_bytes(params, chunk_bytes)
    return params * wire.itemsize


# --- on every rank -------------------------------------------------------------------------------------------------


def _rank_steps(member: Member, settings: DdpSettings) -> Log:
    lab = settings.network is not None
    open_groups(member)
    task = transformer_task(settings.params_m, settings.tokens, settings.device, member.rank)
    replicas = [open_replica(name, task, member) for name in (*settings.contenders, NO_SYNC)]
    storms = [replica for replica in replicas if isinstance(replica, StormReplica)]
    log = Log(
        [],
        chunk_bytes=storms[0].transport.chunk_bytes if storms else None,
        tcp={each.name: each.connections.congestion_control for each in replicas if isinstance(each, GlooReplica)},
    )
    with Stage(member, replicas, patience_s=settings.patience_s if lab else None, lab=lab) as stage:
        size_bytes = _check_without_loss(stage, log)
        stage.cue(LabRequest.LOSE)
        round_robin_calls = RoundRobin(stage, size_bytes, partial(_steps_call, settings.steps))
        for round_index in range(settings.warmup):
            for replica, sample in round_robin_calls.round(round_index):
                if sample.gave_up:
                    log.samples.append(_per_step(replica, sample))  # there will be no other
                elif replica.name != NO_SYNC:
                    _check_alike(stage, replica)
        before = {storm.name: Counters.of(storm.transport) for storm in storms}
        stage.cue(LabRequest.COUNT)
        round_robin_calls = RoundRobin(stage, size_bytes, partial(_steps_call, settings.steps))
        for round_index in range(settings.iters):
            log.samples.extend(_per_step(replica, sample) for replica, sample in round_robin_calls.round(round_index))
            if member.rank == 0:
                member.report(f"{size_bytes / 4e6:.3g} M parameters")
        stage.cue(LabRequest.READ)
        for storm in storms:
            log.counters[storm.name, size_bytes] = Counters.of(storm.transport) - before[storm.name]
    close_groups()
    return log


def _steps_call(steps: int, replica: Replica) -> Call:
    return partial(replica.run_steps, steps)


def _per_step(replica: Replica, sample: Sample) -> Sample:
    """Divides the sample of a call by its steps. For an aborted call, the result is a lower bound."""
    return sample._replace(seconds=sample.seconds / replica.begun, cpu_s=sample.cpu_s / replica.begun)


def _check_without_loss(stage: Stage[Replica], log: Log) -> int:
    """Makes and checks the first step, from equal weights: every replica must have the mean. Returns its bytes."""
    *replicas, local = stage.contenders
    local.run_steps(1)
    mean = [gradient.clone() for gradient in local.gradients()]
    for gradient in mean:
        stage.control.allreduce([gradient]).wait()
        gradient /= stage.member.world
    size_bytes = sum(gradient.nbytes for gradient in mean)
    for replica in replicas:
        sample = stage.timed(replica, _steps_call(1, replica), size_bytes, 0)
        if sample.gave_up:
            log.samples.append(sample)  # there will be no other
            continue
        _check_alike(stage, replica)
        # The queue of a link with a rate may overflow while a backend probes the rate; contributions lost by an owner
        # are missing in its part of the mean, on all ranks.
        if stage.on_all_ranks(sample.arrived == 1.0):
            _check_mean(replica, mean)
    return size_bytes


def _check_alike(stage: Stage[Replica], replica: Replica) -> None:
    """Raises RuntimeError unless all ranks have the same gradients, or parameters of owners, bit for bit."""
    own = torch.stack([tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in replica.alike()])
    total = own.clone()
    stage.control.allreduce([total]).wait()
    different = int((total != own * stage.member.world).sum())
    if not stage.on_all_ranks(different == 0):
        raise RuntimeError(f"{replica.name}: {different} of {own.numel()} tensors differ between ranks")


def _check_mean(replica: Replica, mean: list[torch.Tensor]) -> None:
    """Raises RuntimeError unless the gradients are the mean over the ranks."""
    # Grids round relative to the largest value of a block, which may belong to another parameter.
    largest = max(float(expected.abs().max()) for expected in mean) if WIRES[replica.wire] in GRIDS else 0.0
    for index, (gradient, expected) in enumerate(zip(replica.gradients(), mean, strict=True)):
        furthest = float((gradient - expected).abs().max()) - (_DRIFT_ROUNDING if replica.name in DRIFT else 0.0)
        if not furthest <= _TOLERANCES[replica.wire] * max(float(expected.abs().max()), largest):
            raise RuntimeError(f"{replica.name}: gradient {index} is not the mean over the ranks, off by {furthest:g}")
