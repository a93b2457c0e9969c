# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""A rank of a job that is recomputed: it trains, writes down who gave what, and dies where its schedule says so."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore  # torch.distributed has it, but its types do not

import recompute_recording_apart as apart
import stormtorch
from recompute_program import SILENCE_S, Program, Schedule
from recompute_recording import RankRecording, SharedProgress, watch
from stormtorch import Options, faults, prepare
from stormtorch.collectives import Group

STEP_S = 0.01
"""Least time of a step, so that processes can come in before the job has ended."""


def run(schedule: Schedule, folder: str, rank: int, incarnation: int) -> None:
    """Trains. The target of a process; rank -1 joins."""
    torch.set_num_threads(1)
    where = Path(folder)
    progress = SharedProgress(where / "board")
    events = schedule.events if incarnation == 0 else ()
    mine = [number for number, each in enumerate(events) if each.rank == rank and each.kind != "join"]
    with (where / f"errors-{rank}-{incarnation}").open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    recording = RankRecording(where / f"book-{rank}-{incarnation}", schedule.events, mine, progress)
    logging.getLogger("stormtorch").addHandler(recording)
    watch(recording)
    apart.watch(recording)
    recording.write("starts")
    bad: Any = faults(loss=schedule.program.loss, seed=schedule.seed) if schedule.program.loss else None
    with bad or contextlib.nullcontext():
        try:
            _train(schedule, where, rank, incarnation, recording)
        except SystemExit:
            recording.write("left")
            raise
        except BaseException as error:
            recording.write("failed", words=f"{type(error).__name__}: {error}")
            raise


def _enter(schedule: Schedule, where: Path, rank: int, incarnation: int) -> Any:
    options = Options(silence_s=SILENCE_S, timeout_s=60.0, linger_s=0.5, spare_ranks=4, rejoin=incarnation > 0)
    if schedule.program.loss:
        # Chunks of some fifty elements, so that of each shard a part is lost.
        options = replace(options, datagram_bytes=256)
    if rank < 0:
        addresses = sorted(each.read_text() for each in where.glob("address-*"))
        return stormtorch.join(",".join(addresses), options)
    store = FileStore(str(where / "store"), 10_000)
    store.set_timeout(timedelta(seconds=60))
    return Group(stormtorch.connect(store, rank, schedule.ranks, options))


def _train(schedule: Schedule, where: Path, rank: int, incarnation: int, recording: RankRecording) -> None:
    program, progress = schedule.program, recording.progress
    group = _enter(schedule, where, rank, incarnation)
    transport = group.transport
    recording.rank = rank = transport.rank
    address = f"127.0.0.1:{transport.cards[rank].reception}"
    (where / f"address-{rank}-{incarnation}").write_text(address)
    model = program.model()
    sessions: list[Any] = []
    recording.write("begins", rank=rank, incarnation=incarnation)
    for number, (module, parameters) in enumerate(program.trained(model)):
        optimizer = program.make(parameters, number)
        prepare(module, optimizer, policy=program.policy(), group=group)
        sessions.append(optimizer)
        recording.order.append(optimizer.session)  # type: ignore[attr-defined]  # `prepare` adds it
    for optimizer in sessions:
        if optimizer.session.view.number == 1:
            apart.view(recording, optimizer.session, held=True) if program.diloco else recording.view(optimizer.session)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=program.scaler)
    first = sessions[0].session
    while not progress.end or first.steps < progress.end:
        progress.report(rank, first.steps)
        time.sleep(STEP_S)
        _inject_event(recording, first)
        recording.write("iteration", steps=first.steps)
        for place, part in enumerate(program.parts(model)):
            chosen = [sessions[place]] if program.sessions == "models" else sessions
            _iterate(program, recording, model, place, part, chosen, scaler, rank)
        scaler.update() if program.scaler else None
    progress.report(rank, first.steps, 2)
    for optimizer in sessions:
        optimizer.session.wait()
    with contextlib.ExitStack() as stack:
        for module, _ in program.trained(model)[: None if program.sessions == "models" else 1]:
            stack.enter_context(stormtorch.exact(module))
        recording.write("end", steps=first.steps, values=[each.detach().clone() for each in model.parameters()])
    transport.drain()
    transport.close()


def _inject_event(recording: RankRecording, session: Any) -> None:
    """Does what is due between two steps, and has a clock do what is due at any moment."""
    recording.reach(session, "rest")
    event = recording.due(session, "rest")
    if event is not None:
        recording.begin(event, session)
        if event.kind == "leave":
            time.sleep(event.seconds)
            recording.write("leaves", steps=session.steps)
            stormtorch.leave()
            raise SystemExit(0)
        recording.write("paused", seconds=event.seconds)
        recording.progress.report(recording.rank, session.steps, 1, event.seconds)
        os.kill(os.getpid(), signal.SIGSTOP)
        recording.progress.report(recording.rank, session.steps)
    event = recording.due(session, "any")
    if event is not None:
        recording.begin(event, session)
        timer = threading.Timer(0.004 * (1 + event.place), lambda: recording.die(session.steps, "any"))
        timer.daemon = True
        timer.start()


def _iterate(
    program: Program,
    recording: RankRecording,
    model: torch.nn.Module,
    place: int,
    part: torch.nn.Module,
    optimizers: list[Any],
    scaler: Any,
    rank: int,
) -> None:
    steps = optimizers[0].session.steps

    def compute() -> None:
        scale = float(scaler.get_scale()) if program.scaler else 1.0
        values = [each.detach().clone() for each in model.parameters()]
        recording.write("compute", part=place, steps=steps, rank=rank, scale=scale, values=values)
        *first, last = program.losses(part, rank, steps, scale, scaler.scale)
        with part.no_sync():  # type: ignore[operator]  # `prepare` adds it
            for loss in first:
                loss().backward()
        last().backward()

    if program.closure:
        for optimizer in optimizers:
            optimizer.step(compute)
    else:
        compute()
        if program.scaler:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if program.clip is not None:
            torch.nn.utils.clip_grad_norm_(part.parameters(), program.clip)
        for optimizer in optimizers:
            scaler.step(optimizer) if program.scaler else optimizer.step()
    for optimizer in optimizers:
        program.after(optimizer.session.parameters)
        optimizer.zero_grad()
