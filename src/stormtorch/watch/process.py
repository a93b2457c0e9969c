"""State of one process of a job, built from its records."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stormtorch.watch.fields import amount, by_rank, clean, count, mapping, number, ranks, text

# Records that describe the present: at one a second, the last minute.
_RECENT = 60
_SETTINGS = 40


@dataclass(slots=True)
class StepTotals:
    """Sums over some steps of one process."""

    steps: int = 0
    seconds: float = 0.0
    gradient_wait_s: float = 0.0
    broadcast_wait_s: float = 0.0
    view_wait_s: float = 0.0
    bytes_sent: float = 0.0
    arrived: float = 0.0
    """Fraction that arrived, times the steps."""
    guarded: int = 0

    def add(self, other: "StepTotals") -> None:
        """Adds the sums of other steps."""
        self.steps += other.steps
        self.seconds += other.seconds
        self.gradient_wait_s += other.gradient_wait_s
        self.broadcast_wait_s += other.broadcast_wait_s
        self.view_wait_s += other.view_wait_s
        self.bytes_sent += other.bytes_sent
        self.arrived += other.arrived
        self.guarded += other.guarded

    @property
    def wait_s(self) -> float:
        """Seconds spent only waiting for gradients or parameters."""
        return self.gradient_wait_s + self.broadcast_wait_s

    @property
    def compute_s(self) -> float:
        """Remaining seconds: forward, backward, the optimizer, and communication that overlaps with them."""
        return max(0.0, self.seconds - self.wait_s - self.view_wait_s)

    @property
    def lost(self) -> float:
        """Fraction of the chunks that never arrived."""
        return 1.0 - self.arrived / self.steps if self.steps else 0.0


def sum_totals(step_totals: Iterable[StepTotals]) -> StepTotals:
    """Returns the sum of several totals."""
    result = StepTotals()
    for each in step_totals:
        result.add(each)
    return result


@dataclass(slots=True)
class PeerLink:
    """One link as measured at one of its ends."""

    loss: float | None = None
    """Fraction of the peer's datagrams to this process that were lost."""
    rtt_s: float | None = None
    rate: float | None = None
    """Bytes per second that this process may send to the peer; None if unlimited."""
    heard_s: float | None = None
    """Seconds since the last datagram of the peer."""


@dataclass
class Process:
    """One process: its identity, progress, step times and links."""

    origin: str
    """Unique name of this process: its file name."""
    rank: int | None = None
    incarnation: int = 0
    world: int = 0
    host: str = ""
    pid: int = 0
    name: str = ""
    policy: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    parameters: int | None = None
    chunk_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    started: float | None = None

    told: float = 0.0
    """Time of its last record, by its own clock."""
    arrived: float = 0.0
    """Time at which that record arrived, by the watcher's clock: clocks of other hosts may differ by minutes."""
    step: int | None = None
    why: str | None = None
    """Reason of its end: "done", "left" or an error; None while it runs."""
    ended: float = 0.0
    """Time of its end."""
    recent: deque[tuple[float, StepTotals]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    whole: StepTotals = field(default_factory=StepTotals)
    latest: dict[str, float | None] = field(default_factory=dict)
    """Latest measurements of a step: drift, its bound, lead, effective batch, training loss."""
    lag: dict[int, int] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    links: dict[int, PeerLink] = field(default_factory=dict)
    quorum: bool = True
    """Whether it reaches a majority of the ranks."""
    waits_s: float = 0.0
    """Seconds that it has been waiting in its current call."""
    waits_in: str = ""
    waits_for: list[int] = field(default_factory=list)
    health: dict[str, Any] = field(default_factory=dict)
    busy: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Times, with the processor seconds used until then."""
    _link_losses: dict[int, list[float]] = field(default_factory=dict)

    def begin_again(self) -> None:
        """Discards an earlier end: a program may train twice, and containers reuse process ids."""
        self.why, self.ended, self.whole = None, 0.0, StepTotals()
        self.recent.clear()
        self.busy.clear()

    def apply_rank_record(self, record: dict[str, Any]) -> None:
        """Applies a record of kind "rank": the identity of the process."""
        named = ranks({"rank": [record.get("rank")]}, "rank")
        self.rank = named[0] if named else None
        self.incarnation = count(record, "incarnation") or 0
        self.world = count(record, "world") or 0
        self.host, self.pid, self.name = text(record, "host"), count(record, "pid") or 0, text(record, "group")
        self.policy, self.parameters = text(record, "policy"), count(record, "parameters")
        self.chunk_bytes = count(record, "chunk_bytes") or 0
        self.settings = {
            clean(str(key)): clean(str(value)) for key, value in list(mapping(record, "settings").items())[:_SETTINGS]
        }
        self.versions = {each: text(record, each) for each in ("stormtorch", "torch", "python")}
        self.started = number(record, "started")

    def apply_steps_record(self, time: float, record: dict[str, Any]) -> StepTotals:
        """Applies a record of kind "steps"; returns its sums."""
        steps = count(record, "steps") or 0
        arrived = number(record, "arrived")
        view_wait_s = amount(record, "view_wait_s")
        totals = StepTotals(
            steps,
            amount(record, "seconds"),
            # Under an OwnerPolicy, the wait for gradients contains the wait for views.
            max(0.0, amount(record, "gradient_wait_s") - view_wait_s),
            amount(record, "broadcast_wait_s"),
            view_wait_s,
            amount(record, "bytes_sent"),
            steps * min(1.0, max(0.0, 1.0 if arrived is None else arrived)),
            count(record, "guarded") or 0,
        )
        self.step = count(record, "step") if "step" in record else self.step
        if steps:
            self.recent.append((time, totals))
            self.whole.add(totals)
        for each in (
            "lead",
            "loss",
            "pair_drift",
            "owner_drift",
            "pair_bound",
            "effective_batch",
            "variance_inflation",
        ):
            self.latest[each] = number(record, each)
        if (train_loss := number(record, "train_loss")) is not None:
            self.latest["train_loss"] = train_loss
        self.lag = {age: int(number({"n": chunks}, "n") or 0) for age, chunks in by_rank(record, "lag").items()}
        self.missing = ranks(record, "missing")
        return totals

    def apply_links_record(self, time: float, record: dict[str, Any]) -> None:
        """Applies a record of kind "links": links, counters and processor time."""
        self.links = {
            peer: PeerLink(
                loss=_share(each),
                # 0 means that the round trip is unknown, or that the rate is unlimited.
                rtt_s=number(each, "rtt_s") or None,
                rate=number(each, "rate") or None,
                heard_s=number(each, "heard_s"),
            )
            for peer, each in by_rank(record, "links").items()
            if isinstance(each, dict)
        }
        for peer, link in self.links.items():
            if link.loss is not None:
                sums = self._link_losses.setdefault(peer, [0.0, 0.0])
                sums[0] += link.loss
                sums[1] += 1.0
        self.health = mapping(record, "health")
        self.quorum = record.get("quorum") is not False
        waits = mapping(record, "waits")
        self.waits_s, self.waits_in = amount(waits, "seconds"), text(waits, "call")
        self.waits_for = ranks(waits, "peers")
        if (used := number(record, "cpu_s")) is not None:
            self.busy.append((time, used))

    def mean_loss(self, peer: int) -> float | None:
        """Mean loss on the link from a peer, over all records."""
        sums = self._link_losses.get(peer)
        return sums[0] / sums[1] if sums else None

    def now(self, seconds: float) -> StepTotals:
        """Sums over about `seconds` before its last record; at least the last record of steps."""
        step_totals = [totals for time, totals in self.recent if time > self.told - seconds]
        return sum_totals(step_totals or [totals for _, totals in list(self.recent)[-1:]])

    @property
    def cores(self) -> float | None:
        """Mean number of processor cores in use over the last minute."""
        if len(self.busy) < 2:
            return None
        (then, before), (now, used) = self.busy[0], self.busy[-1]
        return max(0.0, used - before) / (now - then) if now > then else None

    def counter(self, name: str) -> float:
        """Returns a counter of the engine; 0 if unknown."""
        return amount(self.health, name)

    @property
    def resent(self) -> float:
        """Fraction of the sent bytes that were retransmissions."""
        sent = self.counter("bytes_sent")
        return min(1.0, self.counter("repaired") * self.chunk_bytes / sent) if sent else 0.0


def _share(link: dict[str, Any]) -> float | None:
    value = number(link, "loss")
    return None if value is None else min(1.0, max(0.0, value))
