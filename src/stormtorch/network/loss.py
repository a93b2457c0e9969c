"""Packet loss models: which datagrams of a link are lost.

A model describes one direction of one link and draws no random numbers itself. The engine and the simulator take its
parameters and a seed, and produce the same losses every time.

    Bernoulli(p=0.1)                     # lose each datagram with probability 0.1, whatever happened before
    GilbertElliott(p=0.1, burst=8)       # lose as many, but in runs of 8 on average, as on Wi-Fi or in a full queue
    TimedBursts(p=0.1, burst_s=0.005)    # lose as many, but for 5 ms at a time on average, at any rate
    Trace(bits="0001100000")             # replay a recorded link in a loop: 1 is lost
    PerLink(default=Bernoulli(p=0.01), links={(0, 1): GilbertElliott(p=0.2, burst=16)})
    Shared(p=0.1, share=0.5)             # lose half of it at the sender: the same chunks for all its receivers
    Stragglers(chance=0.1, delivered=0.5, network=Bernoulli(p=0.01))    # make ranks late now and then

Most theory assumes `Bernoulli`. Real losses cluster: at the same rate, bursts drop whole stretches of a tensor and
spare others, so measure with both. A link is a pair (source, target): the two directions between a pair of ranks are
two links, each with its own losses. Only `Shared` makes links depend on each other, those of one sender.

`Stragglers` is only for virtual workers (`stormtorch_lab.simulation`): on a transport, deadlines and delays are real.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import NamedTuple, TypeAlias

from stormtorch.network.checked import (
    burst_seconds,
    checked_bits,
    checked_burst,
    checked_burst_s,
    checked_chance,
    checked_link,
    checked_number,
)

__all__ = [
    "Bernoulli",
    "GilbertElliott",
    "LinkFaults",
    "LinkModel",
    "LossModel",
    "PerLink",
    "Shared",
    "Stragglers",
    "TimedBursts",
    "Trace",
]


class LinkFaults(NamedTuple):
    """Loss of one link, in the form that the engine takes; see engine/wire/faults.hpp."""

    loss: float = 0.0
    """Fraction of the datagrams that is lost."""
    burst: float = 1.0
    """Mean length of a run of losses; exactly 1 means independent loss."""
    trace: bytes = b""
    """One byte per datagram, 0 or 1, replayed in a loop; unless empty, it replaces `loss` and `burst`."""
    shared: float = 0.0
    """Fraction of chunks lost at the source, the same for all receivers, in addition to the other losses."""
    burst_s: float = 0.0
    """Mean duration of a burst; unless 0, `burst` is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bernoulli:
    """Independent loss: each datagram is lost with the same probability."""

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

    Per datagram, a link leaves the bad state with probability 1 / burst and enters it with p / ((1 - p) * burst). The
    second must not exceed 1, so frequent loss needs long bursts: `burst >= p / (1 - p)`. `burst = 1 / (1 - p)` equals
    `Bernoulli(p=p)`, and so does a burst of exactly 1: independent loss.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedBursts:
    """Loss in bursts of a mean duration: a link is good or bad, as in `GilbertElliott`, but changes with time alone.

    The bad state lasts for exponential times with the mean `burst_s`, the good one with the mean
    `burst_s * (1 - p) / p`. A burst also passes while nothing is sent, and a faster sender loses more in it. This model
    is for transports and labs: virtual workers have no clock.
    """

    p: float
    """Fraction of time in the bad state, above 0 and below 1: the loss rate at an even sending rate."""
    burst_s: float
    """Mean duration of a burst in seconds, 1 us to 1 h."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", checked_chance("p", self.p))
        object.__setattr__(self, "burst_s", checked_burst_s("burst_s", "p", self.p, self.burst_s))

    def link_faults(self) -> LinkFaults:
        """The engine's parameters of this model."""
        return LinkFaults(loss=self.p, burst_s=self.burst_s)


@dataclass(frozen=True, init=False, slots=True)
class Trace:
    """Recorded losses, replayed in a loop. Each link starts at an offset drawn from the seed."""

    bits: bytes
    """One byte per datagram: 0 arrived, 1 was lost."""

    def __init__(self, *, bits: str | bytes | Sequence[int]) -> None:
        """`bits` may be text ("0010"), bytes of value 0 and 1, or a sequence of the integers 0 and 1."""
        object.__setattr__(self, "bits", checked_bits(bits))

    @classmethod
    def from_file(cls, path: str | PathLike[str], *, line: int = 0, field: str = "bits") -> Trace:
        """Read one trace from a file with a JSON object per line: line `line`, counted from 0, key `field`."""
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
        """Read the traces of all lines of such a file, for example one for each link."""
        return [trace for trace in cls._read(path, field, only=None) if trace is not None]

    @classmethod
    def _read(cls, path: str | PathLike[str], field: str, only: int | None) -> Iterator[Trace | None]:
        """Yield one item per line, None for all but `only`: parsing thousands of traces to get one would be slow."""
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
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: must be JSON, got {text.strip()!r:.40}") from error
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error

    def link_faults(self) -> LinkFaults:
        """The engine's parameters of this model."""
        return LinkFaults(trace=self.bits)


LinkModel: TypeAlias = Bernoulli | GilbertElliott | TimedBursts | Trace
"""The model of one link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLink:
    """A model for each link: links that `links` does not name follow `default`."""

    default: LinkModel = field(default_factory=lambda: Bernoulli(p=0.0))
    """The model of every link that `links` does not name."""
    links: Mapping[tuple[int, int], LinkModel] = field(default_factory=dict, hash=False)
    """Models by (source, target); copied, so later changes of the argument have no effect."""

    def __post_init__(self) -> None:
        if not isinstance(self.default, LinkModel):
            raise ValueError(f"default must be a model of one link, got {self.default!r}")
        if not isinstance(self.links, Mapping):
            raise ValueError(f"links must map (source, target) to a model, got {self.links!r}")
        links = {checked_link("links", link): model for link, model in self.links.items()}
        for link, model in links.items():
            if not isinstance(model, LinkModel):
                raise ValueError(f"links[{link}] must be a model of one link, got {model!r}")
        object.__setattr__(self, "links", links)

    @classmethod
    def matrix(cls, rows: Sequence[Sequence[float | LinkModel]]) -> PerLink:
        """Make a model of loss rates or models: one row per source, one column per target. The diagonal is ignored."""
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

    @classmethod
    def bad_sender(cls, rank: int, world: int, model: LinkModel, default: LinkModel) -> PerLink:
        """Make a model in which the links from `rank` follow `model`, and all others `default`."""
        _check_ranks("rank", [rank], world)
        return cls(default=default, links={(rank, other): model for other in range(world) if other != rank})

    @classmethod
    def bad_rack(cls, ranks: Iterable[int], world: int, model: LinkModel, default: LinkModel) -> PerLink:
        """Make a model in which links between `ranks` and the others follow `model`, and all others `default`."""
        inside = sorted(set(ranks))
        _check_ranks("ranks", inside, world)
        across = [(rank, other) for rank in inside for other in range(world) if other not in inside]
        return cls(default=default, links={link: model for pair in across for link in (pair, pair[::-1])})

    @classmethod
    def traces(
        cls, path: str | PathLike[str], world: int, seed: int, *, least: float = 0.005, most: float = 0.3
    ) -> PerLink:
        """Give every link a trace, drawn from the lines of a file (see `Trace.from_file`) that lose `least` to `most`.

        Recorded links differ widely: many lose nothing and a few nearly everything, so most files need the bounds.
        """
        low, high = checked_chance("least", least), checked_chance("most", most)
        found = [trace for trace in Trace.all_from_file(path) if low <= sum(trace.bits) / len(trace.bits) <= high]
        if not found:
            raise ValueError(f"{path} has no line that loses {100 * low:g} to {100 * high:g} %: change least or most")
        draw = random.Random(seed)
        links = [(source, target) for source in range(world) for target in range(world) if source != target]
        return cls(links={link: draw.choice(found) for link in links})

    def model(self, source: int, target: int) -> LinkModel:
        """The model of the link from `source` to `target`."""
        return self.links.get((source, target), self.default)

    def link_faults(self, source: int, target: int) -> LinkFaults:
        """The engine's parameters of the link from `source` to `target`."""
        return self.model(source, target).link_faults()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Loss that receivers have in common: part of it happens at the sender, and takes all copies of a chunk at once.

    A chunk for only one receiver, as in a reduce-scatter or a retransmission, is lost just as often.
    """

    p: float
    """Fraction of a link's datagrams that are lost in all, in [0, 1]."""
    share: float
    """Fraction of the loss that happens at the sender, so that all receivers lose the same chunk, in [0, 1]."""
    burst: float = 1.0
    """Mean number of chunks lost in a row, at the sender and on each link. More than 1 is for virtual workers only."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", checked_chance("p", self.p))
        object.__setattr__(self, "share", checked_chance("share", self.share))
        object.__setattr__(self, "burst", checked_burst("p", self.p, self.burst))

    @property
    def common(self) -> float:
        """Chance of a chunk to be lost at the sender."""
        return self.p * self.share

    @property
    def own(self) -> float:
        """Chance of a chunk to be lost on a link after that, such that both together lose `p`."""
        return 0.0 if self.common == 1.0 else 1.0 - (1.0 - self.p) / (1.0 - self.common)

    def link_faults(self) -> LinkFaults:
        """The engine's parameters of this model."""
        if self.burst != 1.0:
            raise ValueError(f"burst of shared loss must be 1 on a transport, got {self.burst}")
        return LinkFaults(loss=self.own, shared=self.common)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stragglers:
    """Late ranks: in some exchanges, only the first part of a rank's messages arrives before the deadline.

    This model is for virtual workers. On a transport, `Reliability(deadline_s=...)` ends an exchange and
    `faults(delay_ms=...)` makes a rank late.
    """

    chance: float
    """Probability that a rank is late in an exchange, independently for each rank and exchange, in [0, 1]."""
    delivered: float | None = None
    """Fraction of each message of a late rank, from its begin, that is in time, in (0, 1); None draws it each time."""
    network: LinkModel | PerLink | Shared = field(default_factory=lambda: Bernoulli(p=0.0))
    """Loss of the datagrams that are in time."""
    backwards: bool = False
    """Whether a rank is late because its backward is: it then delivers only the last part of the model, whose gradients
    come first, also to the shards that it owns itself. Parameters that owners send are not late."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chance", checked_chance("chance", self.chance))
        if self.delivered is not None:
            object.__setattr__(self, "delivered", checked_number("delivered", self.delivered))
            if not 0.0 < self.delivered < 1.0:
                raise ValueError(f"delivered must lie in (0, 1), got {self.delivered}")
        if not isinstance(self.network, LinkModel | PerLink | Shared):
            raise ValueError(f"network must be another loss model, got {self.network!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowBackward:
    """Ranks whose backward takes a random time, cut off by the deadline that the policy sets for each step.

    A rank computes the gradients of one part of the model after the other, from the last to the first. Each part takes
    an exponential time, so the number of parts that are complete at the deadline is Poisson. All other gradients are
    missing, even those of the shards that the rank owns itself. A policy without a deadline waits for all of them.

    This model is for virtual workers. No time passes in it: steps end at their deadlines.
    """

    part_s: float | tuple[float, ...]
    """Mean seconds per part; a tuple has one number for each rank."""
    parts: int
    """Number of equal parts of the model, in chunks, which stand for its layers."""
    network: LinkModel | PerLink | Shared = field(default_factory=lambda: Bernoulli(p=0.0))
    """Loss of the datagrams that are in time."""

    def __post_init__(self) -> None:
        each = self.part_s if isinstance(self.part_s, tuple) else (self.part_s,)
        if not each or not all(checked_number("part_s", seconds) > 0.0 for seconds in each):
            raise ValueError(f"part_s must be finite and above 0, got {self.part_s}")
        if self.parts != int(self.parts) or self.parts < 1:
            raise ValueError(f"parts must be a whole number of at least 1, got {self.parts}")
        if not isinstance(self.network, LinkModel | PerLink | Shared):
            raise ValueError(f"network must be another loss model, got {self.network!r}")


LossModel: TypeAlias = LinkModel | PerLink | Shared | Stragglers | SlowBackward
"""Any loss model. `faults(loss=...)` and the simulated network take neither `Stragglers` nor `SlowBackward`."""


def loss_in_bursts(p: float, burst: float | str, *, name: str = "p") -> Bernoulli | GilbertElliott | TimedBursts:
    """Model of a link with this loss rate and these bursts: a mean number of packets, or a mean time such as "5ms".

    A burst of 1 packet is independent loss. Errors call the loss rate `name`.
    """
    if isinstance(burst, str):
        return TimedBursts(p=p, burst_s=checked_burst_s("burst", name, p, burst_seconds(burst)))
    length = checked_burst(name, p, burst)
    return Bernoulli(p=p) if length == 1.0 else GilbertElliott(p=p, burst=length)


def has_timed_bursts(network: LinkModel | PerLink | Shared) -> bool:
    """Whether the bursts of any link have a duration, and so need a clock."""
    models = [network.default, *network.links.values()] if isinstance(network, PerLink) else [network]
    return any(isinstance(model, TimedBursts) for model in models)


def in_time(network: LossModel) -> LinkModel | PerLink | Shared:
    """Loss of datagrams of ranks that are not late."""
    return network.network if isinstance(network, Stragglers | SlowBackward) else network


def _check_ranks(name: str, ranks: Sequence[int], world: int) -> None:
    for rank in ranks:
        if not 0 <= rank < world:
            raise ValueError(f"{name} must lie in 0 to {world - 1}, got {rank}")
