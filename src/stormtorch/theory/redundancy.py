"""Redundancy: parity chunks beside the chunks of a message, and what is still lost where they are not enough.

A message of `data` chunks is sent with `parity` chunks of a maximum-distance-separable code: any `data` of the chunks
of a block give back the block, and if fewer arrive, those data chunks count that came themselves. A block has at most
255 chunks, so long messages have several. Their chunks alternate: chunk i belongs to block i mod `blocks`, data and
parity alike, so that a burst of losses hits all blocks a little instead of one block hard.
"""

import functools
import math
from itertools import pairwise

from stormtorch.checks import check
from stormtorch.theory.arguments import check_count, check_loss

MOST_IN_BLOCK = 255
"""Chunks of a block, data and parity together: as many as a code over bytes has places for."""
RESIDUAL = 0.05
"""Loss that "auto" redundancy leaves: a training hardly notices that much."""
SHARE = 0.55
"""Bytes, in those of float32 without parity, that "auto" redundancy does not exceed."""


def parity_of(redundancy: float, data: int) -> int:
    """Parity chunks of a message of `data` chunks at a redundancy, which is parity per data: the nearest number."""
    return math.floor(redundancy * data + 0.5)


def blocks_of(data: int, parity: int) -> int:
    """Number of blocks of a message: the least for which none has more than 255 chunks. Without parity it is 1."""
    check_count("data", data)
    check_count("parity", parity, least=0)
    if parity == 0:
        return 1
    count = -(-(data + parity) // MOST_IN_BLOCK)
    while -(-data // count) - (-parity // count) > MOST_IN_BLOCK:
        count += 1
    return count


def residual_loss(p: float, data: int, parity: int, burst: float = 1.0) -> float:
    """Fraction of the data chunks of a message that stays lost although parity was sent with it.

    Exact for independent loss; derived here: in a block of k data and m parity chunks, a chunk stays lost if it is lost
    itself and fewer than k of the k + m - 1 others arrive. Bursts are those of a Gilbert-Elliott link; exact too, where
    a message is sent from its first chunk to its last and its parity follows.

    Args:
        p: Chance that a chunk is lost.
        data: Data chunks of the message.
        parity: Parity chunks of the message.
        burst: Mean number of chunks lost in a row; 1 is independent loss.
    """
    check_loss(p)
    count = blocks_of(data, parity)
    check(burst == 1.0 or burst >= max(1.0, p / (1.0 - p)), "burst", "be 1 or at least p/(1-p)", burst)
    if parity == 0:
        return p
    # A block sees every `count`-th chunk of the link, so the memory between two of its chunks fades as often.
    memory = 0.0 if burst == 1.0 else (1.0 - 1.0 / (burst * (1.0 - p))) ** count
    more_data, more_parity = data % count, parity % count
    edges = sorted({0, more_data, more_parity, count})
    lost = 0.0
    for first, last in pairwise(edges):
        k, m = data // count + (first < more_data), parity // count + (first < more_parity)
        if k:
            lost += (last - first) * k * _block_loss(p, k, m, memory)
    return lost / data


def most_parity(data: int, narrower: float, share: float = SHARE) -> int:
    """Parity chunks that a narrow wire pays for: with them, a message takes `share` of the bytes of float32.

    Args:
        data: Data chunks of the message.
        narrower: Bytes of float32 over those of the wire.
        share: Bytes that may be sent, in those of float32.
    """
    check_count("data", data)
    return max(math.floor((share * narrower - 1.0) * data + 1e-9), 0)


@functools.lru_cache(maxsize=4096)
def least_parity(p: float, data: int, most: int, target: float = RESIDUAL) -> int:
    """Least number of parity chunks that leaves a loss of at most `target`; `most`, if not even that many do.

    For independent loss. Where more parity makes another block necessary, the loss may rise by a hair; the number found
    is then one that suffices, though perhaps not the least.
    """
    check_count("most", most, least=0)
    if p <= target or most == 0:
        return 0
    if residual_loss(p, data, most) > target:
        return most
    too_few, enough = 0, most
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if residual_loss(p, data, middle) > target:
            too_few = middle
        else:
            enough = middle
    return enough


@functools.lru_cache(maxsize=65536)
def _block_loss(p: float, k: int, m: int, memory: float) -> float:
    """Fraction of a block's k data chunks that stays lost; `memory` is the correlation of neighbouring losses."""
    if p == 0.0:
        return 0.0
    if memory == 0.0:
        return p * _at_most(k - 1, k + m - 1, 1.0 - p)
    data, parity = _arrivals(p, k, memory, started=None), [_arrivals(p, m, memory, started=bad) for bad in (0, 1)]
    lost = 0.0
    for state in (0, 1):
        # Chance that fewer parity chunks arrive than data chunks are missing, by how many are.
        below, total = [0.0], 0.0
        for came in range(m + 1):
            total += parity[state][0][came] + parity[state][1][came]
            below.append(total)
        for came in range(k):
            missing = k - came
            lost += data[state][came] * missing * below[min(missing, m + 1)]
    return lost / k


def _at_most(most: int, tries: int, chance: float) -> float:
    """Chance of at most `most` successes."""
    if most >= tries:
        return 1.0
    terms = (
        math.lgamma(tries + 1) - math.lgamma(i + 1) - math.lgamma(tries - i + 1)
        + i * math.log(chance) + (tries - i) * math.log1p(-chance)
        for i in range(most + 1)
    )  # fmt: skip
    return math.fsum(math.exp(each) for each in terms)


def _arrivals(p: float, chunks: int, memory: float, *, started: int | None) -> tuple[list[float], list[float]]:
    """Chances of each number of arrivals, apart by whether the link is good or bad (1) at the last chunk.

    Args:
        p: Chance of the bad state.
        chunks: Number of chunks.
        memory: Correlation of the states at two neighbouring chunks.
        started: State at the chunk before the first; None is any.
    """
    stay_bad, enter_bad = p + (1.0 - p) * memory, p * (1.0 - memory)
    chance_bad = p if started is None else float(started)
    good, bad = [1.0 - chance_bad] + [0.0] * chunks, [chance_bad] + [0.0] * chunks
    for number in range(chunks):
        # Where `started` is None, the first chunk finds the link as it is; otherwise it moves on before each chunk.
        if number or started is not None:
            good, bad = (
                [g * (1.0 - enter_bad) + b * (1.0 - stay_bad) for g, b in zip(good, bad, strict=True)],
                [g * enter_bad + b * stay_bad for g, b in zip(good, bad, strict=True)],
            )
        good = [0.0, *good[:-1]]  # it arrives
    return good, bad
