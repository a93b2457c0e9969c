"""Fault injection: packet loss, delay, reordering and corruption on demand, on one machine and without root.

    from stormtorch import faults

    with faults(loss=0.1):                        # lose a tenth of the datagrams
        train_one_epoch()
    with faults(loss=0.1, burst=8, delay_ms=20):  # as many, in runs of 8 on average, and delay the others by 20 ms
        train_one_epoch()
    with faults(loss=0.1, burst="5ms"):           # as many, in bursts that last 5 ms on average at any rate
        train_one_epoch()
    with faults(loss=GilbertElliott(p=0.1, burst=8), links={(0, 1): 0.5, (1, 0): {"delay_ms": 100}}):
        train_one_epoch()                         # make one pair of ranks worse than the others

What to know before trusting a result:

- Faults act where datagrams are **received**: the process of `target` applies those of the link (source, target). Run
  the same `faults(...)` on every rank to impair the whole network, or on one rank to impair only what it receives.
- They apply to every transport of this process, existing and future ones.
- They are reproducible: what happens to the n-th datagram of a link depends on `seed`, source, target and n alone (and
  on the time since the first one, if `burst` is a time). Each setting has its own random numbers, so adding
  `duplicate` does not change which datagrams are lost. (How many are sent may still depend on timing.) Links are
  independent under one seed, except for the losses of `Shared`, which all receivers have in common.
- Blocks nest: the inner block replaces the outer one entirely. When it ends, the outer one applies again and restarts
  its random numbers. Datagrams that are held back when faults change are delivered, not lost.
- An endpoint holds back at most 4,096 datagrams or 64 MiB. A long delay at a high rate exceeds that, and the rest is
  dropped: see the counter `dropped` in the transport's health.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeAlias, TypedDict

from stormtorch.network.checked import checked_chance, checked_link, checked_number
from stormtorch.network.loss import (
    LinkFaults,
    LinkModel,
    LossModel,
    PerLink,
    Shared,
    SlowBackward,
    Stragglers,
    TimedBursts,
    Trace,
    loss_in_bursts,
)

__all__ = ["FaultSettings", "Faults", "LinkOptions", "LinkSettings", "faults"]

MAX_DELAY_MS = 3_600_000.0
"""Longest delay and jitter: an hour, as in engine/wire/faults.hpp."""

Bits: TypeAlias = Trace | str | bytes | Sequence[int]


class LinkOptions(TypedDict, total=False):
    """Settings of one link that differ from those of the others; see `faults`."""

    loss: float | LinkModel
    burst: float | str
    duplicate: float
    reorder: float
    corrupt: float
    delay_ms: float
    jitter_ms: float
    trace: Bits


class LinkSettings(TypedDict):
    """Faults of one link, in the form that the engine takes."""

    loss: float
    burst: float
    burst_ns: int
    shared: float
    duplicate: float
    reorder: float
    corrupt: float
    delay_ns: int
    jitter_ns: int
    trace: bytes


class FaultSettings(TypedDict):
    """Faults of all links, in the form that the engine takes."""

    seed: int
    default: LinkSettings
    links: dict[tuple[int, int], LinkSettings]


def faults(
    *,
    loss: float | LossModel = 0.0,
    burst: float | str = 1.0,
    duplicate: float = 0.0,
    reorder: float = 0.0,
    corrupt: float = 0.0,
    delay_ms: float = 0.0,
    jitter_ms: float = 0.0,
    seed: int = 0,
    links: Mapping[tuple[int, int], LinkOptions | LinkModel | float] | None = None,
    trace: Bits | None = None,
) -> Faults:
    """Make faults for all transports of this process, to use in a `with` statement or by `start()` and `stop()`.

    Args:
        loss: Fraction of datagrams that are lost, in [0, 1], or a loss model instead of `loss` and `burst`.
        burst: Mean number of datagrams lost in a row, or the mean time that a burst lasts, such as "5ms". 1 is
            independent loss; more needs `burst >= loss / (1 - loss)`.
        duplicate: Chance that a datagram arrives twice.
        reorder: Chance that a datagram is held back behind 1 to 8 later ones of its link, for at most 5 ms.
        corrupt: Chance that one bit of a datagram is flipped.
        delay_ms: Delay added to every datagram.
        jitter_ms: Largest further delay, drawn uniformly for each datagram, which also reorders datagrams.
        seed: Random seed; the same seed drops the same datagrams. Links have independent losses under one seed.
        links: Exceptions by link, keyed by (source, target): a loss rate, a loss model, or a dict of the settings above
            and `trace`. A rate or a model replaces loss, burst and trace; settings that an entry does not name are
            those of the other links.
        trace: Recorded losses (1 is lost), replayed in a loop instead of `loss` and `burst`.

    With `Shared`, all receivers lose the same chunks if all of them run these faults with the same seed.

    Raises:
        ValueError: A setting is out of range; the message names the setting, and the link.
    """
    options: dict[str, object] = {
        "duplicate": duplicate,
        "reorder": reorder,
        "corrupt": corrupt,
        "delay_ms": delay_ms,
        "jitter_ms": jitter_ms,
    }
    if isinstance(loss, Stragglers | SlowBackward):
        raise ValueError(
            "loss cannot be Stragglers or SlowBackward, which are for virtual workers: on a transport, end "
            "exchanges by Reliability(deadline_s=...), and make a rank late by faults(delay_ms=...) in its process, or "
            "by links"
        )
    # Settings at their defaults count as not given, so that `trace` or a model alone is no conflict.
    if loss != 0.0:
        options["loss"] = loss.default if isinstance(loss, PerLink) else loss
    if burst != 1.0:
        options["burst"] = burst
    if trace is not None:
        options["trace"] = trace
    default = _changed(_NO_FAULTS, options)
    chosen = FaultSettings(seed=_checked_seed(seed), default=default, links={})
    if isinstance(loss, PerLink):
        for link, model in loss.links.items():
            chosen["links"][link] = _changed(default, {"loss": model})
    for key, entry in _checked_mapping(links).items():
        link = checked_link("links", key)
        try:
            chosen["links"][link] = _changed(chosen["links"].get(link, default), _options(entry))
        except ValueError as error:
            raise ValueError(f"links[{link}]: {error}") from error
    return Faults(chosen)


class Faults:
    """Faults that can be started and stopped any number of times; made by `faults`."""

    def __init__(self, settings: FaultSettings) -> None:
        self._settings = settings

    @property
    def settings(self) -> FaultSettings:
        """Settings for the engine, or for a simulated network."""
        return self._settings

    def start(self) -> None:
        """Apply these faults instead of those started before."""
        with _lock:
            if any(active is self for active in _active):
                raise RuntimeError("these faults are already active: stop them first, or make others with faults(...)")
            _apply(self)
            _active.append(self)

    def stop(self) -> None:
        """End these faults and restore those that they replaced. Does nothing if they are not active."""
        with _lock:
            if not any(active is self for active in _active):
                return
            was_on_top = _active[-1] is self
            _active[:] = [active for active in _active if active is not self]
            # Blocks may end in any order: one that is not the latest is only removed from the list.
            if was_on_top:
                _apply(_active[-1] if _active else None)

    def __enter__(self) -> Faults:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Faults({self._settings!r})"


# Active faults of this process, in the order of their start. The last one applies.
_active: list[Faults] = []
_lock = threading.Lock()

_NO_FAULTS = LinkSettings(
    loss=0.0,
    burst=1.0,
    burst_ns=0,
    shared=0.0,
    duplicate=0.0,
    reorder=0.0,
    corrupt=0.0,
    delay_ns=0,
    jitter_ns=0,
    trace=b"",
)


def _apply(chosen: Faults | None) -> None:
    # Imported here, so that settings can be made and checked without the native module.
    import stormtorch._engine as _engine

    _engine.set_faults(None if chosen is None else dict(chosen.settings))


def _checked_seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an integer in [0, 2**64), got {seed!r}")
    return seed


def _checked_mapping(links: object) -> Mapping[object, object]:
    if links is None:
        return {}
    if not isinstance(links, Mapping):
        raise ValueError(f"links must map (source, target) to a rate, a model or a dict, got {links!r}")
    return links


def _options(entry: object) -> Mapping[str, object]:
    if isinstance(entry, Mapping):
        return entry
    if isinstance(entry, LinkModel):
        return {"loss": entry}
    if isinstance(entry, PerLink | Shared | Stragglers | SlowBackward):
        raise ValueError(f"the entry must be the model of one link, got {type(entry).__name__}")
    # A bare rate describes the link's loss completely, so the burst of the other links is not inherited.
    return {"loss": entry, "burst": 1.0}


def _changed(base: LinkSettings, options: Mapping[str, object]) -> LinkSettings:
    """Copy `base` with the settings in `options`; a ValueError names the one that is wrong."""
    unknown = sorted(str(knob) for knob in options if knob not in LinkOptions.__annotations__)
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no setting; the settings are {', '.join(LinkOptions.__annotations__)}")
    loss = _loss(base, options)
    return LinkSettings(
        loss=loss.loss,
        burst=loss.burst,
        burst_ns=round(1e9 * loss.burst_s),
        shared=loss.shared,
        duplicate=checked_chance("duplicate", options.get("duplicate", base["duplicate"])),
        reorder=checked_chance("reorder", options.get("reorder", base["reorder"])),
        corrupt=checked_chance("corrupt", options.get("corrupt", base["corrupt"])),
        delay_ns=_nanoseconds("delay_ms", options, base["delay_ns"]),
        jitter_ns=_nanoseconds("jitter_ms", options, base["jitter_ns"]),
        trace=loss.trace,
    )


def _loss(base: LinkSettings, options: Mapping[str, object]) -> LinkFaults:
    if "trace" in options:
        if "loss" in options or "burst" in options:
            raise ValueError("trace replaces loss and burst: give either a trace or a loss")
        trace = options["trace"]
        if isinstance(trace, Trace):
            return trace.link_faults()
        if not isinstance(trace, Sequence):
            raise ValueError(f"trace must be a Trace, text, bytes or a sequence of 0 and 1, got {trace!r}")
        try:
            return Trace(bits=trace).link_faults()
        except ValueError as error:
            raise ValueError(f"trace: {error}") from error
    loss = options.get("loss", base["loss"])
    if isinstance(loss, LinkModel | Shared):
        if "burst" in options:
            raise ValueError(f"burst must be given with a loss rate: {loss!r} has its own bursts")
        return loss.link_faults()
    if "loss" not in options and base["trace"]:
        if "burst" in options:
            raise ValueError("burst has no effect on a trace: give a loss rate with it")
        return LinkFaults(trace=base["trace"])
    if "loss" not in options and base["shared"]:
        if "burst" in options:
            raise ValueError("burst has no effect on shared loss: give a loss rate with it")
        return LinkFaults(loss=base["loss"], shared=base["shared"])
    chance = checked_chance("loss", loss)
    if "burst" not in options and base["burst_ns"]:
        # Another loss rate in bursts of the same duration; a link without loss has none.
        return TimedBursts(p=chance, burst_s=1e-9 * base["burst_ns"]).link_faults() if chance else LinkFaults()
    burst = options.get("burst", base["burst"])
    if not isinstance(burst, str):
        burst = checked_number("burst", burst)
    return loss_in_bursts(chance, burst, name="loss").link_faults()


def _nanoseconds(knob: str, options: Mapping[str, object], otherwise_ns: int) -> int:
    if knob not in options:
        return otherwise_ns
    milliseconds = checked_number(knob, options[knob])
    if not 0.0 <= milliseconds <= MAX_DELAY_MS:
        raise ValueError(f"{knob} must lie in [0, {MAX_DELAY_MS:.0f}], got {milliseconds}")
    return round(milliseconds * 1e6)
