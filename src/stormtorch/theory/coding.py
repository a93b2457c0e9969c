"""Time of a message on a link that loses packets: repaired, coded, or both; and how much parity pays.

A message has `chunks` chunks, each of which takes `chunk_s` on the line. Losses follow a chain of two states
(Gilbert and Elliott): a fraction `p` of the datagrams is lost, `burst` of them in a row on average. What is lost is
known a round trip later. The engine makes the same choice (engine/coding/coding_model.cpp); a test compares both.
"""

import math
from dataclasses import dataclass
from typing import Literal

from stormtorch.checks import check
from stormtorch.theory.arguments import check_count, check_loss, check_size

BLOCK_CHUNKS = 128
"""Chunks of data of a block at most."""
STRETCH_BLOCKS = 4
"""Blocks of a stretch at most. Their chunks take turns, so that a burst hits all of them a little."""
_LEAST_GAIN_S = 0.5e-3
_LEAST_GAIN = 0.1
_LEAST_FAILURE = 1e-4
_LEAST_BOUND = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """A link as the model sees it."""

    p: float
    """Fraction of the datagrams that are lost."""
    burst: float = 1.0
    """Mean number of datagrams that are lost in a row; 1 is independent loss."""
    round_trip_s: float
    """Time until the sender knows what was lost."""
    chunk_s: float
    """Time that one chunk takes on the line."""

    def __post_init__(self) -> None:
        check_loss(self.p)
        check(math.isfinite(self.burst) and self.burst >= 1.0, "burst", "be finite and at least 1", self.burst)
        check_size("round_trip_s", self.round_trip_s)
        check_size("chunk_s", self.chunk_s)

    def chain(self, apart: int = 1) -> tuple[float, float]:
        """Chances to go from losing nothing to losing everything and back, seen every `apart` datagrams. Exact.

        The chain has one eigenvalue besides 1, so that what it remembers fades as its power.
        """
        back = 1.0 / max(self.burst, 1.0 / (1.0 - self.p))  # independent losses have runs of 1 / (1 - p)
        memory = max(0.0, 1.0 - back - back * self.p / (1.0 - self.p)) ** apart
        return self.p * (1.0 - memory), (1.0 - self.p) * (1.0 - memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How a stretch is sent, and the time that this costs beyond the chunks themselves."""

    way: Literal["none", "repair", "coding", "hybrid"]
    """`none`: nothing need be done. `coding`: at most one block in a thousand fails. `hybrid`: more fail, and are
    topped up by repairs."""
    chunks: int
    """Chunks of data per block."""
    parity: int
    """Chunks of parity per block."""
    cost_s: float
    """Expected time beyond that of the chunks."""


def block_failures(link: LinkModel, chunks: int, most: int, *, apart: int = 1) -> list[float]:
    """Chances that more than m of `chunks + m` datagrams are lost, for m from 0 to `most`. Exact under the chain.

    With that many losses, a block of `chunks` chunks and m of parity cannot be decoded. The datagrams of a block are
    `apart` places apart on the line.
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
    """Chances that a first, a second, ... round of repair is needed for the last `chunks` chunks of a message.

    The first repair of a chunk is sent once. At the end of a message the line is free, so that from the second round on
    each is sent `copies` times: round j > 1 is needed for a chunk with the chance p^(2 + copies (j - 2)).
    Bursts lose neighbours together, so only every (1 - p) burst-th chunk counts. An approximation where burst is above
    1, and exact for independent losses.
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
    """Expected time that rounds of repair take beyond the first pass, of which chunks that follow hide `hidden_s`."""
    trip = link.round_trip_s
    return sum(
        chance * min(max(j * trip - hidden_s, 0.0), trip)
        for j, chance in enumerate(round_probabilities(link, chunks), 1)
    )


def repair_rounds_quantile(link: LinkModel, chunks: float, *, quantile: float = 0.95) -> int:
    """Rounds of repair that suffice with this chance: each costs a round trip."""
    return sum(chance > 1.0 - quantile for chance in round_probabilities(link, chunks))


def repair_cost_s(link: LinkModel, chunks: int, *, after: int = 0, messages: int = 1) -> float:
    """Expected time of repairing a stretch beyond its chunks: what is sent again, and rounds that nothing hides.

    Somebody waits for the last of `messages` such messages.
    """
    delay_s = repair_delay_s(link, chunks * messages, hidden_s=after * link.chunk_s)
    return delay_s + chunks * link.p / (1.0 - link.p) * link.chunk_s


def coding_cost_s(
    link: LinkModel, failure: float, chunks: int, parity: int, blocks: int, *, after: int = 0, messages: int = 1
) -> float:
    """Expected time of coding a stretch beyond its chunks: its parity, and topping up blocks that fail in any message.

    With less parity than chunks are lost, the rest is repaired.
    """
    hidden_s, trip = after * link.chunk_s, link.round_trip_s
    few = 4.0 * max(1.0, blocks * messages * failure)
    failed = min(max(0.0, trip - hidden_s), trip) + repair_delay_s(link, few, hidden_s=hidden_s - trip)
    sent = max(parity * blocks, chunks * link.p / (1.0 - link.p))
    return sent * link.chunk_s + any_fails(failure, blocks * messages) * failed


def any_fails(failure: float, blocks: int) -> float:
    """Chance that any of so many blocks fails, as if they failed independently. An upper bound, as bursts hit all."""
    return -math.expm1(blocks * math.log1p(-min(failure, 0.999999)))


def parity_for(link: LinkModel, chunks: int, *, failure: float = 1e-3, apart: int = 1) -> int:
    """Smallest parity of a block that fails with at most this chance; raises where no block of 255 is enough."""
    failures = block_failures(link, chunks, 255 - chunks, apart=apart)
    for m, chance in enumerate(failures):
        if chance <= failure:
            return m
    raise ValueError(f"no parity makes blocks of {chunks} chunks fail with at most {failure} at a loss of {link.p}")


def choose(link: LinkModel, chunks: int, *, after: int = 0, budget: float = 0.0, messages: int = 1) -> Choice:
    """Cheapest way to send a stretch of a message, behind which `after` chunks are still to come.

    An exchange ends with the last of its messages: with `messages` of them, a failure that is rare in each of them is
    not rare in all. Repair of what was lost early is hidden by the chunks that follow; parity pays at the end of a
    message, where every round costs a round trip. It must save half a millisecond and a tenth of the cost of repair, as
    it costs processor time. With a budget, what may be missing is neither repaired nor coded: parity pays only if more
    than that is lost.
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
