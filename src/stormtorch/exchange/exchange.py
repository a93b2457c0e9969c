"""Transport interface: plans, exchanges, results and errors. Every collective is made of exchanges.

There are two transports, UDP (`stormtorch.udp.udp`) and a simulated network (`stormtorch.exchange.simulated`). Both
drive the same native core.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch

import stormtorch._engine as _engine
from stormtorch.errors import (
    Closed,
    ExchangeTimeout,
    Interrupted,
    PathBlocked,
    PeerFailed,
    PeerLeft,
    PeerSilent,
    SizeMismatch,
    StormError,
)
from stormtorch.exchange.channels import Channels
from stormtorch.exchange.reliability import EXACT, Priority, Reliability
from stormtorch.exchange.views import Membership
from stormtorch.exchange.waiting import CollectiveServers


class WireDtype(IntEnum):
    """Element types of the engine; the numbers are the engine's."""

    BYTES = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    INT8 = 4
    INT4 = 5


WIRE_DTYPES = {
    torch.float32: WireDtype.FLOAT32,
    torch.bfloat16: WireDtype.BFLOAT16,
    torch.float16: WireDtype.FLOAT16,
}
"""Types that the engine sums on arrival; torch reduces all others once they have arrived."""


class ReduceMode(IntEnum):
    """Ways to combine contributions: sum in rank order, mean of those that arrived, or copy of the only one."""

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
    """A message from a peer: written to an address or, with `reduce`, added to the plan's reduction."""

    peer: int
    into: int
    bytes: int
    second_stage: bool = False
    reduce: bool = False


class Reduction(NamedTuple):
    """Reduction of the first stage's contributions; the second stage sends its result."""

    mode: ReduceMode
    wire: WireDtype
    out_dtype: WireDtype
    own: int
    out: int
    bytes: int
    own_position: int
    average: bool
    seed: int = 0
    """Seed of the grids to which a result of int8 or int4 is rounded."""
    elements: int = 0
    """Elements of the shard, which an odd number of int4 needs; 0 takes as many as the bytes hold."""


EngineArguments = tuple[
    int,
    int,
    list[Send],
    list[Receive],
    Reduction | None,
    tuple[float, float],
    tuple[float | None, float | None],
    float | None,
    int,
    tuple[float | None, float | None],
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
    """Reliability of the first stage."""
    share: Reliability = EXACT
    """Reliability of the second stage."""
    timeout_s: float | None = None
    keep: Sequence[torch.Tensor] = field(default_factory=tuple)
    """Tensors that must live until the exchange ends."""
    view: int = 0
    """View of the exchange, or 0. With a view, the exchange waits for silent or lost peers until a later view is known,
    and then drops the peers that are not in it, even if the exchange is exact."""
    interrupted: Callable[[], bool] | None = None
    """Function that a waiting rank calls every 0.03 s. If it returns true, the exchange is cancelled, and the wait ends
    with `Interrupted`. It must neither block nor wait for another exchange."""
    low: bool = False
    """Whether the exchange uses the low-priority lane. All its ranks must agree."""
    stopped: bool = field(default=False, init=False)
    """Whether `interrupted` has cancelled the exchange."""

    def arguments(self) -> EngineArguments:
        """Arguments of the engine's `post`, where both deadlines count from the start of the exchange."""
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
            self.view,
            (_parity(self.reliability), _parity(self.share)),
        )


def _parity(reliability: Reliability) -> float | None:
    """Redundancy as the engine takes it: None lets its model choose."""
    return None if reliability.redundancy == "auto" else float(reliability.redundancy)


class ExchangeResult:
    """Result of an exchange: what arrived of each message, the number of retransmissions, and the duration."""

    __slots__ = ("_outcome", "rank")

    def __init__(self, outcome: _engine.Outcome, rank: int) -> None:
        self._outcome = outcome
        self.rank = rank

    @property
    def arrived(self) -> float:
        """Fraction of all chunks that arrived at this rank, over both stages."""
        return self.fraction()

    def fraction(self, *, stage: int | None = None, peer: int | None = None) -> float:
        """Fraction of chunks that arrived, of all or of one stage (0 or 1) or peer; 1.0 if none were expected."""
        chunks = arrived = 0
        for each in self._outcome.arrivals:
            if stage in (None, int(each.second_stage)) and peer in (None, each.peer):
                chunks += each.chunks
                arrived += each.arrived
        return arrived / chunks if chunks else 1.0

    def links(self, *, stage: int = 0) -> dict[int, tuple[int, int]]:
        """Chunks in the message of each peer, and how many of them arrived."""
        return {
            each.peer: (each.chunks, each.arrived) for each in self._outcome.arrivals if int(each.second_stage) == stage
        }

    def recovered(self, *, stage: int = 0) -> dict[int, int]:
        """Lost chunks in the message of each peer that forward error correction (parity) recovered."""
        return {each.peer: each.recovered for each in self._outcome.arrivals if int(each.second_stage) == stage}

    def mask(self, peer: int, *, stage: int = 0) -> torch.Tensor:
        """Boolean mask of the chunks of a peer's message that arrived."""
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
        """Number of ranks that contributed to each chunk of this rank's reduction, this rank included."""
        counts = self._outcome.counts
        return (
            torch.frombuffer(bytearray(counts), dtype=torch.uint16).int()
            if counts
            else torch.empty(0, dtype=torch.int32)
        )

    @property
    def count(self) -> tuple[int, int]:
        """The value of `counts` if all chunks have the same one, as without loss, else 0; and the number of chunks."""
        counts = self._outcome.counts
        alike = counts == counts[:2] * (len(counts) // 2)
        return int.from_bytes(counts[:2], sys.byteorder) if alike else 0, len(counts) // 2

    @property
    def repaired(self) -> int:
        """Number of chunks that this rank retransmitted."""
        return self._outcome.repaired

    @property
    def elapsed_s(self) -> float:
        """Seconds from posting to the end, in the transport's own time."""
        return self._outcome.elapsed_s

    def __repr__(self) -> str:
        return f"ExchangeResult(arrived={self.arrived:.4f}, repaired={self.repaired}, elapsed_s={self.elapsed_s:.6f})"


class Exchange(Protocol):
    """A started exchange."""

    def wait(self, timeout_s: float | None = None) -> ExchangeResult:
        """Blocks until the exchange has ended; its tensors then belong to the caller again."""
        ...

    def done(self) -> bool:
        """Whether the exchange has ended."""
        ...

    def cancel(self) -> None:
        """Cancels the exchange; wait() then raises `Closed`."""
        ...


class Transport(Membership, Protocol):
    """Carries exchanges between the ranks of a world."""

    rank: int
    world: int
    job: str
    """Unique name of the run, the same on all ranks; records carry it."""
    chunk_bytes: int
    """Payload of one datagram: a chunk arrives whole or not at all."""
    trip_bytes: int
    """Bytes that a rank can send during one network trip: a collective may send that much more to save a trip."""
    channels: Channels
    collective_servers: CollectiveServers
    """Servers that take part in other ranks' collectives while this rank waits."""

    def post(self, plan: Plan) -> Exchange:
        """Begins an exchange and returns at once. The plan's memory belongs to the engine until the exchange ends."""
        ...

    def low_lane(self, priority: Priority | None) -> bool:
        """Whether exchanges of a priority use the low-priority lane; None is the job's own priority.

        Raises:
            ValueError: The job has no such priority.
        """
        ...

    def in_background(self, task: Callable[[], None]) -> Callable[[], None]:
        """Wraps a task so that another thread may call it once and wait for exchanges while the rank goes on."""
        ...

    def wait_future(self, future: Future[Any], peers: Collection[int] = ()) -> None:
        """Blocks until a future is done. As in a wait for an exchange, the rank serves collectives meanwhile.

        Args:
            future: Future that a task of `in_background` completes.
            peers: Ranks on which that depends.
        """
        ...

    def peek(self, channel: int, seq: int) -> list[tuple[int, bytes]]:
        """Ranks that have begun an exchange that this rank has not posted, and the first chunk of each."""
        ...

    def machine_of(self, rank: int) -> str:
        """Identity of a rank's machine: ranks with the same one are on one host. Empty if unknown."""
        ...

    def health(self) -> dict[str, Any]:
        """Counters of what was sent, received, retransmitted (`repaired`) and rejected."""
        ...

    def take_bottleneck_peaks(self) -> tuple[float, float, float]:
        """Peak bytes per second at the bottleneck since the last call: out, in, and both together."""
        ...

    def close(self) -> None:
        """Sends a goodbye to the peers and frees everything."""
        ...


def conclude(
    outcome: _engine.Outcome, plan: Plan, rank: int, silence_s: float, timeout_s: float | None
) -> ExchangeResult:
    """Returns the result of an exchange, or raises an error that names what is missing and which rank caused it."""
    if outcome.status == _engine.Status.OK:
        return ExchangeResult(outcome, rank)
    where = f"rank {rank}: {plan.what} (channel {plan.channel:08x}, sequence {plan.seq})"
    error = _error(outcome, where, silence_s, timeout_s, stopped=plan.stopped)
    error.culprit = outcome.culprit
    raise error


def _error(
    outcome: _engine.Outcome, where: str, silence_s: float, timeout_s: float | None, *, stopped: bool
) -> StormError:
    status, peer = outcome.status, f"rank {outcome.peer}"
    missing = f"{outcome.missing_bytes} bytes missing"
    if status == _engine.Status.PEER_SILENT:
        # The wait ends earlier if the kernel of the peer's machine reports that no process listens at its port.
        long = f" for {silence_s:g} s" if outcome.elapsed_s >= 0.99 * silence_s else ", no process listens at its port"
        return PeerSilent(
            f"{where}: nothing was received from {peer}{long}, {missing}. "
            "Is it alive, and does every firewall admit UDP? Raise silence_s if it may pause for longer, or allow "
            "loss. Among the ranks of a prepared model, optimizer.session.mean(), sum() and gather() go on without it."
        )
    if status == _engine.Status.PATH_BLOCKED:
        return PathBlocked(
            f"{where}: {peer} answers, but no data reached it for {silence_s:g} s, {missing}. The path drops all but "
            "small datagrams: check the MTU of tunnels and VPNs, and firewalls."
        )
    if status == _engine.Status.MEMORY_BROKEN:
        return PeerFailed(
            f"{where}: {peer} has corrupted the memory that it shares with this rank, {missing}. A bug in its process "
            "writes there: restart it, or turn shared memory off by Options(shared_memory=False)."
        )
    if status == _engine.Status.PEER_LEFT:
        by_itself = outcome.cause == _engine.Status.PEER_LEFT and outcome.culprit == outcome.peer
        why = "before the exchange ended" if by_itself else _why(outcome)
        return PeerLeft(f"{where}: {peer} closed its transport {why}, {missing}.")
    if status == _engine.Status.PEER_FAILED:
        return PeerFailed(f"{where}: {peer} aborted it {_why(outcome)}, {missing}.")
    if status == _engine.Status.TIMED_OUT:
        return ExchangeTimeout(
            f"{where}: Timed out after {timeout_s or 0.0:g} s, waiting for {peer}, {missing}. "
            "Has every rank made this call? Raise timeout_s if it may take longer."
        )
    if status == _engine.Status.SIZE_MISMATCH:
        return SizeMismatch(
            f"{where}: {peer} sends {outcome.announced_bytes} bytes where {outcome.expected_bytes} are expected. "
            "Every rank must pass tensors of the same size and dtype."
        )
    if status == _engine.Status.CLOSED and stopped:
        return Interrupted(f"{where}: was interrupted, because the members of the job are changing.")
    if status == _engine.Status.CLOSED:
        return Closed(f"{where}: was cancelled.")
    return StormError(f"{where}: ended with {status}")


def _why(outcome: _engine.Outcome) -> str:
    """Failure cause as another rank reports it. How long that rank waited is its own setting, unknown here."""
    culprit = f"rank {outcome.culprit}"
    return {
        _engine.Status.PEER_SILENT: f"because nothing was received from {culprit}",
        _engine.Status.PATH_BLOCKED: f"because {culprit} answers, but no data reaches it",
        _engine.Status.PEER_LEFT: f"because {culprit} closed its transport",
        _engine.Status.MEMORY_BROKEN: f"because {culprit} has corrupted shared memory",
        _engine.Status.TIMED_OUT: f"because it timed out, waiting for {culprit}",
        _engine.Status.SIZE_MISMATCH: f"because {culprit} sends another number of bytes than expected",
        _engine.Status.CLOSED: f"because {culprit} cancelled it",
    }[outcome.cause]
