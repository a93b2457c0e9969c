"""Model of retransmission against forward error correction: the time of a message on a lossy link, and the best parity.

A message has `chunks` chunks, each of which takes `chunk_s` on the link. Losses follow the Gilbert-Elliott model: a
fraction `p` of the datagrams is lost, `burst` of them in a row on average. The sender learns of a loss a round trip
later. The engine makes the same choice (engine/coding/coding_model.cpp); a test compares both.
"""

import math
from dataclasses import dataclass
from typing import Literal

from stormtorch.checks import check
from stormtorch.theory.arguments import check_count, check_loss, check_size

BLOCK_CHUNKS = 128
"""Most data chunks of a block."""
STRETCH_BLOCKS = 4
"""Most blocks of a stretch. Their chunks are interleaved, so that a burst is spread over all of them."""
_LEAST_GAIN_S = 0.5e-3
_LEAST_GAIN = 0.1
_LEAST_FAILURE = 1e-4
_LEAST_BOUND = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """Parameters of a lossy link."""

    p: float
    """Fraction of the datagrams that are lost."""
    burst: float = 1.0
    """Mean number of datagrams that are lost in a row; 1 is independent loss."""
    round_trip_s: float
    """Time until the sender learns of a loss."""
    chunk_s: float
    """Serialization time of one chunk."""

    def __post_init__(self) -> None:
        check_loss(self.p)
        check(math.isfinite(self.burst) and self.burst >= 1.0, "burst", "be finite and at least 1", self.burst)
        check_size("round_trip_s", self.round_trip_s)
        check_size("chunk_s", self.chunk_s)

    def chain(self, apart: int = 1) -> tuple[float, float]:
        """Transition probabilities from the good to the bad state and back, over `apart` datagrams. Exact.

        The chain has one eigenvalue besides 1, so that its memory decays as a power of it.
        """
        back = 1.0 / max(self.burst, 1.0 / (1.0 - self.p))  # independent losses have runs of 1 / (1 - p)
        memory = max(0.0, 1.0 - back - back * self.p / (1.0 - self.p)) ** apart
        return self.p * (1.0 - memory), (1.0 - self.p) * (1.0 - memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How a stretch is sent, and the extra time that it costs."""

    way: Literal["none", "repair", "coding", "hybrid"]
    """`none`: no protection needed. `repair`: retransmission. `coding`: parity, with which at most one block in a
    thousand fails. `hybrid`: parity, with retransmission for the blocks that fail."""
    chunks: int
    """Data chunks per block."""
    parity: int
    """Parity chunks per block."""
    cost_s: float
    """Expected time beyond that of the data chunks."""


def block_failures(link: LinkModel, chunks: int, most: int, *, apart: int = 1) -> list[float]:
    """Probabilities that more than m of `chunks + m` datagrams are lost, for m from 0 to `most`. Exact under the model.

    With that many losses, a block of `chunks` data and m parity chunks cannot be decoded. Consecutive datagrams of a
    block are `apart` datagrams apart on the link.
    """
    check_count("chunks", chunks)
    check_count("most", most, 0)
    lose, recover = link.chain(apart)
    good, bad = [0.0] * (most + 2), [0.0] * (most + 2)
    good[0], bad[1] = 1.0 - link.p, link.p
    failures = []
    for sent in range(1, chunks + most + 1):
        if sent >= chunks:
            fine = sum(good[: sent - chunks + 1]) + sum(bad[: sent - chunks + 1])
            failures.append(min(max(1.0 - fine, 0.0), 1.0))
        kept = [g * (1.0 - lose) + b * recover for g, b in zip(good, bad, strict=True)]
        lost = [0.0, *(g * lose + b * (1.0 - recover) for g, b in zip(good[:-1], bad[:-1], strict=True))]
        good, bad = kept, lost
    return failures


def round_probabilities(link: LinkModel, chunks: float, *, copies: int = 2) -> list[float]:
    """Probabilities that a first, a second, ... round of retransmission is needed for the last `chunks` chunks.

    The first retransmission of a chunk is sent once. At the end of a message the link is idle, so that from the second
    round on each is sent `copies` times: round j > 1 is needed for a chunk with probability p^(2 + copies (j - 2)).
    Bursts lose neighbours together, so only every (1 - p) burst-th chunk counts. Exact for independent losses, an
    approximation for bursts.
    """
    events = chunks / max(1.0, (1.0 - link.p) * link.burst)
    chances = []
    for j in range(1, 64):
        still = link.p ** (1 if j == 1 else 2 + copies * (j - 2))
        chance = -math.expm1(events * math.log1p(-min(still, 0.999)))
        if chance < 1e-6:
            break
        chances.append(chance)
    return chances


def repair_delay_s(link: LinkModel, chunks: float, *, hidden_s: float = 0.0) -> float:
    """Expected time of retransmission rounds after the first pass, less the `hidden_s` that later chunks hide."""
    trip = link.round_trip_s
    return sum(
        chance * min(max(j * trip - hidden_s, 0.0), trip)
        for j, chance in enumerate(round_probabilities(link, chunks), 1)
    )


def repair_rounds_quantile(link: LinkModel, chunks: float, *, quantile: float = 0.95) -> int:
    """Retransmission rounds that suffice with probability `quantile`; each costs a round trip."""
    return sum(chance > 1.0 - quantile for chance in round_probabilities(link, chunks))


def repair_cost_s(link: LinkModel, chunks: int, *, after: int = 0, messages: int = 1) -> float:
    """Expected extra time of a stretch with retransmission: retransmitted chunks, and rounds that nothing hides.

    The exchange waits for the last of `messages` such messages.
    """
    delay_s = repair_delay_s(link, chunks * messages, hidden_s=after * link.chunk_s)
    return delay_s + chunks * link.p / (1.0 - link.p) * link.chunk_s


def coding_cost_s(
    link: LinkModel, failure: float, chunks: int, parity: int, blocks: int, *, after: int = 0, messages: int = 1
) -> float:
    """Expected extra time of a stretch with parity: its parity, and retransmission for blocks that fail in any message.

    With less parity than lost chunks, the rest is retransmitted.
    """
    hidden_s, trip = after * link.chunk_s, link.round_trip_s
    few = 4.0 * max(1.0, blocks * messages * failure)
    failed = min(max(0.0, trip - hidden_s), trip) + repair_delay_s(link, few, hidden_s=hidden_s - trip)
    sent = max(parity * blocks, chunks * link.p / (1.0 - link.p))
    return sent * link.chunk_s + any_fails(failure, blocks * messages) * failed


def any_fails(failure: float, blocks: int) -> float:
    """Probability that any of `blocks` blocks fails, if independent; an upper bound, because bursts hit all blocks."""
    return -math.expm1(blocks * math.log1p(-min(failure, 0.999999)))


def parity_for(link: LinkModel, chunks: int, *, failure: float = 1e-3, apart: int = 1) -> int:
    """Least parity with which a block fails with at most this probability; raises if 255 chunks are not enough."""
    failures = block_failures(link, chunks, 255 - chunks, apart=apart)
    for m, chance in enumerate(failures):
        if chance <= failure:
            return m
    raise ValueError(f"no parity makes blocks of {chunks} chunks fail with at most {failure} at a loss of {link.p}")


def choose(link: LinkModel, chunks: int, *, after: int = 0, budget: float = 0.0, messages: int = 1) -> Choice:
    """Chooses the cheapest way to send a stretch of a message that is followed by `after` more chunks.

    An exchange ends with the last of its `messages` messages, so that a failure that is rare in one is not rare in all.
    Early losses are retransmitted while later chunks are sent; parity pays at the end of a message, where every round
    costs a round trip. It must save half a millisecond and a tenth of the cost of retransmission, because it costs
    processor time. With a budget, no protection is needed unless more than the budget is lost.
    """
    check_count("chunks", chunks)
    check_count("after", after, 0)
    check_count("messages", messages)
    check(0.0 <= budget <= 1.0, "budget", "lie in [0, 1]", budget)
    blocks = -(-chunks // BLOCK_CHUNKS)
    each = -(-chunks // blocks)
    if link.p <= budget:
        return Choice(way="none", chunks=each, parity=0, cost_s=0.0)
    without = repair_cost_s(link, chunks, after=after, messages=messages)
    best, least, chance = 0, without, 1.0
    delay_s = repair_delay_s(link, chunks * messages, hidden_s=after * link.chunk_s)
    if link.round_trip_s > 0.0 and delay_s >= _LEAST_GAIN_S:
        most = min(max(each, _LEAST_BOUND), 255 - each)
        for m, failure in enumerate(block_failures(link, each, most, apart=blocks)):
            cost = coding_cost_s(link, failure, chunks, m, blocks, after=after, messages=messages)
            if m > 0 and cost < least:
                best, least, chance = m, cost, failure
            if m > 0 and any_fails(failure, blocks * messages) < _LEAST_FAILURE:
                break
    if without - least <= max(_LEAST_GAIN_S, _LEAST_GAIN * without):
        return Choice(way="repair", chunks=each, parity=0, cost_s=without)
    return Choice(way="coding" if chance <= 1e-3 else "hybrid", chunks=each, parity=best, cost_s=least)
