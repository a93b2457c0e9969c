"""From what was typed to settings: policies by their names, and a network of options that must not contradict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stormtorch.checks import BadSetting, check_between, check_subset
from stormtorch.cli.console import names
from stormtorch.network.link_file import read_links
from stormtorch.network.loss import LossModel, PerLink, Shared, Stragglers, loss_in_bursts
from stormtorch.studies.rank_settings import POLICIES
from stormtorch.studies.worker_settings import SimSettings

TYPED_POLICIES = ("lossless", "bounded-drift", *POLICIES[1:])
"""As `POLICIES`, with another name for the library's default policy."""
_DEFAULT_LOSS = 0.1
# Settings that only some policies look at, with what they are if nobody asks for them.
_OF_DRIFT = {"gradient_budget": 1.0, "weights": "mean", "max_lag": None}


@dataclass(frozen=True, kw_only=True)
class Typed:
    """Options that mean something only together; the fields are the command's."""

    policy: str
    lead: str = "on"
    loss: float | None = None
    burst: float = 1.0
    per_link: Path | None = None
    trace: Path | None = None
    shared: float | None = None
    stragglers: float | None = None
    delivered: float | None = None

    def settings(self, **others: Any) -> SimSettings:
        """The settings of all of it; `others` have the names of `SimSettings`, but device may be "auto".

        Raises:
            BadSetting: A value makes no sense, by itself or beside another.
        """
        policies, lead = self._policies()
        if "plain" not in policies and "lead" not in policies:
            for name, default in _OF_DRIFT.items():
                if others.get(name, default) != default:
                    raise BadSetting(name, f"belongs to bounded-drift, and --policy has {','.join(policies)}")
        if others.get("every", 1) != 1 and "model-averaging" not in policies:
            raise BadSetting("every", f"belongs to model-averaging, and --policy has {','.join(policies)}")
        if policies == ("lossless",) and others.get("budget", 1.0) != 1.0:
            raise BadSetting("budget", "belongs to policies that lose something, and --policy has lossless")
        if others.get("device") == "auto":
            others["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        loss = _DEFAULT_LOSS if self.loss is None else self.loss
        # First without a network: loss and burst are checked there, by their own names.
        plain = SimSettings(policies=policies, lead=lead, loss=loss, burst=self.burst, **others)
        network = self._network(plain)
        return plain if network is None else replace(plain, network=network)

    def _policies(self) -> tuple[tuple[str, ...], float]:
        """The library's names of them, and the lead's factor."""
        typed = names(self.policy)
        check_subset("policy", typed, TYPED_POLICIES)
        factor = self._factor()
        own_name = "lead" if factor else "plain"
        if "bounded-drift" in typed and own_name in typed:
            raise BadSetting("policy", f"must name each only once: bounded-drift is {own_name} here")
        policies = tuple(own_name if each == "bounded-drift" else each for each in typed)
        if self.lead != "on" and not {"bounded-drift", "lead"} & set(typed):
            raise BadSetting("lead", f"belongs to bounded-drift, and --policy has {self.policy}")
        if not factor and "lead" in policies:
            raise BadSetting("lead", "is off, and --policy names lead")
        return policies, factor or 1.0

    def _factor(self) -> float:
        if self.lead in ("on", "off"):
            return float(self.lead == "on")
        try:
            factor = float(self.lead)
        except ValueError:
            raise BadSetting("lead", f"must be on, off or a factor, got {self.lead!r}") from None
        check_between("lead", factor, 0.0, 10.0)
        return factor

    def _network(self, settings: SimSettings) -> LossModel | None:
        """None where loss and burst say all."""
        reached = self._links(settings)
        if self.stragglers is None:
            if self.delivered is not None:
                raise BadSetting("delivered", "needs --stragglers: a part of what late workers send")
            return reached
        check_between("stragglers", self.stragglers, 0.0, 1.0)
        if self.delivered is not None and not 0.0 < self.delivered < 1.0:
            raise BadSetting("delivered", f"must be above 0 and below 1, got {self.delivered:g}")
        inner = loss_in_bursts(settings.loss, settings.burst) if reached is None else reached
        return Stragglers(chance=self.stragglers, delivered=self.delivered, network=inner)

    def _links(self, settings: SimSettings) -> PerLink | Shared | None:
        if self.trace is not None:
            self._alone("trace", per_link=self.per_link, loss=self.loss, burst=self._burst, shared=self.shared)
            try:
                return PerLink.traces(self.trace, settings.workers, settings.first_seed)
            except (OSError, ValueError) as error:
                raise BadSetting("trace", f"cannot be used: {error}") from error
        if self.per_link is not None:
            self._alone("per_link", shared=self.shared)
            if self.loss is None and self._burst is not None:
                raise BadSetting("burst", "needs a --loss beside --per-link: of the links that the file does not name")
            try:
                default = None if self.loss is None else loss_in_bursts(settings.loss, settings.burst)
                return read_links(self.per_link, settings.workers, default=default)
            except (OSError, ValueError) as error:
                raise BadSetting("per_link", str(error)) from error
        if self.shared is None:
            return None
        check_between("shared", self.shared, 0.0, 1.0)
        try:
            return Shared(p=settings.loss, share=self.shared, burst=self.burst)
        except ValueError as error:
            raise BadSetting("shared", str(error)) from error

    @property
    def _burst(self) -> float | None:
        return None if self.burst == 1.0 else self.burst

    @staticmethod
    def _alone(option: str, **others: object) -> None:
        """Names the option that cannot stand beside another."""
        for name, value in others.items():
            if value is not None:
                shown = option.replace("_", "-")
                raise BadSetting(name, f"cannot stand beside --{shown}, which says what every link loses")
