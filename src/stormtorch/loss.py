"""Loss models: which datagrams of a link are lost.

A model describes one direction of one link; it draws nothing itself. The engine and the simulator take its parameters
and a seed and make the same losses of them every time.

    Bernoulli(p=0.1)                     # each datagram is lost with probability 0.1, whatever happened before
    GilbertElliott(p=0.1, burst=8)       # as many are lost, but in runs of 8 on average, as on Wi-Fi or in a full queue
    Trace(bits="0001100000")             # what a real link did, replayed in a loop: 1 is lost
    PerLink(default=Bernoulli(p=0.01), links={(0, 1): GilbertElliott(p=0.2, burst=16)})

`Bernoulli` is what most theory assumes. Real losses cluster; at the same rate, bursts take whole neighbourhoods of a
tensor and spare others, so measure with both. A link is a pair (source, target): the two directions between a pair of
ranks are two links, with losses of their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from os import PathLike
from typing import NamedTuple, TypeAlias

__all__ = ["Bernoulli", "GilbertElliott", "LinkFaults", "LinkModel", "LossModel", "PerLink", "Trace"]

MAX_RANKS = 65_536
"""A rank is 16 bits on the wire."""


class LinkFaults(NamedTuple):
    """The loss of one link in the engine's words; see engine/faults.hpp."""

    loss: float = 0.0
    """Fraction of the datagrams that is lost."""
    burst: float = 1.0
    """Mean length of a run of losses; exactly 1 means independent loss."""
    trace: bytes = b""
    """One byte per datagram, 0 or 1, replayed in a loop; when it is not empty, it replaces the two above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bernoulli:
    """Independent loss: the past says nothing about the next datagram."""

    p: float
    """Probability that a datagram is lost, in [0, 1]. 1 is a dead link."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", checked_chance("p", self.p))

    def link_faults(self) -> LinkFaults:
        """The engine's parameters of this model."""
        return LinkFaults(loss=self.p)


@dataclass(frozen=True, kw_only=True, slots=True)
class GilbertElliott:
    """Loss in bursts: a link is either good and loses nothing, or bad and loses everything.

    The bad state is left with probability 1 / burst per datagram and entered with p / ((1 - p) * burst). The second
    must not exceed 1, so frequent loss needs long bursts: `burst >= p / (1 - p)`. With `burst = 1 / (1 - p)` it is
    `Bernoulli(p=p)`. A burst of exactly 1 means that, too: independent loss.
    """

    p: float
    """Fraction of all datagrams that is lost in the long run, in [0, 1)."""
    burst: float
    """Mean number of datagrams lost in a row, at least 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", checked_chance("p", self.p))
        object.__setattr__(self, "burst", checked_burst("p", self.p, self.burst))

    def link_faults(self) -> LinkFaults:
        """The engine's parameters of this model."""
        return LinkFaults(loss=self.p, burst=self.burst)


@dataclass(frozen=True, init=False, slots=True)
class Trace:
    """Recorded losses, replayed in a loop; each link starts at an offset drawn from the seed, not all in step."""

    bits: bytes
    """One byte per datagram: 0 arrived, 1 was lost."""

    def __init__(self, *, bits: str | bytes | Sequence[int]) -> None:
        """`bits` may be text ("0010"), bytes of value 0 and 1, or a sequence of the integers 0 and 1."""
        object.__setattr__(self, "bits", _checked_bits(bits))

    @classmethod
    def from_file(cls, path: str | PathLike[str], *, line: int = 0, field: str = "bits") -> Trace:
        """The trace in one line (counted from 0) of a file of JSON objects, one per line, under the key `field`."""
        if line < 0:
            raise ValueError(f"line must be at least 0, got {line}")
        count = 0
        for count, trace in enumerate(cls._read(path, field, only=line), start=1):
            if count > line:
                assert trace is not None
                return trace
        raise ValueError(f"line {line} does not exist: {path} has {count} lines")

    @classmethod
    def all_from_file(cls, path: str | PathLike[str], *, field: str = "bits") -> list[Trace]:
        """The traces of all lines of such a file, for example to give each link one of its own."""
        return [trace for trace in cls._read(path, field, only=None) if trace is not None]

    @classmethod
    def _read(cls, path: str | PathLike[str], field: str, only: int | None) -> Iterator[Trace | None]:
        """One item per line, None for those not asked for: parsing thousands of traces to get one would be slow."""
        with open(path, encoding="utf-8") as lines:
            for number, text in enumerate(lines):
                if only is not None and number != only:
                    yield None
                    continue
                try:
                    row = json.loads(text)
                    if not isinstance(row, dict) or field not in row:
                        raise ValueError(f"field {field!r} is missing")
                    yield cls(bits=row[field])
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error

    def link_faults(self) -> LinkFaults:
        """The engine's parameters of this model."""
        return LinkFaults(trace=self.bits)


LinkModel: TypeAlias = Bernoulli | GilbertElliott | Trace
"""The model of one link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLink:
    """A model for each link: what `links` does not name follows `default`."""

    default: LinkModel = field(default_factory=lambda: Bernoulli(p=0.0))
    """The model of every link that has none of its own."""
    links: Mapping[tuple[int, int], LinkModel] = field(default_factory=dict, hash=False)
    """Models by (source, target); copied, so later changes of the argument have no effect."""

    def __post_init__(self) -> None:
        if not isinstance(self.default, LinkModel):
            raise ValueError(f"default must be a Bernoulli, GilbertElliott or Trace, got {self.default!r}")
        if not isinstance(self.links, Mapping):
            raise ValueError(f"links must map (source, target) to a model, got {self.links!r}")
        links = {checked_link("links", link): model for link, model in self.links.items()}
        for link, model in links.items():
            if not isinstance(model, LinkModel):
                raise ValueError(f"links[{link}] must be a Bernoulli, GilbertElliott or Trace, got {model!r}")
        object.__setattr__(self, "links", links)

    @classmethod
    def matrix(cls, rows: Sequence[Sequence[float | LinkModel]]) -> PerLink:
        """One row per source, one column per target: loss rates or models. The diagonal is ignored."""
        links: dict[tuple[int, int], LinkModel] = {}
        for source, row in enumerate(rows):
            if len(row) != len(rows):
                raise ValueError(f"matrix must be square: row {source} has {len(row)} entries, not {len(rows)}")
            for target, entry in enumerate(row):
                if source == target:
                    continue
                if isinstance(entry, LinkModel):
                    links[source, target] = entry
                else:
                    links[source, target] = Bernoulli(p=checked_chance(f"matrix[{source}][{target}]", entry))
        return cls(links=links)

    def model(self, source: int, target: int) -> LinkModel:
        """The model of the link from `source` to `target`."""
        return self.links.get((source, target), self.default)

    def link_faults(self, source: int, target: int) -> LinkFaults:
        """The engine's parameters of the link from `source` to `target`."""
        return self.model(source, target).link_faults()


LossModel: TypeAlias = LinkModel | PerLink
"""Whatever `faults(loss=...)` and the simulator take."""


def checked_number(name: str, value: object) -> float:
    """`value` as a float; a ValueError that names it when it is no finite number."""
    # NumPy's scalars are Real, too. A bool is an int to Python, but hardly what anyone means here.
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def checked_chance(name: str, value: object) -> float:
    """`value` as a float in [0, 1]; a ValueError that names it otherwise."""
    number = checked_number(name, value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {number}")
    return number


def checked_burst(loss_name: str, loss: float, burst: object) -> float:
    """`burst` as a float that is feasible with the valid `loss`; the rules are those of LinkFaults::validate in C++."""
    number = checked_number("burst", burst)
    if number < 1.0:
        raise ValueError(f"burst must be at least 1, got {number}")
    if number > 1.0 and loss == 1.0:
        raise ValueError(f"burst must be 1 when {loss_name} is 1 (a dead link has no bursts), got {number}")
    # The tolerance is for settings on the edge, such as 0.9 with a burst of 9, that rounding would push over it.
    if number > 1.0 and loss / ((1.0 - loss) * number) > 1.0 + 1e-9:
        least = loss / (1.0 - loss)
        raise ValueError(f"burst {number} is too short for {loss_name} {loss}: it must be at least {least:.4g}, or 1")
    return number


def checked_link(name: str, link: object) -> tuple[int, int]:
    """`link` as a pair of ranks; a ValueError that names it otherwise."""
    match link:
        case (int(source), int(target)) if 0 <= source < MAX_RANKS and 0 <= target < MAX_RANKS:
            return source, target
    raise ValueError(f"{name} must have keys (source, target), two ranks in [0, {MAX_RANKS}), got {link!r}")


def _checked_bits(bits: object) -> bytes:
    if isinstance(bits, str):
        values: Sequence[object] = [{"0": 0, "1": 1}.get(character, character) for character in bits]
    elif isinstance(bits, Sequence):
        values = bits
    else:
        raise ValueError(f"bits must be text, bytes or a sequence of 0 and 1, got {type(bits).__name__}")
    if not values:
        raise ValueError("bits must not be empty")
    for at, value in enumerate(values):
        # 1.0 and True equal 1 as well; only what is an integer of its own kind is taken.
        if not isinstance(value, int) or isinstance(value, bool) or value not in (0, 1):
            raise ValueError(f"bits must hold only 0 (arrived) and 1 (lost), got {value!r} at {at}")
    return bytes(value for value in values if isinstance(value, int))
