"""Training of a language model against the clock, by one backend after the other or alternating."""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch

from stormtorch.network.faults import faults
from stormtorch.telemetry.progress import Advance, ignore_progress
from stormtorch_lab.bench.backends import chosen_tcp, congestion_controls
from stormtorch_lab.bench.convergence import ConvergenceSettings, Curve, Point
from stormtorch_lab.bench.language import evaluate, language_task, slowest
from stormtorch_lab.bench.replicas import GlooReplica, Replica, close_groups, open_groups, open_replica
from stormtorch_lab.jobs.control import LabRequest, Stage
from stormtorch_lab.jobs.counters import Delivery
from stormtorch_lab.jobs.failed import RankFailed
from stormtorch_lab.jobs.launch import open_lab, run_in_lab, run_local
from stormtorch_lab.jobs.ranks import Member
from stormtorch_lab.tasks.models.llama import Llama

Watch = Callable[[Point], None]
"""Function that is called with each evaluation."""
# Seconds in which a call must end after its connections are cut.
_ABORT_S = 5.0
# Payload of a datagram under fault injection: lost chunks then have the size that they have on a network.
_ETHERNET_BYTES = 1472


def run_convergence(
    settings: ConvergenceSettings, advance: Advance = ignore_progress, watch: Watch | None = None
) -> Iterator[Curve]:
    """Trains with all backends, in the same lab; yields each curve as soon as its training has ended.

    Args:
        settings: What to train. One by one, each backend has its own processes; alternating backends share them.
        advance: Called with the seconds of training so far, summed over the backends.
        watch: Called with each evaluation immediately.

    Raises:
        stormtorch_lab.jobs.failed.RankFailed: A rank failed or timed out.
        stormtorch_lab.netns.LabError: The lab failed, or this machine cannot make one.
    """
    names = settings.contenders
    clocks_s = dict.fromkeys(names, 0.0)
    received: dict[str, list[Point]] = {name: [] for name in names}

    def on_report(point: object) -> None:
        assert isinstance(point, Point)
        received[point.backend].append(point)
        clocks_s[point.backend] = settings.seconds if point.gave_up else min(point.clock_s, settings.seconds)
        advance(f"{point.backend}, loss {point.loss:.2f} on {settings.ranks} ranks", round(sum(clocks_s.values())))
        if watch is not None:
            watch(point)

    with contextlib.ExitStack() as places:
        network, lab = settings.network, None
        if network is not None:
            lab = places.enter_context(open_lab(settings.ranks, network, congestion_controls(settings.backends)))
        for group in [names] if settings.turns else [(name,) for name in names]:
            advance(group[0], round(sum(clocks_s.values())))
            args, limit_s = (settings, group), settings.timeout_s
            if lab is None or network is None:
                ranks, where = run_local(
                    _rank_learns, settings.ranks, args, timeout_s=limit_s, advance=advance, on_report=on_report
                )
            else:
                try:
                    ranks, where = run_in_lab(
                        _rank_learns,
                        lab,
                        network,
                        settings.ranks,
                        args,
                        timeout_s=limit_s,
                        advance=advance,
                        on_report=on_report,
                    )
                except RankFailed:
                    if not received[group[-1]] or not received[group[-1]][-1].gave_up:
                        raise
                    yield Curve.of(received[group[-1]], params=_params(settings), tcp=chosen_tcp(group[-1]))
                    continue
            for curves in zip(*ranks, strict=True):
                arrived = sum(curve.arrived for curve in curves) / len(curves)
                yield Curve(**asdict(curves[0]) | {"arrived": arrived, "measured": where.get("measured")})


def _params(settings: ConvergenceSettings) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama(settings.size).parameters())


# --- on every rank -------------------------------------------------------------------------------------------------


class _Learner:
    """One backend's training on this rank: its replica, and its evaluations so far."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.points: list[Point] = []
        self._count = 1

    @property
    def clock_s(self) -> float:
        return self.points[-1].clock_s

    def begin(self, loss: float) -> Point:
        return self._keep(Point(backend=self.replica.name, clock_s=0.0, steps=0, loss=loss))

    def learn(self, stage: Stage[Replica], settings: ConvergenceSettings, held_out: torch.Tensor) -> Point:
        """Makes steps for about `every_s` and evaluates."""
        last, count = self.points[-1], self._count
        sample = stage.timed(self.replica, partial(_steps, self.replica, count), 0, len(self.points))
        if sample.gave_up:
            return self._keep(Point(**asdict(last) | {"gave_up": True}))
        seconds = slowest(stage, sample.seconds)
        clock_s = last.clock_s + seconds
        # The first steps allocate memory and open connections: they do not predict the time of later ones.
        ahead_s = min(settings.every_s, max(settings.seconds - clock_s, 0.0))
        self._count = min(max(math.ceil(ahead_s * count / seconds), 1), 8 * count)
        return self._keep(
            Point(
                backend=self.replica.name,
                clock_s=clock_s,
                steps=last.steps + count,
                loss=evaluate(stage, self.replica, held_out),
                arrived=sample.arrived,
            )
        )

    def _keep(self, point: Point) -> Point:
        self.points.append(point)
        return point


def _rank_learns(member: Member, settings: ConvergenceSettings, names: tuple[str, ...]) -> list[Curve]:
    open_groups(member)
    task, held_out = language_task(
        member.rank,
        member.world,
        size=settings.size,
        batch=settings.batch,
        context=settings.context,
        lr=settings.lr,
        seed=settings.seed,
    )
    datagram_bytes = _ETHERNET_BYTES if settings.faults else None
    learners = [_Learner(open_replica(name, task, member, datagram_bytes, settings.policy_of(name))) for name in names]
    lab = settings.network is not None
    # Alternating backends are never aborted: after gloo's connections are cut, a process that storm shares may hang.
    patience_s = settings.patience_s if lab and not settings.turns else None
    # Without loss, fault injection is off, as it costs time for every datagram.
    losing = faults(loss=settings.faults, seed=settings.seed) if settings.faults else contextlib.nullcontext()
    with Stage(member, [each.replica for each in learners], patience_s=patience_s, lab=lab) as stage:
        report = member.report if member.rank == 0 else lambda _point: None
        stage.cue(LabRequest.LOSE)
        stage.cue(LabRequest.COUNT)
        with losing:
            for learner in learners:
                report(learner.begin(evaluate(stage, learner.replica, held_out)))
            # The clocks are equal on all ranks, so all choose the same learner.
            while active := [each for each in learners if _goes_on(each, settings.seconds)]:
                learner = min(active, key=lambda each: each.clock_s)
                with _ending(member, learner, patience_s):
                    point = learner.learn(stage, settings, held_out)
                report(point)
            stage.barrier()  # fault injection ends only when all ranks are done
        stage.cue(LabRequest.READ)
    close_groups()
    params = sum(parameter.numel() for parameter in task.model.parameters())
    return [Curve.of(each.points, params=params, tcp=_tcp(each.replica)) for each in learners]


@contextlib.contextmanager
def _ending(member: Member, learner: _Learner, patience_s: float | None) -> Iterator[None]:
    """Ends this process if its call goes on long after the wait limit: some ranks whose connections are cut wait in
    DistributedDataParallel for ever. Rank 0 ends first, and reports that the learner is aborted.
    """
    if patience_s is None:
        yield
        return

    def end() -> None:
        if member.rank == 0:
            member.report(Point(**asdict(learner.points[-1]) | {"gave_up": True}))
        os._exit(1)

    last_resort = threading.Timer(patience_s + _ABORT_S * (1 if member.rank == 0 else 2), end)
    last_resort.daemon = True
    last_resort.start()
    try:
        yield
    finally:
        last_resort.cancel()


def _goes_on(learner: _Learner, seconds: float) -> bool:
    return learner.clock_s < seconds and not learner.points[-1].gave_up


def _tcp(replica: Replica) -> str | None:
    return replica.connections.congestion_control if isinstance(replica, GlooReplica) else None


def _steps(replica: Replica, count: int) -> Delivery:
    delivery = replica.run_steps(count)
    replica.synchronise()
    return delivery
