"""Hooks on the user's model and optimizer (forward, step, state dict): a plain training loop drives a session."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn

from stormtorch.backend import within_step
from stormtorch.exchange.waiting import in_call
from stormtorch.runtime.members.prepare_checks import check_frozen, warn_of_left_out
from stormtorch.runtime.members.prepared_optimizer import adopt, keep_last
from stormtorch.runtime.members.served_collectives import MODEL_STATE
from stormtorch.runtime.members.wrappers import (
    PreparedParameters,
    refuse_active_wrapper,
    refuse_other_optimizers,
    refuse_wrappers,
)
from stormtorch.runtime.session.buffers import buffers_of
from stormtorch.runtime.session.session import Session, any_prepared, combined, register, sessions_of


def install_hooks(session: Session) -> None:
    """Installs a session's hooks on its optimizer and model."""
    session.bytes_sent()
    adopt(session.optimizer, session)
    session.optimizer.__dict__["ledger"] = session.ledger
    register(session)
    refuse_wrappers(any_prepared)
    refuse_other_optimizers(functools.partial(any_prepared, in_a_job=True), _Outermost.any_on)
    kept = PreparedParameters(session.model, session.parameters)
    _hook_optimizer(session, kept)
    _hook_model(session, kept)
    _add_no_sync(session.model)


class _Outermost:
    """Distinguishes an outer call of `step` from nested ones, where an optimizer calls the step of its base class.

    torch runs the hooks in both if an optimizer of the base class has existed.
    """

    _all: ClassVar[weakref.WeakSet[_Outermost]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._all.add(self)

    @classmethod
    def any_on(cls, frame: FrameType) -> bool:
        """Returns whether a call is made within a step of any prepared optimizer."""
        return any(each._frame is not None and within_step.on_stack(each._frame, frame) for each in list(cls._all))

    def begins(self, frame: FrameType) -> bool:
        """Records that a step begins. Returns False if the call is nested in another step."""
        if self._frame is not None and within_step.on_stack(self._frame, frame):
            return False
        self._frame = frame
        return True

    def now(self, frame: FrameType) -> bool:
        """Returns whether a call is the outermost one."""
        return frame is self._frame

    def ends(self) -> None:
        """Records that the outermost call ends."""
        self._frame = None


def _hook_optimizer(session: Session, kept: PreparedParameters) -> None:
    optimizer_of = weakref.ref(session.optimizer)
    outermost = _Outermost()

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer is optimizer_of() and outermost.begins(sys._getframe(1)):
            check_frozen(session.frozen)
            kept.check()
            _warn_of_unprepared(session)
            session.reattach_parameters()
            # kwargs may hold more than the closure, which may be None in args and in kwargs.
            closure = any(callable(each) for each in (*args[1:], kwargs.get("closure")))
            with in_call("optimizer.step()"):
                session.before_step(closure=closure)
            session.auxiliary_state.before_step()

    def last(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer is not optimizer_of() or not outermost.now(sys._getframe(1)):
            return None
        if session.splits_optimizer:
            within_step.begins(type(optimizer).__name__, sys._getframe(1))
        if not any(callable(each) for each in (*args[1:], kwargs.get("closure"))):
            session.gradients_final()
            return None

        def within(given: Any) -> Any:
            if not callable(given):
                return given

            def closure() -> Any:
                with within_step.closure():
                    session.closure_begins()
                    loss = given()
                    session.gradients_final(within=True)
                return loss

            return closure

        with_closure = {**kwargs, "closure": within(kwargs["closure"])} if "closure" in kwargs else kwargs
        return (args[0], *map(within, args[1:])), with_closure

    def after(optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if optimizer is optimizer_of() and outermost.now(sys._getframe(1)):
            outermost.ends()
            within_step.ends()
            session.auxiliary_state.after_step()
            for bucket in session.buckets:
                bucket.clear_pruned()
            with in_call("optimizer.step()"):
                session.after_step()

    session.optimizer.register_step_pre_hook(before)
    keep_last(session.optimizer, session.optimizer.register_step_pre_hook(last))
    # Runs first, so that the program's own hooks see parameters that have arrived.
    found = session.optimizer.register_step_post_hook(after)
    hooks: Any = session.optimizer._optimizer_step_post_hooks
    hooks.move_to_end(found.id, last=False)


def _hook_model(session: Session, kept: PreparedParameters) -> None:
    def forward(module: nn.Module, _args: object) -> None:
        if not torch.compiler.is_compiling():
            refuse_active_wrapper(module)
            if module.training and torch.is_grad_enabled():
                session.reattach_parameters()

    def saving(module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        if module is session.model:
            kept.check()
            session.reattach_parameters()
            session.synchronise(MODEL_STATE)

    def loading(module: nn.Module, *_: Any) -> None:
        if module is session.model:
            session.reattach_parameters()
            session.wait()  # parameters that arrive later would overwrite those that are loaded

    def loaded(module: nn.Module, _keys: Any) -> None:
        if module is session.model:
            if kept.gone():
                raise RuntimeError(
                    "load_state_dict(assign=True) replaces parameters that are prepared: use assign=False"
                )
            for bucket in session.buckets:
                bucket.clear_pruned()
            session.loaded()
            buffers_of(module).remember()  # other ranks may need them before this rank's next step

    model = session.model
    model.register_forward_pre_hook(forward)
    model.register_state_dict_pre_hook(saving)  # type: ignore[no-untyped-call]  # torch's, and the next two
    model.register_load_state_dict_pre_hook(loading)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(loaded)  # type: ignore[no-untyped-call]


def _add_no_sync(model: nn.Module) -> None:
    """Adds to a model what scripts for DDP use: `no_sync()` and `require_backward_grad_sync`."""
    # A function, not a method, so that a copy of the model does not copy the session.
    model_of = weakref.ref(model)

    def no_sync() -> contextlib.AbstractContextManager[None]:
        model = model_of()
        return combined(each.no_sync() for each in ([] if model is None else sessions_of(model)))

    model.__dict__["no_sync"] = no_sync
    # By setattr, not in __dict__: a compiled model forwards attributes to the original model.
    model.require_backward_grad_sync = True  # type: ignore[assignment]  # torch's modules hold anything


def _warn_of_unprepared(session: Session) -> None:
    """Warns once, at the first step, of parameters without a prepared optimizer. Until then, one may be prepared."""
    if session.checked_left_out:
        return
    sessions = sessions_of(session.model)
    for each in sessions:
        each.checked_left_out = True
    prepared = [parameter for each in sessions for parameter in each.parameters]
    warn_of_left_out(session.model, prepared, session.group.rank)
