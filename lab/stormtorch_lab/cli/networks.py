"""Network conditions from command-line options: a lab's, or a simulated network's loss model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stormtorch.checks import BadCondition, BadSetting, check_between

if TYPE_CHECKING:
    from stormtorch.network.loss import LossModel, PerLink, Shared
    from stormtorch_lab.netns.conditions import Conditions

DEFAULT_LOSS = 0.1


def typed_burst(text: str) -> float | str:
    """Parses the length of bursts: a number of packets, or the text of a time, which `Conditions` checks."""
    try:
        return float(text)
    except ValueError:
        return text


def burst_in_packets(text: str) -> float:
    """Parses the length of bursts where there is no clock; raises `BadSetting` for a time."""
    length = typed_burst(text)
    if isinstance(length, str):
        raise BadSetting("burst", f"must be a number of packets, got {text!r}: virtual workers have no clock")
    return length


def lab_network(seed: int, **conditions: str | float | None) -> Conditions | None:
    """Conditions of a lab; None if no condition was given, which means loopback."""
    from stormtorch_lab.netns.conditions import Conditions

    given: dict[str, str | float | None] = {name: value for name, value in conditions.items() if value is not None}
    if not given:
        return None
    if "burst" in given and "loss" not in given:
        raise BadCondition("burst", "needs a --loss that comes in bursts")
    if isinstance(burst := given.get("burst"), str):
        given["burst"] = typed_burst(burst)
    if given.get("rate") == "unlimited":
        given["rate"] = None
    return Conditions(seed=seed, **given)  # type: ignore[arg-type]  # Conditions checks them all


def with_links(network: Conditions | None, per_link: Path | None, hosts: int) -> Conditions | None:
    """Conditions of a lab with a file of single links and hosts; the file alone also asks for a lab."""
    if per_link is None:
        return network
    from stormtorch_lab.netns.conditions import Conditions
    from stormtorch_lab.netns.per_link import read_per_link

    return read_per_link(per_link, network or Conditions(), hosts)


@dataclass(frozen=True, kw_only=True)
class SimulatedNetworkOptions:
    """Options of a simulated network that must agree with each other; fields are named as the options.

    Raises:
        BadSetting: From `model`: a value is invalid, or contradicts another.
    """

    workers: int = 64
    first_seed: int = 0
    loss: float | None = None
    burst: float = 1.0
    per_link: Path | None = None
    trace: Path | None = None
    shared: float | None = None
    stragglers: float | None = None
    delivered: float | None = None

    @property
    def plain_loss(self) -> float:
        """Loss rate of every link, where no file says otherwise."""
        return DEFAULT_LOSS if self.loss is None else self.loss

    def model(self) -> LossModel | None:
        """Loss model of all links; None where `loss` and `burst` describe it."""
        from stormtorch.network.loss import Stragglers, loss_in_bursts

        reached = self._links()
        if self.stragglers is None:
            if self.delivered is not None:
                raise BadSetting("delivered", "needs --stragglers: it is a fraction of what late workers send")
            return reached
        check_between("stragglers", self.stragglers, 0.0, 1.0)
        if self.delivered is not None and not 0.0 < self.delivered < 1.0:
            raise BadSetting("delivered", f"must be above 0 and below 1, got {self.delivered:g}")
        inner = loss_in_bursts(self.plain_loss, self.burst) if reached is None else reached
        return Stragglers(chance=self.stragglers, delivered=self.delivered, network=inner)

    def _links(self) -> PerLink | Shared | None:
        from stormtorch.network.link_file import read_links
        from stormtorch.network.loss import PerLink, Shared, loss_in_bursts

        if self.trace is not None:
            self._alone("trace", per_link=self.per_link, loss=self.loss, burst=self._burst, shared=self.shared)
            try:
                return PerLink.traces(self.trace, self.workers, self.first_seed)
            except OSError as error:
                raise BadSetting("trace", f"cannot be read: {self.trace}: {error.strerror}") from error
            except ValueError as error:
                raise BadSetting("trace", f"cannot be used: {error}") from error
        if self.per_link is not None:
            self._alone("per_link", shared=self.shared)
            if self.loss is None and self._burst is not None:
                raise BadSetting("burst", "needs a --loss beside --per-link, for the links that the file does not name")
            try:
                default = None if self.loss is None else loss_in_bursts(self.loss, self.burst)
                return read_links(self.per_link, self.workers, default=default)
            except (OSError, ValueError) as error:
                raise BadSetting("per_link", str(error)) from error
        if self.shared is None:
            return None
        check_between("shared", self.shared, 0.0, 1.0)
        try:
            return Shared(p=self.plain_loss, share=self.shared, burst=self.burst)
        except ValueError as error:
            raise BadSetting("shared", str(error)) from error

    @property
    def _burst(self) -> float | None:
        return None if self.burst == 1.0 else self.burst

    @staticmethod
    def _alone(option: str, **others: object) -> None:
        """Raises `BadSetting` for an option that excludes another."""
        for name, value in others.items():
            if value is not None:
                shown = option.replace("_", "-")
                raise BadSetting(name, f"cannot be combined with --{shown}, which sets the loss of every link")
