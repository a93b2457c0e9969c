"""Integration with Hugging Face transformers: a mixin for Trainer, which then trains by `prepare`."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from stormtorch.integrations.accelerate import prepare_by
from stormtorch.policies.policy import Policy
from stormtorch.runtime.prepare import exact
from stormtorch.runtime.session.session import sessions_of


class StormTrainerMixin:
    """Makes a Trainer train by `prepare` instead of DDP: `class MyTrainer(StormTrainerMixin, Trainer): ...`.

    Call `dist.init_process_group("storm")` before TrainingArguments are made. Set `storm_policy` in the class, or pass
    it as an argument of the same name.

    Args:
        storm_policy: How ranks train together; None is that of the class.
        arguments: Passed on to the Trainer.
    """

    storm_policy: Policy | None = None
    """How ranks train together; None is `BoundedDrift()`."""

    def __init__(self, *arguments: Any, storm_policy: Policy | None = None, **named: Any) -> None:
        if storm_policy is not None:
            self.storm_policy = storm_policy
        super().__init__(*arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the Trainer's accelerator, whose `prepare` then uses stormtorch."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # the Trainer's
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        others = accelerator.prepare

        @functools.wraps(others)
        def prepare(*objects: Any, **settings: Any) -> Any:
            return prepare_by(others, accelerator, objects, self.storm_policy, **settings)

        accelerator.prepare = prepare

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        """Evaluates under `exact`, so that all ranks have the same parameters."""
        model: Any = self.model  # type: ignore[attr-defined]
        with exact(model) if sessions_of(model) else contextlib.nullcontext():
            return super().evaluation_loop(*arguments, **named)  # type: ignore[misc]
