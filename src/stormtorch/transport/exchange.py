"""The seam: a transport carries exchanges, and every collective is made of exchanges.

There are two transports: UDP (`stormtorch.transport.udp`) and a simulated network (`stormtorch.transport.simulated`).
Both drive the same native core.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch

from stormtorch import _engine
from stormtorch.errors import (
    Closed,
    ExchangeTimeout,
    PathBlocked,
    PeerFailed,
    PeerLeft,
    PeerSilent,
    SizeMismatch,
    StormError,
)
from stormtorch.reliability import EXACT, Reliability
from stormtorch.transport.channels import Channels
from stormtorch.transport.waiting import Servers


class WireDtype(IntEnum):
    """How the engine reads the elements of a message."""

    BYTES = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    INT8 = 4


WIRE_DTYPES = {
    torch.float32: WireDtype.FLOAT32,
    torch.bfloat16: WireDtype.BFLOAT16,
    torch.float16: WireDtype.FLOAT16,
}
"""What the engine can add up on arrival; everything else is placed and reduced by torch."""


class ReduceMode(IntEnum):
    """How contributions become one: the sum in rank order, the mean of what arrived, or a copy of the only one."""

    IN_ORDER = 0
    ARRIVED = 1
    COPY = 2


class Send(NamedTuple):
    """A message to a peer: an address and a length. The plan keeps the tensor alive."""

    peer: int
    data: int
    bytes: int
    second_stage: bool = False


class Receive(NamedTuple):
    """A message from a peer, placed at an address or, with `reduce`, added to the plan's reduction."""

    peer: int
    into: int
    bytes: int
    second_stage: bool = False
    reduce: bool = False


class Reduction(NamedTuple):
    """What becomes of the first stage's contributions; its result is what the second stage sends."""

    mode: ReduceMode
    wire: WireDtype
    out_dtype: WireDtype
    own: int
    out: int
    bytes: int
    own_position: int
    average: bool
    seed: int = 0
    """Of int8: where the result's grids lie."""


EngineArguments = tuple[
    int,
    int,
    list[Send],
    list[Receive],
    Reduction | None,
    tuple[float, float],
    tuple[float | None, float | None],
    float | None,
]


@dataclass(slots=True)
class Plan:
    """One exchange, as one rank sees it."""

    what: str
    channel: int
    seq: int
    sends: list[Send]
    receives: list[Receive]
    reduction: Reduction | None = None
    reliability: Reliability = EXACT
    """Of the first stage."""
    share: Reliability = EXACT
    """Of the second stage."""
    timeout_s: float | None = None
    keep: Sequence[torch.Tensor] = field(default_factory=tuple)
    """Tensors that must live until the exchange ends."""

    def arguments(self) -> EngineArguments:
        """The plan as the engine's `post` takes it. Deadlines count from the start of the exchange."""
        first, second = self.reliability.deadline_s, self.share.deadline_s
        return (
            self.channel,
            self.seq,
            self.sends,
            self.receives,
            self.reduction,
            (self.reliability.budget, self.share.budget),
            (first, None if second is None else second + (first or 0.0)),
            self.timeout_s,
        )


class Arrival:
    """What an exchange brought: how much of each message arrived, and what it took."""

    __slots__ = ("_outcome", "rank")

    def __init__(self, outcome: _engine.Outcome, rank: int) -> None:
        self._outcome = outcome
        self.rank = rank

    @property
    def arrived(self) -> float:
        """The fraction of all chunks that arrived here, over both stages."""
        return self.fraction()

    def fraction(self, *, stage: int | None = None, peer: int | None = None) -> float:
        """The fraction of chunks that arrived, of one stage (0 or 1) or from one peer if wished; 1.0 of nothing."""
        chunks = arrived = 0
        for each in self._outcome.arrivals:
            if stage in (None, int(each.second_stage)) and peer in (None, each.peer):
                chunks += each.chunks
                arrived += each.arrived
        return arrived / chunks if chunks else 1.0

    def links(self, *, stage: int = 0) -> dict[int, tuple[int, int]]:
        """Of each peer, how many chunks of its message there are and how many arrived."""
        return {
            each.peer: (each.chunks, each.arrived) for each in self._outcome.arrivals if int(each.second_stage) == stage
        }

    def mask(self, peer: int, *, stage: int = 0) -> torch.Tensor:
        """Which chunks of a peer's message arrived, as booleans."""
        for each in self._outcome.arrivals:
            if each.peer == peer and int(each.second_stage) == stage:
                packed = torch.frombuffer(bytearray(each.mask), dtype=torch.uint8)
                bits = (
                    packed.unsqueeze(1)
                    .bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device="cpu"))
                    .bitwise_and(1)
                )
                return bits.flatten()[: each.chunks].bool()
        raise KeyError(f"rank {self.rank} expected no message from rank {peer} in stage {stage}")

    def counts(self) -> torch.Tensor:
        """For each chunk of this rank's reduction, how many ranks' copies are in it, its own included."""
        counts = self._outcome.counts
        return (
            torch.frombuffer(bytearray(counts), dtype=torch.uint16).int()
            if counts
            else torch.empty(0, dtype=torch.int32)
        )

    @property
    def repaired(self) -> int:
        """Chunks that this rank had to send again."""
        return self._outcome.repaired

    @property
    def elapsed_s(self) -> float:
        """Seconds from posting to the end, in the transport's own time."""
        return self._outcome.elapsed_s

    def __repr__(self) -> str:
        return f"Arrival(arrived={self.arrived:.4f}, repaired={self.repaired}, elapsed_s={self.elapsed_s:.6f})"


class Exchange(Protocol):
    """An exchange under way."""

    def wait(self, timeout_s: float | None = None) -> Arrival:
        """Blocks until the exchange has ended; the tensors are then the caller's again."""
        ...

    def done(self) -> bool:
        """Whether it has ended."""
        ...


class Transport(Protocol):
    """Carries exchanges between the ranks of a world."""

    rank: int
    world: int
    chunk_bytes: int
    """The payload of one datagram: what is lost at once."""
    trip_bytes: int
    """How many bytes a rank could send in the time of one trip: what a collective may spend to spare one."""
    channels: Channels
    servers: Servers
    """Who takes part, while this rank waits, in calls that others have begun."""

    def post(self, plan: Plan) -> Exchange:
        """Begins an exchange. Returns at once; the plan's memory is the engine's until it ends."""
        ...

    def peek(self, channel: int, seq: int) -> list[tuple[int, bytes]]:
        """Which ranks have begun an exchange that was not posted here, and the first chunk of what each sends."""
        ...

    def health(self) -> dict[str, Any]:
        """Counters of all that was sent, received, repaired and turned away."""
        ...

    def close(self) -> None:
        """Says goodbye to the peers and frees everything."""
        ...


def conclude(outcome: _engine.Outcome, plan: Plan, rank: int, silence_s: float, timeout_s: float | None) -> Arrival:
    """The arrival of an exchange that ended well, or the error that says what did not and whose fault it was."""
    if outcome.status == _engine.Status.OK:
        return Arrival(outcome, rank)
    where = f"rank {rank}: {plan.what} (channel {plan.channel:08x}, sequence {plan.seq})"
    error = _error(outcome, where, silence_s, timeout_s)
    error.culprit = outcome.culprit
    raise error


def _error(outcome: _engine.Outcome, where: str, silence_s: float, timeout_s: float | None) -> StormError:
    status, peer = outcome.status, f"rank {outcome.peer}"
    missing = f"{outcome.missing_bytes} bytes missing"
    if status == _engine.Status.PEER_SILENT:
        return PeerSilent(
            f"{where}: nothing was heard of {peer} for {silence_s:g} s, {missing}. "
            "Is it alive and is UDP let through? Raise silence_s if it may pause for longer, or allow loss."
        )
    if status == _engine.Status.PATH_BLOCKED:
        return PathBlocked(
            f"{where}: {peer} answers, but no data reached it for {silence_s:g} s, {missing}. Something on the way "
            "drops all but small datagrams: look at the MTU of tunnels and VPNs, and at firewalls."
        )
    if status == _engine.Status.PEER_LEFT:
        by_itself = outcome.cause == _engine.Status.PEER_LEFT and outcome.culprit == outcome.peer
        why = "before this was done" if by_itself else _why(outcome)
        return PeerLeft(f"{where}: {peer} closed its transport {why}, {missing}.")
    if status == _engine.Status.PEER_FAILED:
        return PeerFailed(f"{where}: {peer} gave it up {_why(outcome)}, {missing}.")
    if status == _engine.Status.TIMED_OUT:
        return ExchangeTimeout(
            f"{where}: Timed out after {timeout_s or 0.0:g} s, waiting for {peer}, {missing}. "
            "Has every rank called it? Raise timeout_s if it may take longer."
        )
    if status == _engine.Status.SIZE_MISMATCH:
        return SizeMismatch(
            f"{where}: {peer} sends {outcome.announced_bytes} bytes where {outcome.expected_bytes} are expected. "
            "Every rank must pass tensors that agree in size and dtype."
        )
    if status == _engine.Status.CLOSED:
        return Closed(f"{where}: was cancelled.")
    return StormError(f"{where}: ended with {status}")


def _why(outcome: _engine.Outcome) -> str:
    """What another rank says of the first cause. How long it waited is its own setting and not known here."""
    culprit = f"rank {outcome.culprit}"
    return {
        _engine.Status.PEER_SILENT: f"because nothing was heard of {culprit}",
        _engine.Status.PATH_BLOCKED: f"because {culprit} answers, but no data reaches it",
        _engine.Status.PEER_LEFT: f"because {culprit} closed its transport",
        _engine.Status.TIMED_OUT: f"because it timed out, waiting for {culprit}",
        _engine.Status.SIZE_MISMATCH: f"because {culprit} sends another number of bytes than is expected",
        _engine.Status.CLOSED: f"because {culprit} cancelled it",
    }[outcome.cause]
