"""Model of the time of a training step on a network: computation, and the two stages of gradients and parameters.

Links have the same rate both ways, every rank sends to all others at once, and nothing overlaps with computation: an
upper bound for a training that overlaps them. Transport overhead is not included; in the lab it was 10 to 30 %.
"""

import math
from dataclasses import dataclass

from stormtorch.checks import check
from stormtorch.theory.arguments import check_count, check_loss, check_size
from stormtorch.theory.coding import LinkModel, round_probabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """A rank's access link, which all its traffic shares."""

    bits_per_s: float
    """Rate in each direction."""
    round_trip_s: float
    """Round trip to any other rank."""

    def __post_init__(self) -> None:
        check(self.bits_per_s > 0.0, "bits_per_s", "be above 0", self.bits_per_s)
        check_size("round_trip_s", self.round_trip_s)


def step_on_bottleneck_s(
    bottleneck: Bottleneck,
    *,
    n: int,
    model_bytes: float,
    p: float,
    budgets: tuple[float, float] = (1.0, 1.0),
    redundancy: float = 0.0,
    compute_s: float = 0.0,
    chunk_bytes: float = 1440.0,
) -> float:
    """Time of one step of bounded drift: computation, and per stage transmission, half a round trip and retransmission.

    Args:
        bottleneck: Access link of every rank.
        n: Number of ranks.
        model_bytes: Bytes of the parameters on the wire; gradients have the same size.
        p: Fraction of the chunks that is lost, independently.
        budgets: Fractions of gradients and of parameters that may be missing; 1 never retransmits, 0 is exact.
        redundancy: Parity chunks per data chunk.
        compute_s: Time of forward, backward and optimizer.
        chunk_bytes: Bytes of a chunk.
    """
    check_count("n", n, 2)
    check_loss(p)
    check_size("model_bytes", model_bytes)
    check(redundancy >= 0.0, "redundancy", "be 0 or more", redundancy)
    whole = model_bytes * (n - 1) / n
    first_pass_s = 8.0 * whole * (1.0 + redundancy) / bottleneck.bits_per_s + bottleneck.round_trip_s / 2
    again_s = 0.0
    for budget in budgets:
        check(0.0 <= budget <= 1.0, "budgets", "lie in [0, 1]", budget)
        share, trips = sent_again(p, whole / chunk_bytes, budget)
        again_s += 8.0 * whole * share / bottleneck.bits_per_s + trips * bottleneck.round_trip_s
    return compute_s + 2.0 * first_pass_s + again_s


def sent_again(p: float, chunks: float, budget: float) -> tuple[float, float]:
    """Retransmissions until at most the budget is missing, as a multiple of the first pass; and their round trips.

    Every round retransmits all missing chunks, so that p, p^2, ... remain. With a budget of 0, rounds continue until
    the last of `chunks` chunks has arrived; the mean number of rounds is returned.
    """
    if budget >= p:
        return 0.0, 0.0
    if budget == 0.0:
        # Ignores the extra copies that the engine sends of the last few chunks.
        return p / (1.0 - p), sum(round_probabilities(LinkModel(p=p, round_trip_s=1.0, chunk_s=1.0), chunks))
    rounds = math.ceil(math.log(budget) / math.log(p) - 1e-9) - 1
    return sum(p**j for j in range(1, rounds + 1)), float(rounds)
