"""One simulated training: any model, loss and optimizer, on any number of virtual workers."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec

import torch
from torch import nn

import stormtorch._engine as _engine
from stormtorch.checks import check
from stormtorch.collectives.wire import Wire
from stormtorch.network.loss import Bernoulli, LossModel
from stormtorch.policies import BoundedDrift
from stormtorch.policies.personal_parts import check_parts, names_of
from stormtorch.policies.policy import OwnerPolicy, Policy
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.telemetry.ledger import LedgerRow
from stormtorch_lab.simulation.checkpoints import Checkpoint, digest
from stormtorch_lab.simulation.fit import fitting
from stormtorch_lab.simulation.gradients import How, Loss, trained
from stormtorch_lab.simulation.outcome import ProgressPoint, Simulated
from stormtorch_lab.simulation.parameters.chunks import Chunks
from stormtorch_lab.simulation.processes import Processes
from stormtorch_lab.simulation.replicated import Replicated
from stormtorch_lab.simulation.same_bits import same_bits
from stormtorch_lab.simulation.setting import MakeOptimizer, Reuse, Setting, Works
from stormtorch_lab.simulation.sharded import Sharded
from stormtorch_lab.simulation.workers import Evaluate, Workers

__all__ = ["DATAGRAM_BYTES", "Batches", "Evaluate", "ProgressPoint", "Simulated", "simulate"]

P = ParamSpec("P")

DATAGRAM_BYTES = 1472
"""Size of an Ethernet datagram without IP and UDP headers. A datagram is lost as a whole."""

Batches = Callable[[int, int, int], Any]
"""`batches(step, first, last)` returns the stacked batches of workers first to last - 1."""


def _alone(function: Callable[P, Simulated]) -> Callable[P, Simulated]:
    """Makes `device` the current GPU during a call, and restores torch's matmul precision afterwards.

    Otherwise, operations that name no GPU, such as recording, drawing and summing, would use another one. With
    `deterministic`, it also has torch compute the same bits every time.
    """

    @functools.wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> Simulated:
        device = torch.device(str(kwargs.get("device", "cpu")))
        multiplies = torch.get_float32_matmul_precision()
        wanted = bool(kwargs.get("deterministic"))
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(), same_bits(wanted):
            try:
                return function(*args, **kwargs)
            finally:
                torch.set_float32_matmul_precision(multiplies)

    return inner


@_alone
def simulate(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    optimizer: MakeOptimizer,
    *,
    workers: int,
    steps: int,
    network: LossModel | float = 0.0,
    policy: Policy | Callable[[int], Policy] | None = None,
    seed: int = 0,
    rate: Callable[[int], float] | None = None,
    works: Works | None = None,
    personal: Sequence[nn.Module | nn.Parameter] = (),
    clip: float | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    device: torch.device | str = "cpu",
    how: How = "auto",
    at_once: int | None = None,
    precision: Literal["float32", "tf32", "bfloat16"] = "float32",
    capture: bool = True,
    fuse: bool = False,
    deterministic: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every_s: float = 60.0,
    advance: Callable[[ProgressPoint], None] | None = None,
    reuse: Reuse | None = None,
) -> Simulated:
    """Trains a model on virtual workers, each with its own replica, over a simulated network with packet loss.

    Args:
        model: Model with which all workers begin; trained parameters must be float32. It is not changed.
        loss: `loss(model, batch)` returns the scalar loss of one worker's batch.
        batches: `batches(step, first, last)` returns the stacked batches of workers first to last - 1: a tensor, or
            tuples and dictionaries of tensors, whose first dimension counts workers.
        optimizer: `optimizer(parameters)` makes an optimizer.
        workers: Number of virtual workers.
        steps: Number of steps.
        network: A loss model, or the rate of independent loss on all links.
        policy: How workers train together, as for `prepare`; None is `BoundedDrift()`. Settings about time have no
            effect. A function returns the policy of each step; all must be of one class.
        seed: Seed of the losses.
        rate: Returns the learning rate of each step; None leaves it to the optimizer.
        works: `works(step)` returns whether each worker makes an optimizer step, where a `RankPolicy` has workers of
            different speeds; None has all of them make every step.
        personal: Modules and parameters of the model that are never exchanged, as for `prepare`: each worker begins
            with the model's, and trains its own by its own gradients, with its own optimizer state.
        clip: Norm to which larger gradients are scaled down; None never does that. Those of personal parts are scaled
            by their own norm.
        evaluate: Evaluates a model with the owners' exact parameters, or with the mean of all models. With personal
            parts, `evaluate(model, worker)` evaluates each worker's model in turn, with the worker's own personal
            parts; validations are the mean over all workers.
        evaluate_every: Steps between two evaluations; None makes ten of them. The last step always has one.
        device: Device of all computation: "cpu" or "cuda".
        how: How gradients are computed: "batched" computes workers at once by `torch.func.vmap`, "loop" one by one,
            "auto" tests which works.
        at_once: Number of workers computed at a time; None takes as many as fit.
        precision: Number format in which matrices are multiplied.
        capture: Whether to record kernels once and replay them, on a GPU; needs a loss without data-dependent shapes.
        fuse: Whether `torch.compile` fuses kernels: takes a minute at first, then halves the time of a step.
        deterministic: Whether a GPU must compute the same bits every time; another kind of GPU, version of torch or
            `at_once` may still give others. On the CPU it changes nothing: bits are always the same there.
        checkpoint: File to which the state is saved regularly and at Ctrl-C, which waits for the end of the step. If it
            exists, the simulation continues from it. It is deleted at the end.
        checkpoint_every_s: Seconds between two checkpoints.
        advance: Called after each step.
        reuse: Shares what an earlier simulation of the same model, loss and batch size has compiled and recorded.

    Processes of one torch.distributed group share the work; all must call this with the same arguments.

    Raises:
        ValueError: A setting is invalid, the model, loss or batches are not as described, or the checkpoint
            belongs to another simulation.
        KeyboardInterrupt: Ctrl-C was pressed; with a checkpoint, the state is saved.
    """
    policy_at = policy if callable(policy) else None
    first_policy: Policy = policy(0) if callable(policy) else policy or BoundedDrift()
    if isinstance(network, float | int):
        network = Bernoulli(p=float(network))
    check(isinstance(network, LossModel), "network", "be a loss model or a loss rate", network)
    known = isinstance(first_policy, OwnerPolicy | RankPolicy)
    check(known, "policy", "be an OwnerPolicy or a RankPolicy, or a function of the step", first_policy)
    check(how in ("auto", "batched", "loop"), "how", "be auto, batched or loop", how)
    check(precision in ("float32", "tf32", "bfloat16"), "precision", "be float32, tf32 or bfloat16", precision)
    check(workers >= 1, "workers", "be at least 1", workers)
    check(steps >= 1, "steps", "be at least 1", steps)
    check(clip is None or clip > 0, "clip", "be above 0", clip)
    check(works is None or isinstance(first_policy, RankPolicy), "works", "be None under an OwnerPolicy", works)
    check(at_once is None or at_once >= 1, "at_once", "be at least 1", at_once)
    wire = first_policy.wire
    check(evaluate_every is None or evaluate_every >= 1, "evaluate_every", "be at least 1", evaluate_every)
    device = torch.device(device)
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    processes = Processes()
    check(workers >= processes.world, "workers", f"be at least the {processes.world} processes", workers)
    check_parts(model, personal)
    names = names_of(model, personal)
    exact = copy.deepcopy(model).to(device)
    shared = _shared(exact, names)
    chunk_bytes = _engine.chunk_bytes(DATAGRAM_BYTES, False)
    codes = first_policy.codes if isinstance(first_policy, RankPolicy) else None
    per_chunk = Wire(wire, chunk_bytes).per_chunk if codes is None else codes[0].of
    chunks = Chunks.of(shared, workers, per_chunk)
    first, last = processes.part(workers)
    setting = Setting(
        workers=workers,
        network=network,
        seed=seed,
        chunks=chunks,
        elements=sum(each.numel() for each in shared),
        device=device,
        loss=loss,
        clip=clip,
        wire=wire,
        float32_per_chunk=Wire(torch.float32, chunk_bytes).per_chunk,
        datagram_bytes=DATAGRAM_BYTES,
        at_once=1,
        how=how,
        precision=torch.bfloat16 if precision == "bfloat16" else torch.float32,
        capture=capture,
        fuse=fuse,
        deterministic=deterministic,
        processes=processes,
        works=works,
        reuse=reuse,
        personal=names,
    )
    setting = fitting(setting, exact, batches, last - first) if at_once is None else setting.with_at_once(at_once)
    training: Workers
    if isinstance(first_policy, OwnerPolicy):
        training = Sharded(setting, first_policy, exact, optimizer)
    else:
        assert isinstance(first_policy, RankPolicy)
        training = Replicated(setting, first_policy, exact, optimizer)
    found = Simulated(at_once=min(setting.at_once, last - first))
    every = max(steps // 10, 1) if evaluate_every is None else evaluate_every

    def one_step(step: int) -> None:
        begin = time.perf_counter()
        if rate is not None:
            for each in training.optimizers:
                for group in each.param_groups:
                    group["lr"] = rate(step)
        if policy_at is not None:
            training.policy = _next_policy(first_policy, policy_at(step))
        row: LedgerRow | None
        mean_loss, row = training.step(step, functools.partial(batches, step))
        found.curve.append((step + 1, float(mean_loss)))
        if row is not None:
            found.ledger.add(row)
        found.times_s.append(time.perf_counter() - begin)
        if step + 1 == steps:
            found.drift = training.drift()
        if evaluate is not None and ((step + 1) % every == 0 or step + 1 == steps):
            exact.eval()
            with torch.no_grad():
                found.validations.append((step + 1, *training.judge(evaluate)))

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if checkpoint is None:
        for step in range(steps):
            one_step(step)
            if advance is not None:
                advance(ProgressPoint(step + 1, found.curve[-1][1]))
    else:
        identity = _identity(workers, steps, network, first_policy, seed, setting)
        with Checkpoint(Path(checkpoint), checkpoint_every_s, identity, processes) as kept:
            for step in range(kept.resume(training, found), steps):
                one_step(step)
                try:
                    if advance is not None:
                        advance(ProgressPoint(step + 1, found.curve[-1][1]))
                except KeyboardInterrupt:
                    kept.interrupt()
                kept.tick(training, found, last=step + 1 == steps)
        kept.remove()
    found.how = training.how
    found.peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return found


def _shared(model: nn.Module, personal: frozenset[str]) -> list[nn.Parameter]:
    """Returns the trained parameters that are exchanged."""
    shared, own = trained(model, personal)
    if not shared:
        others = " that is not personal" if own else ""
        raise ValueError(f"model must have a parameter with requires_grad{others}: there is nothing to train")
    for name, each in (shared | own).items():
        if each.dtype != torch.float32:
            raise ValueError(
                f"model must have float32 parameters to train, but {name} is {each.dtype}: call model.float(); "
                'precision="bfloat16" multiplies in fewer bits'
            )
    return list(shared.values())


def _next_policy(first: Policy, policy: Policy) -> Any:
    """Checks that the policy of a later step may follow the first one, and returns it."""
    check(type(policy) is type(first), "policy", f"be {type(first).__name__} in all steps", policy)
    for knob in ("wire", "guard", "weights", "max_lag", "redundancy"):
        given = getattr(policy, knob, None)
        check(given == getattr(first, knob, None), knob, "be the same in all steps", given)
    return policy


def _identity(
    workers: int, steps: int, network: LossModel, policy: Policy, seed: int, setting: Setting
) -> dict[str, object]:
    """Returns the properties that must match those of a checkpoint to resume."""
    return {
        "workers": workers,
        "steps": steps,
        "network": digest(network),
        "policy": repr(policy),
        "seed": seed,
        "elements": setting.elements,
        "clip": setting.clip,
        "precision": str(setting.precision),
        "device": setting.device.type,
        "personal": sorted(setting.personal),
    }
