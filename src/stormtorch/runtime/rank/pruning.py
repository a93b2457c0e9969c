"""Magnitude pruning: `prune` sets the same smallest weights to zero on all ranks, and they are no longer sent."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from stormtorch.checks import check
from stormtorch.collectives.base import objects
from stormtorch.errors import Interrupted, StormError
from stormtorch.exchange.waiting import in_call
from stormtorch.policies.policy import OwnerPolicy
from stormtorch.policies.rank_policy import RankPolicy, remembers
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.rank.gradient_session import GradientSession
from stormtorch.runtime.session.session import Session, combined, sessions_of


def prune(model: nn.Module, *, keep: float, parameters: Iterable[nn.Parameter] | None = None) -> float:
    """Keeps the largest weights of a prepared model and sets all others to zero for good, the same on all ranks.

    Pruned weights stay zero, in the optimizer's state too, and are no longer sent: later steps send that many bytes
    less of gradients and parameters. All ranks call it between two steps, with the same arguments. Another call with a
    smaller `keep` prunes more. A process that joins right after the other ranks have pruned already has their masks:
    its own call at that step returns without waiting.

    Weights are compared by magnitude over all given parameters together, with the values of `exact`. Under
    `GradientAveraging`, which has no common values, those of the lowest rank count.

    Args:
        model: A prepared model.
        keep: Fraction of the given parameters' original weights to keep.
        parameters: Parameters to prune; None prunes all that have two or more dimensions, because biases and the
            factors of normalisation are few and matter much. Personal ones are never pruned.

    Returns:
        Fraction of all elements that are still sent.

    Raises:
        ValueError: The model is not prepared, `keep` is no fraction, or ranks have called it with different arguments.
        RuntimeError: It was called between backward and step.
    """
    check(0.0 < keep <= 1.0, "keep", "lie in (0, 1]", keep)
    sessions = sessions_of(model)
    if not sessions:
        raise ValueError("the model is not prepared: call stormtorch.prepare(model, optimizer) first")
    for session in sessions:
        policy = session.given_policy
        if isinstance(policy, OwnerPolicy) and policy.deadline is not None:
            raise ValueError("prune() needs all ranks at the same step: set deadline=None")
        if isinstance(policy, RankPolicy):
            if remembers(policy) or policy.owners_remember:
                name = type(policy).__name__
                raise ValueError(f"prune() under {name}: its memory of pruned weights would be of no use")
            if policy.delay or policy.pace == "fastest":
                raise ValueError('prune() needs all ranks at the same step: set delay=0 and pace="together"')
        session.wait()
        if not session.is_between_steps():
            raise RuntimeError("prune() between backward() and step(): call it after step()")
    chosen = None if parameters is None else {id(each) for each in parameters}
    before = [session.prunings for session in sessions]
    with in_call("prune()"):
        ahead = any([session.pruned_already() for session in sessions])
        # If a rank dies meanwhile, some ranks have pruned and others have not: these get the masks in the next view.
        while not ahead and any(session.prunings == count for session, count in zip(sessions, before, strict=True)):
            try:
                masks = _agreed(sessions, _masks(sessions, chosen, keep), keep)
                for session, each in zip(sessions, masks, strict=True):
                    session.prune(each)
            except Interrupted:
                sessions[0].iterations.change(sessions[0])
    buckets = [bucket for session in sessions for bucket in session.buckets]
    return sum(bucket.travels for bucket in buckets) / sum(_elements(bucket) for bucket in buckets)


def _elements(bucket: Bucket) -> int:
    return sum(slot.count for slot in bucket.layout.slots)


@torch.no_grad()
def _masks(sessions: Sequence[Session], chosen: set[int] | None, keep: float) -> list[list[torch.Tensor]]:
    """Returns whether each element is kept, by session and bucket."""
    masks = [[_travelling(bucket) for bucket in session.buckets] for session in sessions]
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    """Magnitudes of each parameter that is pruned, and its part of a mask."""
    with combined([session.exact() for session in sessions]):
        for session, of_session in zip(sessions, masks, strict=True):
            for bucket, kept in zip(session.buckets, of_session, strict=True):
                for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                    if parameter.dim() >= 2 if chosen is None else id(parameter) in chosen:
                        part = kept.narrow(0, slot.first, slot.count)
                        values = bucket.flat.narrow(0, slot.first, slot.count).float().abs().cpu()
                        parts.append((torch.where(part, values, -1.0), part))
    if not parts:
        raise ValueError("there is nothing to prune: no prepared parameter is among `parameters`")
    largest = _largest(torch.cat([values for values, _ in parts]), keep)
    sizes = [part.numel() for _, part in parts]
    for (_, part), of_part in zip(parts, torch.split(largest, sizes), strict=True):
        part.logical_and_(of_part)
    return masks


def _travelling(bucket: Bucket) -> torch.Tensor:
    """Returns a mask of the elements of a bucket that are sent: parameters that are not pruned, and no padding."""
    kept = torch.zeros(bucket.layout.elements, dtype=torch.bool)
    for slot in bucket.layout.slots:
        kept.narrow(0, slot.first, slot.count).fill_(True)
    return kept if bucket.kept is None else kept & bucket.kept.cpu()


def _largest(values: torch.Tensor, keep: float) -> torch.Tensor:
    """Returns a mask of the largest values. Among equal ones the first win, so that all ranks choose the same."""
    count = max(round(keep * values.numel()), 1)
    least = values.kthvalue(values.numel() - count + 1).values
    kept = values > least
    (equal,) = torch.nonzero(values == least, as_tuple=True)
    kept[equal[: count - int(kept.sum())]] = True
    return kept


def _agreed(sessions: Sequence[Session], masks: list[list[torch.Tensor]], keep: float) -> list[list[torch.Tensor]]:
    """Returns masks that are the same on all ranks.

    Raises:
        Interrupted: A rank is gone, and another view begins without it.
        ValueError: Ranks have called `prune` with different arguments.
        StormError: Masks differ though arguments do not.
    """
    for session, of_session in zip(sessions, masks, strict=True):
        group = session.channel("prune", interruptible=True)
        gathered = objects.gather(keep, group)
        if any(each != keep for each in gathered):
            raise ValueError(f"prune() was called with another `keep` on other ranks: {gathered}, by rank")
        if isinstance(session, GradientSession):
            for kept in of_session:
                bits = kept.to(torch.uint8)
                session.broadcast_values(group, bits, 0)
                kept.copy_(bits)
        digests = objects.gather([zlib.crc32(each.numpy().tobytes()) for each in of_session], group)
        if any(each != digests[0] for each in digests):
            raise StormError("ranks disagree on what to prune: give all of them the same `parameters`")
    return masks
