"""Advice from measurements: settings to paste, and a prediction of what training costs on this network."""

from dataclasses import asdict, dataclass
from typing import Any

from stormtorch.doctor.examination import DirectedLink, Examination
from stormtorch.doctor.verdict import LOSS_NOTE
from stormtorch.telemetry.statistics import mean
from stormtorch.theory import predict

USUAL_EAGER_BYTES = 256 << 10
USUAL_SILENCE_S = 10.0
_FLOAT_BYTES = 4
_SLOW_STEP_S = 0.5
_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Settings that suit a network; None keeps the default."""

    datagram_bytes: int | None = None
    eager_bytes: int | None = None
    silence_s: float | None = None
    port: int | None = None
    exact: bool = False
    """Whether the loss is so low that retransmission costs almost nothing."""
    wire: str | None = None

    def options(self) -> str:
        """Options as Python, to paste; empty if the defaults suit."""
        chosen = {
            "datagram_bytes": self.datagram_bytes,
            "eager_bytes": self.eager_bytes,
            "silence_s": self.silence_s,
            "port": self.port,
        }
        words = [f"{name}={value}" for name, value in chosen.items() if value is not None]
        return f"Options({', '.join(words)})" if words else ""

    def policy(self) -> str:
        """Policy as Python, to paste."""
        words = ["reliability=EXACT"] if self.exact else []
        words += [f"wire=torch.{self.wire}"] if self.wire else []
        return f"BoundedDrift({', '.join(words)})"

    def to_json(self) -> dict[str, Any]:
        """Advice as plain data and as text."""
        return {**asdict(self), "options_text": self.options(), "policy_text": self.policy()}


@dataclass(frozen=True, kw_only=True)
class PredictedCost:
    """Predicted communication cost of a training. Only the network was measured."""

    parameters: int
    ranks: int
    wire: str
    loss: float
    """Mean loss of the links."""
    rate_bits: float
    """Rate of the slowest link."""
    rate_is_limit: bool
    """Whether the network limited `rate_bits`; otherwise the link may carry more."""
    round_trip_s: float
    reliable_s: float
    """Seconds per step of an ideal ring all-reduce that retransmits every loss at once; TCP takes longer."""
    drift_s: float
    """Seconds per step under BoundedDrift, which retransmits nothing."""
    more_steps: float
    """Factor by which BoundedDrift needs more steps, if gradient noise limits the training."""

    def to_json(self) -> dict[str, Any]:
        """Prediction as plain data."""
        return asdict(self)


def advise(found: Examination, cost: PredictedCost | None = None) -> Advice:
    """Chooses settings for a network from its measurements."""
    links = _usable(found)
    if not links:
        return Advice()
    narrow = [
        link.path_bytes - (48 if ":" in found.ranks[link.source].address else 28)
        for link in links
        if link.path_bytes and link.path_bytes < min(found.ranks[each].mtu for each in (link.source, link.target))
    ]
    # Send a bandwidth-delay product eagerly, without waiting for the receiver's `ready`.
    under_way = max((link.bottleneck_bits / 8 * (link.round_trip_s or 0.0) for link in links), default=0.0)
    slowest = max((link.round_trip_s or 0.0 for link in links), default=0.0)
    longest_run = max((link.burst for link in links if link.loss >= LOSS_NOTE), default=1.0)
    silence = max(100 * slowest, 0.02 * longest_run * USUAL_SILENCE_S)
    ports = {rank.port for rank in found.ranks.values() if rank.chosen_port}
    return Advice(
        datagram_bytes=min(narrow) if narrow else None,
        eager_bytes=_rounded(under_way) if under_way > 2 * USUAL_EAGER_BYTES else None,
        silence_s=float(round(silence)) if silence > USUAL_SILENCE_S else None,
        port=ports.pop() if len(ports) == 1 else None,
        exact=all(link.loss < LOSS_NOTE for link in links),
        wire="bfloat16" if cost is not None and cost.wire == "float32" and cost.drift_s > _SLOW_STEP_S else None,
    )


def predict_cost(
    found: Examination, parameters: int, ranks: int | None = None, wire: str = "float32"
) -> PredictedCost | None:
    """Predicts the communication of a training on this network; None if too little was measured.

    Each rank sends and receives 2 (n-1)/n of the model in a step. The reliable ideal is a ring all-reduce, as gloo's:
    each rank sends all of that to the next one, retransmissions make it 1/(1-p) times the bytes, and 2 (n-1) messages
    follow one another, each after half a round trip. Under BoundedDrift, gradients go to their owners and parameters
    come back: each link carries 2/n of the model, everything is sent once, and two messages follow one another. A mean
    over fewer gradients is noisier, which costs steps (`theory.lead_steps`).
    """
    links = [link for link in _usable(found) if link.rate_bits]
    ranks = ranks or len(found.ranks)
    if not links or ranks < 2:
        return None
    # A link whose receive buffer overflowed says little about the network.
    links = [link for link in links if not link.overflowed] or links
    loss = min(mean([link.loss for link in links]), 0.9)
    trips = [link.round_trip_s for link in links if link.round_trip_s is not None]
    round_trip = max(trips, default=0.0)
    moved = 2 * (ranks - 1) / ranks * parameters * (_FLOAT_BYTES if wire == "float32" else 2)
    rates = {(link.source, link.target): link.bottleneck_bits for link in links}
    line = _bottleneck_rate(rates)
    everyone = sorted(found.ranks)
    ring = [rates[pair] for pair in zip(everyone, everyone[1:] + everyone[:1], strict=True) if pair in rates]
    # For another number of ranks, only the hosts' own rates are known.
    same = ranks == len(everyone)
    ring_bits = min([line, *(ring if same else [])])
    once = max(moved * 8 / line, moved / (ranks - 1) * 8 / min(rates.values()) if same else 0.0)
    slowest = min(links, key=lambda link: link.bottleneck_bits)
    return PredictedCost(
        parameters=parameters,
        ranks=ranks,
        wire=wire,
        loss=loss,
        rate_bits=slowest.bottleneck_bits,
        rate_is_limit=slowest.limited,
        round_trip_s=round_trip,
        reliable_s=moved * 8 / ring_bits / (1.0 - loss) + (ranks - 1) * round_trip,
        drift_s=once + round_trip,
        more_steps=predict(ranks, loss, steps=_STEPS).lead_steps / _STEPS,
    )


def _bottleneck_rate(rates: dict[tuple[int, int], float]) -> float:
    """Rate of the slowest host in its slower direction. A host's rate is that of its best link."""
    best: dict[tuple[int, str], float] = {}
    for (source, target), bits in rates.items():
        for end in ((source, "up"), (target, "down")):
            best[end] = max(best.get(end, 0.0), bits)
    return min(best.values())


def _usable(found: Examination) -> list[DirectedLink]:
    """Links that carry any datagrams. The others must be repaired, or their hosts removed, before a training."""
    return [link for link in found.links.values() if link.received]


def _rounded(size: float) -> int:
    """Next power of two, at most 16 MB."""
    rounded = USUAL_EAGER_BYTES
    while rounded < min(size, 16 << 20):
        rounded *= 2
    return rounded
