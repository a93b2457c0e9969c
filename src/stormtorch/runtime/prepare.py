"""Public entry points of a training script: `prepare`, `exact` and `no_sync`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from stormtorch.collectives import Group
from stormtorch.exchange.waiting import in_call
from stormtorch.policies import BoundedDrift
from stormtorch.policies.policy import OwnerPolicy, Policy
from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.runtime.memory import personal as personal_parts
from stormtorch.runtime.memory.scaling import watch_scalers
from stormtorch.runtime.owner.deadline_session import DeadlineSession
from stormtorch.runtime.owner.sharded import ShardedSession
from stormtorch.runtime.rank.gradient_session import GradientSession
from stormtorch.runtime.rank.model_session import ModelSession
from stormtorch.runtime.recording.recorder import record_session
from stormtorch.runtime.session.hooks import install_hooks
from stormtorch.runtime.session.session import Session, combined, sessions_of
from stormtorch.runtime.session.unwrapped import unwrap
from stormtorch.udp.leaving import add_leave_handler, install_sigterm, say_goodbye_on_error

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741

# Number of sessions that a transport has had. It makes channel names unique, and the same on every rank.
_prepared: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def prepare(
    model: M,
    optimizer: O,
    *,
    policy: Policy | None = None,
    personal: Sequence[nn.Module | nn.Parameter] = (),
    group: Any = None,
) -> tuple[M, O]:
    """Prepares a model and its optimizer for distributed training over a network that may drop packets.

    The loop stays as it is: forward, `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`. Both objects stay
    the same. All ranks call it with the same model, optimizer and policy, and begin with rank 0's parameters. The
    optimizer gets an attribute `ledger` that records what happened at every step.

    `model.state_dict()` and `optimizer.state_dict()` then gather the shards of all ranks. All ranks call them, or one
    rank does between its step and its next backward: the other ranks serve the call while they wait for that rank.

    A model with several optimizers, such as Muon for its matrices and AdamW for the rest, is prepared once with each of
    them, in the same order on all ranks.

    Args:
        model: Any module whose parameters are float32, bfloat16 or float16, on the CPU or on CUDA.
        optimizer: Any optimizer of torch's or yours. Under `BoundedDrift` it works on this rank's shard, and its state
            exists once in the job.
        policy: How ranks train together; None is `BoundedDrift()`.
        personal: Modules and parameters of the model that each rank keeps to itself, such as a head. All ranks name the
            same ones. They are never sent, not even at the beginning. Each rank's optimizer updates them with that
            rank's own gradients, and state dicts hold the rank's own values. Buffers in these modules are not averaged
            either.
        group: A group of the backend storm, or a `stormtorch.collectives.Group`; None is torch.distributed's default
            group.

    Raises:
        TypeError: The group is on another backend, or the model and the optimizer are in the wrong order.
        ValueError: The model or the optimizer cannot be prepared; the message says why.
    """
    given: tuple[Any, Any] = (model, optimizer)  # as Any: callers without a type checker may pass anything
    if not isinstance(given[0], nn.Module) or not isinstance(given[1], torch.optim.Optimizer):
        raise TypeError(
            "prepare(model, optimizer): the model comes first, then its optimizer, got "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    policy = BoundedDrift() if policy is None else policy
    known = {id(parameter) for session in sessions_of(model) for parameter in session.parameters}
    if any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("a parameter of this optimizer is prepared already, with another optimizer")
    if "session" in optimizer.__dict__:
        raise ValueError("the optimizer is prepared already")
    personal_parts.declare(model, personal, again=bool(sessions_of(model)))
    if any(
        kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__
    ):  # importing it takes a while
        raise ValueError("prepare() shards the optimizer itself: give it the optimizer within ZeroRedundancyOptimizer")
    ranks = _group(group)
    number = _prepared.get(ranks.transport, 0)
    _prepared[ranks.transport] = number + 1
    name = f"{ranks.name}/training/{number}"
    watch_scalers()
    say_goodbye_on_error(ranks.transport)
    install_sigterm(ranks.transport)
    with in_call("prepare()"):
        session = _session(model, optimizer, ranks, name, policy)
        install_hooks(session)
        session.recorder = record_session(session)
    add_leave_handler(ranks.transport, session.transfer_and_leave)
    unwrap(model)
    return model, optimizer


def _session(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: Policy) -> Session:
    if isinstance(policy, OwnerPolicy):
        kind_of_owner = ShardedSession if policy.deadline is None else DeadlineSession
        return kind_of_owner(model, optimizer, group, name, policy)
    if isinstance(policy, RankPolicy):
        kind = GradientSession if policy.sends == "gradients" else ModelSession
        return kind(model, optimizer, group, name, policy)
    raise TypeError(
        "policy must be one of the library's, as BoundedDrift() or DiLoCo(), or an OwnerPolicy or RankPolicy of your "
        f"own, got {policy!r}"
    )


def exact(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a prepared model has its exact common parameters: use it to evaluate.

    All ranks enter it, or one rank does between its step and its next backward: the other ranks serve it while they
    wait for that rank.

    Under `BoundedDrift` these are the owners' parameters; stale copies stay up to date afterwards. Under
    `ModelAveraging` they are the mean of all ranks' models; each rank gets its own back afterwards. Under
    `GradientAveraging` there is no common value: every rank keeps its own. Personal parts do not change.
    """
    return combined([each.exact() for each in _sessions_of(model)])


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which backward only accumulates gradients; the first backward after it exchanges the sum.

    `model.no_sync()` does the same.
    """
    return combined([each.no_sync() for each in _sessions_of(model)])


def _sessions_of(model: nn.Module) -> list[Session]:
    found = sessions_of(model)
    if not found:
        raise ValueError("the model is not prepared: call stormtorch.prepare(model, optimizer) first")
    return found


def _group(group: Any) -> Group:
    if isinstance(group, Group):
        return group
    if group is None and not dist.is_initialized():
        raise ValueError('prepare() comes after dist.init_process_group("storm"), or takes a group as `group`')
    given = dist.distributed_c10d._get_default_group() if group is None else group
    from stormtorch.backend.process_group import StormProcessGroup

    if not isinstance(given, StormProcessGroup):
        name = dist.get_backend(given) if isinstance(given, dist.ProcessGroup) else type(given).__name__
        raise TypeError(
            f'prepare() needs a group of the backend "storm", got {name}: call dist.init_process_group("storm")'
        )
    return given.group
